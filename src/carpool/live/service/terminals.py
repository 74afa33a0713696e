"""The terminals of jobs, and commands beside their workers: what goes between the HTTP API and the doors of workers.

A worker's wrapper holds its terminal (`live/door.py`), so the service keeps nothing here: a request opens the door,
asks for something, and closes it. What a program prints is read from the worker's log, at the pace of the reader. The
HTTP API decides which user may call what.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.core.model import Status
from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors.base import DoorConnection, Executor, OpensDoors
from carpool.live.service.jobs import JobBook
from carpool.live.spec import Spec

NO_TERMINALS = (
    "the executor of this service offers no terminals and no commands beside workers; use `carpool submit`, or serve "
    "with --executor local or agents"
)
ANSWER_S = 10.0
"""Seconds that a wrapper has to answer."""
QUIET_S = 15.0
"""Seconds after which a stream shows that it is alive."""
PIECE_BYTES = 32 << 10
LOOK_S = 0.02
"""Seconds between two looks whether a worker is gone."""


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of what a terminal printed."""

    data: bytes
    """Empty: nothing was printed for a while."""
    next: int
    """Offset of what follows."""


@dataclass
class Terminals:
    """Reaches the workers of jobs."""

    state: State
    book: JobBook
    executor: Executor
    _open: set[DoorConnection] = field(default_factory=set)
    """Doors in use."""
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self, specs: Sequence[Spec]) -> None:
        """Raise `InputError` for jobs with terminals where there can be none."""
        if any(spec.terminal for spec in specs) and not isinstance(self.executor, OpensDoors):
            raise InputError(f"terminal: {NO_TERMINALS}")

    def attempt(self, job: str) -> int:
        """Return the number of the attempt whose terminal can be used. Raise `WrongStatus` if there is none."""
        record = self.book.record(job)
        if not self.book.specs[job].terminal:
            raise WrongStatus(f"job {job} has no terminal; `carpool logs {job}` shows its output, `carpool exec` works")
        if not record.gpus or record.status is Status.STARTING:
            raise WrongStatus(f"job {job} is {record.status} and has no terminal yet; try again when it runs")
        return record.attempt

    async def type(self, job: str, keys: Mapping[str, Any]) -> bool:
        """Pass on what a user typed, or the size of a window; return False if there is no room for it now."""
        return await self._tell(job, 0, {"do": "type", **keys})

    async def type_to(self, job: str, rank: int, command: str, keys: Mapping[str, Any]) -> bool:
        """Pass on what a user typed to a command beside a worker; return False if there is no room for it now."""
        return await self._tell(job, rank, {"do": "type to", "command": command, **keys})

    async def follow(self, job: str, attempt: int, offset: int, tail: int | None) -> AsyncGenerator[Output, None]:
        """Yield what a terminal prints, from an offset of its log on, until its worker has ended."""
        async with contextlib.AsyncExitStack() as door:
            lines: DoorConnection | None = None
            with contextlib.suppress(WrongStatus):  # it has just ended: all of its output is in the log
                lines = await door.enter_async_context(self._opened(job, attempt, 0, {"do": "watch"}))
            while not self._closing.is_set():
                piece = await self.executor.read_log(
                    (job, attempt), 0, "stdout", offset=offset, limit=PIECE_BYTES, tail=tail
                )
                offset, tail = piece.next, None
                if piece.data:
                    yield Output(piece.data, offset)
                elif lines is None:
                    await self._gone(job, attempt)
                    return
                else:
                    try:
                        if not await asyncio.wait_for(lines.readline(), QUIET_S):
                            lines = None
                    except TimeoutError:
                        yield Output(b"", offset)
                    except Unavailable:
                        raise
                    except ValueError:
                        lines = None
        raise Unavailable("the service is stopping; try again when it runs again")

    async def _gone(self, job: str, attempt: int) -> None:
        """Wait until the workers of an attempt are gone, whose door is closed. Raise `Unavailable` if they are not."""
        until = time.monotonic() + ANSWER_S
        while (job, attempt) in self.executor.present():
            if self._closing.is_set() or time.monotonic() > until:
                raise Unavailable(f"job {job}: its terminal cannot be reached; try again")
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """End all streams, because the service ends; clients ask the next one."""
        self._closing.set()
        for door in list(self._open):
            door.close()

    async def run(self, job: str, rank: int, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Run a command beside a worker and yield what the door says: its name, its output, its exit code. The command
        ends when the iterator is closed. An empty message says that nothing was printed for a while."""
        attempt = self._running(job)
        async with self._opened(job, attempt, rank, {"do": "run", **request}) as lines:
            said = await _answer(lines, job)
            while True:
                yield said
                if "exit_code" in said:
                    return
                try:
                    said = await _line(lines, job, QUIET_S)
                except TimeoutError:
                    said = {}

    def _running(self, job: str) -> int:
        record = self.book.record(job)
        if record.status is not Status.RUNNING:
            raise WrongStatus(f"job {job} is {record.status}; commands run beside workers only while they run")
        return record.attempt

    async def _tell(self, job: str, rank: int, request: Mapping[str, Any]) -> bool:
        record = self.book.record(job)
        async with self._opened(job, record.attempt, rank, request) as lines:
            said = await _answer(lines, job)
        return bool(said.get("taken"))

    @contextlib.asynccontextmanager
    async def _opened(
        self, job: str, attempt: int, rank: int, request: Mapping[str, Any]
    ) -> AsyncIterator[DoorConnection]:
        """Make a request at the door of a worker, and close the connection at the end."""
        if not isinstance(self.executor, OpensDoors):
            raise InputError(NO_TERMINALS)
        door = await self.executor.open_door((job, attempt), rank, request)
        self._open.add(door)
        try:
            yield door
        finally:
            self._open.discard(door)
            door.close()


async def _answer(lines: DoorConnection, job: str) -> dict[str, Any]:
    """Return the first line of a door."""
    try:
        return await _line(lines, job, ANSWER_S)
    except TimeoutError:
        raise Unavailable(f"job {job}: its worker does not answer; try again") from None


async def _line(lines: DoorConnection, job: str, seconds: float) -> dict[str, Any]:
    """Return what a door says next. Where jobs run as the service's user, a job may have put another in its place."""
    try:
        found = json.loads(await asyncio.wait_for(lines.readline(), seconds) or b'{"error": "the worker has ended"}')
    except Unavailable:
        raise
    except (ValueError, RecursionError):  # no JSON, or a line without an end
        found = None
    if not isinstance(found, dict):
        raise WrongStatus(f"job {job}: the answer of its worker cannot be read; cancel it")
    if "error" in found:
        sentence = str(found["error"]).removeprefix(f"job {job}: ")
        raise (Unavailable if found.get("again") else WrongStatus)(f"job {job}: {sentence}")
    return found
