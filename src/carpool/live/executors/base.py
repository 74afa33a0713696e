"""What the service wants of an executor, and what an executor tells the service. One file per kind of executor beside
this one; the scheduler core knows nothing of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from carpool.channel import Report
from carpool.core.model import GpuId

Key = tuple[str, int]
"""A gang: the job's id and which of its launches."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One GPU as a worker knows it."""

    id: GpuId
    node: str
    index: int
    uuid: str = ""
    """Empty: a logical slot, without a GPU behind it."""

    @property
    def name(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A gang to be started."""

    job: str
    attempt: int
    slots: tuple[Slot, ...]
    command: tuple[str, ...]
    directory: str
    env: Mapping[str, str]
    accumulation: int = 1
    can_shrink: bool | None = None
    cpus: int | None = None
    memory: int | None = None
    grace_s: float = 30.0
    uid: int | None = None
    """The user to run as; None: ours."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """More of the environment, from the service: where MPS is, which member of an array this is."""

    @property
    def key(self) -> Key:
        return self.job, self.attempt


class How(StrEnum):
    """How to stop a gang."""

    SAVE = "save"  # a checkpoint first, where the training library is there to take it
    END = "end"
    KILL = "kill"


class Outcome(StrEnum):
    FINISHED = "finished"
    STOPPED = "stopped"  # on request
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"  # by no fault of its own: the machine restarted, MPS failed, or it was never started
    NEVER = "never"  # not launched, and nothing of it is left


@dataclass(frozen=True, slots=True)
class Ended:
    """All workers of a gang are gone."""

    job: str
    attempt: int
    outcome: Outcome
    reason: str = ""
    exit_code: int | None = None
    done: float | None = None
    """The iteration of the last checkpoint, where one was reported."""
    needs_alone: bool = False


class Listener(Protocol):
    """Who hears of gangs: the service."""

    def gang_up(self, job: str, attempt: int) -> None: ...

    def gang_ended(self, ended: Ended) -> None: ...

    def trouble(self, job: str, text: str) -> None:
        """Something that people should know, and that the executor goes on trying to mend."""


class Executor(Protocol):
    def start(self, listener: Listener) -> None: ...

    async def recover(self, known: Iterable[Key]) -> None:
        """Find the gangs of an earlier service. Of the known ones that were launched, the living are watched again and
        the dead are reported; a known one that was never launched stays unmentioned; all others are killed."""

    def launch(self, launch: Launch) -> None:
        """Start a gang whole or not at all, in the background."""

    def stop(self, key: Key, how: How) -> bool:
        """Stop a gang in the background; False if there is none."""

    def retune(self, key: Key, accumulation: int) -> None:
        """Ask for another accumulation; the reports tell when it is in force."""

    def present(self) -> Mapping[Key, tuple[GpuId, ...]]:
        """The gangs that may have workers, and on which GPUs."""

    def report(self, key: Key) -> Report | None:
        """What the first worker reported last."""

    def ranks(self, key: Key) -> list[dict[str, Any]]:
        """What is recorded of a gang's workers: rank, pid, started, exit_code, ended."""

    async def close(self) -> None:
        """Let go; the workers run on."""
