"""Identity of processes: whether a recorded process still runs, and which processes a worker left behind.

A pid alone proves nothing, because the kernel reuses pids. A process is the recorded one if pid, start time and boot of
the machine agree. Workers carry their directory in their environment, which identifies leftover processes. Used by the
local executor.
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

__all__ = ["ProcessIdentity", "boot_id", "kill_strays", "process_stat", "remove_cgroup", "start_ticks", "strays"]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, which no later process with the same pid is taken for."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, data: Any) -> "ProcessIdentity | None":
        """Read a wrapper's record; None where it is missing or cannot be read."""
        try:
            return cls(int(data["pid"]), int(data["start"]), str(data["boot"]))
        except (KeyError, TypeError, ValueError):
            return None

    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.start

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; return False if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():  # checked after opening: the descriptor now stands for the process that was checked
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def strays(directory: str, wrapper: ProcessIdentity | None = None) -> Iterator[int]:
    """Yield the processes that carry a worker's directory in their environment, or are in its wrapper's session."""
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


def kill_strays(directory: str, wrapper: ProcessIdentity | None = None, patience_s: float = 30.0) -> int:
    """Kill the processes that a worker left behind and return their number. Raise OSError if some do not die."""
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


def remove_cgroup(path: str, patience_s: float = 2.0) -> None:
    """Remove a cgroup whose processes were killed: they leave it a moment after they are gone from /proc."""
    until = time.monotonic() + patience_s
    while os.path.isdir(path):
        try:
            os.rmdir(path)
        except OSError:
            if time.monotonic() > until:
                return
            time.sleep(0.01)
