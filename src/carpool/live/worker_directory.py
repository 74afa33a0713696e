"""The directory of a worker: the files by which executor, wrapper and worker communicate.

The wrapper (`rank.py`) reads and writes the files through `WorkerDirectory`; executors use their names. A worker may
replace files in its directory, so reading follows no link and waits for nothing. `rank.py` loads this file by its path
into a bare interpreter, so it imports no other module of Carpool.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any

ORDERS = "rank.json"  # what to run; written by the executor
RECORD = "process.json"  # pids and start times of wrapper and worker
EXIT = "exit.json"  # how the worker ended
STOP = "stop.json"  # how to stop: {"how": "save" | "end" | "kill"}
PAUSE = "pause.json"  # whether to pause: {"sequence": n, "paused": bool, "patience_s": seconds, "alive": path,
# "swap_in": the command that moves the worker's memory back to its GPU, where it was moved away}
PAUSED = "paused.json"  # the last request that is carried out: {"sequence": n, "paused": bool, "let_go": bool}
KNOCK = "knock"  # an empty file: the service wants to reach the worker
GO = "go"  # in the directory above: the gang is complete; the launch's nonce, or {"nonce": it, "env": more variables}
CONTROL = "control.json"  # what the training library is to do: see `carpool.channel`
REPORTS, SLOT, MAGIC, ITERATION = ("report", "watch"), 512, b"CPR1", 16
"""Where a worker reports its steps: files, size of a slot, how a record begins, and where it has its iterations, as
`carpool.channel` writes them."""
EXIT_BYTES = 512
"""Size of the exit file, written at the start so that an exit can be recorded on a full disk."""
PAUSED_BYTES = 64
MAX_JSON_BYTES = 1 << 26
"""Largest part of a JSON file that is read; the environment of a job may be long."""


class WorkerDirectory:
    """The worker's directory, held open so that a later directory of the same name is not mistaken for it."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def read(self, name: str) -> Any:
        """Read a JSON file. The worker may have put something else in its place, which must not be waited for."""
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        with os.fdopen(descriptor) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{name} is not a regular file")
            return json.loads(file.read(MAX_JSON_BYTES))

    def replace(self, name: str, data: Any, mode: int = 0o600) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(f".{name}", flags, mode, dir_fd=self.fd)
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file)
        os.replace(f".{name}", name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def has(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            return True
        return False

    def size(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return os.stat(name, dir_fd=self.fd).st_size
        return 0

    def has_steps(self) -> bool:
        """Return whether the worker has reported a step. What it may have put in place of a report counts as none."""
        return any(_steps(self._read_bytes(name)) for name in REPORTS)

    def _read_bytes(self, name: str) -> bytes:
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                return os.pread(descriptor, 2 * SLOT, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
            finally:
                os.close(descriptor)
        return b""

    def open_log(self, name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600, dir_fd=self.fd)

    def open_reserved(self, name: str, size: int) -> int:
        """Return a file of fixed size, which can be overwritten on a full disk."""
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        os.pwrite(descriptor, b" " * size, 0)
        return descriptor


def _steps(report: bytes) -> int:
    """Return the iterations in a report. A half-written slot may count: the other one soon has the same number."""
    slots = [report[at : at + SLOT] for at in (0, SLOT)]
    told = [slot for slot in slots if len(slot) == SLOT and slot.startswith(MAGIC)]
    return max([int.from_bytes(slot[ITERATION : ITERATION + 8], "little") for slot in told], default=0)
