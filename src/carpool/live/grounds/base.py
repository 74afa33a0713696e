"""What a ground is: something that hands out machines and keeps an agent alive on each. The protocols, and by hand.

A ground that owns machines (Slurm, Ray) implements `Ground`, which the service calls, and `Witness`, which its agents
call. Nodes that operators start by hand have neither: nobody hands them out, and nobody can be asked about them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class JoinTicket:
    """What a new agent needs."""

    urls: tuple[str, ...]
    """Where the services listen."""
    token: str
    """Secret: it belongs in no argument, environment of a job or log."""


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


class Ground(Protocol):
    """Hands out machines. Every call is bounded in time and may fail with `InputError`."""

    name: str

    async def submit(self, count: int, join: JoinTicket) -> None:
        """Ask for agents on this many more machines."""

    async def pilots(self) -> list[Pilot]:
        """Return the pilots of this service, ended ones too as long as the ground remembers them."""

    async def give_up(self, pilot: Pilot) -> bool:
        """End a pilot; return whether the ground has that on record, so that its witnesses deny it from now on."""


class Witness(Protocol):
    """Asked by an agent that cannot hear the service: may its workers go on?"""

    def wanted(self) -> bool | None:
        """Return whether the ground still wants this agent's pilot; None: it cannot be asked. Blocks for seconds."""


class NoWitness:
    """The witness of a node that was started by hand: there is none."""

    def wanted(self) -> bool | None:
        return None
