"""Who was on which GPU when, read from a run's events: the stuff of Gantt charts."""

from collections.abc import Iterable
from dataclasses import dataclass

from carpool.core import events as ev
from carpool.core.model import GpuId, JobId


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time in which the set of jobs on one GPU did not change."""

    gpu: GpuId
    start: float
    end: float
    jobs: tuple[JobId, ...]


def segments(events: Iterable[ev.Event]) -> list[Segment]:
    """All stretches of time in which a GPU held somebody."""
    found: list[Segment] = []
    where: dict[JobId, tuple[GpuId, ...]] = {}
    now_on: dict[GpuId, tuple[JobId, ...]] = {}
    since: dict[GpuId, float] = {}

    def change(gpu: GpuId, at: float, jobs: tuple[JobId, ...]) -> None:
        before = now_on.get(gpu, ())
        if before and since[gpu] < at:
            found.append(Segment(gpu, since[gpu], at, before))
        now_on[gpu], since[gpu] = jobs, at

    def leave(job: JobId, at: float) -> None:
        for gpu in where.pop(job, ()):
            change(gpu, at, tuple(other for other in now_on[gpu] if other != job))

    for event in events:
        if isinstance(event, ev.Planned):
            for decision in event.decisions:
                leave(decision.job, event.at)
            for decision in event.decisions:
                if decision.allocation is not None:
                    where[decision.job] = decision.allocation.gpus
                    for gpu in decision.allocation.gpus:
                        change(gpu, event.at, (*now_on.get(gpu, ()), decision.job))
        elif isinstance(event, ev.Finished | ev.Failed | ev.Stopped):
            leave(event.job, event.at)
    return sorted(found, key=lambda segment: (segment.start, segment.gpu))
