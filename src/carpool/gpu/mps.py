"""NVIDIA MPS: one control daemon for the GPUs we manage, so that kernels of several jobs run side by side.

The live executor and the profiler start a `Daemon`, pass its `env()` to their workers, and verify that MPS serves the
running processes: a client that cannot reach the daemon runs without it and reports no error. The daemon has its own
directories and survives a killed service; the next `start` adopts it. Clocks, compute mode and MIG layout stay as they
are. No limit on the share of GPU threads is set, because kernels of two gangs that wait for each other could hang.
"""

import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InputError
from carpool.gpu import nvml

CONTROL = "nvidia-cuda-mps-control"
SOCKET_LONGEST = 107 - len("/control_privileged")
"""Maximum length of the pipe directory's path. The daemon puts Unix sockets there, whose paths have 107 characters."""
ANSWER_S = 10.0
START_S = 20.0
STOP_S = 10.0
CHECK_S = 60.0
"""Seconds that a trial client may take. The first one waits for the server, which initialises every GPU."""
RECOVERY_S = 120.0
"""Maximum seconds to wait for the clients of a failed server. It accepts no new clients before they are gone."""
BEGUN = re.compile(rb"Starting new server (\d+)")
"""Line of the daemon's log about a new server."""
MIB = 2**20
PROBE_LIMIT = 3 * 2**30
"""Memory limit of the trial client: more than a context takes, less than `PROBE_MUCH`."""
PROBE_MUCH = 4 * 2**30


