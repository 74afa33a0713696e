"""The jobs on each GPU over time, computed from a run's events; Gantt charts are drawn from it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from carpool.core import events as ev
from carpool.core.model import GpuId, JobId, NodeId


@dataclass(frozen=True, slots=True)
class Segment:
    """A period in which neither the set of jobs on one GPU nor which of them are paused changed."""

    gpu: GpuId
    start: float
    end: float
    jobs: tuple[JobId, ...]
    paused: frozenset[JobId] = frozenset()
    """Those of the jobs that do not compute: from the decision to pause them until they compute again."""


def segments(events: Iterable[ev.Event]) -> list[Segment]:
    """Return all periods in which a GPU held at least one job, sorted by start and GPU."""
    account = _Occupancy()
    for event in events:
        if isinstance(event, ev.Planned):
            account.plan(event)
        elif isinstance(event, ev.JobEvent):
            if event.attempt == account.attempts.get(event.job):  # a message about an earlier attempt changes nothing
                account.hear(event)
        elif isinstance(event, ev.PausedByOwner):
            account.pause_for_owner(event)
        elif isinstance(event, ev.ResumedByOwner):
            account.kept_by_owner.discard(event.job)
        elif isinstance(event, ev.NodeJoined):
            account.nodes[event.node.id] = event.node.gpus
        elif isinstance(event, ev.NodeLost):
            lost = set(account.nodes.pop(event.node, ()))
            account.move(event.at, {job: () for job, gpus in account.where.items() if not lost.isdisjoint(gpus)})
    return sorted(account.found, key=lambda segment: (segment.start, segment.gpu))


class _Occupancy:
    """The GPUs of each job now, which jobs are paused, and the periods that have ended."""

    def __init__(self) -> None:
        self.found: list[Segment] = []
        self.where: dict[JobId, tuple[GpuId, ...]] = {}
        self.attempts: dict[JobId, int] = {}
        self.nodes: dict[NodeId, tuple[GpuId, ...]] = {}
        self.kept_by_owner: set[JobId] = set()
        """Jobs that their owner paused, or that are to be paused for their owner as soon as they run."""
        self._computing: set[JobId] = set()
        self._paused: set[JobId] = set()
        self._on: dict[GpuId, tuple[JobId, ...]] = {}
        self._since: dict[GpuId, float] = {}

    def plan(self, event: ev.Planned) -> None:
        places = {d.job: d.allocation.gpus if d.allocation else () for d in event.decisions}
        pauses = [d.job for d in event.decisions if d.allocation and not d.allocation.active]
        self.move(event.at, places)
        if pauses:
            self._change_pauses(event.at, pause=pauses)

    def hear(self, event: ev.JobEvent) -> None:
        """Take a message from the present workers of a job into account."""
        job = event.job
        if isinstance(event, ev.Finished | ev.Failed | ev.Stopped):
            self.move(event.at, {job: ()})
        elif isinstance(event, ev.Paused) and job in self.where:  # a closure pauses jobs without a plan
            self._change_pauses(event.at, pause=[job])
        elif isinstance(event, ev.Started | ev.Computing | ev.Resumed) and job in self.where:
            self._computing.add(job)
            if job in self.kept_by_owner:
                self._change_pauses(event.at, pause=[job])
            elif isinstance(event, ev.Resumed) or (job in self._paused and self._has_turn(event)):
                self._change_pauses(event.at, resume=[job])

    def _has_turn(self, event: ev.JobEvent) -> bool:
        """Return whether a job that started without a turn to compute is up and has one: no mate computes."""
        if isinstance(event, ev.Started) and not event.computes:
            return False
        mates = {other for gpu in self.where[event.job] for other in self._on[gpu] if other != event.job}
        return mates <= self._paused

    def pause_for_owner(self, event: ev.PausedByOwner) -> None:
        if event.job in self.where:
            self.kept_by_owner.add(event.job)
            if event.job in self._computing:
                self._change_pauses(event.at, pause=[event.job])

    def move(self, at: float, places: Mapping[JobId, tuple[GpuId, ...]]) -> None:
        """Apply all releases, then all claims. A job that stays on a GPU starts no new period there."""
        touched: dict[GpuId, list[JobId]] = {}
        moved: set[JobId] = set()
        for job, gpus in places.items():
            held = self.where.pop(job, ())
            if gpus:
                self.where[job] = gpus
            if gpus != held:
                moved.add(job)
                self._computing.discard(job)
                self.kept_by_owner.discard(job)
                self.attempts[job] = self.attempts.get(job, 0) + bool(gpus)
            for gpu in (*held, *gpus):
                touched.setdefault(gpu, [])
            for gpu in gpus:
                touched[gpu].append(job)
        paused_before = self._paused
        self._paused = paused_before - moved
        for gpu, claimed in touched.items():
            before = self._on.get(gpu, ())
            staying = [job for job in before if job not in places or job in claimed]
            after = (*staying, *(job for job in claimed if job not in staying))
            if after != before or not moved.isdisjoint(paused_before.intersection(before)):
                self._close(gpu, at, paused_before)
                self._on[gpu] = after

    def _change_pauses(self, at: float, pause: Collection[JobId] = (), resume: Collection[JobId] = ()) -> None:
        changed = [job for job in pause if job not in self._paused] + [job for job in resume if job in self._paused]
        for gpu in {gpu for job in changed for gpu in self.where.get(job, ())}:
            self._close(gpu, at, self._paused)
        self._paused = (self._paused | set(pause)) - set(resume)
        self._computing.difference_update(pause)

    def _close(self, gpu: GpuId, at: float, paused: Collection[JobId]) -> None:
        """End the present period of a GPU."""
        jobs = self._on.get(gpu, ())
        if jobs and self._since[gpu] < at:
            self.found.append(Segment(gpu, self._since[gpu], at, jobs, frozenset(paused).intersection(jobs)))
        self._since[gpu] = at
