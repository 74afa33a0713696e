"""The values everything else is made of: jobs, nodes, allocations and decisions.

All of them are frozen. Times are seconds, sizes are bytes, work is counted in iterations.
Every part of Carpool, from the policies to the live service, speaks in these words.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

JobId = str
GpuId = int
NodeId = str


@dataclass(frozen=True, slots=True)
class Job:
    """What a user asked for. `batch` is samples per GPU per iteration; only that of an `elastic` job may be changed."""

    id: JobId
    submitted: float
    model: str
    gpus: int
    batch: int
    iterations: int
    user: str = ""
    duration_s: float | None = None
    """Run time alone at the most consolidated placement, where known; otherwise the performance model predicts it."""
    can_shrink: bool = True
    """May the scheduler split the batch into smaller micro-batches (gradient accumulation)?"""
    exclusive: bool = False
    max_slowdown: float | None = None
    priority: int = 0
    after: tuple[JobId, ...] = ()
    retries: int = 0
    min_accumulation: int = 1
    """The fewest pieces into which the batch must be split: it ran out of memory with fewer."""
    elastic: bool = False
    """May the scheduler give it another number of GPUs and another batch, within the limits of its task?"""
    can_checkpoint: bool = True
    """May the scheduler suspend the job and resume it later? Only policies that suspend ask."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: the ids of its GPUs and the memory of each."""

    id: NodeId
    gpus: tuple[GpuId, ...]
    memory: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A gang's GPUs and its gradient accumulation: the sub-batch is ceil(batch / accum)."""

    gpus: tuple[GpuId, ...]
    accumulation: int = 1
    batch: int | None = None
    """Samples per GPU and iteration that the scheduler chose for an elastic job; None: the user's own."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of desired state: where a job shall run from now on, or None to stop and requeue it.

    Start, preemption, move and re-tune all follow from comparing it with the present. `why` is shown to users.
    """

    job: JobId
    allocation: Allocation | None
    why: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What one user may hold at the same time; None means no limit."""

    jobs: int | None = None
    gpus: int | None = None


class Status(StrEnum):
    """Where a job is in its life."""

    BLOCKED = "blocked"  # waits for the jobs named in `after`
    PENDING = "pending"
    HELD = "held"  # would be pending, but is not to be started before it is released
    STARTING = "starting"  # GPUs reserved, workers not up yet
    RUNNING = "running"
    STOPPING = "stopping"  # told to stop; comes back as pending
    CANCELLING = "cancelling"  # told to stop for good; holds its GPUs until the workers are gone
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


def as_scaled(job: Job, allocation: Allocation) -> Job:
    """The job as it runs there: an elastic one has the GPUs and the batch that the scheduler chose."""
    return job if allocation.batch is None else replace(job, gpus=len(allocation.gpus), batch=allocation.batch)


def sub_batch(batch: int, accumulation: int) -> int:
    """The largest of the `accumulation` micro-batches, whose sizes differ by at most one sample."""
    return -(-batch // accumulation)


def allowed_accumulations(job: Job) -> tuple[int, ...]:
    """Into how many pieces this job's batch may be cut, fewest first; never empty."""
    if not job.can_shrink:
        return (1,)
    counts = accumulations(job.batch)
    return tuple(count for count in counts if count >= job.min_accumulation) or counts[-1:]


def accumulations(batch: int) -> tuple[int, ...]:
    """The accumulation counts that Algorithm 2 tries: sub-batch B, B/2, B/4, … down to and including 1."""
    counts, size = [1], batch
    while size > 1:
        size = -(-size // 2)
        counts.append(-(-batch // size))
    return tuple(counts)
