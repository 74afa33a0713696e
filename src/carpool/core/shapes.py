"""Makes the shapes by which jobs are alike, one object for each; the performance model says what their sizes cost."""

from dataclasses import dataclass

from carpool.core.model import Job, allowed_accumulations
from carpool.core.perf import PerformanceModel, Placement


@dataclass(frozen=True, slots=True)
class Size:
    """One way to cut a job's batch: the accumulation, its memory on each GPU, and its iteration time
    relative to the uncut batch (at the most consolidated placement)."""

    accumulation: int
    memory: int
    relative_time: float


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What decides where a job can go, whatever its length. Jobs of one shape share one object:
    a policy that finds no place for one of them need not try the longer ones."""

    gpus: int
    priority: int
    exclusive: bool
    max_slowdown: float | None
    user: str | None
    """The user, where limits apply to that user."""
    sizes: tuple[Size, ...]
    """From the whole batch down to what the job allows."""
    placement: Placement
    """The most consolidated one."""


class Shapes:
    def __init__(self, perf: PerformanceModel) -> None:
        self.perf = perf
        self._known: dict[tuple[object, ...], Shape] = {}

    def of(self, job: Job, priority: int, user: str | None) -> Shape:
        """`user` is given only where limits apply to that user."""
        cut = (job.can_shrink, job.min_accumulation)
        key = (job.gpus, job.model, job.batch, cut, job.exclusive, job.max_slowdown, priority, user)
        shape = self._known.get(key)
        if shape is None:
            best = Placement(job.gpus, self.perf.fewest_nodes(job.gpus))
            sizes = self._sizes(job, best)
            shape = Shape(job.gpus, priority, job.exclusive, job.max_slowdown, user, sizes, best)
            self._known[key] = shape
        return shape

    def _sizes(self, job: Job, best: Placement) -> tuple[Size, ...]:
        whole = self.perf.iteration_time(job, 1, best)
        accumulations = allowed_accumulations(job)
        return tuple(
            Size(s, self.perf.memory(job, s), self.perf.iteration_time(job, s, best) / whole) for s in accumulations
        )
