"""What slows a gang down on those of its GPUs that a guest does not join.

`join_candidates` asks for it whenever it simulates a host. Guest after guest asks about the same hosts, and the answer
stays the same until a move of the pass concerns one of the jobs there: so it is kept for each gang and for each cell.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

from carpool.core.availability import Until, corrected
from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.perf import Mate
from carpool.core.rules import Resident
from carpool.core.view import JobView
from carpool.policies.joint.objective import Objective

Jobs = tuple[JobView, ...]


class _Cell(NamedTuple):
    """The jobs on some GPUs."""

    active: Jobs
    """Those that compute, in the order in which they came."""
    by_end: Sequence[tuple[float, int, Mate]]
    """Those that compute, with their ends and `seq`, the first to end first."""


class _Known(NamedTuple):
    """Something that holds until a move concerns one of the jobs."""

    as_of: int
    """Number of decisions at which it was found."""
    seqs: frozenset[int]


class SlowedElsewhere:
    """The slow-downs of gangs in one scheduling pass, cell by cell."""

    def __init__(self, draft: Draft, objective: Objective) -> None:
        self.draft = draft
        self.objective = objective
        self.perf = draft.view.perf
        self._of_host: dict[int, tuple[_Known, list[tuple[Jobs, list[Until]]]]] = {}  # by `seq`
        self._cells: dict[Sequence[JobView], tuple[_Known, _Cell]] = {}

    def of(self, host: Resident, simulated: Set[Jobs]) -> list[Until]:
        """Return the slow-downs of a host on the GPUs whose cells, given by their active jobs, are not simulated, and
        in how many seconds each of them ends."""
        if len(self.draft.gpus_of(host.record)) == 1:
            return []
        steps: list[Until] = []
        for active, slowed in self._by_cell(host):
            if active not in simulated:
                steps += slowed
        if host.record.gpus and steps:
            return corrected(steps, max([xi for _, xi in steps]), host.record.slowdown)
        return steps

    def _by_cell(self, host: Resident) -> list[tuple[Jobs, list[Until]]]:
        """Return the active jobs of each cell of a gang, and what they do to it there."""
        record = host.record
        kept = self._of_host.get(record.seq)
        if kept is not None and self._holds(kept[0]):
            return kept[1]
        there = {self.draft.jobs_on(gpu): gpu for gpu in self.draft.gpus_of(record)}
        cells = [self._cell(jobs, gpu) for jobs, gpu in there.items() if len(jobs) > 1]
        found = [(cell.active, self._slowed(host, cell)) for cell in cells]
        seqs = frozenset([job.seq for jobs in there for job in jobs])
        self._of_host[record.seq] = _Known(len(self.draft.decisions), seqs), found
        return found

    def _slowed(self, host: Resident, cell: _Cell) -> list[Until]:
        record, now = host.record, self.objective.now
        mates = [one for one in cell.by_end if one[1] != record.seq]
        jobs = [mate for _, _, mate in mates]
        return [
            (max(0.0, end - now), self.perf.slowdown(record.job, host.accumulation, jobs[index:]))
            for index, (end, _, _) in enumerate(mates)
        ]

    def _cell(self, jobs: Sequence[JobView], gpu: GpuId) -> _Cell:
        kept = self._cells.get(jobs)
        if kept is not None and self._holds(kept[0]):
            return kept[1]
        end, residents = self.objective.end, self.draft.active_on(gpu)
        by_end = sorted([(end(one.record), one.record.seq, (one.record.job, one.accumulation)) for one in residents])
        cell = _Cell(tuple([one.record for one in residents]), by_end)
        self._cells[jobs] = _Known(len(self.draft.decisions), frozenset([job.seq for job in jobs])), cell
        return cell

    def _holds(self, known: _Known) -> bool:
        return known.as_of == len(self.draft.decisions) or self.objective.moved.isdisjoint(known.seqs)
