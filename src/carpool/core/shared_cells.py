"""The cells of several jobs that have room for one more, indexed by the kinds of their residents.

Cells of one kind differ only in the memory and in the times that are left: a guest is slowed down alike in all of them.
So a policy judges a kind once and looks at few of its cells, however many there are. `Hosts` owns the index and enters
the cells of a job again whenever the job or its mates changed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import inf

from carpool.core.model import Job
from carpool.core.record import JobRecord
from carpool.core.view import CellKind, ResidentKind, SharedCell


class SharedCells:
    """The index of cells of several jobs."""

    def __init__(self) -> None:
        self.by_kind: dict[CellKind, list[SharedCell]] = {}
        """The cells of each kind; those whose first job ends soonest come first."""
        self.kinds_version = 0
        """Number of times that a kind appeared or disappeared."""
        self._known: dict[tuple[int, ...], tuple[CellKind, SharedCell]] = {}
        self._of_job: dict[int, list[tuple[int, ...]]] = {}  # the cells as they were entered last, by `seq`

    def update(self, record: JobRecord, cells: Iterable[tuple[CellKind, SharedCell]]) -> None:
        """Replace the cells of a job."""
        for name in self._of_job.pop(record.seq, ()):
            self._discard(name)
        names = []
        for kind, cell in cells:
            name = tuple([resident.seq for resident in cell.residents])
            self._discard(name)
            group = self.by_kind.get(kind)
            if group is None:
                group = self.by_kind[kind] = []
                self.kinds_version += 1
            insort(group, cell)
            self._known[name] = kind, cell
            names.append(name)
        if names:
            self._of_job[record.seq] = names

    def _discard(self, name: tuple[int, ...]) -> None:
        known = self._known.pop(name, None)
        if known is not None:
            kind, cell = known
            group = self.by_kind[kind]
            del group[bisect_left(group, cell)]
            if not group:
                del self.by_kind[kind]
                self.kinds_version += 1


def describe_cell(residents: tuple[JobRecord, ...], gpus: list[int], memory_left: int) -> tuple[CellKind, SharedCell]:
    """Return the entry of a cell in the index."""
    end = min([record.end() if record.computing else inf for record in residents])
    in_order = sorted([(kind_of(record.job, record.accumulation), record.seq, record) for record in residents])
    kind = tuple([kind for kind, _, _ in in_order])
    seqs = tuple([seq for _, seq, _ in in_order])
    return kind, SharedCell(
        end, seqs, tuple([record for _, _, record in in_order]), residents, tuple(sorted(gpus)), memory_left
    )


def kind_of(job: Job, accumulation: int) -> ResidentKind:
    """Return what counts about a resident for a guest, besides the time that it has left."""
    return ResidentKind(job.model, job.batch, accumulation, inf if job.max_slowdown is None else job.max_slowdown)
