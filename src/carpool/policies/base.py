"""What every policy derives from, and what policies of several families use.

A policy is a dataclass: its fields are its options, its docstring's first line is what `carpool policies` shows. To add
one, write a file in a family folder and add its class to the table in `registry`; or keep it outside and name it as
`path/to/file.py:Class`. examples/longest_first.py is a complete policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any, ClassVar

from carpool.core.model import Decision, JobId
from carpool.core.tenants import WITHOUT_PREEMPTION, Entitlement
from carpool.core.view import JobView, View


def option(default: Any, help: str) -> Any:
    """Declare an option of a policy: its default, and one line of help that `carpool policies` shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class BasePolicy:
    """A policy without decisions: a subclass names itself, sorts the queue by `key` and decides in `decide`."""

    name: ClassVar[str]
    """The name under which users choose the policy."""
    restart_s: ClassVar[float] = 0.0
    """Seconds that the simulator charges when a suspended job starts again."""
    start_s: ClassVar[float] = 0.0
    """Seconds that the simulator charges when a job starts for the first time."""
    jobs_per_gpu: ClassVar[int] = 2
    """Number of jobs that the service lets compute on a GPU, unless its operator chooses another."""

    entitlement: ClassVar[Entitlement] = WITHOUT_PREEMPTION
    """Which part of its share a group may have before others get any, where shares count."""

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        """Return the job's sort key in the queue, smallest first. It stays as it is while the job waits."""
        raise TypeError(f"{type(self).__name__} must define key()")

    def decide(self, view: View) -> Sequence[Decision]:
        """Return what to change now. The same view gives the same decisions; fill a `Draft` and return its list."""
        raise TypeError(f"{type(self).__name__} must define decide()")

    def wake(self, view: View) -> float | None:
        """Return when to be asked again even if nothing happens; None: only after an event."""
        return None

    def explain(self, view: View, job: JobView) -> "Explanation | None":
        """Return why a pending job that finds too few free GPUs does not share; None: there is nothing to say."""
        return None

    @property
    def in_rounds(self) -> bool:
        """Whether the policy is asked only at the times that `wake` names."""
        return False


@dataclass(frozen=True, slots=True)
class PairComparison:
    """What a policy compared for a waiting job and one running job: to share from now on, or to wait for its end."""

    host: JobId
    guest_slowdown: float
    host_slowdown: float
    share_s: float
    """Sum of both completion times, counted from now, if they share."""
    wait_s: float
    """The same sum if the guest waits for the host to end."""
    pays: bool
    """Whether `pair.pays` says to share."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a policy lets a job wait instead of sharing. `carpool explain` shows it."""

    why: str
    """Half a sentence without a full stop. Where hosts were compared, it continues a sentence about the best one."""
    compared: tuple[PairComparison, ...] = ()
    """The running jobs that it could join, best first."""


def next_round(now: float, round_s: float) -> float:
    """Return the first multiple of the round after now."""
    number = floor(now / round_s) + 1
    return number * round_s if number * round_s > now else (number + 1) * round_s


def shortest_first(job: JobView, now: float) -> tuple[float, ...]:
    """Return SJF's sort key: the expected time left alone, L_k (Alg. 1, l. 1)."""
    return (job.alone_left(now),)
