"""Room for connections: clients without a token, and clients that hold many connections, cannot keep others out.

A connection is a stranger until a request on it carries a valid token. Strangers share a small room of their own, and
have a few seconds for the head of a request. Where a room is full, a connection of the address, or of the user, with
the most connections is closed: the oldest one that waits, or else the oldest one that is being answered. So a new
connection always finds room. `carpool serve` gives `guarded_protocol` to uvicorn; the gate calls `authenticated`.
"""

import asyncio
from collections.abc import Hashable, MutableMapping
from typing import Any, Protocol

CONNECTION = "carpool.connection"
"""Key of the ASGI scope under which the gate finds the connection."""
STRANGERS, STRANGERS_PER_ADDRESS = 128, 96
"""Connections without a token: all, and those of one address."""
KNOWN, KNOWN_PER_USER = 512, 384
"""Connections with a token: all, and those of one user."""
AGENTS, PER_AGENT = 8192, 8
"""Connections of agents: all, and those of one node. They have a room of their own, so that users find theirs."""
LEAST = 8
"""Least number of connections in a room, however few files can be open."""
HEAD_S = 10.0
"""Seconds in which the first request of a connection must have sent its head."""
KEPT_S = 30.0
"""Seconds in which the next request must have sent its head."""


class Guest(Protocol):
    """A connection as a room sees it."""

    busy: bool
    """A request is being answered."""

    def close_now(self) -> None: ...


class Room:
    """Connections by the address or the user that they belong to, oldest first."""

    def __init__(self, most: int, most_each: int) -> None:
        self._most, self._most_each = most, most_each
        self._guests: dict[Guest, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, guest: Guest, whose: Hashable) -> None:
        """Add a connection, and close another one if the room is full now."""
        self._guests[guest] = whose
        self._numbers[whose] = self._numbers.get(whose, 0) + 1
        if self._numbers[whose] > self._most_each:
            self._close_one(whose)
        elif len(self._guests) > self._most:
            self._close_one(max(self._numbers, key=lambda one: self._numbers[one]))

    def leave(self, guest: Guest) -> None:
        whose = self._guests.pop(guest, None)
        if whose is not None:
            self._numbers[whose] -= 1
            if not self._numbers[whose]:
                del self._numbers[whose]

    def _close_one(self, whose: Hashable) -> None:
        own = [guest for guest, owner in self._guests.items() if owner == whose]
        victim = next((guest for guest in own if not guest.busy), own[0])
        self.leave(victim)
        victim.close_now()


class Rooms:
    """The rooms of a service."""

    def __init__(self, files: int = STRANGERS + KNOWN + AGENTS) -> None:
        """`files`: number of connections that can be open at all; where they are few, the rooms are smaller."""
        part = min(1.0, max(0, files) / (STRANGERS + KNOWN))
        numbers = (STRANGERS, STRANGERS_PER_ADDRESS, KNOWN, KNOWN_PER_USER)
        strangers, per_address, known, per_user = (max(LEAST, int(number * part)) for number in numbers)
        self.strangers = Room(strangers, per_address)
        self.known = Room(known, per_user)
        self.agents = Room(max(LEAST, min(AGENTS, files - strangers - known)), PER_AGENT)

    def arrived(self, guest: Guest, address: str) -> None:
        self.strangers.enter(guest, address)

    def authenticated(self, guest: Guest, user: str, *, agent: bool = False) -> None:
        """Move a connection, because a request on it carries the token of a user, or of an agent."""
        self.left(guest)
        (self.agents if agent else self.known).enter(guest, user)

    def left(self, guest: Guest) -> None:
        for room in (self.strangers, self.known, self.agents):
            room.leave(guest)


def guarded_protocol(base: Any, rooms: Rooms, head_s: float = HEAD_S, kept_s: float = KEPT_S) -> Any:
    """Return uvicorn's protocol class `base` with limits for connections and for the time of a request's head."""

    class GuardedProtocol(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.busy = False
            self._user = ""
            self._inner: Any = self.app  # type: ignore[has-type]
            self.app = self._answer
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            rooms.arrived(self, str(self.client[0]) if self.client else "")
            self._await_head(head_s)

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_timer()
            rooms.left(self)
            super().connection_lost(error)

        def authenticated(self, user: str, *, agent: bool = False) -> None:
            if self._user != user:
                self._user = user
                rooms.authenticated(self, user, agent=agent)

        def close_now(self) -> None:
            self._stop_timer()
            self.transport.abort()

        async def _answer(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            self._stop_timer()
            self.busy = True
            scope[CONNECTION] = self
            try:
                await self._inner(scope, receive, send)
            finally:
                self.busy = False
                if not self.transport.is_closing():
                    self._await_head(kept_s)

        def _await_head(self, seconds: float) -> None:
            # uvicorn has a time limit only for a connection that sends nothing after an answer
            self._stop_timer()
            self._timer = self.loop.call_later(seconds, self.close_now)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return GuardedProtocol
