"""The inbox of the driver: what users, executors and background tasks ask for or report, until its turn comes.

An input is a function that says what it means for the state at the moment of its turn, because a job may end in
between. The driver empties the inbox at the start of each turn. Notes for the operator wait here too.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from carpool.core import events as ev
from carpool.live.clock import Clock
from carpool.live.errors import Unavailable
from carpool.live.journal.store import Commit

log = logging.getLogger("carpool.live")

Prepare = Callable[[float, Commit], Sequence[ev.Event]]
"""Returns the events of an input, and adds rows for other tables to the commit. It must change nothing else, because
it is called again if the journal could not be written."""
Answer = asyncio.Future[None]
Note = tuple[float, str]


@dataclass(slots=True)
class TurnInput:
    """One input."""

    prepare: Prepare
    answer: Answer | None = None
    """Where a user's request is answered. A request is refused if it cannot be written; other inputs are kept."""


@dataclass
class Inbox:
    """Collects inputs and notes, and wakes the driver."""

    clock: Clock
    refusal: str = ""
    """Why no request is accepted now; empty: requests are accepted."""
    closed: bool = False
    """The service is stopping, and nothing is accepted any more."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    _inputs: list[TurnInput] = field(default_factory=list)
    _notes: list[Note] = field(default_factory=list)

    def add_events(self, *events: ev.Event) -> None:
        self.add(lambda now, commit: events)

    def add(self, prepare: Prepare) -> None:
        self._inputs.append(TurnInput(prepare))
        self.woken.set()

    async def request(self, prepare: Prepare) -> None:
        """Add a user's request and wait until it is durable and applied. Raise its error, or `Unavailable`."""
        if self.refusal:
            raise Unavailable(self.refusal)
        answer: Answer = asyncio.get_running_loop().create_future()
        self._inputs.append(TurnInput(prepare, answer))
        self.woken.set()
        await answer

    def note(self, text: str, level: int = logging.WARNING) -> None:
        """Log a line and keep it in the journal, for operators."""
        log.log(level, "%s", text)
        self._notes.append((self.clock.now(), text))
        self.woken.set()

    # ---- for the driver --------------------------------------------------------------------------------------------

    def take(self) -> tuple[list[TurnInput], list[Note]]:
        """Empty the inbox."""
        taken = self._inputs, self._notes
        self._inputs, self._notes = [], []
        return taken

    def put_back(self, inputs: Sequence[TurnInput], notes: Sequence[Note]) -> None:
        """Keep what could not be written for the next turn; users' requests are not kept."""
        self._inputs = [one for one in inputs if one.answer is None] + self._inputs
        self._notes = [*notes, *self._notes]
        self.woken.set()

    def refuse(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not answer.done():
                answer.set_exception(Unavailable(self.refusal))

    @property
    def empty(self) -> bool:
        return not self._inputs and not self._notes
