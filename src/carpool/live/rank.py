"""The wrapper of one worker process: `python rank.py DIRECTORY NONCE`, started by an executor, outlives the service.

It waits until its gang is complete, starts the worker in a process group of its own, records pid, start time and exit
code in the worker's directory, and stops it in steps: a request through the channel, SIGTERM, SIGKILL. Processes that
the worker leaves behind are killed. If the wrapper itself is killed, the kernel kills the worker. It pauses the worker
and lets it go on as the file `pause.json` says; one that starts ahead of its turn, from its first step on. On a node of
a cluster it kills the worker when the node's lease is over. It holds the terminal of an interactive job, and starts
commands beside a worker (`door.py`). A bare interpreter runs this file, which imports no other module of Carpool but
`freezer.py`, `worker_directory.py`, `may_run.py` and, where it is needed, `door.py`, so that it starts in about 30 ms.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from carpool.live import door as door_module
    from carpool.live import freezer, may_run
    from carpool.live import worker_directory as files


def _load_beside(name: str) -> Any:
    """Load a file of this folder. An interpreter that was started with this file cannot import Carpool's packages, and
    must not find them by short names."""
    from importlib import util

    spec = util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING and not __package__:
    freezer, files, may_run = map(_load_beside, ("freezer", "worker_directory", "may_run"))

CGROUP = "carpool-"  # how the names of the wrappers' cgroups begin
LINGER_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a worker that did not save in time."""
MARK = "CARPOOL_WORKER_DIR"
"""Variable in the environment of every process of a worker."""
NOT_FOUND, NOT_RUNNABLE = 127, 126
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1}
process_stat, uptime = freezer.process_stat, may_run.uptime


def boot_id() -> str:
    """Return the id of this boot of the machine; a pid is only valid within one boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it is gone or a zombie. Pid and start identify it."""
    stat = process_stat(pid)
    return int(stat[19]) if stat is not None and stat[0] not in "ZX" else None


