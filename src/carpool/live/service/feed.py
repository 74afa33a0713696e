"""The feed: what happens, as a stream of numbered events that a reader can resume after any number.

Numbers are those of the journal. The latest events are in memory, older ones are read from the journal. A reader holds
nothing but a number, so that a slow one costs no memory. `http.event_routes` sends the feed to users.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from carpool.core import codec
from carpool.core import events as ev
from carpool.core.model import GpuId
from carpool.live.insight.event_views import NOTE, jobs_of, only_for, shown_event
from carpool.live.journal.reader import DAMAGE
from carpool.live.journal.store import Store
from carpool.live.service.turns import TurnDone

KEPT = 10_000
"""Number of events that stay in memory."""
MOST = 1000
"""Number of events that a reader gets at a time."""
APART_S = 0.1
"""Seconds between two answers to one reader: events that come close together are sent together."""
QUIET_S = 15.0
"""Seconds after which a reader gets an empty answer, so that both sides notice a connection that is gone."""


@dataclass(frozen=True)
class FedEvent:
    """One event of the journal. What users see is made when the first reader asks."""

    seq: int
    source: ev.Event | None
    labels: Callable[[], Mapping[GpuId, str]]
    at: float = 0.0
    text: str = ""
    """The note, where it is one."""

    @property
    def kind(self) -> str:
        return NOTE if self.source is None else type(self.source).__name__

    @cached_property
    def data(self) -> dict[str, Any]:
        """Fields that users see."""
        row = {"at": self.at, "text": self.text} if self.source is None else shown_event(self.source, self.labels())
        return {"seq": self.seq, "kind": self.kind, **row}

    @cached_property
    def encoded(self) -> bytes:
        """The event as one message of a stream of server-sent events."""
        data = json.dumps(self.data, separators=(",", ":"))
        return f"id: {self.seq}\nevent: {self.kind}\ndata: {data}\n\n".encode()

    def visible_to(self, user: str, admin: bool) -> bool:
        """Return whether a user may see the event."""
        if admin:
            return True
        return self.source is not None and only_for(self.source) in (None, user)

    def concerns(self, job: str) -> bool:
        """Return whether the event is about a job."""
        return self.source is not None and job in jobs_of(self.source)


@dataclass(frozen=True, slots=True)
class FeedPart:
    """What a reader gets at a time."""

    events: Sequence[FedEvent]
    last: int
    """Number after which the next part begins."""
    gap: bool = False
    """Events before these are missing, because the journal no longer has them: the reader has to look at all again."""


class EventFeed:
    """The events of one service."""

    def __init__(self, store: Store, labels: Callable[[], Mapping[GpuId, str]]) -> None:
        self._store, self._labels = store, labels
        self._kept: list[FedEvent] = []
        self._news = asyncio.Event()
        self._last = store.seq
        self.closed = False

    @property
    def last(self) -> int:
        """Number of the latest event."""
        return self._last

    def turned(self, turn: TurnDone) -> None:
        number = turn.first
        for source in turn.events:
            self._kept.append(FedEvent(number, source, self._labels))
            number += 1
        for at, text in turn.notes:
            self._kept.append(FedEvent(number, None, self._labels, at, text))
            number += 1
        if number == turn.first:
            return
        self._last = number - 1
        if len(self._kept) > 2 * KEPT:
            del self._kept[:-KEPT]
        self._wake()

    def close(self) -> None:
        """End all streams; their readers ask the next service."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int | None, until: float | None = None) -> AsyncGenerator[FeedPart, None]:
        """Yield all events after a number, and then those that happen; None: only those that happen from now on.

        The first part comes at once, also if it is empty. `until`: when to end, in the time of `time.monotonic`.
        """
        position = self._last if after is None else after
        part = await self._next(position) if position <= self._last else FeedPart((), self._last, gap=True)
        while not self.closed:
            yield part
            position = part.last
            left = QUIET_S if until is None else min(QUIET_S, until - time.monotonic())
            if position < self._last:
                await asyncio.sleep(APART_S)
            elif left <= 0.0:
                return
            elif await self._news_within(left):
                await asyncio.sleep(APART_S)
            part = await self._next(position)

    async def _news_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _next(self, position: int) -> FeedPart:
        if position >= self._last:
            return FeedPart((), position)
        first = self._kept[0].seq if self._kept else self._last + 1
        if position + 1 >= first:
            found = self._kept[position + 1 - first :][:MOST]
            return FeedPart(found, found[-1].seq)
        return await self._read(position)

    async def _read(self, position: int) -> FeedPart:
        rows = await asyncio.to_thread(self._store.rows_after, position, MOST)
        if not rows:
            return FeedPart((), self._last, gap=True)
        found = [one for row in rows if (one := self._decode(row)) is not None]
        return FeedPart(found, rows[-1]["seq"], gap=rows[0]["seq"] > position + 1)

    def _decode(self, row: dict[str, Any]) -> FedEvent | None:
        """Return an event from its row; None: it cannot be read, or only another release knows it."""
        try:
            data = json.loads(row["data"])
            if row["kind"] == NOTE:
                return FedEvent(row["seq"], None, self._labels, row["at"], str(data))
            return FedEvent(row["seq"], codec.decode(data), self._labels)
        except DAMAGE:
            return None
