"""The values that all parts of Carpool exchange: jobs, nodes, allocations and decisions.

All of them are frozen. Times are in seconds, sizes in bytes, and work is counted in iterations.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from carpool.core.values import quick

JobId = str
GpuId = int
NodeId = str


class Guess(StrEnum):
    """What the user of a job guessed about its length."""

    DURATION = "duration"
    ITERATIONS = "iterations"
    NOTHING = "nothing"


@quick
@dataclass(frozen=True, slots=True)
class Job:
    """A training that a user submitted."""

    id: JobId
    submitted: float
    model: str
    gpus: int
    """Number of workers of the gang, one per GPU."""
    batch: int
    """Samples per GPU per iteration. The scheduler may change only that of an `elastic` job."""
    iterations: int
    user: str = ""
    duration_s: float | None = None
    """Run time alone at the most consolidated placement; None: the performance model predicts it."""
    can_shrink: bool = True
    """The scheduler may split the batch into micro-batches (gradient accumulation)."""
    exclusive: bool = False
    """The job shares its GPUs with no other job, paused ones included."""
    max_slowdown: float | None = None
    """Largest slow-down that the job accepts; None: any."""
    priority: int = 0
    """Jobs of a higher priority come first in the queue."""
    after: tuple[JobId, ...] = ()
    """Jobs that must finish before this one starts."""
    retries: int = 0
    """Number of failures after which the job starts again."""
    min_accumulation: int = 1
    """Smallest accumulation with which the job may run: it ran out of memory with a smaller one."""
    elastic: bool = False
    """The scheduler may choose another number of GPUs and another batch, within the limits of the task."""
    can_checkpoint: bool = True
    """The scheduler may suspend the job and resume it later."""
    saves: bool | None = True
    """The job saves its work when it is asked to stop; None: it is not known so far."""
    can_pause: bool = True
    """The scheduler may pause the job. Its owner may pause it in any case."""
    can_start_ahead: bool | None = True
    """The job may start up before its turn to compute: its description says that it reports the end of its start-up.
    What was observed of its model counts more. None: it may once a job of its model has reported it."""
    group: str = ""
    """Group whose share of the cluster the job uses: that of its user at submission."""
    project: str = ""
    """Project that accounts count the job for."""
    limit_s: float | None = None
    """Seconds for which the job may compute; None: the limit of its group, if there is one."""
    requeue: bool = False
    """At its time limit, the job goes back into the queue instead of ending, and goes on from its checkpoint."""
    guess: Guess | None = None
    """What its user guessed; None: the duration where the job has one, else the iterations."""

    @property
    def can_suspend(self) -> bool:
        """Whether a policy may suspend it: that is allowed, and it is not known to lose its work."""
        return self.can_checkpoint and self.saves is not False


MOST_GPUS = 1 << 24
"""Numbers of GPUs are below this one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: the ids of its GPUs and the memory of each."""

    id: NodeId
    gpus: tuple[GpuId, ...]
    memory: int
    can_swap: bool = False
    """The memory that a paused job of one GPU holds there can be moved to main memory and back."""

    def __post_init__(self) -> None:
        """Refuse a number of a GPU that a damaged journal may contain: sets of GPUs have a bit for each number."""
        if not all(0 <= gpu < MOST_GPUS for gpu in self.gpus):
            raise ValueError(f"node {self.id}: has a GPU with an impossible number")


@quick
@dataclass(frozen=True, slots=True)
class Allocation:
    """A gang's GPUs and its gradient accumulation: the sub-batch is ceil(batch / accumulation)."""

    gpus: tuple[GpuId, ...]
    accumulation: int = 1
    batch: int | None = None
    """Samples per GPU per iteration that the scheduler chose for an elastic job; None: the user's own."""
    active: bool = True
    """Whether the gang computes. A paused gang keeps its place and its memory, and makes no progress. A gang that
    starts like that stands still once it is up, until no job computes on its GPUs."""
    swapped: bool = False
    """Whether the memory of a paused gang is in main memory, so that other jobs can use it."""