class Wrapper:
    """Runs one worker and records what happens to it."""

    def __init__(self, path: str, nonce: str) -> None:
        self.directory = files.WorkerDirectory(path)
        self.orders = self.directory.read(files.ORDERS)
        if self.orders["nonce"] != nonce:
            sys.exit(f"{path} belongs to another launch")
        self.nonce = nonce
        self.me: dict[str, Any] = {
            "pid": os.getpid(),
            "start": start_ticks(os.getpid()),
            "boot": boot_id(),
            "nonce": nonce,
            "pauses": True,
            "door": True,
        }
        self.door: door_module.Door | None = None
        self.terminal: door_module.Terminal | None = None
        self.cgroup: freezer.CgroupFreezer | None = None
        planned = freezer.cgroup_below(f"{CGROUP}{nonce}-{os.path.basename(path)}")
        if planned is not None and self.orders.get("cgroup"):
            self.me["cgroup"] = planned  # recorded before it is made, so that a service always finds it
        self.pause = may_run.Pause(self.directory, f"{MARK}={self.orders['env'].get(MARK, '')}")
        self.lease = may_run.Lease(self.orders.get("lease"))
        self.lease_due: float | None = None
        self.worker = 0
        self.status: int | None = None
        self.deadline: float | None = None
        self.stage = ""
        self.fenced = False
        """The node's lease ran out."""
        self.unasked = False
        """A signal to end came from something other than the executor."""
        self.idle = False
        """The terminal was left alone for too long."""
        self._exit = self.directory.open_reserved(files.EXIT, files.EXIT_BYTES)

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)  # before the executor knows which process to signal
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.directory.replace(files.RECORD, self.me)
        os.write(1, b"r")  # ready
        while os.read(0, 1):  # the service holds the other end until it has decided or is gone
            pass
        try:
            self._run()
        finally:
            if self.cgroup is not None:
                self.cgroup.remove()

    def _run(self) -> None:
        if not self._complete():
            self._record({"never": True})
            return
        began = self.me["began"] = time.time()
        self.me["began_uptime"] = uptime()
        self._start()
        self._attend()
        self._leave_nothing_behind()
        if self.door is not None:
            self.door.finish()
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        ended = {"code": code if code >= 0 else 128 - code, "signal": max(0, -code), "began": began}
        times = {"began_uptime": self.me["began_uptime"], "ended": time.time(), "ended_uptime": uptime()}
        whose = {name: True for name in ("fenced", "unasked", "idle") if getattr(self, name)}
        self._record({**ended, **times, "stage": self.stage, **whose})

    def _complete(self) -> bool:
        """Return whether the executor wrote `go` for this launch, and take the variables that came with it."""
        self.lease.look()
        if self.lease.over:
            return False
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            go = self.directory.read(f"../{files.GO}")
            if isinstance(go, dict):
                go, more = go["nonce"], go["env"]
                self.orders["env"].update(more)
            return bool(go == self.nonce)
        return False

    def _record(self, data: dict[str, Any]) -> None:
        os.pwrite(self._exit, json.dumps(data).encode().ljust(files.EXIT_BYTES), 0)
        with contextlib.suppress(OSError):
            os.fsync(self._exit)

    # ---- the worker ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        logs = (self.directory.open_log("stdout.log"), self.directory.open_log("stderr.log"))
        if self.owner is not None:
            for log in logs:
                os.fchown(log, *self.owner)
        if "cgroup" in self.me:
            self.cgroup = self.pause.cgroup = freezer.make_cgroup(self.me["cgroup"])
        if self.orders.get("idle_s") is None:
            nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self.worker = self._spawn(self.orders["command"], (nothing, *logs))
            os.close(nothing)
            os.close(logs[0])
        else:
            self._open_door()
            assert self.door is not None
            self.terminal = _door_module().Terminal(logs[0], self.orders["idle_s"], self.owner)
            self.door.has(self.terminal)
            slave = self.terminal.slave
            self.worker = self._spawn(self.orders["command"], (slave, slave, slave), terminal=True)
        os.close(logs[1])
        if self.orders.get("gate"):
            self.pause.arm(self.orders["gate"], self.worker)
        worker = {"pid": self.worker, "start": start_ticks(self.worker)}
        with contextlib.suppress(OSError):  # on a full disk, the worker is still found by its environment
            self.directory.replace(files.RECORD, {**self.me, "worker": worker})

    @property
    def owner(self) -> tuple[int, int] | None:
        """Uid and gid of the worker; None: those of the wrapper."""
        return (self.orders["uid"], self.orders["gid"]) if self.orders.get("uid") is not None else None

    def _spawn(
        self,
        command: list[str],
        streams: tuple[int, int, int],
        terminal: bool = False,
        env: dict[str, str] | None = None,
    ) -> int:
        """Start a process in a group of its own, with the rights of the job; `terminal`: the streams are one."""
        orders = {**self.orders, "command": command, "env": env or self.orders["env"]}
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _become_worker(orders, streams, parent, self.cgroup, terminal)
            except BaseException as error:
                code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE
                text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                where = orders["directory"] if getattr(error, "filename", None) == orders["directory"] else command[0]
                os.write(streams[2], f"carpool: cannot run {where}: {text}\n".encode())
                os._exit(code)
        if not terminal:  # with a terminal it starts a session, which the leader of a group cannot
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        return pid

    def _open_door(self) -> None:
        """Let the service reach the worker's terminal and start commands beside the worker."""
        if self.door is None:
            self.door = _door_module().Door(self.directory.fd, self._run_beside, self.owner, _WAKING)

    def _run_beside(self, command: list[str], streams: tuple[int, int, int], terminal: bool) -> int:
        env = {"TERM": "xterm-256color", **self.orders["env"]}
        if self.orders.get("unwatched") is not None:  # its iterations are not the worker's
            del env["PYTHONPATH"]
            env |= {"PYTHONPATH": self.orders["unwatched"]} if self.orders["unwatched"] else {}
        return self._spawn(command, streams, terminal, env)

    def _attend(self) -> None:
        """Wait until the worker has ended, and enforce requests to pause it and to stop it."""
        self._look_at_lease()
        while self.status is None:
            idle_at = self.terminal.idle_at if self.terminal is not None and not self.stage else None
            due = [at for at in (self.deadline, self.pause.due, self.lease_due, idle_at) if at is not None]
            signals = self._await_signals(max(0.0, min(due) - time.monotonic()) if due else None)
            if signal.SIGUSR1 in signals:
                self.pause.obey(self.worker)
                if self.directory.has(files.KNOCK):
                    with contextlib.suppress(OSError):  # the service asks again
                        self._open_door()
            if signals - {signal.SIGUSR1, signal.SIGCHLD}:
                self._asked_to_stop()
            self._reap()
            if self.status is None:  # also after a signal: a worker may cause signals without end
                self._time_passed()

    def _await_signals(self, left: float | None) -> set[int]:
        """Wait for signals, or until the time is over, and return those that came."""
        if self.door is not None:
            return self.door.attend(left)
        got = signal.sigwaitinfo(_WAKING) if left is None else signal.sigtimedwait(_WAKING, left)
        return set() if got is None else {got.si_signo}

    def _time_passed(self) -> None:
        now = time.monotonic()
        if self.terminal is not None and not self.stage and now >= self.terminal.idle_at:
            self._left_alone(self.terminal)
        if self.pause.due is not None and now >= self.pause.due:
            self.pause.look()
        if self.deadline is not None and now >= self.deadline:
            self._next_stage()
        if self.lease_due is not None and now >= self.lease_due:
            self._look_at_lease()

    def _left_alone(self, terminal: door_module.Terminal) -> None:
        """End the worker, whose terminal was left alone for the stated time. A paused one could not be used."""
        if self.pause.paused:
            terminal.used()
        else:
            self.idle = True
            terminal.say(f"carpool: ended, because nothing was typed or printed for {self.orders['idle_s']:g} s")
            self._ask_to_leave()

    def _look_at_lease(self) -> None:
        """Kill the worker if the node's lease is over: it may be started elsewhere from then on."""
        self.lease.look()
        if self.lease.over:
            self.fenced, self.lease_due = True, None
            self._kill()
            return
        if self.lease.wants_checkpoint:
            self.lease.asked = True
            self._ask_to_save()
        self.lease_due = self.lease.due

    def _ask_to_save(self) -> None:
        """Ask the training library for a checkpoint while there is time. The rest of the control stays as it is."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            control = self.directory.read(files.CONTROL)
            self.directory.replace(files.CONTROL, {**control, "checkpoint": int(control["checkpoint"]) + 1}, 0o644)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.worker:
                    self.status = status
                elif self.door is not None:
                    self.door.reaped(pid, status)

    def _asked_to_stop(self) -> None:
        try:
            how = self.directory.read(files.STOP)["how"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            how, self.unasked = "end", True
        if how == "kill":
            self._kill()
            return
        self.pause.end()  # a stopped process sees neither the request nor the signal
        if how == "save" and self.stage == "saving":  # a service that starts asks again
            return
        if how == "save" and not self.stage and self._reports():
            self._wait("saving", self.orders["grace_s"])  # the training library reads the request in control.json
        elif self.stage in ("", "saving"):
            self._ask_to_leave()

    def _ask_to_leave(self) -> None:
        self._signal(signal.SIGTERM)
        if self.terminal is not None:  # as if its window were closed: an interactive shell ignores SIGTERM
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGCONT)
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


def _door_module() -> Any:
    """Return `door.py`, which most workers do not need."""
    return door_module if __package__ else sys.modules.get("door") or _load_beside("door")


def _become_worker(
    orders: dict[str, Any],
    streams: tuple[int, int, int],
    parent: int,
    cgroup: freezer.CgroupFreezer | None,
    terminal: bool,
) -> None:
    os.setsid() if terminal else os.setpgid(0, 0)
    if cgroup is not None:
        with contextlib.suppress(OSError):  # the worker can still be stopped by signals
            cgroup.enter()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    if terminal:
        _door_module().control(0)
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


def close_inherited() -> None:
    """Close every file but the standard ones. A file that the service had open must not reach a worker."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


if __name__ == "__main__":
    close_inherited()
    Wrapper(sys.argv[1], sys.argv[2]).run()
