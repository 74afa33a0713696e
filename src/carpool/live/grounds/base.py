"""What a ground is: something that hands out machines and keeps an agent alive on each. The protocols, and by hand.

A ground that owns machines (Slurm, Ray) implements `Ground`, which the service calls, and `Witness`, which its agents
call. Nodes that operators start by hand have neither. A *pilot* is what a ground runs on one machine: the supervisor
and the agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

HAND = "hand"
"""Ground of nodes whose agents operators start."""


@dataclass(frozen=True, slots=True)
class JoinTicket:
    """What a new agent needs."""

    pilot: str
    """Name of the pilot."""
    urls: tuple[str, ...]
    """Where the services listen."""
    token: str
    """Secret: it belongs in no argument, environment of a job or log."""
    certificate: str = ""
    """Certificate by which the service is known, as text; empty: none is needed."""
    gpus: int | None = None
    """Number of logical GPUs of the node; None: those that exist."""
    mps: bool = True
    home: str = ""
    """Folder for the homes of agents, on a local disk of the node; empty: one in the folder for temporary files."""
    service: str = ""
    """Short name of the service's home, which tells agents of several services on one machine apart."""
    emulated: str = ""
    """File that describes emulated GPUs, which the node has then; empty: none."""

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class PilotStatus(StrEnum):
    """How far a pilot is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Pilot:
    """What a ground runs to keep one agent alive on one machine."""

    id: str
    node: str
    """Name of the machine; empty while it waits."""
    status: PilotStatus
    ends_at: float | None = None
    """When the ground takes the machine back, in seconds since 1970; None: not known, or never."""
    handle: str = ""
    """Name of the pilot in the ground's own words, such as the number of a Slurm job."""
    why: str = ""
    """Why it waits, or how it ended, in the ground's words."""

    @property
    def alive(self) -> bool:
        return self.status is not PilotStatus.ENDED


class Ground(Protocol):
    """Hands out machines. Every call is bounded in time and may fail with `InputError`."""

    name: str

    async def submit(self, ticket: JoinTicket) -> None:
        """Ask for an agent on one more machine."""

    async def pilots(self) -> list[Pilot]:
        """Return the pilots of this service. One that is missing has ended and can start no more."""

    async def give_up(self, pilot: Pilot) -> None:
        """End a pilot. Its witness denies it as soon as `pilots` says that it has ended."""

    async def close(self) -> None:
        """Release what the ground holds in this process. Pilots stay."""


class Witness(Protocol):
    """Tells an agent that gets no answer of the service whether its workers may go on."""

    def wanted(self, timeout_s: float) -> bool | None:
        """Return whether the ground still wants this agent's pilot; None: it cannot be asked. Blocks up to
        `timeout_s`."""


class NoWitness:
    """The witness of a node that was started by hand: there is none."""

    def wanted(self, timeout_s: float) -> bool | None:
        return None


def make_witness(settings: Mapping[str, Any] | None) -> Witness:
    """Return the witness that a pilot's settings describe; without any, there is none."""
    if not settings:
        return NoWitness()
    if settings["kind"] == "slurm":
        from carpool.live.grounds.slurm import SlurmWitness

        return SlurmWitness(str(settings["job"]), str(settings["node"]))
    if settings["kind"] == "emulated":
        from carpool.live.grounds.emulated import EmulatedWitness

        return EmulatedWitness(str(settings["record"]), str(settings["address"]))
    from carpool.live.grounds.witness_socket import SocketWitness

    return SocketWitness(str(settings["path"]))
