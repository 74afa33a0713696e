"""Reaching the door of a worker on this machine: see `live/door.py`. Used by the local executor."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from carpool.live.door import NAME
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors.gang import LocalRank, read_object
from carpool.live.home import write_private
from carpool.live.worker_directory import KNOCK, RECORD

OPEN_S = 10.0
"""Seconds that a wrapper has to open its door on a busy machine."""
LOOK_S = 0.02
LINE_BYTES = 1 << 20
"""Longest line that is read from a door; it sends pieces of 32 KiB."""


class LocalDoor:
    """A connection to a door on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, request: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the worker has ended: nothing follows
            self._writer.write(json.dumps(dict(request)).encode() + b"\n")
            await self._writer.drain()

    async def readline(self) -> bytes:
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""

    async def read(self, most: int) -> bytes:
        """Return some bytes of the answer; empty: the door is closed."""
        try:
            return await self._reader.read(most)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._writer.close()


async def open_door(rank: LocalRank, job: str, request: Mapping[str, Any]) -> LocalDoor:
    """Make a request at the door of a worker; its wrapper opens it when it is first asked to."""
    door = LocalDoor(*await _connect(rank, job))
    await door.ask(request)
    return door


async def _connect(rank: LocalRank, job: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not read_object(rank.directory / RECORD).get("door"):
        raise WrongStatus(f"job {job}: an earlier release of Carpool started it; requeue it to reach its workers")
    until, asked = time.monotonic() + OPEN_S, 0.0
    while time.monotonic() < until:
        if not rank.alive or rank.identity is None:
            raise WrongStatus(f"job {job}: the worker has ended")
        try:
            directory = os.open(rank.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:  # through the open directory, because paths of sockets are short
                path = f"/proc/self/fd/{directory}/{NAME}"
                return await asyncio.open_unix_connection(path, limit=LINE_BYTES)
            finally:
                os.close(directory)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            if time.monotonic() - asked > 1.0:
                with contextlib.suppress(OSError):  # a full disk
                    write_private(rank.directory / KNOCK, "", sync=False)
                rank.identity.signal(signal.SIGUSR1)
                asked = time.monotonic()
        except OSError as error:
            raise Unavailable(f"job {job}: its worker cannot be reached ({error.strerror}); try again") from None
        await asyncio.sleep(LOOK_S)
    raise Unavailable(f"job {job}: its worker does not answer; try again")
