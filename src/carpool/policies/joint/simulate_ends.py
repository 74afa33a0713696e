"""The ends of a guest and its hosts, simulated until all of them are done.

This is Theorem 1's case, `pair_ends` in `sharing.pair`, for any number of jobs: speeds change as each of them ends. A
host may have other mates, which share no GPU with the guest; they slow it down until their own predicted ends.
"""

from collections.abc import Collection, Sequence
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
    if len(participants) == 2 and len(cells) == 1 and len(cells[0]) == 2 and not startup:  # mostly
        one, other = participants
        if not one.elsewhere and not other.elsewhere:
            return _pair_ends(one, other, perf)
    return _ends(participants, cells, perf, startup)


def _pair_ends(one: Participant, other: Participant, perf: PerformanceModel) -> list[float]:
    """Return the seconds until two jobs that share all of their GPUs are done. The result equals that of `_ends` to the
    last bit, because which of two moves is better may depend on it."""
    slow = max(1.0, perf.slowdown(one.job, one.accumulation, [(other.job, other.accumulation)]))
    other_slow = max(1.0, perf.slowdown(other.job, other.accumulation, [(one.job, one.accumulation)]))
    first = min(one.left * slow, other.left * other_slow)
    rest, other_rest = one.left - first / slow, other.left - first / other_slow
    return [
        first if rest <= DONE * one.left else first + rest,
        first if other_rest <= DONE * other.left else first + other_rest,
    ]


def _ends(
    participants: Sequence[Participant], cells: Sequence[Sequence[int]], perf: PerformanceModel, startup: float
) -> list[float]:
    """Return the seconds until each participant is done, whatever cells they share."""
    simulated = [_Cell(cell) for cell in cells]
    own = _cells_of_each(simulated, len(participants))
    elsewhere = [_worst_later(one.elsewhere) for one in participants]
    breaks = sorted([(until, index) for index, steps in enumerate(elsewhere) for until, _ in steps], reverse=True)
    left = [one.left for one in participants]
    done = [DONE * one.left for one in participants]
    ends = [0.0] * len(participants)
    slow = [1.0] * len(participants)
    active = list(range(len(participants)))
    if startup:
        breaks = sorted([*breaks, (startup, 0)], reverse=True)
        active = active[1:]
    changed = set(active)
    for cell in simulated:
        cell.keep(changed)
        cell.update(participants, perf)
    now = 0.0
    while active:
        for index in changed:
            slow[index] = _slowdown(own[index], elsewhere[index], index)
        moment = now + min([left[index] * slow[index] for index in active])
        changed = set()
        if breaks and breaks[-1][0] <= moment:
            moment = breaks[-1][0]
            changed = _pass_break(breaks, elsewhere).intersection(active)
        passed = moment - now
        for index in active:
            left[index] -= passed / slow[index]
        ended = [index for index in active if left[index] <= done[index]]
        if ended:
            for index in ended:
                ends[index] = moment
            active = [index for index in active if index not in ended]
            changed.intersection_update(active)
            for cell in {cell for index in ended for cell in own[index]}:
                cell.keep(active)
                changed.update(cell.update(participants, perf))
        now = moment
        if startup and (now == startup or not active):  # from now on the guest computes
            now, startup = startup, 0.0
            active.append(0)
            changed.add(0)
            for cell in own[0]:
                cell.there = [0, *cell.there]
                changed.update(cell.update(participants, perf))
    return ends


def _worst_later(steps: Sequence[Until]) -> list[Until]:
    """Return the slow-downs that are the worst at some time, the last first. Of a gang on many cells, few are."""
    worst: list[Until] = []
    for until, xi in sorted(steps, reverse=True):
        if until > 0.0 and xi > (worst[-1][1] if worst else 1.0):
            worst.append((until, xi))
    return worst


def _pass_break(breaks: list[tuple[float, int]], elsewhere: Sequence[list[Until]]) -> set[int]:
    """Remove the next break, and the slow-downs that last until then. Return the participants concerned."""
    moment, concerned = breaks[-1][0], set()
    while breaks and breaks[-1][0] == moment:
        index = breaks.pop()[1]
        concerned.add(index)
        steps = elsewhere[index]
        while steps and steps[-1][0] <= moment:
            steps.pop()
    return concerned


class _Cell:
    """The participants that are still there on some GPUs, and how much they slow each other down."""

    __slots__ = ("slowdowns", "there")

    def __init__(self, there: Sequence[int]) -> None:
        self.there = there
        self.slowdowns: dict[int, float] = {}

    def keep(self, active: Collection[int]) -> None:
        """Remove the participants that do not compute."""
        self.there = [index for index in self.there if index in active]

    def update(self, participants: Sequence[Participant], perf: PerformanceModel) -> Sequence[int]:
        """Compute the slow-downs again: participants were added or are done. Return those that are there."""
        there = self.there
        if len(there) == 1:
            self.slowdowns[there[0]] = 1.0
            return there
        jobs = [(participants[index].job, participants[index].accumulation) for index in there]
        for place, index in enumerate(there):
            job, accumulation = jobs[place]
            self.slowdowns[index] = perf.slowdown(job, accumulation, jobs[:place] + jobs[place + 1 :])
        return there


def _cells_of_each(cells: Sequence[_Cell], participants: int) -> list[list[_Cell]]:
    own: list[list[_Cell]] = [[] for _ in range(participants)]
    for cell in cells:
        for index in cell.there:
            own[index].append(cell)
    return own


def _slowdown(cells: Sequence[_Cell], elsewhere: Sequence[Until], index: int) -> float:
    """Return the worst slow-down over its cells and its other GPUs: a gang waits for its slowest worker."""
    worst = max([cell.slowdowns[index] for cell in cells], default=1.0)
    return max(worst, elsewhere[-1][1] if elsewhere else 1.0)
