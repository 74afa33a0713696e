"""Gangs as processes of this machine. Each worker runs under `rank.py`, which outlives us.

A gang starts in two phases. First all wrappers come up and wait, each with one end of a pipe that we hold; then the
file `go` is made and the pipes are closed. A wrapper that sees its pipe close looks for `go`: if we die in between,
either all of them start or none. A nonce in both keeps a straggler of an earlier launch from taking part. Ends are
noticed through pidfds, for wrappers that an earlier service started as well.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import select
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from carpool import channel
from carpool.core.model import GpuId
from carpool.live import rank as wrapper
from carpool.live.accounts import account
from carpool.live.executors.base import Ended, How, Key, Launch, Listener, Outcome
from carpool.live.executors.environment import DEFAULT_PATH, base_environment, environments
from carpool.live.executors.gang import GANG, Gang, Rank, open_gang, read_json
from carpool.live.executors.processes import sweep
from carpool.live.home import Home, write_private

log = logging.getLogger("carpool.live")

READY_S = 60.0
"""So long a wrapper may take to come up, on a machine that is busy."""
LOOK_S = 0.5
"""How often a gang is looked at even if nothing was noticed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class LocalExecutor:
    def __init__(self, home: Home) -> None:
        self.home = home
        self._gangs: dict[Key, Gang] = {}
        self._children: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports: dict[Key, int] = {}
        self._cores: dict[Key, list[int]] = {}
        self._listener: Listener
        self._closed = False

    def start(self, listener: Listener) -> None:
        self._listener = listener

    def present(self) -> Mapping[Key, tuple[GpuId, ...]]:
        return {key: tuple(slot.id for slot in gang.slots) for key, gang in self._gangs.items()}

    def report(self, key: Key) -> channel.Report | None:
        gang = self._gangs.get(key)
        found = gang.ranks[0].report() if gang and gang.ranks else None
        return found if found is not None and found.attempt == key[1] else None

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for gang in self._gangs.values():
            _drop_leases(gang)

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        gang = Gang(launch.key, self.home.attempt(*launch.key), launch.slots)
        self._gangs[launch.key] = gang
        self._spawn(self._attend(gang, partial(self._bring_up, gang, launch)))

    async def _attend(self, gang: Gang, work: Callable[[], Awaitable[None]]) -> None:
        """Whatever goes wrong with us, a gang is not left alone while we live."""
        try:
            await work()
        except Exception as error:
            log.exception("gang %s", gang.key)
            self._listener.trouble(gang.key[0], f"{type(error).__name__}: {error}; it is looked at again")
            await asyncio.sleep(FIRST_PAUSE_S)
            if self._gangs.get(gang.key) is gang:
                await self._attend(gang, partial(self._watch, gang))

    async def _bring_up(self, gang: Gang, launch: Launch) -> None:
        pause = FIRST_PAUSE_S
        while not gang.stop:
            try:
                nonce = secrets.token_hex(8)
                await asyncio.to_thread(self._prepare, gang, launch, nonce)
                if gang.stop:
                    break
                write_exclusive(gang.directory / wrapper.GO, json.dumps(nonce))
            except OSError as error:  # the disk is full, too many processes: not the job's fault
                _drop_leases(gang)
                self._listener.trouble(launch.job, f"cannot be started yet: {error}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            _drop_leases(gang)
            self._listener.gang_up(*gang.key)
            await self._watch(gang)
            return
        _drop_leases(gang)
        self._forget(gang)
        self._listener.gang_ended(Ended(*gang.key, Outcome.NEVER))

    def _prepare(self, gang: Gang, launch: Launch, nonce: str) -> None:
        """Make the directories and bring all wrappers up. Runs in a thread."""
        _make_room(gang.directory)
        user = account(launch.uid) if launch.uid is not None and launch.uid != os.getuid() else None
        checkpoints = self.home.checkpoints(launch.job)
        mode = 0o711 if user else 0o700
        self.home.job(launch.job).mkdir(mode=mode, parents=True, exist_ok=True)
        self.home.job(launch.job).chmod(mode)
        checkpoints.mkdir(mode=0o700, exist_ok=True)
        (self.home.running / f"{launch.job}-{launch.attempt}").touch(mode=0o600)
        gang.directory.mkdir(mode=mode)
        if user:
            os.chown(checkpoints, user.pw_uid, user.pw_gid)
        commands = environments(launch, self._free_port(gang.key))
        write_private(
            gang.directory / GANG,
            json.dumps({"slots": [asdict(slot) for slot in gang.slots], "ranks": len(commands), "nonce": nonce}),
        )
        gang.ranks = []
        cores = self._pick_cores(gang.key, launch.cpus, len(commands))
        for number, variables in enumerate(commands):
            directory = gang.directory / f"rank-{number}"
            directory.mkdir(mode=mode)
            variables[channel.ENV_DIRECTORY] = str(directory)
            variables[channel.ENV_CHECKPOINTS] = str(checkpoints)
            told: dict[str, Any] = {
                "nonce": nonce,
                "command": list(launch.command),
                "directory": launch.directory,
                "env": {**base_environment(user), **launch.env, **launch.extra, **variables},
                "grace_s": launch.grace_s,
                "memory": launch.memory,
                "cores": cores[number],
            }
            if user:
                groups = os.getgrouplist(user.pw_name, user.pw_gid)
                told |= {"uid": user.pw_uid, "gid": user.pw_gid, "groups": groups}
                (directory / channel.REPORT).touch(mode=0o600)  # all that the worker writes here; the rest is ours
                os.chown(directory / channel.REPORT, user.pw_uid, user.pw_gid)
            write_private(directory / wrapper.TOLD, json.dumps(told))
            gang.ranks.append(Rank(directory))
        gang.say(channel.Control(sequence=1, accumulation=launch.accumulation, can_shrink=launch.can_shrink))
        self._start_wrappers(gang, nonce)

    def _start_wrappers(self, gang: Gang, nonce: str) -> None:
        ready: list[int] = []
        try:
            for rank in gang.ranks:
                ours, theirs = os.pipe2(os.O_CLOEXEC)  # ours: they write; theirs: their end
                lease_in, lease_out = os.pipe2(os.O_CLOEXEC)
                try:
                    self._children.add(_spawn_wrapper(rank.directory, nonce, lease_in, theirs))
                finally:
                    gang.leases.append(lease_out)
                    ready.append(ours)
                    os.close(theirs)
                    os.close(lease_in)
            for rank, descriptor in zip(gang.ranks, ready, strict=True):
                if not select.select([descriptor], [], [], READY_S)[0] or not os.read(descriptor, 1):
                    raise OSError("a wrapper did not come up")
                rank.look()
        finally:
            for descriptor in ready:
                os.close(descriptor)

    def _free_port(self, key: Key) -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in self._ports.values():
                self._ports[key] = port
                return port

    def _pick_cores(self, key: Key, cpus: int | None, workers: int) -> list[list[int] | None]:
        """The cores that other gangs use least, so many for each worker; None: any."""
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

    # ---- watching and stopping -------------------------------------------------------------------------------------

    def stop(self, key: Key, how: How) -> bool:
        gang = self._gangs.get(key)
        if gang is None:
            return False
        gang.stop = str(how)
        if gang.launched:
            self._tell_to_stop(gang, how)
        return True

    def _tell_to_stop(self, gang: Gang, how: How) -> None:
        if how is How.SAVE:
            gang.say(replace(gang.control, sequence=gang.control.sequence + 1, stop=True))
        for rank in gang.ranks:
            with contextlib.suppress(OSError):  # without the file it is an `end`
                write_private(rank.directory / wrapper.STOP, json.dumps({"how": str(how)}))
        gang.signal()

    def retune(self, key: Key, accumulation: int) -> None:
        gang = self._gangs.get(key)
        if gang is not None and gang.control.accumulation != accumulation:
            gang.say(replace(gang.control, sequence=gang.control.sequence + 1, accumulation=accumulation))

    async def _watch(self, gang: Gang) -> None:
        """Until every worker is gone; the death of one ends all."""
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        watched = [descriptor for rank in gang.ranks if (descriptor := _open_pidfd(rank)) is not None]
        for descriptor in watched:
            loop.add_reader(descriptor, _wake, loop, descriptor, woken)
        try:
            while not all(rank.gone for rank in gang.ranks):
                await self._look(gang)
                if all(rank.gone for rank in gang.ranks):
                    break
                woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), LOOK_S)
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        self._forget(gang)
        self._listener.gang_ended(await asyncio.to_thread(gang.ended))

    async def _look(self, gang: Gang) -> None:
        self._reap()
        for rank in gang.ranks:
            if rank.gone or rank.alive:
                continue
            rank.look()
            if rank.exit is None and not rank.rebooted:  # the wrapper was killed: its worker died too, but who else?
                try:
                    await asyncio.to_thread(sweep, str(rank.directory), rank.identity)
                except OSError as error:
                    self._listener.trouble(gang.key[0], str(error))
                    continue
            rank.gone = True
        dead = gang.first_death()
        if dead is None or gang.broken or gang.stop == How.END or all(rank.gone for rank in gang.ranks):
            return
        if gang.stop:  # it will not save any more
            gang.stop = str(How.END)
        else:
            gang.break_off(dead)
        self._tell_to_stop(gang, How.END)

    def _reap(self) -> None:
        """Wrappers that we started ourselves stay zombies until we ask for their status."""
        for pid in list(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)

    def _forget(self, gang: Gang) -> None:
        del self._gangs[gang.key]
        self._unmark(gang.key)
        self._ports.pop(gang.key, None)
        self._cores.pop(gang.key, None)

    def _unmark(self, key: Key) -> None:
        with contextlib.suppress(OSError):
            (self.home.running / f"{key[0]}-{key[1]}").unlink()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- coming back -----------------------------------------------------------------------------------------------

    async def recover(self, known: Iterable[Key]) -> None:
        wanted = set(known)
        for key in sorted(wanted | _marked(self.home)):
            gang = open_gang(self.home.attempt(*key), key)
            if key in wanted and gang is not None:
                self._gangs[key] = gang
                self._listener.gang_up(*key)
                self._spawn(self._attend(gang, partial(self._watch, gang)))
            else:
                await self._clear(key, remembered=key in wanted)

    async def _clear(self, key: Key, *, remembered: bool) -> None:
        """See to it that nothing runs of a gang that was never complete, or that nobody wants any more."""
        try:
            killed = await asyncio.to_thread(_kill_all, self.home.attempt(*key))
        except OSError as error:
            self._listener.trouble(key[0], str(error))
            return
        self._unmark(key)
        if killed and not remembered:
            text = f"attempt {key[1]} ran though nobody remembers it; {killed} of its processes were killed"
            self._listener.trouble(key[0], text)

    def ranks(self, key: Key) -> list[dict[str, Any]]:
        directory = self.home.attempt(*key)
        rows = []
        for path in sorted(directory.glob("rank-*"), key=lambda p: int(p.name.partition("-")[2])):
            record, ended = read_json(path / wrapper.RECORD) or {}, read_json(path / wrapper.EXIT) or {}
            rows.append(
                {
                    "rank": int(path.name.partition("-")[2]),
                    "pid": record.get("worker", {}).get("pid"),
                    "started": record.get("began", ended.get("began")),
                    "exit_code": ended.get("code"),
                    "ended": ended.get("ended"),
                }
            )
        return rows


