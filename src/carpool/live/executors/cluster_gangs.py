"""The gangs of a cluster: what the service asks for, what their agents shall do, and how each ended.

`ClusterExecutor` adds the exchange with agents and hands in what they say. Nothing here sends anything: agents are
woken (`_call_agents`) and fetch their orders. Which parts a gang has is written down before any agent is told, and how
it ended before that is reported, so that the next service finds both.
"""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool.channel import Report
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.live.accounts import login_name
from carpool.live.clock import since_boot
from carpool.live.errors import Unavailable
from carpool.live.executors.base import (
    ExecutorListener,
    ExecutorOptions,
    GangEnded,
    GangKey,
    GangOutcome,
    Launch,
    NodeFault,
    StopMode,
)
from carpool.live.executors.cluster_gang import (
    ClusterGang,
    ClusterPart,
    read_end,
    read_parts,
    share_out,
    write_end,
    write_parts,
)
from carpool.live.executors.gang import open_gang
from carpool.live.executors.nodes import ClusterNode, NodeBook
from carpool.live.home import Home

RETRY_S = 1.0
"""Seconds before another attempt to write a file that could not be written."""
TERM_SHIFT = 20
"""Requests to pause and resume in one life of the service: their numbers follow from its term."""


class ClusterGangs:
    """All gangs on the nodes of a book: the part of `ClusterExecutor` without the messages."""

    def __init__(self, options: ExecutorOptions) -> None:
        self.home: Home = options.home
        self.book = NodeBook(options.home.nodes)
        self._leadership = options.leadership
        self._closed = False
        self._gangs: dict[GangKey, ClusterGang] = {}
        self._present: dict[GangKey, tuple[GpuId, ...]] = {}
        """The GPUs of each gang."""
        self._on: dict[str, dict[GangKey, ClusterGang]] = {}
        """The gangs with a part on each node."""
        self._listener: ExecutorListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[GangKey] = set()
        """Gangs whose end is being written down."""

    @property
    def term(self) -> int:
        return self._leadership.term

    @property
    def listener(self) -> ExecutorListener:
        assert self._listener is not None, "recover() comes first"
        return self._listener

    def present(self) -> Mapping[GangKey, tuple[GpuId, ...]]:
        return self._present.copy()

    def _enter(self, gang: ClusterGang) -> None:
        self._gangs[gang.key] = gang
        self._present[gang.key] = gang.gpus
        for name in gang.parts:
            self._on.setdefault(name, {})[gang.key] = gang

    def _leave(self, gang: ClusterGang) -> None:
        del self._gangs[gang.key], self._present[gang.key]
        for name in gang.parts:
            del self._on[name][gang.key]

    def _gangs_on(self, node: str) -> list[ClusterGang]:
        return list(self._on.get(node, {}).values())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- recovery --------------------------------------------------------------------------------------------------

    async def recover(self, known: Iterable[GangKey], listener: ExecutorListener) -> Collection[GangKey]:
        """Find the gangs that earlier services told agents to start. They count as present until their agents have
        reported. Agents kill gangs that are not known here. Raise `InputError` where one runs on this machine."""
        self._listener = listener
        found: set[GangKey] = set()
        ends: list[GangEnded] = []
        for key in sorted(set(known)):
            directory = self.home.attempt(*key)
            gang = await asyncio.to_thread(read_parts, directory, key)
            if gang is None:
                await asyncio.to_thread(_check_not_here, directory, key)
                continue
            found.add(key)
            end = await asyncio.to_thread(read_end, directory)
            if end is not None:
                ends.append(end[0])
                continue
            self._enter(gang)
            for part in gang.parts.values():
                self._lose_if_gone(gang, part)
        for ended in sorted(ends, key=lambda end: end.ended_at or 0.0):
            if ended.outcome is not GangOutcome.NEVER_STARTED:
                listener.gang_started(ended.key, ended.ended_at)
            listener.gang_ended(ended)
        for gang in list(self._gangs.values()):
            self._follow(gang)
        return found

    def _lose_if_gone(self, gang: ClusterGang, part: ClusterPart) -> None:
        """Give up a part whose node an earlier service gave up."""
        node = self.book.nodes.get(part.share.node)
        if node is None or not node.present or part.share.gpus[0] not in node.gpus:
            gang.lose(part.share.node, f"node {part.share.node} was lost")

    # ---- what the service asks for ---------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        places = self.book.places(launch.gpus)
        missing = [gpu for gpu in launch.gpus if gpu not in places]
        if missing:  # the node was lost while the plan was written
            self._refuse(launch, GangOutcome.NEVER_STARTED)
            return
        shares = share_out(launch.gpus, places)
        if launch.idle_s is not None and len(shares) > 1:
            nodes = " and ".join(share.node for share in shares)
            reason = f"a terminal is on one node, and its GPUs would be on {nodes}; ask for fewer, or try again later"
            self._refuse(launch, GangOutcome.FAILED, reason)
            return
        parts = {share.node: ClusterPart(share) for share in shares}
        launch = replace(launch, checkpoints=str(self.home.checkpoints(launch.job)))
        gang = ClusterGang(launch.key, parts, launch, accumulation=launch.accumulation, paused=launch.ahead or None)
        gang.user = login_name(launch.uid) if launch.uid is not None else ""
        self._enter(gang)
        self._spawn(self._record(gang))

    def _refuse(self, launch: Launch, outcome: GangOutcome, reason: str = "") -> None:
        """Report the end of a gang that no agent was told of."""
        gang = ClusterGang(launch.key, {}, launch)
        self._enter(gang)
        ended = GangEnded(*launch.key, outcome, reason)
        asyncio.get_running_loop().call_soon(self._give_up, gang, ended)

    def _give_up(self, gang: ClusterGang, ended: GangEnded) -> None:
        if self._gangs.get(gang.key) is gang:
            self._leave(gang)
            self.listener.gang_ended(ended)

    async def _record(self, gang: ClusterGang) -> None:
        """Write down which parts a gang has; only then its agents are told."""
        while not gang.recorded and not gang.stop:
            try:
                self.check_leading()
                await asyncio.to_thread(write_parts, self.home.attempt(*gang.key), gang)
                await asyncio.to_thread(self._note_start, gang)
                gang.recorded = True
            except (OSError, Unavailable) as error:
                if not gang.unrecorded:
                    self._note(gang.key, f"cannot start now ({error}); the executor tries again")
                gang.unrecorded = f"it cannot start now ({error}); this is tried again"
                await asyncio.sleep(RETRY_S)
        if gang.recorded:
            self._call_agents(gang)
        elif self._gangs.get(gang.key) is gang:
            self._give_up(gang, GangEnded(*gang.key, GangOutcome.NEVER_STARTED))

    def delay(self, key: GangKey) -> str:
        gang = self._gangs.get(key)
        return "" if gang is None else gang.delay

    def _note_start(self, gang: ClusterGang) -> None:
        """Note what else must be known before a gang starts. Blocks."""

    def stop(self, key: GangKey, mode: StopMode) -> bool:
        gang = self._gangs.get(key)
        if gang is None:
            return False
        gang.stop_by(mode)
        self._call_agents(gang)
        return True

    def pause(self, key: GangKey, *, swap: bool = False) -> None:
        self._ask_to_switch(key, paused=True, swap=swap)

    def resume(self, key: GangKey) -> None:
        self._ask_to_switch(key, paused=False)

    def _ask_to_switch(self, key: GangKey, *, paused: bool, swap: bool = False) -> None:
        gang = self._gangs.get(key)
        if gang is None or gang.stop or not (gang.started or gang.launch is None):
            return
        if gang.request_switch(paused, swap, self.term << TERM_SHIFT):
            asyncio.get_running_loop().call_soon(self._report_switch, gang, paused)
        else:
            self._call_agents(gang)

    def _report_switch(self, gang: ClusterGang, paused: bool) -> None:
        if self._gangs.get(gang.key) is gang and gang.paused in (paused, None) and not gang.stop:
            if paused:
                self.listener.gang_paused(gang.key, swapped=gang.swapped)
            else:
                self.listener.gang_resumed(gang.key)

    def retune(self, key: GangKey, accumulation: int) -> None:
        gang = self._gangs.get(key)
        if gang is not None and gang.accumulation != accumulation:
            gang.accumulation = accumulation
            self._call_agents(gang)

    def checkpoint(self, key: GangKey) -> None:
        gang = self._gangs.get(key)
        if gang is not None:
            gang.checkpoint = max(gang.checkpoint, self.term << TERM_SHIFT) + 1
            self._call_agents(gang)

    def _call_agents(self, gang: ClusterGang) -> None:
        """Let the answers to a gang's agents go out."""
        for name in gang.parts:
            if name in self.book.nodes:
                self.book.nodes[name].changed.set()

    def _note(self, key: GangKey, text: str) -> None:
        self.listener.note(f"job {key[0]}: {text}")

    def check_leading(self) -> None:
        if self._closed or not self._leadership.leads():
            raise Unavailable("this service does not lead the cluster now; another one does, or will")

    def _follow(self, gang: ClusterGang) -> None:
        """Report what became of a gang, and let its agents know what follows."""
        if gang.over:
            self._end(gang)
            return
        if gang.up and not gang.started:
            gang.started = True
            ago = [part.state.started_ago_s for part in gang.parts.values() if part.state is not None]
            known = [since_boot() - seconds for seconds in ago if seconds is not None]
            self.listener.gang_started(gang.key, max(known) if known else None)
        if gang.has_switched():
            self._report_switch(gang, bool(gang.paused))
        self._call_agents(gang)

    def _end(self, gang: ClusterGang) -> None:
        if gang.key in self._ending:
            return
        self._ending.add(gang.key)
        self._spawn(self._report_end(gang))

    async def _report_end(self, gang: ClusterGang) -> None:
        """Write down how a gang ended, then report it."""
        ended, said = gang.ended(), False
        while True:
            try:
                self.check_leading()
                await asyncio.to_thread(write_end, self.home.attempt(*gang.key), gang, ended)
                break
            except (OSError, Unavailable) as error:
                if not said:
                    self._note(gang.key, f"its end cannot be recorded now ({error}); the executor tries again")
                said = True
                await asyncio.sleep(RETRY_S)
        self._ending.discard(gang.key)
        if self._gangs.get(gang.key) is not gang:
            return
        if not gang.started and gang.up:
            self.listener.gang_started(gang.key, ended.ended_at)
        self._leave(gang)
        self._call_agents(gang)
        self.listener.gang_ended(ended)

    def _lose_gangs(self, node: ClusterNode, why: str) -> None:
        for gang in self._gangs_on(node.name):
            gang.lose(node.name, why)
            self._follow(gang)

    def _move_gangs(self, node: ClusterNode, why: str) -> None:
        """Let the gangs of a node save and start again elsewhere."""
        gangs = frozenset(gang.key for gang in self._gangs_on(node.name))
        self.listener.node_fault(NodeFault(node.name, why, gangs))

    def jobs_on(self, node: str) -> int:
        """Return the number of gangs with a part on a node."""
        return len(self._on.get(node, ()))

    def ranks_on(self, node: str, key: GangKey) -> set[int]:
        """Return the ranks of a gang whose workers are on a node: by GPU, or by node where each has one process."""
        gang = self._gangs.get(key)
        if gang is None or node not in gang.parts:
            return set()
        share = gang.parts[node].share
        return {*range(share.first_rank, share.first_rank + len(share.gpus)), list(gang.parts).index(node)}

    def has_whole(self, node: str, key: GangKey) -> bool:
        """Return whether all workers of a gang are on a node."""
        gang = self._gangs.get(key)
        return gang is not None and list(gang.parts) == [node]

    def has_job(self, node: str, job: str) -> bool:
        """Return whether a gang of a job has a part on a node."""
        return any(gang.key[0] == job for gang in self._gangs_on(node))

    def report(self, key: GangKey) -> Report | None:
        gang = self._gangs.get(key)
        state = gang.first.state if gang is not None and gang.parts else None
        found = state.report if state is not None else None
        return found if found is not None and found.attempt == key[1] else None

    def ranks(self, key: GangKey) -> list[dict[str, Any]]:
        gang = self._gangs.get(key)
        if gang is not None:
            return gang.rank_rows()
        found = read_end(self.home.attempt(*key))
        return found[1] if found is not None else []

    def exit_code(self, key: GangKey) -> int | None:
        found = read_end(self.home.attempt(*key))
        return found[0].exit_code if found is not None else None


def _check_not_here(directory: Path, key: GangKey) -> None:
    """Refuse a gang that an earlier service without agents started, and that still runs: its job would run twice.
    Blocks."""
    gang = open_gang(directory, key)
    if gang is not None and any(rank.alive for rank in gang.ranks):
        raise InputError(
            f"job {key[0]} runs on this machine without an agent; serve without agents as before until no job runs"
        )
