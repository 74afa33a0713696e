"""Copies of the workers' logs for the service: what a worker writes here is appended there, by offset.

The service says how much it has, so that a lost answer or a restart repeats nothing. The end of a part, and that it is
paused, are reported only when the service has its logs, so that these are complete by then.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from carpool.errors import InputError
from carpool.live.agent.parts import NodePart, NodeParts
from carpool.live.agent.road import NoAnswer, Road, Turned
from carpool.live.executors.base import GangKey
from carpool.live.executors.logs import read_log_file
from carpool.live.home import Home

log = logging.getLogger("carpool.agent")

EVERY_S = 0.5
"""Seconds between two looks at the logs."""
CHUNK = 1 << 19
A_TURN = 8
"""Number of chunks of one log that are copied before those of others have their turn."""
STREAMS = ("stdout", "stderr")
Stream = tuple[GangKey, int, str]


class LogCopies:
    """Copies logs in the background."""

    def __init__(
        self,
        home: Home,
        road: Road,
        parts: NodeParts,
        changed: Callable[[], None],
        may_end: Callable[[NodePart], bool] = lambda part: True,
    ) -> None:
        """`may_end`: whether the end of a part may be reported as soon as its logs are copied."""
        self._home, self._road, self._parts, self._changed = home, road, parts, changed
        self._may_end = may_end
        self._sizes: dict[Stream, int] = {}
        """How much of each log the service has."""

    async def run(self) -> None:
        while True:
            behind = False
            for part in list(self._parts.parts.values()):
                if part.logged:
                    continue
                try:
                    ended, stood = part.ended is not None, part.asked_switch if part.stands else 0
                    if not await asyncio.to_thread(self._copy, part.key):
                        behind = True
                    elif ended and self._may_end(part):
                        self._done(part)
                    elif stood and part.stands and part.switch != stood:
                        part.switch = stood
                        self._changed()
                except Turned as error:
                    if error.status == 404 or (error.status != 503 and part.ended is not None):
                        self._done(part)  # the service does not want it
                except NoAnswer:
                    behind = False
                    break
                except Exception:  # the logs of other parts must be copied
                    log.exception("logs of %s", part.key)
                    self._done(part)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news(), 0.0 if behind else EVERY_S)

    async def _news(self) -> None:
        """Return soon after something happened that is reported when logs are copied."""
        while not any(part.has_news and self._may_end_soon(part) for part in self._parts.parts.values()):
            await asyncio.sleep(0.02)

    def _may_end_soon(self, part: NodePart) -> bool:
        return part.ended is None or self._may_end(part)

    def _done(self, part: NodePart) -> None:
        if part.ended is not None and not part.logged:
            part.logged = True
            self._changed()

    def forget(self, key: GangKey) -> None:
        self._sizes = {stream: size for stream, size in self._sizes.items() if stream[0] != key}

    def copy_stdout(self, key: GangKey, rank: int) -> None:
        """Copy what a worker has printed up to now, because a user watches it. Blocks."""
        self._copy_stream((key, rank, "stdout"))

    def _copy(self, key: GangKey) -> bool:
        """Copy what is new in the logs of a part; return whether that was all. Blocks."""
        complete = True
        for directory in self._home.attempt(*key).glob("rank-*"):
            rank = int(directory.name.removeprefix("rank-"))
            for name in STREAMS:
                complete &= self._copy_stream((key, rank, name))
        return complete

    def _copy_stream(self, stream: Stream) -> bool:
        """Copy a turn's worth of a log; return whether there is no more of it."""
        key, rank, name = stream
        path = self._home.rank(*key, rank) / f"{name}.log"
        written = path.stat().st_size if path.is_file() else 0  # what is printed meanwhile is copied the next time
        for _ in range(A_TURN):
            at = self._sizes.get(stream, 0)
            if at >= written:
                return True
            try:
                chunk = read_log_file(path, at, CHUNK)
            except InputError:  # the worker replaced it
                return True
            if not chunk.data or chunk.next - len(chunk.data) != at:
                return True
            size = self._road.send_log(chunk.data, job=key[0], attempt=key[1], rank=rank, stream=name, offset=at)
            self._sizes[stream] = size
            if size == at:  # the service takes no more
                return True
        return self._sizes[stream] >= written
