"""What the joint rule can do for a job that waits, the guest: seven kinds of move. A guest is pending or paused.

The modules of candidates offer moves, `objective` prices them, `choice` keeps the best, and `policy` makes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from carpool.core.availability import Change
from carpool.core.model import GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView


@dataclass(slots=True)
class Move:
    """What all moves have in common."""

    guest: JobView
    gpus: tuple[GpuId, ...]
    ends: dict[int, float]
    """The end of the guest and the new ends of its hosts, by `seq`."""
    cost: float
    """The guest's completion time, counted from now, and what its hosts lose."""
    gain: float = field(default=0.0, kw_only=True)
    """Seconds by which the objective falls; known once the move was priced."""
    changes: Sequence[Change] | None = field(default=None, kw_only=True)
    """When GPUs will be free if the move is made; known once the move was priced."""


@dataclass(slots=True)
class StartAlone(Move):
    """Start the guest on free GPUs."""

    size: Size


@dataclass(slots=True)
class FillIn(Move):
    """Start the guest on free GPUs that are kept for another job, which needs them later."""

    size: Size
    claimant: JobView


@dataclass(slots=True)
class Join(Move):
    """Start the guest on GPUs of its hosts, filled up with free ones."""

    size: Size
    hosts: tuple[JobView, ...]
    lone: bool = False
    """Whether its only host has all of its GPUs to itself."""
    trial: bool = False
    """Whether it is priced at the low end of the belief: they share only for as long as a trial takes."""


@dataclass(slots=True)
class ClaimGpus(Move):
    """Let the guest wait until its hosts have ended, and keep their GPUs for it."""

    hosts: tuple[JobView, ...]
    lone: bool = False
    """Whether its only host has all of its GPUs to itself."""


@dataclass(slots=True)
class Suspend(Move):
    """Suspend running jobs and start the guest alone. The draft picks the GPUs once the victims are gone."""

    size: Size
    victims: tuple[JobView, ...]


@dataclass(slots=True)
class Displace(Move):
    """Start a pending guest, or let a paused one go on, while some residents of its GPUs are paused."""

    size: Size
    hosts: tuple[JobView, ...]
    """The residents whose ends move."""
    victims: tuple[JobView, ...]
    """The hosts that are paused."""
    starts_up: bool = False
    """Whether the guest only starts up so far, beside residents that go on. Those that will be paused for it then are
    among the hosts."""
    withdraws: bool = False
    """Whether it is the guest that is paused: it shares, and its mates gain more if it goes on after them."""
    swapped: JobView | None = None
    """The victim that gives up its memory, because the guest does not fit beside it."""


@dataclass(slots=True)
class Relocate(Move):
    """Suspend a job that is paused or shares its GPUs, and start it again on free ones."""

    size: Size
    hosts: tuple[JobView, ...] = ()
    """The mates that it leaves."""


def names(records: Sequence[JobView]) -> str:
    """Return the ids of the first three jobs, and how many more there are."""
    shown = ", ".join(record.job.id for record in records[:3])
    return shown + (f" and {len(records) - 3} more" if len(records) > 3 else "")
