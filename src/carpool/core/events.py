"""Everything that can happen, as past participles. Events are the only way to change a `State`.

Drivers (the simulator, the live service) make all of them except `Planned`, which the scheduler itself appends
before anybody acts on a plan. A journal of them, replayed, gives the same state again. `attempt` counts a job's
launches, so that a message from an earlier launch is recognised as stale and ignored.
"""

from dataclasses import dataclass

from carpool.core.model import Decision, GpuId, Job, JobId, Limits, Node, NodeId


@dataclass(frozen=True, slots=True)
class Event:
    at: float


@dataclass(frozen=True, slots=True)
class Submitted(Event):
    job: Job


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The scheduler's plan, applied as a whole: all releases, then all claims."""

    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class JobEvent(Event):
    job: JobId
    attempt: int


@dataclass(frozen=True, slots=True)
class Started(JobEvent):
    """The whole gang is up and iterates, from `done` iterations on where it had to fall back to a checkpoint."""

    done: float | None = None


@dataclass(frozen=True, slots=True)
class Progressed(JobEvent):
    done: float


@dataclass(frozen=True, slots=True)
class Observed(JobEvent):
    """Iterations done, and seconds per iteration as measured now."""

    done: float
    iteration_s: float


@dataclass(frozen=True, slots=True)
class Retuned(JobEvent):
    """The workers now run with this accumulation, and with this batch where the scheduler chose one."""

    accumulation: int
    batch: int | None = None
    unasked: bool = False
    """Nobody planned it: they ran out of memory and split their batch by themselves."""


@dataclass(frozen=True, slots=True)
class Checkpointed(JobEvent):
    done: float


@dataclass(frozen=True, slots=True)
class Stopped(JobEvent):
    """The workers are gone on request; a restart resumes at `done` iterations."""

    done: float


@dataclass(frozen=True, slots=True)
class Requeued(JobEvent):
    """Somebody wants the job stopped and back in the queue."""


@dataclass(frozen=True, slots=True)
class Finished(JobEvent):
    pass


@dataclass(frozen=True, slots=True)
class Failed(JobEvent):
    """The workers died; a retry, where the job has one left, resumes at the last checkpoint."""

    reason: str
    again: bool = False
    """Not the job's fault (the machine restarted, a mate took the memory): it comes back and keeps its retries."""


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    job: JobId


@dataclass(frozen=True, slots=True)
class Held(Event):
    """The job is not to be started until it is released; one that runs goes on, but does not start again."""

    job: JobId


@dataclass(frozen=True, slots=True)
class Released(Event):
    job: JobId


@dataclass(frozen=True, slots=True)
class ConstraintsChanged(Event):
    """Something turned out to be otherwise than the job said: it may be split, must be split, or must be alone.

    None leaves a term as it is. A job that holds GPUs holds them on the old terms, so for such a one only the
    permission to split counts.
    """

    job: JobId
    can_shrink: bool | None = None
    min_accumulation: int | None = None
    exclusive: bool | None = None


@dataclass(frozen=True, slots=True)
class PriorityChanged(Event):
    """The job's place in the queue is to be computed anew, with another priority where one is given."""

    job: JobId
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class LimitsChanged(Event):
    """Limits of one user; the user "" stands for everybody without limits of their own."""

    user: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class NodeJoined(Event):
    node: Node


@dataclass(frozen=True, slots=True)
class MemoryTaken(Event):
    """Processes that are none of our jobs hold so much of a GPU's memory now."""

    gpu: GpuId
    memory: int


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """The machine is gone with all that ran on it. Its jobs go back to the queue, once their other workers are gone."""

    node: NodeId
