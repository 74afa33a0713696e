"""Doors of workers on the nodes of a cluster, as the service reaches them: their agents fetch what is asked, and bring
what the doors say.

The service calls no agent. The answer to an exchange says that a door is wanted; the agent then asks which ones, in
requests that are held while nothing changes (`NodeDoors.fetch`), and brings the bytes of each door by offset
(`NodeDoors.bring`), so that a request that is lost or comes twice changes nothing. A door takes only as many bytes as
there is room for, and the agent keeps the rest: a caller that does not read stops its own command and nothing else. An
agent that is silent, or that was started again, ends the connections and no job.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from carpool.errors import InputError
from carpool.live.clock import since_boot
from carpool.live.errors import NoSuchJob, Unavailable
from carpool.live.executors.base import GangKey
from carpool.live.executors.wire import HOLD_S, DoorOrder, DoorsHere, DoorsWanted, key_text

MAX_DOORS = 64
"""Connections to the doors of one node at a time."""
MAX_PENDING = 256 << 10
"""Bytes of one door that wait for their reader, and the longest line."""
LOST_S = 10.0
"""Seconds without a request of the agent after which its doors are given up."""
SUMMON_S = 0.5
"""Seconds between two answers that call the agent to its doors."""


class NoSuchDoor(NoSuchJob):
    def __init__(self, number: int) -> None:
        InputError.__init__(self, f"there is no open door {number}; its caller has closed it")


class RelayedDoor:
    """A connection to a door on a node, on which one request was made."""

    def __init__(self, doors: "NodeDoors", order: DoorOrder) -> None:
        self.order, self.since = order, since_boot()
        self.ended = False
        """Nothing more comes from it."""
        self._doors, self._buffer, self._received, self._problem = doors, bytearray(), 0, ""
        self._changed = asyncio.Event()

    async def readline(self) -> bytes:
        """Return the next line; empty: the door is closed. Raise `Unavailable` if its agent cannot be reached any more,
        and `ValueError` for a line that is too long."""
        while True:
            end = self._buffer.find(b"\n") + 1
            if end or self.ended:
                line = bytes(self._buffer[: end or None])
                del self._buffer[: len(line)]
                return line
            if self._problem:
                raise Unavailable(self._problem)
            if len(self._buffer) >= MAX_PENDING:
                raise ValueError("the line is too long")
            self._changed.clear()
            await self._changed.wait()

    def take(self, offset: int, data: bytes, *, last: bool) -> int:
        """Take bytes that follow those that are here, as far as there is room; return how many came so far."""
        if offset <= self._received <= offset + len(data):
            new = data[self._received - offset :]
            taken = new[: max(0, MAX_PENDING - len(self._buffer))]
            self._buffer += taken
            self._received += len(taken)
            self.ended = self.ended or (last and len(taken) == len(new))
            self._changed.set()
        return self._received

    def fail(self, problem: str) -> None:
        """Let the reader know that the agent is lost."""
        self._problem = self._problem or problem
        self._doors.forget(self)
        self._changed.set()

    def close(self) -> None:
        """Let the agent close the door."""
        self.ended = True
        self._doors.forget(self)
        self._changed.set()


class NodeDoors:
    """The connections to the doors of one node."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._life = secrets.token_hex(8)
        """Name of this table: numbers of another one mean other doors."""
        self._number, self._held = 0, 0
        self._doors: dict[int, RelayedDoor] = {}
        self._asked_at = self._summoned_at = -LOST_S
        self._changed = asyncio.Event()

    # ---- callers ---------------------------------------------------------------------------------------------------

    def open(self, key: GangKey, rank: int, request: Mapping[str, Any]) -> RelayedDoor:
        """Return a connection to the door of a worker; what cannot be opened says so in its first line."""
        if len(self._doors) >= MAX_DOORS:
            raise Unavailable(f"node {self._node}: {MAX_DOORS} terminals and commands are in use there; end one")
        self._number += 1
        order = DoorOrder(self._number, key_text(key), rank, json.dumps(dict(request)))
        door = self._doors[self._number] = RelayedDoor(self, order)
        self._changed.set()
        return door

    def forget(self, door: RelayedDoor) -> None:
        self._doors.pop(door.order.number, None)
        self._changed.set()

    def fail(self, problem: str, doors: Iterable[RelayedDoor] | None = None) -> None:
        """Give doors up; without `doors`, all of them."""
        for door in list(self._doors.values() if doors is None else doors):
            door.fail(problem)

    def look(self) -> None:
        """Give up doors whose agent is silent."""
        now = since_boot()
        silent = [door for door in self._doors.values() if now - max(self._asked_at, door.since) > LOST_S]
        if silent and not self._held:
            self.fail(f"node {self._node}: its agent does not answer; try again", silent)

    # ---- the agent -------------------------------------------------------------------------------------------------

    @property
    def awaits_agent(self) -> bool:
        """Whether the agent must be called, because doors are wanted and it does not ask for them at the moment."""
        quiet_s = since_boot() - max(self._asked_at, self._summoned_at)
        return bool(self._doors) and not self._held and quiet_s > SUMMON_S

    def summons(self) -> bool:
        """Return whether this answer to the agent shall call it."""
        called = self.awaits_agent
        if called:
            self._summoned_at = since_boot()
        return called

    async def fetch(self, here: DoorsHere) -> DoorsWanted:
        """Answer an agent: at once if there are doors to open or to close, else after a while."""
        after = here.after if here.life == self._life else 0
        lost = [door for number, door in self._doors.items() if number <= after and number not in here.open]
        self.fail(f"node {self._node}: its agent has lost the connection; try again", [d for d in lost if not d.ended])
        self._held += 1
        try:
            until = since_boot() + HOLD_S
            while True:
                self._changed.clear()
                new = tuple(door.order for number, door in self._doors.items() if number > after)
                left = until - since_boot()
                closed = here.life != self._life or any(number not in self._doors for number in here.open)
                if new or closed or here.leaves or left <= 0.0:
                    return DoorsWanted(self._life, self._number, new, tuple(self._doors))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
        finally:
            self._held -= 1
            self._asked_at = since_boot() if not here.leaves else -LOST_S

    def bring(self, number: int, offset: int, data: bytes, *, last: bool) -> int:
        """Take what a door said; return how many bytes of it came so far. Raise `NoSuchDoor` for one that is closed."""
        door = self._doors.get(number)
        if door is None:
            raise NoSuchDoor(number)
        return door.take(offset, data, last=last)
