"""Identity of processes: whether a recorded process still runs, and which processes a worker left behind.

A pid alone proves nothing, because the kernel reuses pids. A process is the recorded one if pid, start time and boot of
the machine agree. Workers carry their directory in their environment, which identifies leftover processes. Those that
cleared it are known by their cgroup, or by the logs of the worker that they still write. Used by the local executor.
"""

import contextlib
import os
import signal
import stat as stat_module
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from carpool.channel import ENV_DIRECTORY
from carpool.live.freezer import cgroup_of, process_words
from carpool.live.rank import __file__ as rank_file
from carpool.live.rank import boot_id, process_stat, start_ticks

WRAPPER_WORDS = 64
"""Number of words of a command line among which a wrapper's are."""
LOGS = ("stdout.log", "stderr.log")

__all__ = [
    "ProcessIdentity",
    "boot_id",
    "kill_processes",
    "kill_strays",
    "process_stat",
    "start_ticks",
    "strays",
    "worker_processes",
]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, told apart from a later one with the same pid."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, data: Any) -> "ProcessIdentity | None":
        """Read a wrapper's record; None where it is missing or cannot be read."""
        try:
            return cls(int(data["pid"]), int(data["start"]), str(data["boot"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.start

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; return False if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
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


def strays(directory: str, wrapper: ProcessIdentity | None = None, cgroup: str | None = None) -> Iterator[int]:
    """Yield the processes that carry a worker's directory in their environment, are in its wrapper's session or in its
    cgroup, or have one of its logs open for writing."""
    logs = _identities(directory)
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
        marked = any(word == mark for word in process_words(name, "environ"))
        if marked or _writes(name, logs) or (cgroup is not None and cgroup_of(pid) == cgroup):
            yield pid


def _identities(directory: str) -> set[tuple[int, int]]:
    """Return device and inode of a worker's logs."""
    found = set()
    for name in LOGS:
        with contextlib.suppress(OSError):
            log = os.stat(f"{directory}/{name}", follow_symlinks=False)
            if stat_module.S_ISREG(log.st_mode):
                found.add((log.st_dev, log.st_ino))
    return found


def _writes(pid: str, files: Container[tuple[int, int]]) -> bool:
    """Return whether a process has one of these files open for writing. One that reads a log is no stray."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for descriptor in os.listdir(f"/proc/{pid}/fd") if files else ():
            with contextlib.suppress(FileNotFoundError):  # it was closed, or leads to nothing
                found = os.stat(f"/proc/{pid}/fd/{descriptor}")
                if (found.st_dev, found.st_ino) in files:
                    with open(f"/proc/{pid}/fdinfo/{descriptor}") as file:
                        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                    if flags & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


def kill_strays(
    directory: str, wrapper: ProcessIdentity | None = None, patience_s: float = 30.0, cgroup: str | None = None
) -> int:
    """Kill the processes that a worker left behind and return their number. Raise OSError if some do not die."""
    until = time.monotonic() + patience_s
    killed: set[int] = set()
    while True:
        found = list(strays(directory, wrapper, cgroup))
        if not found:
            return len(killed)
        if time.monotonic() > until:
            raise OSError(f"processes {found} of {directory} do not die")
        for pid in found:
            killed.add(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def worker_processes(jobs: str) -> dict[str, set[int]]:
    """Return the processes of workers below a directory of jobs, by the worker's directory, whether it exists or not.

    Workers carry their directory in their environment, wrappers in their command line. Descendants of both count, also
    those that cleared their environment.
    """
    found: dict[str, set[int]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        stat = process_stat(name) if name.isdigit() else None
        if stat is None or stat[0] in "ZX" or int(name) == os.getpid():
            continue
        children.setdefault(int(stat[1]), []).append(int(name))
        directory = _worker_directory(name)
        if directory is not None and directory.startswith(f"{jobs}/"):
            found.setdefault(directory, set()).add(int(name))
    for pids in found.values():
        todo = list(pids)
        while todo:
            below = [pid for pid in children.get(todo.pop(), ()) if pid not in pids]
            pids.update(below)
            todo += below
    return found


def _worker_directory(pid: str) -> str | None:
    """Return the directory of the worker that a process belongs to, as the process itself says."""
    mark = f"{ENV_DIRECTORY}=".encode()
    own = next((word[len(mark) :] for word in process_words(pid, "environ") if word.startswith(mark)), None)
    if own is not None:
        return os.fsdecode(own)
    words = list(islice(process_words(pid, "cmdline"), WRAPPER_WORDS))
    wrapper = os.fsencode(rank_file)
    if wrapper in words[:-1]:
        return os.fsdecode(words[words.index(wrapper) + 1])
    return None


def kill_processes(pids: Iterable[int], patience_s: float = 30.0) -> int:
    """Kill processes, wait until they are gone, and return their number. Raise OSError if some do not die."""
    left = {pid: start for pid in pids if (start := start_ticks(pid)) is not None}
    number, until = len(left), time.monotonic() + patience_s
    while left:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = {pid: start for pid, start in left.items() if start_ticks(pid) == start}
        if left and time.monotonic() > until:
            raise OSError(f"processes {sorted(left)} do not die")
    return number
