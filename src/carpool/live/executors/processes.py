"""Is a recorded process still that process, and what did it leave behind? Called by the executor, never by a policy.

A pid alone proves nothing: pids are used again. A process is the one that was recorded if pid, start time and the
machine's boot agree. Workers carry their directory in their environment, by which strays are found.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from carpool.channel import ENV_DIRECTORY
from carpool.live.rank import boot_id, process_stat, start_ticks

__all__ = ["Identity", "boot_id", "process_stat", "start_ticks", "strays", "sweep"]


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, for as long as it lives."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, data: Any) -> "Identity | None":
        """From a wrapper's record; None where it has not written one that can be read."""
        try:
            return cls(int(data["pid"]), int(data["start"]), str(data["boot"]))
        except (KeyError, TypeError, ValueError):
            return None

    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.start

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; False if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():  # looked at after opening: the descriptor stands for the process that we saw
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def strays(directory: str, wrapper: Identity | None = None) -> Iterator[int]:
    """The processes that carry a worker's mark, or belong to the session that its wrapper opened."""
    session = wrapper.pid if wrapper and start_ticks(wrapper.pid) in (None, wrapper.start) else None
    mark = f"{ENV_DIRECTORY}={directory}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        stat = process_stat(pid)
        if stat is None or stat[0] in "ZX" or pid == os.getpid():
            continue
        if session is not None and int(stat[3]) == session:
            yield pid
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                yield pid


def sweep(directory: str, wrapper: Identity | None = None, patience_s: float = 30.0) -> int:
    """Kill what a worker left behind; the number of processes found. Raises OSError if some do not die."""
    until = time.monotonic() + patience_s
    killed: set[int] = set()
    while True:
        found = list(strays(directory, wrapper))
        if not found:
            return len(killed)
        if time.monotonic() > until:
            raise OSError(f"processes {found} of {directory} do not die")
        for pid in found:
            killed.add(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
