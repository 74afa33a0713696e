"""The wrapper of one worker process: `python rank.py DIRECTORY NONCE`, started by an executor, outlives the service.

It waits until its gang is complete, starts the worker in a process group of its own, records pid, start time and exit
code in the worker's directory, and stops it in steps: a request through the channel, SIGTERM, SIGKILL. Processes that
the worker leaves behind are killed. If the wrapper itself is killed, the kernel kills the worker. A bare interpreter
runs this file, which imports no other module of Carpool, so that it starts in about 30 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import Any

ORDERS = "rank.json"  # what to run; written by the executor
RECORD = "process.json"  # pids and start times of wrapper and worker
EXIT = "exit.json"  # how the worker ended
STOP = "stop.json"  # how to stop: {"how": "save" | "end" | "kill"}
GO = "go"  # in the directory above: the gang is complete
EXIT_BYTES = 512
"""Size of the exit file, written at the start so that an exit can be recorded on a full disk."""
LINGER_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a worker that did not save in time."""
NOT_FOUND, NOT_RUNNABLE = 127, 126
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def boot_id() -> str:
    """Return the id of this boot of the machine; a pid is only valid within one boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def process_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it is gone or a zombie. Pid and start identify it."""
    stat = process_stat(pid)
    return int(stat[19]) if stat is not None and stat[0] not in "ZX" else None


class WorkerDirectory:
    """The worker's directory, held open so that a later directory of the same name is not mistaken for it."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def read(self, name: str) -> Any:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        with os.fdopen(descriptor) as file:
            return json.load(file)

    def replace(self, name: str, data: Any) -> None:
        descriptor = os.open(f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file)
        os.replace(f".{name}", name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def size(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return os.stat(name, dir_fd=self.fd).st_size
        return 0

    def open_log(self, name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600, dir_fd=self.fd)


class Wrapper:
    """Runs one worker and records what happens to it."""

    def __init__(self, path: str, nonce: str) -> None:
        self.directory = WorkerDirectory(path)
        self.orders = self.directory.read(ORDERS)
        if self.orders["nonce"] != nonce:
            sys.exit(f"{path} belongs to another launch")
        self.nonce = nonce
        self.me: dict[str, Any] = {
            "pid": os.getpid(),
            "start": start_ticks(os.getpid()),
            "boot": boot_id(),
            "nonce": nonce,
        }
        self.worker = 0
        self.status: int | None = None
        self.deadline: float | None = None
        self.stage = ""
        self._exit = os.open(EXIT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self.directory.fd)
        os.pwrite(self._exit, b" " * EXIT_BYTES, 0)

    def run(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.directory.replace(RECORD, self.me)
        os.write(1, b"r")  # ready
        while os.read(0, 1):  # the service holds the other end until it has decided or is gone
            pass
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
        if not self._complete():
            self._record({"never": True})
            return
        began = self.me["began"] = time.time()
        self._start()
        self._attend()
        self._leave_nothing_behind()
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        ended = {"code": code if code >= 0 else 128 - code, "signal": max(0, -code), "began": began}
        self._record({**ended, "ended": time.time(), "stage": self.stage})

    def _complete(self) -> bool:
        """Return whether the executor wrote `go` for this launch."""
        with contextlib.suppress(OSError, ValueError):
            return bool(self.directory.read(f"../{GO}") == self.nonce)
        return False

    def _record(self, data: dict[str, Any]) -> None:
        os.pwrite(self._exit, json.dumps(data).encode().ljust(EXIT_BYTES), 0)
        with contextlib.suppress(OSError):
            os.fsync(self._exit)

    # ---- the worker ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        logs = [self.directory.open_log("stdout.log"), self.directory.open_log("stderr.log")]
        if self.orders.get("uid") is not None:
            for log in logs:
                os.fchown(log, self.orders["uid"], self.orders["gid"])
        parent = os.getpid()
        self.worker = os.fork()
        if self.worker == 0:
            try:
                _become_worker(self.orders, logs, parent)
            except BaseException as error:
                code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE
                text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                place, program = self.orders["directory"], self.orders["command"][0]
                where = place if getattr(error, "filename", None) == place else program
                os.write(logs[1], f"carpool: cannot run {where}: {text}\n".encode())
                os._exit(code)
        with contextlib.suppress(OSError):
            os.setpgid(self.worker, self.worker)
        for log in logs:
            os.close(log)
        worker = {"pid": self.worker, "start": start_ticks(self.worker)}
        with contextlib.suppress(OSError):  # on a full disk, the worker is still found by its environment
            self.directory.replace(RECORD, {**self.me, "worker": worker})

    def _attend(self) -> None:
        """Wait until the worker has ended, and enforce requests to stop it."""
        while self.status is None:
            left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            got = signal.sigwaitinfo(_WAKING) if left is None else signal.sigtimedwait(_WAKING, left)
            if got is None:
                self._next_stage()
            elif got.si_signo != signal.SIGCHLD:
                self._asked_to_stop()
            self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.worker:
                    self.status = status

    def _asked_to_stop(self) -> None:
        try:
            how = self.directory.read(STOP)["how"]
        except (OSError, ValueError, KeyError, TypeError):
            how = "end"
        if how == "kill":
            self._kill()
        elif how == "save" and not self.stage and self._reports():
            self._wait("saving", self.orders["grace_s"])  # the training library reads the request in control.json
        elif self.stage in ("", "saving"):
            self._signal(signal.SIGTERM)
            self._wait("ending", self.orders["grace_s"])

    def _reports(self) -> bool:
        """Return whether the worker uses the training library."""
        return self.directory.size("report") > 0

    def _next_stage(self) -> None:
        if self.stage == "saving":
            self._signal(signal.SIGTERM)
            self._wait("ending", LINGER_S)
        else:
            self._kill()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._wait("killed", 1.0)

    def _wait(self, stage: str, seconds: float) -> None:
        self.stage, self.deadline = stage, time.monotonic() + seconds

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.worker, number)

    def _leave_nothing_behind(self) -> None:
        """Kill the worker's orphans, which are now children of this process, until none is left."""
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            self._signal(signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            for pid in _children(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _children(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        stat = process_stat(int(name)) if name.isdigit() else None
        if stat is not None and int(stat[1]) == parent:
            found.append(int(name))
    return found


def _become_worker(orders: dict[str, Any], logs: list[int], parent: int) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in zip((nothing, *logs), (0, 1, 2), strict=True):
        os.dup2(descriptor, target)
    if orders.get("memory"):
        resource.setrlimit(resource.RLIMIT_DATA, (orders["memory"], orders["memory"]))
    if orders.get("cores"):
        os.sched_setaffinity(0, orders["cores"])
    if orders.get("uid") is not None:
        os.setgroups(orders["groups"])
        os.setgid(orders["gid"])
        os.setuid(orders["uid"])
    os.umask(0o022)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user would have cleared it
    if os.getppid() != parent:
        os._exit(NOT_RUNNABLE)
    os.chdir(orders["directory"])
    os.execvpe(orders["command"][0], orders["command"], orders["env"])


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    Wrapper(sys.argv[1], sys.argv[2]).run()
