"""Starting a gang on this machine: its directories, its environment, its wrappers. Used by the local executor.

A gang starts in two phases. First all wrappers start and wait, each on a pipe that the executor holds; then the file
`go` is written and the pipes are closed. A wrapper whose pipe closes looks for `go`: if the service dies in between,
either all wrappers start their workers or none does. A nonce in both files excludes wrappers of an earlier launch.
"""

import json
import os
import pwd
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carpool import channel
from carpool.live import rank as wrapper
from carpool.live import worker_directory as files
from carpool.live.accounts import account
from carpool.live.executors.base import ExecutorOptions, GangKey, Launch
from carpool.live.executors.environment import (
    DEFAULT_PATH,
    base_environment,
    first_rank,
    rank_environments,
    watch_python,
)
from carpool.live.executors.gang import GANG_FILE, LocalGang, LocalRank
from carpool.live.home import write_private

READY_S = 60.0
"""Seconds that a wrapper may take to start on a busy machine."""


class GangLauncher:
    """Prepares gangs and starts their wrappers."""

    cgroups = True
    """Whether workers get cgroups of their own, where the system allows that, so that they can be frozen."""

    def __init__(self, options: ExecutorOptions) -> None:
        self.home = options.home
        self._lease = options.lease
        self._leads = options.leadership.leads
        self.patience_s = options.pause_patience_s
        self._emulated = options.emulated
        self.children: set[int] = set()
        """Wrappers that this process started and has not reaped."""
        self._ports: dict[GangKey, int] = {}
        self._held: dict[GangKey, socket.socket] = {}
        """Sockets that keep the ports of gangs over several nodes free until their workers may listen there."""
        self._cores: dict[GangKey, list[int]] = {}

    def prepare(self, gang: LocalGang, launch: Launch, nonce: str, sharing: Mapping[str, str]) -> None:
        """Make the directories and start all wrappers, which then wait. Blocks. `sharing`: variables for MPS."""
        if not self._leads():  # the directory may be that of a gang that another service started
            raise OSError("another service may lead")
        _set_aside(gang.directory)
        user = account(launch.uid) if launch.uid is not None and launch.uid != os.getuid() else None
        self._make_directories(gang, launch, user)
        gang.port = self._free_port(gang.key, everywhere=launch.part is not None)
        variables = rank_environments(launch, gang.slots, gang.port)
        first, gang.world_size = first_rank(launch), launch.part.world_size if launch.part else len(variables)
        record = {
            "slots": [asdict(slot) for slot in gang.slots],
            "ranks": len(variables),
            "first": first,
            "world_size": gang.world_size,
            "nonce": nonce,
            "exclusive": gang.exclusive,
            "ahead": launch.ahead,
        }
        write_private(gang.directory / GANG_FILE, json.dumps(record))
        gang.ranks, gang.paused = [], launch.ahead or None
        cores = self._pick_cores(gang.key, launch.cpus, len(variables))
        checkpoints = launch.checkpoints or str(self.home.checkpoints(launch.job))
        for number, own in enumerate(variables):
            directory = gang.directory / f"rank-{first + number}"
            directory.mkdir(mode=0o711 if user else 0o700)
            own[channel.ENV_DIRECTORY] = str(directory)
            own[channel.ENV_CHECKPOINTS] = checkpoints
            if self._emulated:
                own[channel.ENV_EMULATED] = self._emulated
            environment = {**base_environment(user), **launch.env, **sharing, **own}
            if launch.idle_s is not None:
                environment.setdefault("TERM", "xterm-256color")
            if launch.watch:
                watch_python(environment)
            self._write_rank(directory, launch, nonce, environment, cores[number], user)
            gang.ranks.append(LocalRank(directory))
        # several workers stand before their first step together; one is stopped by its wrapper
        stands_s = self.patience_s if launch.ahead and gang.world_size > 1 else 0.0
        control = channel.Control(1, launch.accumulation, can_shrink=launch.can_shrink, pause_s=stands_s)
        gang.write_control(control)
        self._start_wrappers(gang, nonce)

    def release(self, key: GangKey) -> None:
        """Forget the port and the cores of a gang that has ended."""
        self.release_port(key)
        self._ports.pop(key, None)
        self._cores.pop(key, None)

    def _make_directories(self, gang: LocalGang, launch: Launch, user: pwd.struct_passwd | None) -> None:
        self.home.make_folders()
        mode = 0o711 if user else 0o700
        job, checkpoints = self.home.job(launch.job), self.home.checkpoints(launch.job)
        job.mkdir(mode=mode, exist_ok=True)
        job.chmod(mode)
        if launch.checkpoints:
            checkpoints = Path(launch.checkpoints)
        checkpoints.mkdir(mode=0o700, exist_ok=True)
        (self.home.running / f"{launch.job}-{launch.attempt}").touch(mode=0o600)
        gang.directory.mkdir(mode=mode)
        if user:
            os.chown(checkpoints, user.pw_uid, user.pw_gid)

    def _write_rank(
        self,
        directory: Path,
        launch: Launch,
        nonce: str,
        environment: Mapping[str, str],
        cores: Sequence[int] | None,
        user: pwd.struct_passwd | None,
    ) -> None:
        """Write what the wrapper has to run."""
        orders: dict[str, Any] = {
            "nonce": nonce,
            "command": list(launch.command),
            "directory": launch.directory,
            "env": dict(environment),
            "grace_s": launch.grace_s,
            "memory": launch.memory,
            "cores": cores,
            "cgroup": self.cgroups,
            "lease": str(self._lease) if self._lease is not None else None,
            "idle_s": launch.idle_s,
            "unwatched": launch.env.get("PYTHONPATH", "") if launch.watch else None,
        }
        if launch.ahead and len(launch.gpus) == 1 and launch.part is None:
            request = {"sequence": 0, "paused": True, "patience_s": self.patience_s, "alive": str(self.home.alive)}
            orders["gate"] = request
        if user:
            groups = os.getgrouplist(user.pw_name, user.pw_gid)
            orders |= {"uid": user.pw_uid, "gid": user.pw_gid, "groups": groups}
            for name in (channel.REPORT, channel.WATCH):  # the only files here that the worker may write
                (directory / name).touch(mode=0o600)
                os.chown(directory / name, user.pw_uid, user.pw_gid)
        write_private(directory / files.ORDERS, json.dumps(orders))

    def _start_wrappers(self, gang: LocalGang, nonce: str) -> None:
        ready: list[int] = []
        try:
            for rank in gang.ranks:
                ready_in, ready_out = os.pipe2(os.O_CLOEXEC)
                lease_in, lease_out = os.pipe2(os.O_CLOEXEC)
                try:
                    self.children.add(_spawn_wrapper(rank.directory, nonce, lease_in, ready_out))
                finally:
                    gang.leases.append(lease_out)
                    ready.append(ready_in)
                    os.close(ready_out)
                    os.close(lease_in)
            for rank, descriptor in zip(gang.ranks, ready, strict=True):
                if not select.select([descriptor], [], [], READY_S)[0] or not os.read(descriptor, 1):
                    raise OSError("a wrapper did not start")
                rank.refresh()
        finally:
            for descriptor in ready:
                os.close(descriptor)

    def _free_port(self, key: GangKey, *, everywhere: bool) -> int:
        """Find a free port for a gang's workers to meet; `everywhere`: on all addresses, and held until `go`."""
        self.release_port(key)
        while True:
            probe = socket.socket()
            probe.bind(("" if everywhere else "127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if everywhere and port not in self._ports.values():
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a worker that does so too may listen
                self._held[key] = probe
            else:
                probe.close()
            if port not in self._ports.values():
                self._ports[key] = port
                return port

    def release_port(self, key: GangKey) -> None:
        """Let the workers of a gang listen at its port."""
        if held := self._held.pop(key, None):
            held.close()

    def _pick_cores(self, key: GangKey, cpus: int | None, workers: int) -> list[list[int] | None]:
        """Pick `cpus` cores for each worker, those that other gangs use least; None: any core."""
        if cpus is None:
            return [None] * workers
        every = sorted(os.sched_getaffinity(0))
        used = dict.fromkeys(every, 0)
        for cores in self._cores.values():
            for core in cores:
                used[core] = used.get(core, 0) + 1
        picked: list[list[int] | None] = []
        for _ in range(workers):
            mine = sorted(every, key=lambda core: (used[core], core))[:cpus]
            for core in mine:
                used[core] += 1
            self._cores.setdefault(key, []).extend(mine)
            picked.append(mine)
        return picked


def release_wrappers(gang: LocalGang) -> None:
    """Close the pipes on which the wrappers wait."""
    while gang.leases:
        os.close(gang.leases.pop())


def kill_workers(directory: Path) -> int:
    """Kill every process of an attempt, wrappers first, wait until they are gone, and return their number. Blocks."""
    killed = 0
    for path in directory.glob("rank-*"):
        rank = LocalRank(path)
        rank.refresh()
        if rank.identity is not None and rank.identity.signal(9):
            killed += 1
        if not rank.rebooted and not (rank.exit and not rank.alive):
            killed += rank.kill_leftovers()
        elif not rank.rebooted:  # the wrapper may have been killed between its record and the removal
            rank.remove_cgroup()
    return killed


def write_exclusive(path: Path, text: str) -> None:
    """Create a file that must not exist yet; no reader sees a part of it."""
    partial = path.with_name(f".{path.name}")
    write_private(partial, text, sync=False)
    os.link(partial, path)
    partial.unlink()


def _set_aside(directory: Path) -> None:
    """Rename the directory of an earlier launch with the same number: it never ran, or the journal lost it."""
    if not directory.exists():
        return
    kill_workers(directory)
    number = 0
    while (aside := directory.with_name(f"{directory.name}.void-{number}")).exists():
        number += 1
    directory.rename(aside)


def _spawn_wrapper(directory: Path, nonce: str, stdin: int, stdout: int) -> int:
    """Start a wrapper in a session of its own, with no open files but these two."""
    actions = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    command = [sys.executable, "-I", "-S", wrapper.__file__, str(directory), nonce]
    environment = {"PATH": DEFAULT_PATH}
    return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)
