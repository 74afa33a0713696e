"""Events that are due at a moment without a report: jobs near their time limits or at them, closures that begin or end.

The core decides what is due (`core.time_limits`, `core.closures`); `dispatcher.py` asks workers to save, to pause or to
stop once the event is in the journal. All of it is part of the state, so that a restart changes nothing.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from carpool.core import closures, time_limits
from carpool.core import events as ev
from carpool.core.state import State
from carpool.live.clock import Clock
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox

log = logging.getLogger("carpool.live")
EVERY_S = 1.0
"""Seconds between two looks."""


@dataclass
class DueEvents:
    """Puts events into the inbox when they are due."""

    state: State
    inbox: Inbox
    clock: Clock

    async def run(self) -> None:
        while True:  # it looks first: services that are killed again and again would never look otherwise
            try:
                self.look()
            except Exception:  # the next look must happen
                log.exception("time limits and closures could not be looked at")
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Put what is due into the inbox."""
        if self.inbox.refusal:  # the journal cannot be written, and looks must not pile up
            return
        if any(True for _ in self._due(self.clock.now())):
            self.inbox.add(self._prepare)

    def _prepare(self, now: float, commit: Commit) -> Sequence[ev.Event]:
        return list(self._due(now))

    def _due(self, now: float) -> Iterator[ev.Event]:
        yield from time_limits.due(self.state.running, now)
        for name, over in closures.due(self.state, now):
            yield (ev.ClosureRemoved if over else ev.ClosureBegan)(now, name)
