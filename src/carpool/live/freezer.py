"""Stopping every process of a worker, and letting all of them go on. The wrapper (`rank.py`) calls it.

A worker in a cgroup of its own (version 2) is stopped by the kernel's freezer, at once and unseen by its processes.
Where no such cgroup can be made, SIGSTOP goes to every process of the worker's tree until two scans in a row find the
same processes and all of them stopped, so that a process that was forked meanwhile is found as well. `rank.py` loads
this file by its path into a bare interpreter, so it imports no other module of Carpool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

ATTEMPT_S = 0.25
"""Seconds after which an attempt to stop all processes is given up; the caller tries again."""
LOOK_S = 0.001
"""Seconds between two looks at processes that are being stopped."""
STOPPED, GONE = "Tt", "ZXx"
"""States of a stopped thread, and of one that has ended, in /proc."""
WAITS = "D"
"""State of a thread in an uninterruptible wait. With a stop pending it runs no more code of its program."""
PROCESS_BYTES = 8 << 20
"""Largest part of a process's environment that is read. The kernel lets a process start with 6 MiB at most."""
WORD_BYTES = 64 << 10
"""Bytes that are read at a time; a path is shorter."""


def process_stat(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def process_words(pid: int | str, file: str) -> Iterator[bytes]:
    """Yield the words of a process's environment or command line, which the process itself may have made large.

    Little memory is needed at a time. What follows the largest size that the kernel gives a new process is not read,
    and of a word that is longer than any of Carpool's, only the beginning is kept.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as source:
        rest, left = b"", PROCESS_BYTES
        while left > 0 and (part := source.read(min(left, WORD_BYTES))):
            left -= len(part)
            *whole, last = part.split(b"\0")
            if whole:
                yield rest + whole[0]
                yield from whole[1:]
                rest = last
            else:
                rest = (rest + last)[:WORD_BYTES]
        if rest:
            yield rest


class SignalFreezer:
    """Stops the descendants of a process, and processes that carry a mark in their environment, by signals.

    The process itself is a subreaper, so that descendants whose parents have ended are its children.
    """

    def __init__(self, root: int, mark: str) -> None:
        self._root = root
        self._mark = mark.encode()
        stat = process_stat(root)
        self._since = int(stat[19]) if stat else 0
        self._foreign: set[int] = set()
        """Processes that belong to another user and cannot be stopped."""

    def stop(self) -> bool:
        """Stop all processes; return False if some still run after `ATTEMPT_S`. Repeating it is harmless."""
        until = time.monotonic() + ATTEMPT_S
        asked: set[int] = set()
        before: set[int] | None = None
        while True:
            found = self._processes()
            restless = [pid for pid in found if not _stands(pid, pid in asked)]
            if not restless and found == before:
                return True
            before = None if restless else found
            for pid in restless:
                self._send(pid, signal.SIGSTOP)
            asked.update(restless)
            if time.monotonic() > until:
                return False
            if restless:
                time.sleep(LOOK_S)

    def go_on(self) -> None:
        """Let all processes go on."""
        until = time.monotonic() + ATTEMPT_S
        # all of them: one in an uninterruptible wait is not stopped yet, and SIGCONT cancels the pending stop
        todo = self._processes()
        while todo:
            for pid in todo:
                self._send(pid, signal.SIGCONT)
            if time.monotonic() > until:
                return
            time.sleep(LOOK_S)
            todo = {pid for pid in self._processes() if _is_stopped(pid)}

    def remove(self) -> None:
        return

    def _send(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except PermissionError:
            self._foreign.add(pid)
        except OSError:
            pass  # it has ended

    def _processes(self) -> set[int]:
        """Return the processes of the tree that have not ended."""
        children: dict[int, list[int]] = {}
        marked = []
        for name in os.listdir("/proc"):
            stat = process_stat(name) if name.isdigit() else None
            if stat is None:
                continue
            pid = int(name)
            children.setdefault(int(stat[1]), []).append(pid)
            if int(stat[19]) >= self._since and pid != self._root and self._is_marked(pid):
                marked.append(pid)
        found: set[int] = set()
        todo = [*children.get(self._root, ()), *marked]
        while todo:
            pid = todo.pop()
            if pid not in found:
                found.add(pid)
                todo += children.get(pid, ())
        return {pid for pid in found - self._foreign if not _has_ended(pid)}

    def _is_marked(self, pid: int) -> bool:
        return any(word == self._mark for word in process_words(pid, "environ"))


class CgroupFreezer:
    """Stops all processes of a cgroup."""

    def __init__(self, path: str) -> None:
        self.path = path

    def enter(self) -> None:
        """Move the calling process into the cgroup; its children are born there."""
        self._write("cgroup.procs", "0")

    def holds(self, pid: int) -> bool:
        """Return whether a process is in the cgroup."""
        return cgroup_of(pid) == self.path

    def stop(self) -> bool:
        """Stop all processes; return False if some still run after `ATTEMPT_S`. Repeating it is harmless."""
        until = time.monotonic() + ATTEMPT_S
        self._write("cgroup.freeze", "1")
        while not self._frozen():
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True

    def go_on(self) -> None:
        """Let all processes go on."""
        with contextlib.suppress(OSError):
            self._write("cgroup.freeze", "0")

    def remove(self) -> None:
        """Remove the cgroup after its last process has ended."""
        remove_cgroup(self.path)

    def _frozen(self) -> bool:
        with open(f"{self.path}/cgroup.events") as file:
            return "frozen 1" in file.read()

    def _write(self, name: str, text: str) -> None:
        descriptor = os.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def cgroup_below(name: str) -> str | None:
    """Return the path of a cgroup below the one of this process, which need not exist; None without cgroups."""
    path = cgroup_of("self")
    return None if path is None else f"{path}/{name}"


def make_cgroup(path: str) -> CgroupFreezer | None:
    """Make a cgroup; None where the kernel or the system does not allow it."""
    try:
        os.mkdir(path)
    except OSError:
        return None
    if not os.access(f"{path}/cgroup.freeze", os.W_OK):
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return None
    return CgroupFreezer(path)


def remove_cgroup(path: str, patience_s: float = 2.0) -> None:
    """Remove a cgroup whose processes have ended: they leave it a moment after they are gone from /proc."""
    until = time.monotonic() + patience_s
    while os.path.isdir(path):
        try:
            os.rmdir(path)
        except OSError:
            if time.monotonic() > until:
                return
            time.sleep(0.01)


def sweep_cgroups(prefix: str, older_than_s: float) -> int:
    """Remove empty cgroups beside those of this process's children, and return their number.

    They are left where a wrapper was killed and its directory is gone. Young ones may be about to be entered. The
    kernel refuses to remove one that holds a process.
    """
    parent = cgroup_of("self")
    removed = 0
    for name in os.listdir(parent) if parent is not None and os.path.isdir(parent) else ():
        path = f"{parent}/{name}"
        with contextlib.suppress(OSError):
            if name.startswith(prefix) and time.time() - os.stat(path).st_mtime > older_than_s:
                os.rmdir(path)
                removed += 1
    return removed


def cgroup_of(pid: int | str) -> str | None:
    """Return the directory of a process's cgroup; None without cgroups of version 2, or if it has ended."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            own = next((line[3:].strip() for line in file if line.startswith("0::")), None)
        with open("/proc/self/mounts") as file:
            mount = next((words[1] for words in map(str.split, file) if words[2] == "cgroup2"), None)
    except OSError:
        return None
    return None if own is None or mount is None else f"{mount}{own}".rstrip("/")


def _threads(pid: int) -> Iterator[str]:
    """Yield the state of each thread of a process."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for name in names:
        stat = process_stat(f"{pid}/task/{name}")
        if stat is not None:
            yield stat[0]


def _stands(pid: int, asked: bool) -> bool:
    """Return whether no thread of a process can run its program. `asked`: it has got SIGSTOP already."""
    quiet = STOPPED + GONE + (WAITS if asked else "")
    return all(state in quiet for state in _threads(pid))


def _is_stopped(pid: int) -> bool:
    return any(state in STOPPED for state in _threads(pid))


def _has_ended(pid: int) -> bool:
    return all(state in GONE for state in _threads(pid))
