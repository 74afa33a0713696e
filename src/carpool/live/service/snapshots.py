"""Snapshots of the state beside the journal's events: when they are written, so that a restart replays less."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carpool.core import snapshot
from carpool.core.state import State
from carpool.live.errors import Deposed
from carpool.live.journal.store import Store, StoreError
from carpool.live.service.inbox import Inbox

SNAPSHOT_EVENTS = 20_000
"""Number of events between two snapshots."""
KEEP_EVENTS = 200_000
"""Number of events before the older snapshot that stay in the journal, for operators who look back."""


@dataclass
class SnapshotKeeper:
    """Writes a snapshot every `SNAPSHOT_EVENTS` events and at the end."""

    store: Store
    state: State
    inbox: Inbox
    last: int = 0
    """Event after which the latest snapshot was taken."""
    _writing: asyncio.Task[None] | None = None

    def after_turn(self) -> None:
        """Take a snapshot if it is due. Call it only while everything in the state is on disk."""
        busy = self._writing is not None and not self._writing.done()
        if self.store.seq - self.last >= SNAPSHOT_EVENTS and not busy:
            self.last = self.store.seq
            self._writing = asyncio.create_task(self._write(snapshot.encode(self.state), self.last))

    async def _write(self, data: Mapping[str, Any], seq: int) -> None:
        try:
            await self.store.keep_snapshot(data, seq, KEEP_EVENTS)
        except Deposed:  # the service ends
            return
        except StoreError as error:  # the journal is complete without it
            self.inbox.note(f"no snapshot could be written: {error}")

    async def close(self, *, take_last: bool) -> None:
        """Wait for a snapshot that is being written, and take a last one."""
        if self._writing is not None:
            await self._writing
        if take_last:
            with contextlib.suppress(StoreError, Deposed):
                await self.store.keep_snapshot(snapshot.encode(self.state), self.store.seq, KEEP_EVENTS)