class MpsError(InputError):
    """MPS does not work on this machine. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A server that failed. All its clients must be started again."""

    server: int
    clients: frozenset[int]
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a trial client: whether MPS serves it, and whether the memory limit holds."""

    served: bool
    limited: bool
    detail: str


def available(control: str = CONTROL) -> str | None:
    """Return None if MPS can be used on this machine, else the reason why not."""
    if not sys.platform.startswith("linux"):
        return "MPS exists on Linux only"
    if shutil.which(control) is None:
        return f"{control} is not installed; it comes with the NVIDIA driver"
    if not nvml.devices():
        return "no GPU was found"
    return None


class Daemon:
    """The control daemon in `directory`, for the GPUs with these UUIDs (all GPUs if none are given)."""

    def __init__(self, directory: str | os.PathLike[str], uuids: Sequence[str] = (), control: str = CONTROL) -> None:
        self.directory = Path(directory).resolve()
        self.uuids = tuple(uuids)
        self._control = control
        self._child: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._birth: int | None = None
        self._forget_servers()

    def _forget_servers(self) -> None:
        self._served: dict[int, frozenset[int]] = {}
        self._begun: set[int] = set()
        self._failed: dict[int, float] = {}
        self._read = {path: _size(path) for path in self._logs()}

    @property
    def pipe(self) -> Path:
        """The directory of the sockets: inside ours, or a short private one if that path is too long."""
        inside = self.directory / "pipe"
        if len(os.fsencode(inside)) <= SOCKET_LONGEST:
            return inside
        name = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"carpool-{os.getuid()}-{name}"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def _logs(self) -> tuple[Path, ...]:
        """The files in which the daemon reports its servers: its output, and its own log when it runs as a daemon."""
        return self.log / "daemon.log", self.log / "control.log"

    @property
    def pid(self) -> int | None:
        return self._pid

    def start(self) -> None:
        """Start the daemon, or adopt the one that an earlier service left in this directory."""
        self._forget_servers()
        if self._adopt():
            return
        for place in (self.directory, self.pipe, self.log):
            _private(place)
        self._end_forgotten()
        with (self.log / "daemon.log").open("ab") as output:
            try:
                self._child = subprocess.Popen(
                    [self._control, "-f"],
                    env=self._own_env(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise MpsError(
                    f"{self._control}: cannot be started ({error.strerror}); share by time-slicing"
                ) from None
        self._pid, self._birth = self._child.pid, _birth(self._child.pid)
        self._note().write_text(json.dumps({"pid": self._pid, "birth": self._birth, "uuids": self.uuids}))
        until = time.monotonic() + START_S
        while self._servers() is None:
            if not self.alive() or time.monotonic() > until:
                self.stop()
                raise MpsError(f"the MPS daemon does not answer; see {self.log}, or share by time-slicing")
            time.sleep(0.05)

    def env(self, memory_limit: int | None = None, gpus: int = 1) -> dict[str, str]:
        """Return a worker's environment variables. The limit is in bytes per GPU and includes the context."""
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}
        if memory_limit is not None:
            whole = max(1, memory_limit // MIB)
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{gpu}={whole}M" for gpu in range(gpus))
        return variables

    def alive(self) -> bool:
        """Return whether our daemon's process still runs."""
        if self._child is not None and self._child.poll() is not None:
            return False
        return self._pid is not None and _birth(self._pid) == self._birth and self._birth is not None

    def clients(self) -> set[int]:
        """Return the processes that MPS serves now."""
        return {client for server in self._servers() or () for client in self._clients_of(server)}

    @property
    def recovering(self) -> bool:
        """Whether a server waits for its clients to leave after a fault. It refuses new clients until then."""
        return any(time.monotonic() - since < RECOVERY_S for since in self._failed.values())

    def verify(self, pid: int) -> bool:
        """Return whether MPS serves this process or one of its descendants."""
        clients = self.clients()
        return any(client == pid or pid in _ancestors(client) for client in clients)

    def fell_back(self, pids: Sequence[int]) -> list[int]:
        """Return those of `pids` that use our GPUs outside MPS."""
        uuids = self.uuids or tuple(device.uuid for device in nvml.devices())
        busy = {use.pid for uuid in uuids for use in nvml.processes(uuid)}
        clients = self.clients()
        return [pid for pid in pids if pid in busy and pid not in clients]

    def faults(self) -> list[Fault]:
        """Return the servers that failed since the last call, with their last known clients. Call it regularly.

        All clients belong to one user, so a server never ends on its own: one that is gone has failed.
        """
        self._begun |= self._newly_begun()
        servers = self._servers()
        if servers is None:
            return [] if self.alive() else self._all_lost()
        ended = {server for server in self._begun if _birth(server) is None}
        found = [
            Fault(gone, self._served.pop(gone, frozenset()), "the server is gone")
            for gone in sorted((self._served.keys() | ended) - set(servers))
        ]
        self._begun -= ended | set(servers)
        for server in servers:
            seen = frozenset(self._clients_of(server))
            failed = "FAULT" in (self._ask(f"get_server_status {server}") or "").upper()
            if failed and server not in self._failed:
                self._failed[server] = time.monotonic()
                found.append(Fault(server, seen | self._served.get(server, frozenset()), "a client's fatal fault"))
            elif not failed:
                self._failed.pop(server, None)
            self._served[server] = seen
        self._failed = {server: since for server, since in self._failed.items() if server in servers}
        return found

    def served(self) -> set[int]:
        """Return the processes that were served at the last call of `faults`."""
        return set().union(*self._served.values())

    def _all_lost(self) -> list[Fault]:
        lost = [Fault(server, clients, "the daemon is gone") for server, clients in self._served.items()]
        self._forget_servers()
        return lost or [Fault(0, frozenset(), "the daemon is gone")]

    def _newly_begun(self) -> set[int]:
        found: set[int] = set()
        for path, start in self._read.items():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(start)
                whole = file.read().rpartition(b"\n")[0]  # an incomplete line is read next time
                self._read[path] = start + len(whole)
                found.update(int(number) for number in BEGUN.findall(whole))
        return found

    def check(self, uuid: str, python: str = sys.executable) -> Check:
        """Run a trial client to find out whether MPS serves it and enforces a memory limit."""
        env = {**os.environ, **self.env(PROBE_LIMIT), "CUDA_VISIBLE_DEVICES": uuid}
        command = [python, "-m", "carpool.gpu.probe", str(PROBE_MUCH)]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
            assert probe.stdout is not None
            try:
                if not select.select([probe.stdout], [], [], CHECK_S)[0]:
                    return Check(False, False, f"a trial client gave no answer in {CHECK_S:g} s")
                answer = json.loads(probe.stdout.readline())
                served = self.verify(probe.pid)
            except ValueError:
                return Check(False, False, "a trial client ended without an answer")
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    probe.communicate(timeout=STOP_S)  # it exits when its input closes
                probe.kill()
        if "error" in answer:
            return Check(False, False, f"a trial client failed: {answer['error']}")
        limited = answer.get("much") == 2 and answer.get("little") == 0
        return Check(served, limited, json.dumps(answer) if served else "a trial client ran outside MPS")

    def stop(self) -> None:
        """Stop the daemon and its servers. Stop the workers first: those that still use a server would fail."""
        if self.alive():
            self._ask(f"quit -t {STOP_S / 2:g}", timeout=STOP_S)
            self._wait_gone(STOP_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.alive() and self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)
                self._wait_gone(STOP_S / 2)
        self._note().unlink(missing_ok=True)
        if self.pipe.parent != self.directory:
            shutil.rmtree(self.pipe, ignore_errors=True)
        self._child = self._pid = self._birth = None

    def __enter__(self) -> "Daemon":
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _note(self) -> Path:
        return self.directory / "daemon.json"

    def _own_env(self) -> dict[str, str]:
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.uuids)} if self.uuids else {}
        return {**os.environ, **self.env(), **visible}

    def _adopt(self) -> bool:
        try:
            note = json.loads(self._note().read_text())
            pid, birth, uuids = int(note["pid"]), int(note["birth"]), tuple(note["uuids"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if _birth(pid) != birth:
            return False
        self._pid, self._birth = pid, birth
        if uuids != self.uuids:
            if self.clients():
                raise MpsError(
                    f"{self.directory}: an MPS daemon for other GPUs serves jobs there; wait for them to end"
                )
            self.stop()
            return False
        if self._servers() is None:
            self.stop()
            return False
        return True

    def _end_forgotten(self) -> None:
        """Stop a daemon that answers in our directory although its record is lost: it would block ours."""
        if self._servers() is None:
            return
        if self.clients():
            raise MpsError(f"{self.pipe}: an unknown MPS daemon serves jobs there; wait until they have ended")
        self._ask(f"quit -t {STOP_S / 2:g}", timeout=STOP_S)
        until = time.monotonic() + STOP_S
        while self._servers() is not None:
            if time.monotonic() > until:
                raise MpsError(f"{self.pipe}: an unknown MPS daemon answers there; stop it and start again")
            time.sleep(0.05)

    def _wait_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.05)

    def _servers(self) -> list[int] | None:
        """Return the process ids of the servers, or None if the daemon does not answer."""
        answer = self._ask("get_server_list")
        return None if answer is None else _numbers(answer)

    def _clients_of(self, server: int) -> list[int]:
        return _numbers(self._ask(f"get_client_list {server}") or "")

    def _ask(self, command: str, timeout: float = ANSWER_S) -> str | None:
        try:
            done = subprocess.run(
                [self._control],
                input=command + "\n",
                env={**os.environ, **self.env()},
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None


def _numbers(text: str) -> list[int]:
    return [int(line) for line in text.split() if line.isdigit()]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _private(place: Path) -> None:
    """Make a private directory: a user who can write to it could impersonate the daemon."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise MpsError(f"{place}: belongs to another user; remove it or choose another home")
    place.chmod(0o700)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, or None if the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def _birth(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, which distinguishes reused process ids."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1 and (fields := _stat(pid)):
        pid = int(fields[1])
        yield pid
