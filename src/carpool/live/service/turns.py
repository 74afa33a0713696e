"""What a turn of the driver did, for the parts that only observe: feed, records, metrics, notices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from carpool.core import events as ev
from carpool.live.service.inbox import Note
from carpool.live.service.jobs import EndedJob


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A turn that is over: its events are durable and applied."""

    now: float
    first: int
    """Number of its first event in the journal."""
    events: Sequence[ev.Event]
    """Events in the order of the journal: the plan of the turn before, then what came in."""
    notes: Sequence[Note]
    """Notes, which follow the events in the journal."""
    planned: ev.Planned | None
    """Plan that the turn made. The state has it, and the journal gets it with the next turn."""
    ended: Sequence[EndedJob]
    """Jobs whose stories are written with this turn."""
    decision_s: float | None
    """Seconds of the scheduler's step, events applied and plan checked; None: the policy was not asked."""


class TurnObserver(Protocol):
    """A part that observes turns. It changes nothing, and its failures stop no turn."""

    def turned(self, turn: TurnDone) -> None: ...
