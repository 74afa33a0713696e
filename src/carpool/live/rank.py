"""The wrapper of one worker process: `python rank.py DIRECTORY NONCE`, started by an executor, outlives the service.

It waits until its gang is complete, starts the worker in a process group of its own, records pid, start time and exit
code in the worker's directory, and stops it in steps: a request through the channel, SIGTERM, SIGKILL. Processes that
the worker leaves behind are killed. If the wrapper itself is killed, the kernel kills the worker. It pauses the worker
and lets it go on as the file `pause.json` says; one that starts ahead of its turn, from its first step on. On a node of
a cluster it kills the worker when the node's lease is over. It holds the terminal of an interactive job, and starts
commands beside a worker (`door.py`). A bare interpreter runs this file, which imports no other module of Carpool but
`freezer.py` and, where it is needed, `door.py`, so that it starts in about 30 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from carpool.live import door as door_module
    from carpool.live import freezer


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
    freezer = _load_beside("freezer")

ORDERS = "rank.json"  # what to run; written by the executor
RECORD = "process.json"  # pids and start times of wrapper and worker
EXIT = "exit.json"  # how the worker ended
STOP = "stop.json"  # how to stop: {"how": "save" | "end" | "kill"}
PAUSE = "pause.json"  # whether to pause: {"sequence": n, "paused": bool, "patience_s": seconds, "alive": path,
# "swap_in": the command that moves the worker's memory back to its GPU, where it was moved away}
PAUSED = "paused.json"  # the last request that is carried out: {"sequence": n, "paused": bool, "let_go": bool}
KNOCK = "knock"  # an empty file: the service wants to reach the worker
CGROUP = "carpool-"  # how the names of the wrappers' cgroups begin
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
AGAIN_S = 0.02
"""Seconds before another attempt to stop processes that are not all stopped."""
GATE_S = 0.02
"""Seconds between two looks whether a worker that starts ahead of its turn has made a step."""
LEASE_LOOK_S = 5.0
"""Largest number of seconds between two looks at the node's lease: the machine may have been suspended."""
LOOK_S = 15.0
"""Largest number of seconds between two looks whether the service of a paused worker runs."""
LINGER_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a worker that did not save in time."""
MARK = "CARPOOL_WORKER_DIR"
"""Variable in the environment of every process of a worker."""
NOT_FOUND, NOT_RUNNABLE = 127, 126
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1}
process_stat = freezer.process_stat


def boot_id() -> str:
    """Return the id of this boot of the machine; a pid is only valid within one boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it is gone or a zombie. Pid and start identify it."""
    stat = process_stat(pid)
    return int(stat[19]) if stat is not None and stat[0] not in "ZX" else None


def uptime() -> float:
    """Return the seconds since the machine booted, which no user can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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


