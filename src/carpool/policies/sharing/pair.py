"""When should two jobs share? Theorem 1, and Algorithm 2's search for the guest's sub-batch.

The host runs, the guest asks to join. L is time left alone, ξ the slow-down while both run. With the completion times
counted from now, sharing gives `together`, waiting for the host to end gives 2·L_host + L_guest; a tie waits.
Waiting is valued at the sub-batch that the guest would have alone, also where it must cut its batch to share.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from carpool.core.model import Job
from carpool.core.perf import PerformanceModel
from carpool.core.shapes import Size
from carpool.core.view import JobView

TIE = 1.0 - 1e-9


def together(host_left: float, guest_left: float, host_xi: float, guest_xi: float) -> float:
    """The sum of both completion times if they share from now on (Theorem 1, κ = 0)."""
    host, guest = host_xi * host_left, guest_xi * guest_left
    if guest <= host:  # the guest ends first; then the host runs on alone
        return host_left + guest * (2.0 - 1.0 / host_xi)
    return guest_left + host * (2.0 - 1.0 / guest_xi)


def apart(host_left: float, guest_left: float) -> float:
    """The same if the guest waits for the host to end (κ = L_host)."""
    return 2.0 * host_left + guest_left


class Option(NamedTuple):
    """One sub-batch at which a guest of some shape fits beside a host of some kind."""

    size: Size
    host_xi: float
    guest_xi: float
    relative_time: float
    """Iteration time of the guest at this sub-batch, relative to the one it would have alone."""
    needs: float
    """Sharing pays iff the host has more than this times the guest's time left: see `host_needs`."""

    @property
    def total_speed(self) -> float:
        """Of both jobs while they share, relative to a job alone; below 1 the GPU gets less done than with one."""
        return 1.0 / self.guest_xi + 1.0 / self.host_xi


class Verdict(NamedTuple):
    together: float
    option: Option


def host_needs(host_xi: float, guest_xi: float, relative_time: float) -> float:
    """The ratio L_host / L_guest above which sharing pays.

    Divide together − apart by L_guest and read it as a function of x = L_host / L_guest. It starts at pace − 1 ≥ 0,
    falls with slope `gain` until the guest ends first (x = turn), and with slope 1 from there on: it crosses zero once.
    """
    turn = relative_time * guest_xi / host_xi
    gain = 2.0 - host_xi * (2.0 - 1.0 / guest_xi)
    if gain > 0.0 and (relative_time - 1.0) < gain * turn:
        return (relative_time - 1.0) / gain
    return relative_time * guest_xi * (2.0 - 1.0 / host_xi) - 1.0


def option_at(perf: PerformanceModel, guest: JobView, size: Size, host: Job, host_accumulation: int) -> Option:
    guest_xi = perf.slowdown(guest.job, size.accumulation, [(host, host_accumulation)])
    host_xi = perf.slowdown(host, host_accumulation, [(guest.job, size.accumulation)])
    relative_time = size.relative_time * guest.whole_iteration_s / guest.alone_iteration_s
    return Option(size, host_xi, guest_xi, relative_time, host_needs(host_xi, guest_xi, relative_time))


def options(
    perf: PerformanceModel, guest: JobView, host: Job, host_accumulation: int, memory_left: int, at_least: int = 1
) -> list[Option]:
    """The sub-batches (accumulation `at_least`) at which a guest fits beside a host within both jobs' limits.

    Those that another beats in every respect are left out, so that usually one remains.
    """
    found: list[Option] = []
    for size in guest.shape.sizes:  # Alg. 2, l. 5: B, B/2, …, 1
        if size.accumulation < at_least or size.memory > memory_left:
            continue
        new = option_at(perf, guest, size, host, host_accumulation)
        if _over(new.guest_xi, guest.job.max_slowdown) or _over(new.host_xi, host.max_slowdown):
            continue
        if not any(
            o.relative_time <= new.relative_time and o.host_xi <= new.host_xi and o.guest_xi <= new.guest_xi
            for o in found
        ):
            found.append(new)
    return found


def _over(xi: float, limit: float | None) -> bool:
    return limit is not None and xi > limit


def best(choices: Iterable[Option], host_left: float, guest_left: float) -> Verdict | None:
    """Algorithm 2: the option with the smallest `together`, provided that it beats waiting."""
    least, winner = inf, None
    for option in choices:
        time = together(host_left, guest_left * option.relative_time, option.host_xi, option.guest_xi)
        if time < least:
            least, winner = time, option
    if winner is None or least >= apart(host_left, guest_left) * TIE:
        return None
    return Verdict(least, winner)
