"""The shapes of jobs: what decides where a job can be placed.

`State` asks `Shapes` for the shape of every job; jobs of one shape share one object, so policies and the queue treat
them alike. The performance model gives the memory and the iteration time of each size.
"""

from dataclasses import dataclass

from carpool.core.model import Job, allowed_accumulations
from carpool.core.perf import PerformanceModel, Placement


@dataclass(frozen=True, slots=True)
class Size:
    """One way to split a job's batch."""

    accumulation: int
    memory: int
    """Bytes on each GPU."""
    relative_time: float
    """Iteration time relative to that of the whole batch, at the most consolidated placement."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What decides where a job can be placed, independent of its length.

    A policy that finds no place for a job need not try longer jobs of the same shape.
    """

    gpus: int
    priority: int
    exclusive: bool
    max_slowdown: float | None
    user: str | None
    """The user, where limits apply to it or shares count; None otherwise."""
    sizes: tuple[Size, ...]
    """Sizes from the whole batch down to the smallest sub-batch that the job allows."""
    placement: Placement
    """The most consolidated placement."""
    group: str | None = None
    """The group, where shares, guarantees or caps count; None otherwise."""
    _general: "Shape | None" = None

    @property
    def general(self) -> "Shape":
        """The same shape without priority, user and group. Jobs with the same general shape find the same hosts."""
        return self._general or self


class Shapes:
    """The shapes that exist under one performance model."""

    def __init__(self, perf: PerformanceModel) -> None:
        self.perf = perf
        self._known: dict[str, dict[tuple[object, ...], Shape]] = {}
        """By the model of the jobs, and then by all else that decides."""

    def forget(self, model: str) -> None:
        """Forget the shapes of jobs of a model whose iteration times changed."""
        self._known.pop(model, None)

    def of(self, job: Job, priority: int, user: str | None, group: str | None = None) -> Shape:
        """Return the shape of a job. `user` is given only where limits apply to that user or shares count, `group`
        only where shares, guarantees or caps count."""
        split = job.min_accumulation if job.can_shrink else 0
        key = (job.gpus, job.batch, split, job.exclusive, job.max_slowdown, priority, user, group)
        known = self._known.get(job.model)
        if known is None:
            known = self._known[job.model] = {}
        shape = known.get(key)
        if shape is None:
            general = self.of(job, 0, None) if priority or user is not None or group is not None else None
            if general is None:
                best = Placement(job.gpus, self.perf.fewest_nodes(job.gpus))
                sizes = self._sizes(job, best)
            else:
                best, sizes = general.placement, general.sizes
            shape = Shape(job.gpus, priority, job.exclusive, job.max_slowdown, user, sizes, best, group, general)
            known[key] = shape
        return shape

    def _sizes(self, job: Job, best: Placement) -> tuple[Size, ...]:
        whole = self.perf.iteration_time(job, 1, best)
        accumulations = allowed_accumulations(job)
        return tuple(
            Size(s, self.perf.memory(job, s), self.perf.iteration_time(job, s, best) / whole) for s in accumulations
        )
