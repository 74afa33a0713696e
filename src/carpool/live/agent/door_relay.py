"""Doors of this node's workers for the service: it asks which are wanted, opens them, and passes on what they say.

The service cannot call an agent, so the agent asks as soon as an exchange says that a door is wanted, and for a while
after the last one is closed (`carpool.live.executors.relayed_doors` is the other end). Bytes are numbered by offset.
The service takes what it has room for; the rest stays here, and the door is not read meanwhile. Where the service does
not answer for some time, the doors are closed: commands beside workers end, terminals and jobs do not.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from carpool.errors import InputError
from carpool.live.agent.log_copies import LogCopies
from carpool.live.agent.road import NoAnswer, Road, Turned
from carpool.live.clock import since_boot
from carpool.live.errors import Unavailable
from carpool.live.executors import wire
from carpool.live.executors.doors import LocalDoor
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.relayed_doors import LOST_S
from carpool.live.executors.wire import DoorOrder, DoorsHere, DoorsWanted

log = logging.getLogger("carpool.agent")

LINGER_S = 60.0
"""Seconds after the last door is closed for which the agent still asks, so that the next one is opened at once."""
AGAIN_S = 0.3
"""Seconds before another request after one that failed."""
NO_ROOM_S, LONGEST_NO_ROOM_S = 0.02, 0.5
"""Seconds before bytes are sent again for which the service had no room: at first, and at most."""
PIECE_BYTES = 64 << 10
THREADS = 4
"""Requests at a time: one that the service holds, and those that bring something. Exchanges have threads of their
own, so that doors do not delay them."""

Found = TypeVar("Found")


class DoorRelay:
    """Opens doors for the service."""

    def __init__(self, road: Road, executor: LocalExecutor, copies: LogCopies, instance: str) -> None:
        self._road, self._executor, self._copies, self._instance = road, executor, copies, instance
        self._threads = ThreadPoolExecutor(THREADS, "doors")
        self._asking: asyncio.Task[None] | None = None
        self._until = self._answered = 0.0
        self._life, self._after = "", 0
        self._open: dict[int, asyncio.Task[None]] = {}

    def summon(self) -> None:
        """Ask for doors from now on, because the service wants some."""
        self._until = since_boot() + LINGER_S
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def close(self) -> None:
        """Close all doors."""
        tasks = [task for task in (self._asking, *self._open.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[..., Found], *arguments: Any) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # ---- which doors -----------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        self._answered = since_boot()
        leaves = False
        while not leaves:
            leaves = not self._open and since_boot() > self._until
            here = DoorsHere(self._instance, self._life, self._after, tuple(self._open), leaves)
            try:
                wanted = wire.read(DoorsWanted, await self._call(self._road.doors, wire.plain(here)))
            except InputError as error:
                await self._not_answered(error)
                continue
            self._answered = since_boot()
            self._follow(wanted)
            leaves = leaves and not self._open

    async def _not_answered(self, error: InputError) -> None:
        """Wait before the next request; close all doors where the service has been silent for long, or refuses."""
        final = isinstance(error, Turned) and error.status != 503
        if final or since_boot() - self._answered > LOST_S:
            for task in self._open.values():
                task.cancel()
            self._open.clear()
        await asyncio.sleep(AGAIN_S)

    def _follow(self, wanted: DoorsWanted) -> None:
        """Open and close what the service says."""
        known = self._life == wanted.life
        for number in [number for number in self._open if not known or number not in wanted.open]:
            self._open.pop(number).cancel()
        self._life, self._after = wanted.life, max(wanted.number, self._after if known else 0)
        for order in wanted.new:
            self._until = since_boot() + LINGER_S
            self._open[order.number] = asyncio.get_running_loop().create_task(self._guarded(order))

    async def _guarded(self, order: DoorOrder) -> None:
        life = self._life
        work: Coroutine[Any, Any, None] = self._relay(order)
        try:
            await work
        except InputError as error:  # the service is away, or does not want it any more
            log.debug("door %s: %s", order.number, error)
        except Exception:
            log.exception("door %s of job %s", order.number, order.key)
        finally:
            if self._life == life and self._open.get(order.number) is asyncio.current_task():
                del self._open[order.number]

    # ---- one door --------------------------------------------------------------------------------------------------

    async def _relay(self, order: DoorOrder) -> None:
        """Open a door, send it the service's request, and pass on all that it says."""
        key, request = wire.read_key(order.key), json.loads(order.request)
        try:
            door = await self._executor.open_door(key, order.rank, request)
        except InputError as error:
            refusal = {"error": str(error), "again": isinstance(error, Unavailable)}
            await self._bring(order, 0, json.dumps(refusal).encode() + b"\n", last=True)
            return
        try:
            await self._pass_on(order, door, shows_log=request.get("do") == "watch")
        finally:
            door.close()

    async def _pass_on(self, order: DoorOrder, door: LocalDoor, *, shows_log: bool) -> None:
        sent, data = 0, b"-"
        while data:
            data = await door.read(PIECE_BYTES)
            if shows_log:  # it says how long the log is: the service must have the log by then
                with suppress(InputError):
                    await self._call(self._copies.copy_stdout, wire.read_key(order.key), order.rank)
            await self._bring(order, sent, data, last=not data)
            sent += len(data)

    async def _bring(self, order: DoorOrder, offset: int, data: bytes, *, last: bool) -> None:
        """Send bytes until the service has taken them all. Raise `InputError` if it does not want them."""
        end, wait_s, began = offset + len(data), NO_ROOM_S, since_boot()
        while True:
            place = {"door": order.number, "offset": offset, "last": int(last), "instance": self._instance}
            try:
                size = await self._call(self._road.bring_from_door, data[len(data) - (end - offset) :], place)
            except NoAnswer:
                if since_boot() - began > LOST_S:
                    raise
                await asyncio.sleep(AGAIN_S)
                continue
            if not offset <= size <= end:
                raise InputError("the service has other bytes than were sent")
            began = since_boot()
            wait_s = NO_ROOM_S if size > offset else min(LONGEST_NO_ROOM_S, 2 * wait_s)
            offset = size
            if offset == end:
                return
            await asyncio.sleep(wait_s)
