"""The rule of when two jobs share a GPU: Theorem 1 of the paper, and Algorithm 2's search for the guest's sub-batch.

This is the only module that states the rule. The host runs, the guest asks to join it. L is a job's time left alone, ξ
its slow-down while both run, and completion times count from now. Sharing from now on gives `together`; waiting for the
host to end gives `apart`; a tie waits. Waiting is valued at the sub-batch that the guest would have alone, even where
it must split its batch to share.

To change the rule, change `together`, `apart` and `pays`, and what follows from them: `pair_ends`, `host_delay` and
`host_needs`; then change the words of `WAITING_WINS`. tests/policies/test_pair.py compares the functions with each
other, and tests/policies/test_explain.py compares decisions and explanations with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from carpool.core.model import Job
from carpool.core.perf import PerformanceModel
from carpool.core.shapes import Size
from carpool.core.view import JobView

PAYS_BELOW = 1.0 - 1e-9
"""Factor on `apart` below which sharing pays. Just below 1, so that a tie waits; 0.95 would require 5 % less."""
WAITING_WINS = "so the two finish sooner, in sum, if it waits"
"""Half a sentence with which `carpool explain` says that sharing does not pay."""


# ---- Theorem 1 -------------------------------------------------------------------------------------------------------


def together(host_left: float, guest_left: float, host_xi: float, guest_xi: float) -> float:
    """Return the sum of both completion times if they share from now on (Theorem 1, κ = 0)."""
    host, guest = host_xi * host_left, guest_xi * guest_left
    if guest <= host:  # the guest ends first; then the host runs on alone
        return host_left + guest * (2.0 - 1.0 / host_xi)
    return guest_left + host * (2.0 - 1.0 / guest_xi)


def apart(host_left: float, guest_left: float) -> float:
    """Return the sum of both completion times if the guest waits for the host to end (κ = L_host)."""
    return 2.0 * host_left + guest_left


def pays(share_s: float, host_left: float, guest_left: float) -> bool:
    """Return whether sharing, with `share_s` as the sum of both completion times, beats waiting."""
    return share_s < apart(host_left, guest_left) * PAYS_BELOW


def pair_ends(host_left: float, guest_left: float, host_xi: float, guest_xi: float) -> tuple[float, float]:
    """Return the seconds until the guest and until its host end, if they share from now on: the terms of `together`."""
    host, guest = host_xi * host_left, guest_xi * guest_left
    if guest <= host:
        return guest, host_left + guest * (1.0 - 1.0 / host_xi)
    return guest_left + host * (1.0 - 1.0 / guest_xi), host


def host_delay(cost: float, host_left: float, host_xi: float) -> float:
    """Return the seconds that the host loses by sharing, where `cost` is `together` − L_host.

    The first term holds where the guest ends first. Otherwise the host is slowed down until its own end, and the
    second term, which is then the smaller one, holds.
    """
    speed = 1.0 / host_xi
    return min(cost * (1.0 - speed) / (2.0 - speed), host_left * (host_xi - 1.0))


def host_needs(host_xi: float, guest_xi: float, relative_time: float) -> float:
    """Return the ratio L_host / L_guest above which sharing pays.

    Divide `together` − `apart` by L_guest and read it as a function of x = L_host / L_guest. It starts at
    relative_time − 1 ≥ 0, falls with slope `gain` until the guest ends first (x = turn), and with slope 1 from there
    on: it crosses zero once.
    """
    turn = relative_time * guest_xi / host_xi
    gain = 2.0 - host_xi * (2.0 - 1.0 / guest_xi)
    if gain > 0.0 and (relative_time - 1.0) < gain * turn:
        return (relative_time - 1.0) / gain
    return relative_time * guest_xi * (2.0 - 1.0 / host_xi) - 1.0


def total_speed(guest_xi: float, host_xi: float) -> float:
    """Return the speed of both jobs while they share, relative to one job alone.

    Below 1 the GPU gets less done than with one job.
    """
    return 1.0 / guest_xi + 1.0 / host_xi


# ---- Algorithm 2 -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharingOption:
    """One sub-batch at which a guest of some shape fits beside a host of some kind."""

    size: Size
    host_xi: float
    guest_xi: float
    relative_time: float
    """Iteration time of the guest at this sub-batch, relative to the one that it would have alone."""
    needs: float
    """Ratio L_host / L_guest above which sharing pays: see `host_needs`."""

    @property
    def total_speed(self) -> float:
        """Speed of both jobs while they share, relative to one job alone."""
        return total_speed(self.guest_xi, self.host_xi)

    def ends(self, host_left: float, guest_left: float, startup: float = 0.0) -> tuple[float, float]:
        """Return the seconds until the guest and until its host end; `guest_left` is at this sub-batch.

        The host is slowed down only once the guest has started up.
        """
        if not startup:
            return pair_ends(host_left, guest_left, self.host_xi, self.guest_xi)
        if host_left <= startup:
            return startup + guest_left, host_left
        guest, host = pair_ends(host_left - startup, guest_left, self.host_xi, self.guest_xi)
        return startup + guest, startup + host


class SharingVerdict(NamedTuple):
    """The best option of a pair, and the sum of both completion times with it."""

    together: float
    option: SharingOption


def option_at(perf: PerformanceModel, guest: JobView, size: Size, host: Job, host_accumulation: int) -> SharingOption:
    """Return the option of a guest at one sub-batch, whether it fits or not."""
    guest_xi = perf.slowdown(guest.job, size.accumulation, [(host, host_accumulation)])
    host_xi = perf.slowdown(host, host_accumulation, [(guest.job, size.accumulation)])
    relative_time = size.relative_time * guest.whole_iteration_s / guest.alone_iteration_s
    return SharingOption(size, host_xi, guest_xi, relative_time, host_needs(host_xi, guest_xi, relative_time))


def options(
    perf: PerformanceModel, guest: JobView, host: Job, host_accumulation: int, memory_left: int, at_least: int = 1
) -> list[SharingOption]:
    """Return the sub-batches at which a guest fits beside a host within the limits of both jobs.

    `at_least` is the smallest accumulation to consider. An option that another one beats in every respect is left out,
    so that usually one remains.
    """
    found: list[SharingOption] = []
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


def least_together(choices: Iterable[SharingOption], host_left: float, guest_left: float) -> SharingVerdict | None:
    """Return the option with the smallest `together`, whether it beats waiting or not; None without any option."""
    least, winner = inf, None
    for option in choices:
        time = together(host_left, guest_left * option.relative_time, option.host_xi, option.guest_xi)
        if time < least:
            least, winner = time, option
    return None if winner is None else SharingVerdict(least, winner)


def least_cost(choices: Sequence[SharingOption], needs: float) -> float:
    """Return what sharing costs at least, `together` − L_host, for a second of the guest's time left.

    The host has at least `needs` times the guest's time left.

    Where no job gains speed by sharing, the cost grows with what the host has left. Otherwise no bound is known.
    """
    verdict = least_together(choices, needs, 1.0)
    if verdict is None or any(option.host_xi < 1.0 or option.guest_xi < 1.0 for option in choices):
        return 0.0
    return verdict.together - needs


def best(
    choices: Sequence[SharingOption], host_left: float, guest_left: float, startup: float = 0.0
) -> SharingVerdict | None:
    """Algorithm 2: return the option with the smallest `together`, provided that it beats waiting.

    While the guest starts up the host runs as if it were alone, so Theorem 1 holds for what the host has left then. The
    start-up itself counts on neither side: a guest that waits could start up meanwhile. A host that ends first is
    not slowed down at all. In `together`, both completion times are counted from now.
    """
    if not startup:
        if len(choices) == 1:  # the usual case, and asked often
            option = choices[0]
            least = together(host_left, guest_left * option.relative_time, option.host_xi, option.guest_xi)
            return SharingVerdict(least, option) if pays(least, host_left, guest_left) else None
        verdict = least_together(choices, host_left, guest_left)
        return verdict if verdict is not None and pays(verdict.together, host_left, guest_left) else None
    both = host_left - startup
    verdict = least_together(choices, max(0.0, both), guest_left)
    if verdict is None:
        return None
    if both <= 0.0:
        return verdict._replace(together=host_left + startup + guest_left * verdict.option.relative_time)
    if not pays(verdict.together, both, guest_left):
        return None
    return verdict._replace(together=verdict.together + 2.0 * startup)
