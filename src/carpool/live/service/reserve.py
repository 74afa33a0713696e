"""Room that is kept for a start on a full disk: a file in the home, which a starting service removes if it needs it.

A service cannot start without writing its journal, and without a service the job that fills the disk cannot be
cancelled. `open_journal` calls `free_if_full`, and the service's `run` makes the file again as soon as there is room.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger("carpool.live")

RESERVE_BYTES = 8 << 20
"""Size of the file: a journal that is opened writes its log back, which has some MiB."""
PROBE_BYTES = 1 << 20
"""Room without which a start counts as one on a full disk."""
CHUNK = 1 << 18
FIRST_S, EVERY_S = 5.0, 60.0
"""Seconds up to the first look whether there is room for the file, and between two looks."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskReserve:
    """The file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def free_if_full(self) -> str:
        """Remove the file if nothing else can be written; return a note for the operator, empty if that was not so."""
        if not self._path.exists():
            return ""
        probe = self._path.with_name(".probe")
        try:
            _fill(probe, PROBE_BYTES)
            return ""
        except OSError as error:
            if error.errno not in FULL:  # the parts that need the file system report the problem
                return ""
            probe.unlink(missing_ok=True)
            self._path.unlink()
            return f"the disk is full ({error.strerror}); the service starts in the room kept for that; make room"
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def make(self) -> bool:
        """Make the file if it is missing and the disk has room for twice its size; return whether it is there."""
        if self._path.exists():
            return True
        partial = self._path.with_name(f".{self._path.name}")
        try:
            if shutil.disk_usage(self._path.parent).free < 2 * RESERVE_BYTES:
                return False
            _fill(partial, RESERVE_BYTES)
            partial.rename(self._path)
            return True
        except OSError as error:
            log.debug("no room is kept for a start on a full disk: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink()
            return False

    async def run(self) -> None:
        """Keep the file in place."""
        await asyncio.sleep(FIRST_S)
        while True:
            await asyncio.to_thread(self.make)
            await asyncio.sleep(EVERY_S)


def _fill(path: Path, size: int) -> None:
    """Write a file of random bytes, which no file system keeps in less room."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        written = 0
        while written < size:
            written += file.write(os.urandom(min(CHUNK, size - written)))
        os.fsync(file.fileno())