@quick
@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy wants changed for one job.

    Whether it is a start, a preemption, a move, a re-tune, a pause or a resume follows from comparing it with the
    present allocation.
    """

    job: JobId
    allocation: Allocation | None
    """Where the job runs from now on; None: it is stopped and requeued."""
    why: str
    """Reason that users read."""
    trial: JobId | None = None
    """The other job of the trial that the decision begins or continues; None: it belongs to none."""


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """What a job uses of a GPU when it runs alone. Shares are between 0 and 1, as means over some seconds."""

    sm: float
    """Share of the multiprocessors in use; without GPM counters, that of the time in which a kernel ran."""
    busy: float
    """Share of the time in which a kernel ran."""
    dram: float = 0.0
    """Share of the memory bandwidth in use."""
    tensor: float = 0.0
    """Share of time in which tensor cores compute; 0 without GPM counters."""
    memory: int = 0
    """Peak bytes of device memory; 0: not known."""
    iteration_s: float = 0.0
    """Seconds per iteration as the workers count; 0: not known."""
    gpm: bool = True
    """Whether GPM counters gave the shares."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The number of jobs and GPUs that one user may hold at the same time; None: no limit."""

    jobs: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class UserGroup:
    """Users that share one part of the cluster, as the operator describes them."""

    name: str
    weight: float = 1.0
    """Share of the cluster, relative to the weights of the other groups that have jobs."""
    guarantee: int = 0
    """GPUs that are the group's when it wants them. Others may use them while it does not."""
    cap: int | None = None
    """Largest number of GPUs that the group may hold; None: any."""
    default_limit_s: float | None = None
    """Time limit of jobs that name none; None: `max_limit_s`."""
    max_limit_s: float | None = None
    """Longest time limit that a job may have; None: any."""


@dataclass(frozen=True, slots=True)
class FairShare:
    """How strongly groups and users that used less than their share go first."""

    strength: float = 0.0
    """0: not at all; 1: shares above all."""
    half_life_s: float = 86_400.0
    """Seconds after which a GPU-second that was used counts half."""


@dataclass(frozen=True, slots=True)
class Closure:
    """GPUs that are closed from a time on: drained by the operator, or reserved for a group."""

    id: str
    """Name that operators use: the node or GPU that is drained, or the number of a reservation."""
    gpus: tuple[GpuId, ...]
    start: float
    end: float | None = None
    """When it is over; None: when the operator says so."""
    group: str | None = None
    """Group whose jobs may use the GPUs; None: no job may."""
    lets_finish: bool = False
    """Jobs that run there when it begins run to their ends."""

    def is_for(self, job: Job) -> bool:
        """Return whether the GPUs are reserved for a job's group."""
        return self.group is not None and self.group == job.group


class Status(StrEnum):
    """Where a job is in its life."""

    BLOCKED = "blocked"  # waits for the jobs named in `after`
    PENDING = "pending"
    HELD = "held"  # would be pending, but must be released first
    STARTING = "starting"  # GPUs reserved, workers not up
    RUNNING = "running"
    PAUSING = "pausing"  # asked to pause, and may still compute
    PAUSED = "paused"  # keeps its place and its memory, computes nothing
    RESUMING = "resuming"  # asked to go on, and does not compute yet
    STOPPING = "stopping"  # asked to stop; becomes pending again
    CANCELLING = "cancelling"  # asked to stop for good; holds its GPUs until its workers are gone
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


PAUSE = (Status.PAUSING, Status.PAUSED, Status.RESUMING)
"""The statuses from a pause to the end of it."""
WORKING = (Status.STARTING, Status.RUNNING, *PAUSE)
"""The statuses of a job that has GPUs and keeps them until something happens."""
HOLDING = (*WORKING, Status.CANCELLING)
"""The statuses in which a job may hold GPUs."""
ALIVE = (*HOLDING, Status.STOPPING)
"""The statuses in which a job may have workers."""
SWAP_OUT_S, SWAP_IN_S = 0.54, 0.21
"""Seconds to move 1 GiB of a paused job from its GPU to main memory, and back (docs/experiments/swap.md)."""


def as_scaled(job: Job, allocation: Allocation) -> Job:
    """Return the job as it runs in this allocation: with the GPUs and the batch that the scheduler chose."""
    return job if allocation.batch is None else replace(job, gpus=len(allocation.gpus), batch=allocation.batch)


def sub_batch(batch: int, accumulation: int) -> int:
    """Return the size of the largest micro-batch; the sizes differ by at most one sample."""
    return -(-batch // accumulation)


def allowed_accumulations(job: Job) -> tuple[int, ...]:
    """Return the accumulations that this job allows, smallest first; never empty."""
    if not job.can_shrink:
        return (1,)
    counts = accumulations(job.batch)
    return tuple(count for count in counts if count >= job.min_accumulation) or counts[-1:]


def accumulations(batch: int) -> tuple[int, ...]:
    """Return the accumulations that Algorithm 2 tries: sub-batch B, B/2, B/4, … down to 1."""
    counts, size = [1], batch
    while size > 1:
        size = -(-size // 2)
        counts.append(-(-batch // size))
    return tuple(counts)
