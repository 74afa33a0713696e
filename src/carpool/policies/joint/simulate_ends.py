"""What happens if a guest joins? Plays the guest and its hosts forward until all of them are done.

Speeds change as each of them ends. Other mates of a host, with whom the guest shares no GPU, slow the host down until
their own predicted end.
"""

from collections.abc import Sequence
from typing import NamedTuple

from carpool.core.availability import Until
from carpool.core.model import Job
from carpool.core.perf import PerformanceModel

DONE = 1e-9
"""The share of its work up to which a job counts as done."""


class Participant(NamedTuple):
    """A job that takes part: its time left alone, and what slows it down besides the others."""

    left: float
    job: Job
    accumulation: int
    elsewhere: Sequence[Until] = ()
    """Slow-downs on its other GPUs, with the seconds from now until which they last."""


def pair_ends(host_left: float, guest_left: float, host_xi: float, guest_xi: float) -> tuple[float, float]:
    """Seconds until the guest and until its only host are done, if they share from now on (Theorem 1, κ = 0)."""
    host, guest = host_xi * host_left, guest_xi * guest_left
    if guest <= host:
        return guest, host_left + guest * (1.0 - 1.0 / host_xi)
    return guest_left + host * (1.0 - 1.0 / guest_xi), host


def simulate_ends(
    participants: Sequence[Participant], cells: Sequence[Sequence[int]], perf: PerformanceModel
) -> list[float]:
    """Seconds until each of the actors is done; a cell lists the actors that are on one and the same GPUs."""
    own: list[list[Sequence[int]]] = [[] for _ in participants]
    for cell in cells:
        for index in cell:
            own[index].append(cell)
    breaks = sorted({until for actor in participants for until, _ in actor.elsewhere if until > 0.0}, reverse=True)
    left = [actor.left for actor in participants]
    ends = [0.0] * len(participants)
    slow = [1.0] * len(participants)
    active = set(range(len(participants)))
    changed = set(active)
    now = 0.0
    while active:
        for index in changed & active:
            slow[index] = _slowdown(participants, own[index], index, active, now, perf)
        moment = now + min([left[index] * slow[index] for index in active])
        changed = set()
        if breaks and breaks[-1] <= moment:
            moment = breaks.pop()
            changed.update([index for index in active if participants[index].elsewhere])
        for index in list(active):
            left[index] -= (moment - now) / slow[index]
            if left[index] <= DONE * participants[index].left:
                ends[index] = moment
                active.discard(index)
                for cell in own[index]:
                    changed.update(cell)
        now = moment
    return ends


def _slowdown(
    participants: Sequence[Participant],
    cells: Sequence[Sequence[int]],
    index: int,
    active: set[int],
    now: float,
    perf: PerformanceModel,
) -> float:
    """The worst over an actor's cells and over its other GPUs: a gang waits for its slowest worker."""
    actor = participants[index]
    worst = 1.0
    for until, xi in actor.elsewhere:
        if until > now and xi > worst:
            worst = xi
    for cell in cells:
        mates = [
            (participants[mate].job, participants[mate].accumulation)
            for mate in cell
            if mate != index and mate in active
        ]
        if mates:
            worst = max(worst, perf.slowdown(actor.job, actor.accumulation, mates))
    return worst
