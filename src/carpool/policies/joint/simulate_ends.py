"""When will a guest and its hosts end? Simulates them until all of them are done.

This is Theorem 1's case, `pair_ends` in `sharing.pair`, for any number of jobs: speeds change as each of them ends. A
host may have other mates, which share no GPU with the guest; they slow it down until their own predicted ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

from carpool.core.availability import Until
from carpool.core.model import Job
from carpool.core.perf import PerformanceModel

DONE = 1e-9
"""Share of its work below which a job counts as done."""


class Participant(NamedTuple):
    """A job that takes part in the simulation."""

    left: float
    """Time left alone."""
    job: Job
    accumulation: int
    elsewhere: Sequence[Until] = ()
    """Slow-downs on its other GPUs, with the seconds from now until which they last."""


def simulate_ends(
    participants: Sequence[Participant], cells: Sequence[Sequence[int]], perf: PerformanceModel, startup: float = 0.0
) -> list[float]:
    """Return the seconds until each participant is done; a cell lists the participants on the same GPUs.

    The first participant, the guest, computes after `startup` seconds.
    """
    own: list[list[Sequence[int]]] = [[] for _ in participants]
    for cell in cells:
        for index in cell:
            own[index].append(cell)
    breaks = sorted({until for one in participants for until, _ in one.elsewhere if until > 0.0}, reverse=True)
    left = [one.left for one in participants]
    ends = [0.0] * len(participants)
    slow = [1.0] * len(participants)
    active = set(range(len(participants)))
    if startup:
        breaks = sorted({*breaks, startup}, reverse=True)
        active.discard(0)
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
        if startup and (now == startup or not active):  # from now on the guest computes
            now, startup = startup, 0.0
            active.add(0)
            changed.update([0, *(index for cell in own[0] for index in cell)])
    return ends


def _slowdown(
    participants: Sequence[Participant],
    cells: Sequence[Sequence[int]],
    index: int,
    active: set[int],
    now: float,
    perf: PerformanceModel,
) -> float:
    """Return the worst slow-down over its cells and its other GPUs: a gang waits for its slowest worker."""
    one = participants[index]
    worst = 1.0
    for until, xi in one.elsewhere:
        if until > now and xi > worst:
            worst = xi
    for cell in cells:
        mates = [
            (participants[mate].job, participants[mate].accumulation)
            for mate in cell
            if mate != index and mate in active
        ]
        if mates:
            worst = max(worst, perf.slowdown(one.job, one.accumulation, mates))
    return worst
