"""The jobs on each GPU over time, computed from a run's events; Gantt charts are drawn from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from carpool.core import events as ev
from carpool.core.model import GpuId, JobId, NodeId


@dataclass(frozen=True, slots=True)
class Segment:
    """A period in which the set of jobs on one GPU did not change."""

    gpu: GpuId
    start: float
    end: float
    jobs: tuple[JobId, ...]


def segments(events: Iterable[ev.Event]) -> list[Segment]:
    """Return all periods in which a GPU held at least one job, sorted by start and GPU."""
    account = _Occupancy()
    for event in events:
        if isinstance(event, ev.Planned):
            account.move(event.at, {d.job: d.allocation.gpus if d.allocation else () for d in event.decisions})
        elif isinstance(event, ev.Finished | ev.Failed | ev.Stopped):
            if event.attempt == account.attempts.get(event.job):  # a message about an earlier attempt changes nothing
                account.move(event.at, {event.job: ()})
        elif isinstance(event, ev.NodeJoined):
            account.nodes[event.node.id] = event.node.gpus
        elif isinstance(event, ev.NodeLost):
            lost = set(account.nodes.pop(event.node, ()))
            account.move(event.at, {job: () for job, gpus in account.where.items() if not lost.isdisjoint(gpus)})
    return sorted(account.found, key=lambda segment: (segment.start, segment.gpu))


class _Occupancy:
    """The GPUs of each job now, and the periods that have ended."""

    def __init__(self) -> None:
        self.found: list[Segment] = []
        self.where: dict[JobId, tuple[GpuId, ...]] = {}
        self.attempts: dict[JobId, int] = {}
        self.nodes: dict[NodeId, tuple[GpuId, ...]] = {}
        self._on: dict[GpuId, tuple[JobId, ...]] = {}
        self._since: dict[GpuId, float] = {}

    def move(self, at: float, places: Mapping[JobId, tuple[GpuId, ...]]) -> None:
        """Apply all releases, then all claims. A job that stays on a GPU starts no new period there."""
        touched: dict[GpuId, list[JobId]] = {}
        for job, gpus in places.items():
            held = self.where.pop(job, ())
            if gpus:
                self.where[job] = gpus
                self.attempts[job] = self.attempts.get(job, 0) + (gpus != held)
            for gpu in (*held, *gpus):
                touched.setdefault(gpu, [])
            for gpu in gpus:
                touched[gpu].append(job)
        for gpu, claimed in touched.items():
            before = self._on.get(gpu, ())
            staying = [job for job in before if job not in places or job in claimed]
            after = (*staying, *(job for job in claimed if job not in staying))
            if after != before:
                if before and self._since[gpu] < at:
                    self.found.append(Segment(gpu, self._since[gpu], at, before))
                self._on[gpu], self._since[gpu] = after, at
