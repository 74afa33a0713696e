"""Everything that can happen, named by past participles. Events are the only way to change a `State`.

Drivers (the simulator, the live service) create all events except `Planned`, which the scheduler appends before a plan
is carried out. A journal of events, replayed, gives the same state again. `attempt` is the number of a job's launch, so
that a message from an earlier attempt is recognised as stale and ignored.

A subclass of `Event` registers itself under its class name: `codec` writes and reads it from its fields alone. It needs
one more thing, a function that applies it to the state: see `transitions`.
"""

from dataclasses import dataclass
from typing import ClassVar

from carpool.core.model import (
    Closure,
    Decision,
    FairShare,
    GpuDemand,
    GpuId,
    Job,
    JobId,
    Limits,
    Node,
    NodeId,
    UserGroup,
)
from carpool.core.values import quick

EVENTS: dict[str, type["Event"]] = {}
"""All kinds of events by name, abstract ones left out. Filled by the subclasses of `Event`."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. A subclass whose body says `abstract = True` is a base for others and not registered."""

    abstract: ClassVar[bool] = True
    at: float
    """Seconds on the driver's clock."""

    def __init_subclass__(cls) -> None:
        if cls.__dict__.get("abstract", False):
            return
        known = EVENTS.get(cls.__name__)
        # dataclass(slots=True) makes the class a second time; a class of that name in another module is a mistake
        if known is not None and known.__module__ != cls.__module__:
            raise TypeError(f"{cls.__module__}: there is an event {cls.__name__} already, in {known.__module__}")
        EVENTS[cls.__name__] = cls


@quick
@dataclass(frozen=True, slots=True)
class Submitted(Event):
    """A user submitted a job."""

    job: Job


@quick
@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The scheduler made a plan. It is applied as a whole: all releases, then all claims."""

    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class JobEvent(Event):
    """Something that happened to one attempt of a job."""

    abstract = True
    job: JobId
    attempt: int


@quick
@dataclass(frozen=True, slots=True)
class Started(JobEvent):
    """The whole gang is up."""

    done: float | None = None
    """Iterations done, where the gang had to fall back to a checkpoint; None: as many as the state knows."""
    computes: bool = True
    """Whether it iterates; False: it still warms up, and `Computing` follows."""


@dataclass(frozen=True, slots=True)
class Computing(JobEvent):
    """A gang that was warming up does its first iteration."""

    told: bool = True
    """Whether its workers reported it; False: it is assumed, because they reported nothing for a time."""


@dataclass(frozen=True, slots=True)
class Progressed(JobEvent):
    """The workers reported how many iterations are done."""

    done: float


@quick
@dataclass(frozen=True, slots=True)
class Observed(JobEvent):
    """The workers reported the iterations done and the seconds per iteration that they measure now."""

    done: float
    iteration_s: float
    relative: bool = False
    """The number of iterations is a guess, so that only ratios of iteration times mean something."""


@dataclass(frozen=True, slots=True)
class DemandMeasured(JobEvent):
    """What the job uses of a GPU was measured, while no other job computed on its GPUs."""

    demand: GpuDemand


@dataclass(frozen=True, slots=True)
class Outlived(JobEvent):
    """The job still runs, although it should have ended by what is believed of it."""


@dataclass(frozen=True, slots=True)
class Retuned(JobEvent):
    """The workers now run with this accumulation, and with this batch where the scheduler chose one."""

    accumulation: int
    batch: int | None = None
    unasked: bool = False
    """No plan asked for it: the workers ran out of memory and split their batch themselves."""


@dataclass(frozen=True, slots=True)
class Checkpointed(JobEvent):
    """The workers wrote a checkpoint after `done` iterations."""

    done: float


@dataclass(frozen=True, slots=True)
class SavingSeen(JobEvent):
    """The workers showed whether they save when they are asked to stop."""

    saves: bool


@dataclass(frozen=True, slots=True)
class Stopped(JobEvent):
    """The workers are gone on request. A restart resumes after `done` iterations."""

    done: float


@quick
@dataclass(frozen=True, slots=True)
class Paused(JobEvent):
    """All workers of the gang have stopped computing. They keep their memory."""


@dataclass(frozen=True, slots=True)
class SwapFailed(JobEvent):
    """The memory of a paused gang could not be moved to main memory. The gang is paused and keeps its memory."""


@quick
@dataclass(frozen=True, slots=True)
class Resumed(JobEvent):
    """All workers of a paused gang go on."""


@dataclass(frozen=True, slots=True)
class Requeued(JobEvent):
    """A user asked for the job to be stopped and put back into the queue."""


@dataclass(frozen=True, slots=True)
class LimitNeared(JobEvent):
    """The job reaches its time limit soon. Its workers are asked for a checkpoint."""

    left_s: float
    """Seconds for which it may still compute."""


@dataclass(frozen=True, slots=True)
class LimitReached(JobEvent):
    """The job has computed for as long as it may. Its workers save and stop, and the job ends or is requeued."""


@quick
@dataclass(frozen=True, slots=True)
class Finished(JobEvent):
    """The job did all its iterations."""


@dataclass(frozen=True, slots=True)
class Failed(JobEvent):
    """The workers died. A retry, where the job has one left, resumes at the last checkpoint."""

    reason: str
    again: bool = False
    """The failure is not the job's fault (the machine restarted, a mate took the memory): the job goes back to the
    queue and keeps its retries."""


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """The owner cancelled the job."""

    job: JobId


@dataclass(frozen=True, slots=True)
class Held(Event):
    """The job is not to be started until it is released. A running job goes on, but does not start again."""

    job: JobId
    why: str = ""
    """What keeps it from starting; empty: its owner held it."""
    for_good: bool = False
    """No release lets it start."""


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The job may be started again."""

    job: JobId