class Pause:
    """Whether the worker is paused: as the executor's latest request says, unless the service is gone for too long."""

    def __init__(self, directory: WorkerDirectory, mark: str) -> None:
        self._directory = directory
        self._by_signals = freezer.SignalFreezer(os.getpid(), mark)
        self.cgroup: freezer.CgroupFreezer | None = None
        """The worker's cgroup, if it has one."""
        self._freezer: freezer.CgroupFreezer | freezer.SignalFreezer = self._by_signals
        self._answer = directory.open_reserved(PAUSED, PAUSED_BYTES)
        self._request: dict[str, Any] = {}
        self._wanted = self._paused = self._over = self._armed = False
        self._worker = 0
        self._seen = 0
        """Time stamp of the service's last sign of life."""
        self._seen_at = 0.0
        self.due: float | None = None
        """When to call `look` next."""

    @property
    def paused(self) -> bool:
        return self._paused

    def obey(self, worker: int) -> None:
        """Carry out the executor's latest request."""
        try:
            self._request = self._directory.read(PAUSE)
            wanted = bool(self._request["paused"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        if self._over:
            return
        self._armed = False
        if wanted:
            self._begin(worker)
        else:
            self._go_on()

    def arm(self, request: dict[str, Any], worker: int) -> None:
        """Pause a worker that starts ahead of its turn as soon as it reports a step, whether or not a service runs. A
        request of the executor replaces this one."""
        self._request, self._worker, self._armed = request, worker, True
        self.due = time.monotonic() + GATE_S

    def _begin(self, worker: int) -> None:
        if not self._wanted:
            inside = self.cgroup is not None and self.cgroup.holds(worker)
            self._freezer = self.cgroup if inside and self.cgroup is not None else self._by_signals
        self._wanted, self._paused, self._seen_at = True, False, time.monotonic()
        self._seen = self._sign_of_life()
        self.look()

    def look(self) -> None:
        """Stop what still runs or runs again, and let the worker go on if the service shows no sign of life."""
        if self._armed:
            if not self._directory.has_steps():
                self.due = time.monotonic() + GATE_S
                return
            self._armed = False
            self._begin(self._worker)
            return
        if not self._wanted:
            self.due = None
            return
        now, seen = time.monotonic(), self._sign_of_life()
        patience = float(self._request.get("patience_s", 600.0))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if now - self._seen_at > patience:
            self._go_on(let_go=True)
            self._swap_in()
            return
        try:
            stopped = self._freezer.stop()
        except OSError:  # the cgroup is gone
            self._freezer, stopped = self._by_signals, self._by_signals.stop()
        if stopped and not self._paused:
            self._paused = True
            self._confirm(paused=True)
        self.due = time.monotonic() + (min(LOOK_S, patience / 5) if stopped else AGAIN_S)

    def end(self) -> None:
        """Let the worker go on for good, because it is to stop."""
        self._over, self._armed = True, False
        if self._wanted:
            self._go_on()
            self._swap_in()

    def _go_on(self, *, let_go: bool = False) -> None:
        self._freezer.go_on()
        self._wanted = self._paused = False
        self.due = None
        self._confirm(paused=False, let_go=let_go)

    def _swap_in(self) -> None:
        """Let the worker's memory be moved back to its GPU, in the background; when it resumes, the service does it."""
        command = self._request.get("swap_in")
        if command:
            with contextlib.suppress(OSError):
                os.posix_spawn(command[0], command, {"PATH": os.defpath})

    def _confirm(self, *, paused: bool, let_go: bool = False) -> None:
        data = {"sequence": self._request.get("sequence", 0), "paused": paused, "let_go": let_go}
        with contextlib.suppress(OSError):
            os.pwrite(self._answer, json.dumps(data).encode().ljust(PAUSED_BYTES), 0)

    def _sign_of_life(self) -> int:
        """Return the time stamp of the file that the service touches while it runs. Only changes of it count, so that
        a clock that is set does not matter."""
        with contextlib.suppress(OSError, KeyError):
            return os.stat(self._request["alive"]).st_mtime_ns
        return 0


class Lease:
    """How long the workers of this node may run, as the node's agent wrote it down; on one machine there is none.

    The file has two times on the clock `uptime`, `UNTIL SAVE`: when the lease ends, and when the worker should save if
    the lease has not been renewed by then. A file that cannot be read leaves the last known lease in force.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._until = self._save = 0.0
        self.asked = False
        """The worker was asked to save because the lease was not renewed."""

    def look(self) -> None:
        """Read the latest lease."""
        with contextlib.suppress(OSError, ValueError):
            with open(self._path or "") as file:
                until, save = map(float, file.read(200).split())
            if until > self._until:
                self._until, self._save, self.asked = until, save, False

    @property
    def over(self) -> bool:
        return self._path is not None and uptime() >= self._until

    @property
    def wants_checkpoint(self) -> bool:
        return self._path is not None and not self.asked and uptime() >= self._save

    @property
    def due(self) -> float | None:
        """When to look again, on the monotonic clock."""
        if self._path is None:
            return None
        at = self._until if self.asked else self._save
        return time.monotonic() + min(LEASE_LOOK_S, max(0.01, at - uptime()))


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
            "pauses": True,
            "door": True,
        }
        self.door: door_module.Door | None = None
        self.terminal: door_module.Terminal | None = None
        self.cgroup: freezer.CgroupFreezer | None = None
        planned = freezer.cgroup_below(f"{CGROUP}{nonce}-{os.path.basename(path)}")
        if planned is not None and self.orders.get("cgroup"):
            self.me["cgroup"] = planned  # recorded before it is made, so that a service always finds it
        self.pause = Pause(self.directory, f"{MARK}={self.orders['env'].get(MARK, '')}")
        self.lease = Lease(self.orders.get("lease"))
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
        self._exit = self.directory.open_reserved(EXIT, EXIT_BYTES)

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)  # before the executor knows which process to signal
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.directory.replace(RECORD, self.me)
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
            go = self.directory.read(f"../{GO}")
            if isinstance(go, dict):
                go, more = go["nonce"], go["env"]
                self.orders["env"].update(more)
            return bool(go == self.nonce)
        return False

    def _record(self, data: dict[str, Any]) -> None:
        os.pwrite(self._exit, json.dumps(data).encode().ljust(EXIT_BYTES), 0)
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
            self.directory.replace(RECORD, {**self.me, "worker": worker})

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
                if self.directory.has(KNOCK):
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
            control = self.directory.read(CONTROL)
            self.directory.replace(CONTROL, {**control, "checkpoint": int(control["checkpoint"]) + 1}, 0o644)

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
            how = self.directory.read(STOP)["how"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            how, self.unasked = "end", True
        if how == "kill":
            self._kill()
            return
        self.pause.end()  # a stopped process sees neither the request nor the signal
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