def _wake(loop: asyncio.AbstractEventLoop, descriptor: int, woken: asyncio.Event) -> None:
    loop.remove_reader(descriptor)  # it stays readable for ever
    woken.set()


def _open_pidfd(rank: Rank) -> int | None:
    try:
        return os.pidfd_open(rank.identity.pid) if rank.alive and rank.identity else None
    except OSError:
        return None


def _drop_leases(gang: Gang) -> None:
    while gang.leases:
        os.close(gang.leases.pop())


def _make_room(directory: Path) -> None:
    """Move away what an earlier launch under the same number left: it never ran, or nobody remembers that it did."""
    if not directory.exists():
        return
    _kill_all(directory)
    number = 0
    while (aside := directory.with_name(f"{directory.name}.void-{number}")).exists():
        number += 1
    directory.rename(aside)


def _kill_all(directory: Path) -> int:
    """End every process that belongs to an attempt's directory, wrappers first, and wait until they are gone."""
    killed = 0
    for path in directory.glob("rank-*"):
        rank = Rank(path)
        rank.look()
        if rank.identity is not None and rank.identity.signal(9):
            killed += 1
        if not rank.rebooted and not (rank.exit and not rank.alive):
            killed += sweep(str(path), rank.identity)
    return killed


def _marked(home: Home) -> set[Key]:
    """The gangs that may have processes."""
    names = (name.split("-") for name in os.listdir(home.running))
    return {(parts[0], int(parts[1])) for parts in names if len(parts) == 2 and all(p.isdigit() for p in parts)}


def _spawn_wrapper(directory: Path, nonce: str, stdin: int, stdout: int) -> int:
    """In a session of its own, with no other open files than these two."""
    actions = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    command = [sys.executable, "-I", "-S", wrapper.__file__, str(directory), nonce]
    environment = {"PATH": DEFAULT_PATH}
    return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)


def write_exclusive(path: Path, text: str) -> None:
    """Make a file that must not exist yet, whole from its first moment on."""
    partial = path.with_name(f".{path.name}")
    write_private(partial, text, sync=False)
    os.link(partial, path)
    partial.unlink()
