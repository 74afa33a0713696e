"""Gangs as processes of this machine. Each worker runs under a wrapper (`rank.py`) that outlives the service.

`launching.py` starts gangs, `gang.py` reads their files, `node.py` has the GPUs, and `mps_faults.py` judges failures
under MPS. Ends are noticed through pidfds, also for wrappers that an earlier service started.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from carpool import channel
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.gpu.counters import GpuUse
from carpool.live import rank as wrapper
from carpool.live import worker_directory as files
from carpool.live.clock import since_boot
from carpool.live.errors import WrongStatus
from carpool.live.executors.base import (
    STOP_STRENGTH,
    ExecutorListener,
    ExecutorOptions,
    GangEnded,
    GangKey,
    GangOutcome,
    Launch,
    LogChunk,
    NodeInventory,
    StopMode,
)
from carpool.live.executors.cluster_gang import runs_on_nodes
from carpool.live.executors.doors import LocalDoor, open_door
from carpool.live.executors.gang import LocalGang, LocalRank, open_gang, read_object
from carpool.live.executors.gate import PartGate
from carpool.live.executors.launching import GangLauncher, kill_workers, release_wrappers, write_exclusive
from carpool.live.executors.logs import read_log_file
from carpool.live.executors.mps_faults import MpsFaultWatch
from carpool.live.executors.node import LocalNode, OwnProcesses, gang_of, open_node
from carpool.live.executors.processes import kill_processes, worker_processes
from carpool.live.executors.switching import GangSwitch, went_on
from carpool.live.freezer import sweep_cgroups
from carpool.live.home import Home, write_private

log = logging.getLogger("carpool.live")

LOOK_S = 0.5
"""Seconds after which a gang is looked at even if nothing was noticed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pauses before a launch that the machine refused is tried again."""
MPS_PAUSE_S = 0.2
"""Seconds between two looks at an MPS server that refuses new clients."""
LEFT_S = 10.0
"""Age in seconds from which an empty cgroup counts as left behind: a worker enters its own at once."""
MEMORY_S = 5.0
"""Seconds between two looks at the memory that other processes hold."""
ONE_USER = "jobs run under their users' ids, and MPS serves one user at a time"


class LocalExecutor:
    """Runs gangs on this machine."""

    def __init__(self, options: ExecutorOptions) -> None:
        if options.settings:
            raise InputError(f"--executor local: takes no settings, so leave out {', '.join(options.settings)}")
        self.home = options.home
        self._options = options
        self._launcher = GangLauncher(options)
        self.gate = PartGate()
        self._switch = GangSwitch(options, lambda gang, text: self._note(gang.key, text))
        self._gangs: dict[GangKey, LocalGang] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._node: LocalNode | None = None
        self._faults: MpsFaultWatch | None = None

    async def open(self, *, separate_users: bool = False) -> None:
        without_mps = "switched off" if not self._options.mps else ONE_USER if separate_users else ""
        self._node = await asyncio.to_thread(open_node, self._options, without_mps)

    async def leave_mps(self) -> None:
        """Let jobs share without MPS because they run under their users' ids, where that is known only after `open`;
        before `recover`."""
        assert self._faults is None, "recover() comes later"
        await asyncio.to_thread(self.node.leave_mps, ONE_USER)

    def set_patience(self, pause_patience_s: float, gang_pause_s: float) -> None:
        """Take how long gangs that are paused from now on stay so without a service."""
        self._options = replace(self._options, pause_patience_s=pause_patience_s, gang_pause_s=gang_pause_s)
        self._switch.options = self._options
        self._launcher.patience_s = pause_patience_s

    @property
    def node(self) -> LocalNode:
        assert self._node is not None, "open() comes first"
        return self._node

    @property
    def faults(self) -> MpsFaultWatch:
        assert self._faults is not None, "recover() comes first"
        return self._faults

    @property
    def _listener(self) -> ExecutorListener:
        return self.faults.listener

    def nodes(self) -> Sequence[NodeInventory]:
        return (self.node.inventory,)

    def present(self) -> Mapping[GangKey, tuple[GpuId, ...]]:
        return {key: gang.gpus for key, gang in self._gangs.items()}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for gang in self._gangs.values():
            release_wrappers(gang)
        if self._node is None:
            return
        if self._faults is None:  # gangs of an earlier service may run
            await asyncio.to_thread(self._node.stop_mps_if_unused)
        elif not self._gangs:
            await asyncio.to_thread(self._node.stop_mps)

    # ---- recovery --------------------------------------------------------------------------------------------------

    async def recover(self, known: Iterable[GangKey], listener: ExecutorListener) -> Collection[GangKey]:
        self._faults = MpsFaultWatch(self.node, self._gangs, listener)
        wanted = set(known)
        await asyncio.to_thread(_check_not_on_nodes, self.home, wanted)
        await asyncio.to_thread(sweep_cgroups, wrapper.CGROUP, LEFT_S)
        processes = await asyncio.to_thread(_running, self.home)
        found: list[LocalGang] = []
        ended: list[tuple[LocalGang, GangEnded]] = []
        for key in sorted(wanted | _marked(self.home) | processes.keys()):
            gang = open_gang(self.home.attempt(*key), key)
            if key not in wanted or gang is None:
                await self._clear(key, processes.get(key, set()), known=key in wanted)
                continue
            found.append(gang)
            if await self._has_ended(gang):
                ended.append((gang, await self._read_end(gang)))
        self._report_found(found, ended)
        self._spawn(self._switch.prove_life())
        self._spawn(self.faults.run())
        self._spawn(self._watch_memory())
        return {gang.key for gang in found}

    async def _has_ended(self, gang: LocalGang) -> bool:
        """Return whether all workers of a gang are gone and have left a record of it."""
        for rank in gang.ranks:
            if not rank.alive:
                try:
                    rank.refresh()  # it may have ended since its files were read
                except OSError:
                    continue
                rank.gone = rank.exit is not None or rank.rebooted
                if rank.gone:
                    await asyncio.to_thread(rank.remove_cgroup)
        return all(rank.gone for rank in gang.ranks)

    def _report_found(self, found: Sequence[LocalGang], ended: Sequence[tuple[LocalGang, GangEnded]]) -> None:
        """Report starts and ends in the order in which they happened, and watch what runs.

        Nothing is awaited here: the service looks at `present` before any watch can report another end.
        """
        now = since_boot()
        gone = {gang.key for gang, _ in ended}
        for gang in found:
            if gang.key not in gone:
                self._gangs[gang.key] = gang
        reports: list[tuple[float, Callable[[], None]]] = []
        for gang in found:
            at = gang.started_at
            reports.append((now if at is None else at, partial(self._listener.gang_started, gang.key, at)))
        for gang, end in ended:
            self._unmark(gang.key)
            reports.append((now if end.ended_at is None else end.ended_at, partial(self.faults.gang_ended, end, gang)))
        for _, report in sorted(reports, key=lambda one: one[0]):
            report()
        for gang in self._gangs.values():
            self._spawn(self._attend(gang, partial(self._watch, gang)))

    async def _clear(self, key: GangKey, processes: Iterable[int], *, known: bool) -> None:
        """Kill what runs of a gang that was never complete, that the journal does not know or whose directory is gone.

        `processes`: those that say that they belong to it."""
        directory = self.home.attempt(*key)
        lost = not directory.exists()
        try:
            # first those that say so: a wrapper that was just started has no record yet, and may write it now
            killed = await asyncio.to_thread(kill_processes, processes)
            killed += await asyncio.to_thread(kill_workers, directory)
        except OSError as error:
            self._note(key, str(error))
            return
        self._unmark(key)
        if killed and lost:
            self._note(key, f"attempt {key[1]} ran without its directory; {killed} processes were killed")
        elif killed and not known:
            self._note(key, f"attempt {key[1]} ran, but the journal does not know it; {killed} processes were killed")

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        slots = tuple(self.node.slots[gpu] for gpu in launch.gpus)
        gang = LocalGang(launch.key, self.home.attempt(*launch.key), slots, launch.exclusive)
        self._gangs[launch.key] = gang
        self._spawn(self._attend(gang, partial(self._start, gang, launch)))

    def delay(self, key: GangKey) -> str:
        """Return why a gang could not be started so far; empty: nothing hindered it."""
        gang = self._gangs.get(key)
        return "" if gang is None else gang.delay

    async def _attend(self, gang: LocalGang, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, and keep watching the gang whatever goes wrong in this process."""
        try:
            await work()
        except Exception as error:
            log.exception("gang %s", gang.key)
            release_wrappers(gang)
            if not gang.launched:
                gang.failure = gang.failure or f"it could not be prepared ({type(error).__name__}: {error})"
            self._note(gang.key, f"{type(error).__name__}: {error}; the executor looks at it again")
            await asyncio.sleep(FIRST_PAUSE_S)
            if self._gangs.get(gang.key) is gang:
                await self._attend(gang, partial(self._watch, gang))

    async def _start(self, gang: LocalGang, launch: Launch) -> None:
        pause, failing_since = FIRST_PAUSE_S, None
        while not gang.stop:
            if not self.node.ready or not self._options.leadership.leads():
                await asyncio.sleep(MPS_PAUSE_S)
                continue
            try:
                nonce, sharing = secrets.token_hex(8), self._sharing_environment(launch)
                await asyncio.to_thread(self._launcher.prepare, gang, launch, nonce, sharing)
                if gang.stop:
                    break
                go: str | dict[str, object] = nonce
                if launch.part is not None:
                    variables = await self.gate.wait(gang.key, gang.port)
                    if variables is None or gang.stop:
                        break
                    go = {"nonce": nonce, "env": dict(variables)}
                if not self._options.leadership.leads():  # this process was stopped for a while
                    release_wrappers(gang)
                    continue
                self._launcher.release_port(gang.key)
                write_exclusive(gang.directory / files.GO, json.dumps(go))
            except OSError as error:  # a full disk or too many processes: not the job's fault
                release_wrappers(gang)
                self._options.launch_failed(error)
                failing_since = failing_since or since_boot()
                if since_boot() - failing_since >= self._options.launch_patience_s:
                    self._forget(gang)
                    reason = f"it could not start on {self._options.node} ({error.strerror or error})"
                    self.faults.gang_ended(GangEnded(*gang.key, GangOutcome.LOST, reason), gang)
                    return
                gang.delay = f"it cannot start now ({error}); this is tried again"
                self._note(gang.key, gang.delay)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            release_wrappers(gang)
            gang.delay = ""
            self._listener.gang_started(gang.key)
            await self._watch(gang)
            return
        release_wrappers(gang)
        self._forget(gang)
        self.faults.gang_ended(GangEnded(*gang.key, GangOutcome.NEVER_STARTED), gang)

    def _sharing_environment(self, launch: Launch) -> dict[str, str]:
        """Return the MPS variables of a gang; none if it does not share by MPS."""
        if launch.exclusive:
            return {}
        if launch.uid is None:
            return self.node.environment(launch.gpu_memory, len(launch.gpus))
        if self.node.mps is not None:  # the user was added after the start
            self._note(launch.key, f"shares by time-slicing: {ONE_USER}; restart the service, then its agents")
        return {}

    # ---- watching and stopping -------------------------------------------------------------------------------------

    def stop(self, key: GangKey, mode: StopMode) -> bool:
        gang = self._gangs.get(key)
        if gang is None:
            return False
        if STOP_STRENGTH.get(gang.stop, 0) > STOP_STRENGTH[mode]:
            mode = StopMode(gang.stop)
        gang.stop = str(mode)
        self.gate.open(key, None)
        if gang.launched:
            self._stop_workers(gang, mode)
        return True

    def _stop_workers(self, gang: LocalGang, mode: StopMode) -> None:
        if mode is StopMode.SAVE:
            gang.write_control(replace(gang.control, sequence=gang.control.sequence + 1, stop=True, pause_s=0.0))
        for rank in gang.ranks:
            with contextlib.suppress(OSError):  # a wrapper without the file terminates its worker
                write_private(rank.directory / files.STOP, json.dumps({"how": str(mode)}))
        gang.signal()

    def pause(self, key: GangKey, *, swap: bool = False) -> None:
        self._ask_to_switch(key, paused=True, swap=swap)

    def resume(self, key: GangKey) -> None:
        self._ask_to_switch(key, paused=False)

    def _ask_to_switch(self, key: GangKey, *, paused: bool, swap: bool = False) -> None:
        gang = self._gangs.get(key)
        if gang is None or gang.stop or not gang.launched:
            return
        never_paused = gang.paused is None and not paused
        same = gang.paused is paused and gang.swap is swap
        if never_paused or (same and gang.switched):
            asyncio.get_running_loop().call_soon(self._report_switch, gang, paused)
        elif not same or not gang.switch:
            self._spawn(self._carry_out_switch(gang, gang.ask_to_switch(paused, swap=swap)))

    async def _carry_out_switch(self, gang: LocalGang, request: int) -> None:
        try:
            if await self._switch.run(gang, request):
                self._report_switch(gang, bool(gang.paused))
        except Exception as error:
            log.exception("gang %s", gang.key)
            self._note(gang.key, f"{type(error).__name__}: {error}; the executor tries to switch it again")
            await asyncio.sleep(FIRST_PAUSE_S)
            if self._gangs.get(gang.key) is gang and gang.switch == request:
                self._spawn(self._carry_out_switch(gang, request))

    def _report_switch(self, gang: LocalGang, paused: bool) -> None:
        if self._gangs.get(gang.key) is gang and gang.paused in (paused, None) and not gang.stop:
            if paused:
                self._listener.gang_paused(gang.key, swapped=gang.swapped)
            else:
                self._listener.gang_resumed(gang.key)

    def retune(self, key: GangKey, accumulation: int) -> None:
        gang = self._gangs.get(key)
        if gang is not None and gang.control.accumulation != accumulation:
            control = replace(gang.control, sequence=gang.control.sequence + 1, accumulation=accumulation)
            gang.write_control(control)

    def checkpoint(self, key: GangKey) -> None:
        gang = self._gangs.get(key)
        if gang is not None and gang.ranks:
            gang.ask_for_checkpoint()

    async def _watch(self, gang: LocalGang) -> None:
        """Wait until every worker is gone. If one fails, the others are stopped."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        watched = [descriptor for rank in gang.ranks if (descriptor := _open_pidfd(rank)) is not None]
        for descriptor in watched:
            loop.add_reader(descriptor, _process_ended, loop, descriptor, changed)
        try:
            while not all(rank.gone for rank in gang.ranks):
                await self._look(gang)
                if all(rank.gone for rank in gang.ranks):
                    break
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), LOOK_S)
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        ended = await self._read_end(gang)
        self._forget(gang)  # not before: a gang that is not present has ended, and its end is reported at once
        self.faults.gang_ended(ended, gang)

    async def _read_end(self, gang: LocalGang) -> GangEnded:
        """Return how a gang ended. Whatever its workers left in their files, it has an end."""
        try:
            return await asyncio.to_thread(gang.ended)
        except Exception as error:
            log.exception("gang %s", gang.key)
            reason = f"how it ended cannot be read ({type(error).__name__}: {error})"
            return GangEnded(*gang.key, GangOutcome.FAILED, reason)

    async def _look(self, gang: LocalGang) -> None:
        self._reap()
        for rank in gang.ranks:
            if rank.gone or rank.alive:
                continue
            try:
                rank.refresh()
            except OSError as error:
                self._note_unread(gang, str(error))
                continue
            gang.unread = ""
            if rank.alive:  # its record could not be read before
                continue
            if rank.exit is None and not rank.rebooted:  # the wrapper was killed, and perhaps not all of its children
                try:
                    await asyncio.to_thread(rank.kill_leftovers)
                except OSError as error:
                    self._note(gang.key, str(error))
                    continue
            else:
                await asyncio.to_thread(rank.remove_cgroup)
            rank.gone = True
        if gang.paused and gang.switched and not gang.stop and went_on(gang):
            self._note(gang.key, "went on because it saw no service for too long; it is paused again")
            self._spawn(self._carry_out_switch(gang, gang.ask_to_switch(True, swap=gang.swap)))
        failed = gang.failed_rank()
        terminating = gang.stop == StopMode.TERMINATE
        if failed is None or gang.failure or terminating or all(rank.gone for rank in gang.ranks):
            return
        if gang.stop:  # a gang without one of its workers cannot save
            gang.stop = str(StopMode.TERMINATE)
        else:
            gang.record_failure(failed)
        self._stop_workers(gang, StopMode.TERMINATE)

    def _note_unread(self, gang: LocalGang, error: str) -> None:
        if not gang.unread:
            self._note(gang.key, f"its files cannot be read ({error}); how it ended is looked up when they can")
        gang.unread = error

    def _reap(self) -> None:
        """Collect the status of wrappers that this process started; until then they stay zombies."""
        for pid in list(self._launcher.children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._launcher.children.discard(pid)

    def _forget(self, gang: LocalGang) -> None:
        del self._gangs[gang.key]
        self._unmark(gang.key)
        self._launcher.release(gang.key)

    def _unmark(self, key: GangKey) -> None:
        with contextlib.suppress(OSError):
            (self.home.running / f"{key[0]}-{key[1]}").unlink()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note(self, key: GangKey, text: str) -> None:
        self._listener.note(f"job {key[0]}: {text}")

    async def _watch_memory(self) -> None:
        """Report the memory that other processes hold, and workers that run outside MPS."""
        own = OwnProcesses(self.home, self.node.mps)
        while self.node.mechanism != "logical":
            for gpu, memory in await asyncio.to_thread(self.node.foreign_memory, own):
                self._listener.memory_taken(gpu, memory)
            for pid in await asyncio.to_thread(self.node.outside_mps, own):
                job, attempt = gang_of(pid) or ("unknown", 0)
                self._note((job, attempt), f"process {pid} runs outside MPS, so it shares by time-slicing")
            await asyncio.sleep(MEMORY_S)

    # ---- what is recorded ------------------------------------------------------------------------------------------

    def report(self, key: GangKey) -> channel.Report | None:
        gang = self._gangs.get(key)
        found = gang.ranks[0].report() if gang and gang.ranks else None
        if found is None and gang and gang.ranks and channel.is_watched(gang.ranks[0].directory):
            return channel.Report(attempt=key[1], watched=True)
        return found if found is not None and found.attempt == key[1] else None

    def gpu_use(self, gpu: GpuId) -> GpuUse | None:
        return self.node.use_of(gpu)

    def ranks(self, key: GangKey) -> list[dict[str, Any]]:
        directory = self.home.attempt(*key)
        rows = []
        for path in sorted(directory.glob("rank-*"), key=lambda p: int(p.name.partition("-")[2])):
            record, ended = read_object(path / files.RECORD), read_object(path / files.EXIT)
            worker = record.get("worker")
            rows.append(
                {
                    "rank": int(path.name.partition("-")[2]),
                    "pid": worker.get("pid") if isinstance(worker, dict) else None,
                    "started": record.get("began", ended.get("began")),
                    "exit_code": ended.get("code"),
                    "ended": ended.get("ended"),
                }
            )
        return rows

    def exit_code(self, key: GangKey) -> int | None:
        gang = open_gang(self.home.attempt(*key), key)
        return gang.ended().exit_code if gang is not None else None

    async def read_log(
        self, key: GangKey, rank: int, stream: str, *, offset: int = 0, limit: int, tail: int | None = None
    ) -> LogChunk:
        path = self.home.rank(*key, rank) / f"{stream}.log"
        return await asyncio.to_thread(read_log_file, path, offset, limit, tail)

    # ---- terminals and commands beside workers ---------------------------------------------------------------------

    async def open_door(self, key: GangKey, rank: int, request: Mapping[str, Any]) -> LocalDoor:
        gang = self._gangs.get(key)
        name = f"rank-{rank}"  # a part of a gang over several nodes has not all ranks
        own = [one for one in gang.ranks if one.directory.name == name] if gang is not None and gang.launched else []
        if not own:
            raise WrongStatus(f"job {key[0]}: worker {rank} does not run; `carpool show {key[0]}` lists its workers")
        return await open_door(own[0], key[0], request)


def _check_not_on_nodes(home: Home, keys: Iterable[GangKey]) -> None:
    """Refuse gangs that an earlier service started through agents: their jobs would run twice. Blocks."""
    for key in sorted(keys):
        if runs_on_nodes(home.attempt(*key)):
            raise InputError(
                f"job {key[0]} runs on the nodes of a cluster; serve with --executor agents, --on or --emulate as "
                "before until no job runs"
            )


def _process_ended(loop: asyncio.AbstractEventLoop, descriptor: int, changed: asyncio.Event) -> None:
    loop.remove_reader(descriptor)  # it would stay readable for ever
    changed.set()


def _open_pidfd(rank: LocalRank) -> int | None:
    try:
        return os.pidfd_open(rank.identity.pid) if rank.alive and rank.identity else None
    except OSError:
        return None


def _marked(home: Home) -> set[GangKey]:
    """Return the gangs that may have processes."""
    home.make_folders()
    names = (name.split("-") for name in os.listdir(home.running))
    return {(parts[0], int(parts[1])) for parts in names if len(parts) == 2 and all(p.isdigit() for p in parts)}


def _running(home: Home) -> dict[GangKey, set[int]]:
    """Return the processes of this home's gangs by what they say themselves, because their files may be gone. Blocks.

    Directories are named as they were when the gangs started, so a home that is reached by another name counts too.
    """
    found: dict[GangKey, set[int]] = {}
    for jobs in {str(home.jobs), os.path.realpath(home.jobs)}:
        for directory, pids in worker_processes(jobs).items():
            parts = Path(directory).relative_to(jobs).parts
            attempt = parts[1].removeprefix("attempt-") if len(parts) == 3 else ""
            if attempt.isdigit() and parts[0].isdigit():
                found.setdefault((parts[0], int(attempt)), set()).update(pids)
    return found