@dataclass(frozen=True, slots=True)
class PausedByOwner(Event):
    """The owner paused the job. No policy resumes it before `ResumedByOwner`."""

    job: JobId


@dataclass(frozen=True, slots=True)
class ResumedByOwner(Event):
    """The owner lets a paused job go on."""

    job: JobId


@dataclass(frozen=True, slots=True)
class ConstraintsChanged(Event):
    """The job turned out to differ from its description: its batch can be split, must be split, it must be alone, or it
    can be paused.

    None leaves a constraint as it is. A job that holds GPUs keeps its constraints, except that it may be allowed to
    split its batch and to be paused.
    """

    job: JobId
    can_shrink: bool | None = None
    min_accumulation: int | None = None
    exclusive: bool | None = None
    can_pause: bool | None = None


@dataclass(frozen=True, slots=True)
class PriorityChanged(Event):
    """The job's place in the queue is computed again, with another priority where one is given."""

    job: JobId
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class LimitsChanged(Event):
    """A user's limits changed. The user "" stands for all users without limits of their own."""

    user: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class GroupChanged(Event):
    """The operator described a group, or changed its description."""

    group: UserGroup


@dataclass(frozen=True, slots=True)
class FairShareChanged(Event):
    """The operator chose how strongly shares count."""

    fair_share: FairShare


@dataclass(frozen=True, slots=True)
class AccountsOpened(Event):
    """What jobs use of the GPUs is counted from now on. A repeated event changes nothing."""

    exact: bool = False
    """Whether the state's iteration times are true, as in a simulation, so that none must be measured."""


@dataclass(frozen=True, slots=True)
class GuessesTrusted(Event):
    """From now on guesses of users count as they are, or are corrected by what came of earlier ones."""

    trusted: bool = True


@dataclass(frozen=True, slots=True)
class NodeJoined(Event):
    """A node became part of the cluster."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeClosed(Event):
    """Nothing new may start on a node. Jobs that are there go on."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NodeOpened(Event):
    """Jobs may start on a node again."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class ClosureSet(Event):
    """The operator closes GPUs from a time on, or changes a closure."""

    closure: Closure


@dataclass(frozen=True, slots=True)
class ClosureBegan(Event):
    """The time of a closure has come: jobs that must not be there save and move, or are paused."""

    closure: str


@dataclass(frozen=True, slots=True)
class ClosureRemoved(Event):
    """A closure is over, or the operator took it back."""

    closure: str


@dataclass(frozen=True, slots=True)
class SwapChanged(Event):
    """A node can, or can no longer, move the memory of paused jobs to main memory."""

    node: NodeId
    can_swap: bool


@dataclass(frozen=True, slots=True)
class MemoryTaken(Event):
    """Processes that are not jobs now hold `memory` bytes of a GPU."""

    gpu: GpuId
    memory: int


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """A node is gone with all workers on it. Its jobs go back to the queue once their other workers are gone."""

    node: NodeId
