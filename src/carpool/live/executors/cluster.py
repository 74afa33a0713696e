"""Gangs on the nodes of a cluster, through their agents: `carpool serve --executor agents`.

An agent sends what is on its node and gets what shall be there (`wire.py`); this executor never calls an agent. It
keeps one `ClusterGang` for each gang and one `ClusterNode` for each node, and turns what agents say into the calls of
the executor's contract. Every answer grants a lease: workers of a node that hears nothing end before it is over, and
only some time after that the node is lost and its jobs may run elsewhere. Logs are copied to the home by `agent_logs`.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
import zlib
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from carpool.channel import Report
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.field_types import Duration, FieldError
from carpool.gpu.counters import GpuUse
from carpool.live.accounts import login_name
from carpool.live.clock import since_boot
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors import wire
from carpool.live.executors.base import (
    ExecutorListener,
    ExecutorOptions,
    GangEnded,
    GangKey,
    GangOutcome,
    Launch,
    LogChunk,
    NodeFault,
    NodeInventory,
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
from carpool.live.executors.logs import read_log_file
from carpool.live.executors.nodes import SILENT_S, ClusterNode, NodeBook, by_gpu, same_node
from carpool.live.executors.wire import NodeOrders, NodeState, PartOrder, PartState, Phase, Want
from carpool.live.home import Home

log = logging.getLogger("carpool.live")

LEASE_S, MARGIN_S = 300.0, 30.0
"""Seconds for which workers of a node that hears nothing may run, and how much later the node is lost."""
LOOK_S = 0.25
"""Seconds between two looks for silent nodes."""
RETRY_S = 1.0
"""Seconds before a file is written again that could not be written."""
TERM_SHIFT = 20
"""Requests to pause and resume in one life of the service: their numbers follow from its term."""
PROOF = "shared-home"
"""File in the home that agents read to prove that they see it."""


class ClusterExecutor:
    """Runs gangs on the nodes whose agents speak to the service."""

    def __init__(self, options: ExecutorOptions) -> None:
        settings = dict(options.settings)
        self.lease_s = _seconds(settings.pop("lease", None), LEASE_S)
        self.margin_s = _seconds(settings.pop("margin", None), min(MARGIN_S, 0.25 * self.lease_s))
        if settings:
            raise InputError(f"--executor agents: has no setting {', '.join(settings)}; it has lease and margin")
        if options.gpus is not None or options.only:
            raise InputError("--gpus: belongs to `carpool agent`, because the GPUs are on the nodes; leave it out here")
        self.home: Home = options.home
        self._leadership = options.leadership
        self.book = NodeBook(options.home.nodes)
        self._gangs: dict[GangKey, ClusterGang] = {}
        self._present: dict[GangKey, tuple[GpuId, ...]] = {}
        """The GPUs of each gang."""
        self._on: dict[str, dict[GangKey, ClusterGang]] = {}
        """The gangs with a part on each node."""
        self._listener: ExecutorListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = 0
        self._ending: set[GangKey] = set()
        """Gangs whose end is being written down."""
        self._closed = False
        self._as_root = False
        self._proof = ""

    async def open(self, *, separate_users: bool = False) -> None:
        self._as_root = os.getuid() == 0
        self.book.load()
        self._proof = secrets.token_hex(16)
        path = self.home.path / PROOF
        with contextlib.suppress(OSError):  # without it, no agent sees the home
            await asyncio.to_thread(path.write_text, self._proof)

    @property
    def term(self) -> int:
        return self._leadership.term

    @property
    def listener(self) -> ExecutorListener:
        assert self._listener is not None, "recover() comes first"
        return self._listener

    def nodes(self) -> Sequence[NodeInventory]:
        return [node.inventory for node in self.book.present]

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

    async def close(self) -> None:
        self._closed = True
        for node in self.book.nodes.values():
            node.changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- recovery --------------------------------------------------------------------------------------------------

    async def recover(self, known: Iterable[GangKey], listener: ExecutorListener) -> Collection[GangKey]:
        """Find the gangs that earlier services told agents to start. They count as present until their agents have
        spoken; what agents run that is not known here, they kill."""
        self._listener = listener
        found: set[GangKey] = set()
        ends: list[GangEnded] = []
        for key in sorted(set(known)):
            directory = self.home.attempt(*key)
            gang = await asyncio.to_thread(read_parts, directory, key)
            if gang is None:
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
        self._spawn(self._watch())
        return found

    def _lose_if_gone(self, gang: ClusterGang, part: ClusterPart) -> None:
        """Give up a part whose node an earlier service gave up."""
        node = self.book.nodes.get(part.share.node)
        if node is None or not node.present or part.share.gpus[0] not in node.gpus:
            gang.lose(part.share.node, f"node {part.share.node} was lost")

    # ---- what the service asks for ---------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        places = self.book.places()
        missing = [gpu for gpu in launch.gpus if gpu not in places]
        if missing:  # the node was lost while the plan was written
            gang = ClusterGang(launch.key, {}, launch)
            ended = GangEnded(*launch.key, GangOutcome.NEVER_STARTED)
            self._enter(gang)
            asyncio.get_running_loop().call_soon(self._give_up, gang, ended)
            return
        shares = share_out(launch.gpus, places)
        parts = {share.node: ClusterPart(share) for share in shares}
        launch = replace(launch, checkpoints=str(self.home.checkpoints(launch.job)))
        gang = ClusterGang(launch.key, parts, launch, accumulation=launch.accumulation)
        gang.user = login_name(launch.uid) if launch.uid is not None else ""
        self._enter(gang)
        self._spawn(self._record(gang))

    def _give_up(self, gang: ClusterGang, ended: GangEnded) -> None:
        if self._gangs.get(gang.key) is gang:
            self._leave(gang)
            self.listener.gang_ended(ended)

    async def _record(self, gang: ClusterGang) -> None:
        """Write down which parts a gang has; only then its agents are told."""
        said = False
        while not gang.recorded and not gang.stop:
            try:
                self._check_leading()
                await asyncio.to_thread(write_parts, self.home.attempt(*gang.key), gang)
                gang.recorded = True
            except (OSError, Unavailable) as error:
                if not said:
                    self._note(gang.key, f"cannot start now ({error}); the executor tries again")
                said = True
                await asyncio.sleep(RETRY_S)
        if gang.recorded:
            self._call_agents(gang)
        elif self._gangs.get(gang.key) is gang:
            self._give_up(gang, GangEnded(*gang.key, GangOutcome.NEVER_STARTED))

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

    def _call_agents(self, gang: ClusterGang) -> None:
        """Let the answers to a gang's agents go out."""
        for name in gang.parts:
            if name in self.book.nodes:
                self.book.nodes[name].changed.set()

    def _note(self, key: GangKey, text: str) -> None:
        self.listener.note(f"job {key[0]}: {text}")

    # ---- the exchange ----------------------------------------------------------------------------------------------

    async def sync(self, state: NodeState) -> NodeOrders:
        """Answer an agent: at once if it has something new to do, else after `HOLD_S`. Raise `InputError`."""
        self._check_leading()
        if state.term > self.term:
            raise Unavailable(
                f"node {state.node} has obeyed a later start of a service (term {state.term}, not {self.term}), "
                "so this one must not lead it; stop this service"
            )
        try:
            node = self._admit(state)
        except OSError as error:
            raise Unavailable(f"the list of nodes cannot be written ({error.strerror}); make room") from None
        if node is None:  # it has something to get rid of first
            return self._answer({}, 0.0, joined=False)
        if node.instance != state.instance:
            node.instance, node.number, node.remarks = state.instance, 0, 0
        if state.number > node.number:
            node.number = state.number
            node.changed.set()  # an earlier request of the agent need not wait any longer
            self._take(node, state)
        if not node.present:
            return self._answer({}, 0.0, joined=False)
        orders = await self._hold(node, state)
        self._check_leading()
        if not node.present or self.book.nodes.get(node.name) is not node:
            return self._answer({}, 0.0, joined=False)
        node.answered = since_boot()
        return self._answer(orders, self.lease_s, joined=True, heard=node.remarks)

    def _check_leading(self) -> None:
        if self._closed or not self._leadership.leads():
            raise Unavailable("this service does not lead the cluster now; another one does, or will")

    def _answer(self, orders: Mapping[str, PartOrder], lease_s: float, *, joined: bool, heard: int = 0) -> NodeOrders:
        self._answers += 1
        return NodeOrders(
            self.term,
            self._answers,
            lease_s,
            _mark(orders),
            orders,
            heard,
            str(self.home.path),
            PROOF,
            self._as_root,
            joined,
        )

    def _admit(self, state: NodeState) -> ClusterNode | None:
        """Return the node that an agent speaks for, as part of the cluster; None: it is not yet."""
        node = self.book.nodes.get(state.node)
        if node is not None and node.present:
            if same_node(node, state):
                return node
            if node.record.identity != state.identity and node.record.boot == state.boot:
                raise WrongStatus(
                    f"another agent speaks for node {state.node} (home {node.record.identity[:8]}); stop that one, "
                    f"and wait until its lease is over, or run `carpool nodes lost {state.node}`"
                )
            if node.record.boot == state.boot:
                self._lose(node, f"the GPUs of node {node.name} changed")
            elif node.record.identity == state.identity or node.silent_s > self.lease_s + self.margin_s:
                self._lose(node, f"node {node.name} restarted")
            else:
                raise WrongStatus(f"node {state.node}: an agent on another machine has this name; stop one of the two")
        if state.leaving or state.parts is None or any(part.phase is not Phase.GONE for part in state.parts.values()):
            return None
        node = self.book.admit(state)
        self.listener.note(f"node {node.name} joined with {len(node.gpus)} GPUs ({node.record.ground})")
        node.heard = True
        self.listener.nodes_changed()
        return node

    def _take(self, node: ClusterNode, state: NodeState) -> None:
        """Take everything that an agent says."""
        before = node.closed
        if state.leaving and not node.leaving:
            gangs = frozenset(gang.key for gang in self._gangs_on(node.name))
            self.listener.node_fault(NodeFault(node.name, "the node leaves the cluster", gangs))
        node.heard, node.silent, node.leaving = True, False, state.leaving
        node.as_root, node.release = state.as_root, state.release
        node.shared = bool(state.shared) and state.shared == self._proof
        if self.book.refresh(node, state) or before != node.closed:
            self.listener.nodes_changed()
        self._take_remarks(node, state)
        self._take_counters(node, state)
        if state.parts is None:
            return
        told = {wire.read_key(name): part for name, part in state.parts.items()}
        for gang in self._gangs_on(node.name):
            if gang.recorded and gang.tell(node.name, told.get(gang.key, PartState(Phase.UNKNOWN))):
                self._follow(gang)
        if state.leaving and not any(part.phase is not Phase.GONE for part in told.values()):
            self._lose(node, f"node {node.name} left")

    def _take_remarks(self, node: ClusterNode, state: NodeState) -> None:
        for remark in sorted(state.remarks, key=lambda one: one.number):
            if remark.number <= node.remarks:
                continue
            node.remarks = remark.number
            if remark.fault:
                own = frozenset(key for name in remark.gangs if (key := wire.read_key(name)) in self._gangs)
                self.listener.node_fault(NodeFault(node.name, remark.text, own))
            else:
                self.listener.note(f"{node.name}: {remark.text}")

    def _take_counters(self, node: ClusterNode, state: NodeState) -> None:
        node.use.update(by_gpu(node, state.use))
        taken = dict.fromkeys(node.gpus, 0) | dict(by_gpu(node, state.taken))
        for gpu, memory in taken.items():
            if memory != node.taken.get(gpu, 0):
                node.taken[gpu] = memory
                self.listener.memory_taken(gpu, memory)

    async def _hold(self, node: ClusterNode, state: NodeState) -> dict[str, PartOrder]:
        """Wait until the agent has something new to do, at most `HOLD_S`."""
        until = since_boot() + wire.HOLD_S
        while True:
            node.changed.clear()
            orders = self._orders(node)
            left = until - since_boot()
            news = _mark(orders) != state.seen or any(order.launch is not None for order in orders.values())
            overtaken = state.instance == node.instance and state.number < node.number
            if news or overtaken or left <= 0.0 or self._closed:
                return orders
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.changed.wait(), left)

    def _orders(self, node: ClusterNode) -> dict[str, PartOrder]:
        orders = {}
        for gang in self._gangs_on(node.name):
            if not gang.recorded or gang.parts[node.name].lost:
                continue
            order = gang.order(node.name)
            if order.want is Want.GO and order.port:
                first = self.book.nodes.get(gang.first.share.node)
                order = replace(order, address=first.record.address if first is not None else "")
            orders[wire.key_text(gang.key)] = order
        return orders

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
                self._check_leading()
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

    # ---- silence ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._look()
            except Exception:  # the next look must happen
                log.exception("nodes could not be looked at")

    def _look(self) -> None:
        if not self._leadership.leads():  # it may have slept while another service took over
            return
        for node in self.book.present:
            if node.silent_s > self.lease_s + self.margin_s:
                self._lose(node, f"node {node.name} was silent for {node.silent_s:.0f} s")
            elif node.silent_s > SILENT_S and not node.silent and node.heard:
                node.silent = True
                self.listener.nodes_changed()

    def _lose(self, node: ClusterNode, why: str) -> None:
        """Give a node up. Its workers are gone: their lease is over, or their machine restarted, or they were ended."""
        self.book.change(node, lost=why, since=time.time())
        self.listener.note(f"{why}; it is no part of the cluster now")
        self.listener.nodes_changed()
        for gang in self._gangs_on(node.name):
            gang.lose(node.name, why)
            self._follow(gang)
        node.changed.set()

    def give_up(self, name: str) -> None:
        """Lose a node because the operator says that nothing runs there any more."""
        self._lose(self._known(name), f"node {name} was given up by the operator")

    def drain(self, name: str, drained: bool) -> None:
        """Let nothing new start on a node, or let it again."""
        node = self._known(name)
        if node.record.drained is not drained:
            self.book.change(node, drained=drained)
            self.listener.nodes_changed()

    def _known(self, name: str) -> ClusterNode:
        node = self.book.nodes.get(name)
        if node is None or not node.present:
            raise WrongStatus(f"node {ascii(name)[:40]} is no part of the cluster; `carpool nodes` lists them")
        return node

    def node_rows(self) -> list[dict[str, Any]]:
        """Return the nodes as operators see them."""
        return [self._row(self.book.nodes[name]) for name in sorted(self.book.nodes)]

    def _row(self, node: ClusterNode) -> dict[str, Any]:
        record = node.record
        state = "lost" if record.lost else "drained" if record.drained else "silent" if node.closed else "open"
        lease = None if record.lost else max(0.0, self.lease_s - node.silent_s)
        return {
            "node": node.name,
            "state": state,
            "why": record.lost or node.closed,
            "ground": record.ground,
            "pilot": record.pilot,
            "address": record.address,
            "gpus": len(record.devices),
            "mechanism": record.mechanism,
            "jobs": len(self._on.get(node.name, ())),
            "lease_s": lease,
            "since": record.since,
            "shared_home": node.shared,
            "as_root": node.as_root,
            "release": node.release,
        }

    def ranks_on(self, node: str, key: GangKey) -> set[int]:
        """Return the ranks of a gang whose workers are on a node: by GPU, or by node where each has one process."""
        gang = self._gangs.get(key)
        if gang is None or node not in gang.parts:
            return set()
        share = gang.parts[node].share
        return {*range(share.first_rank, share.first_rank + len(share.gpus)), list(gang.parts).index(node)}

    def has_job(self, node: str, job: str) -> bool:
        """Return whether a gang of a job has a part on a node."""
        return any(gang.key[0] == job for gang in self._gangs_on(node))

    # ---- what is recorded ------------------------------------------------------------------------------------------

    def gpu_use(self, gpu: GpuId) -> GpuUse | None:
        node = self.book.node_of(gpu)
        return node.use.pop(gpu, None) if node is not None else None

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

    async def read_log(
        self, key: GangKey, rank: int, stream: str, *, offset: int = 0, limit: int, tail: int | None = None
    ) -> LogChunk:
        path = self.home.rank(*key, rank) / f"{stream}.log"
        return await asyncio.to_thread(read_log_file, path, offset, limit, tail)


def _mark(orders: Mapping[str, PartOrder]) -> str:
    """Return a name for orders, by which an agent says that it has them."""
    shown = sorted(
        (name, one.want, one.how, one.address, one.port, one.accumulation, one.switch, one.paused, one.swap)
        for name, one in orders.items()
    )
    return f"{zlib.crc32(repr(shown).encode()):08x}"


def _seconds(text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        found: float = Duration(0.5, 1e6).from_option(text)
        return found
    except FieldError as error:
        raise InputError(f"--executor agents: {error}") from None
