"""Gangs on the nodes of a cluster, through their agents: `carpool serve --executor agents`.

An agent sends what is on its node and gets what shall be there (`wire.py`); this executor never calls an agent. It
keeps one `ClusterGang` for each gang (`cluster_gangs.py`) and one `ClusterNode` for each node (`members.py`), and turns
what agents say into the calls of the executor's contract. Every answer grants a lease: workers of a node that gets no
answer end before it is over. Only some time after that, the node is lost and its jobs may run elsewhere. Logs are
copied to the home by `live/http/agent_routes.py`.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.field_types import ByteSize, Duration, FieldError
from carpool.gpu.counters import GpuUse
from carpool.live.clock import since_boot
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors import wire
from carpool.live.executors.base import (
    ExecutorListener,
    ExecutorOptions,
    GangKey,
    LogChunk,
    NodeFault,
    NodeInventory,
)
from carpool.live.executors.cluster_gang import ClusterGang
from carpool.live.executors.cluster_gangs import ClusterGangs
from carpool.live.executors.fetched_checkpoints import MOST_BYTES, FetchedCheckpoints
from carpool.live.executors.logs import read_log_file
from carpool.live.executors.members import LOOK_S, ClusterMembers
from carpool.live.executors.nodes import ClusterNode, by_gpu
from carpool.live.executors.relayed_doors import NodeDoors, RelayedDoor
from carpool.live.executors.wire import NodeOrders, NodeState, PartOrder, PartState, Phase, Want

log = logging.getLogger("carpool.live")

LEASE_S, MARGIN_S = 300.0, 30.0
"""Seconds for which workers of a node that gets no answer may run, and how much later the node is lost."""
PROOF = "shared-home"
"""File in the home that agents read to prove that they see it."""
NOT_ROOT = "its agent does not run as root, so jobs of users cannot run there"


class ClusterExecutor(ClusterGangs):
    """Runs gangs on the nodes whose agents speak to the service."""

    def __init__(self, options: ExecutorOptions) -> None:
        super().__init__(options)
        settings = dict(options.settings)
        self.lease_s = _seconds(settings.pop("lease", None), LEASE_S)
        self.margin_s = _seconds(settings.pop("margin", None), min(MARGIN_S, 0.25 * self.lease_s))
        self.checkpoints = FetchedCheckpoints(self.home, _bytes(settings.pop("checkpoints", None), MOST_BYTES))
        if settings:
            raise InputError(
                f"--executor agents: has no setting {', '.join(settings)}; it has lease, margin and checkpoints"
            )
        if options.gpus is not None or options.only:
            raise InputError("--gpus: belongs to `carpool agent`, because the GPUs are on the nodes; leave it out here")
        self.members = ClusterMembers(self.book, self.lease_s, self.margin_s)
        self.members.on_lost, self.members.on_leaving = self._lose_node, self._move_gangs
        self.transfers: dict[str, asyncio.Task[Any]] = {}
        """Checkpoints that are being packed or unpacked."""
        self._answers = 0
        self._options = options
        self._as_root = self._separate_users = False
        self._proof = ""
        self._doors: dict[str, NodeDoors] = {}

    async def open(self, *, separate_users: bool = False) -> None:
        self._as_root, self._separate_users = os.getuid() == 0, separate_users
        self.book.load()
        self._proof = secrets.token_hex(16)
        path = self.home.path / PROOF
        with contextlib.suppress(OSError):  # without it, no agent sees the home
            await asyncio.to_thread(path.write_text, self._proof)

    def nodes(self) -> Sequence[NodeInventory]:
        return [node.inventory for node in self.book.present]

    async def close(self) -> None:
        self._closed = True
        for node in self.book.nodes.values():
            node.changed.set()
        for doors in self._doors.values():
            doors.fail("the service is stopping; try again when it runs again")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def recover(self, known: Iterable[GangKey], listener: ExecutorListener) -> Collection[GangKey]:
        self.members.listener = listener
        found = await super().recover(known, listener)
        self._spawn(self._watch())
        return found

    # ---- the exchange ----------------------------------------------------------------------------------------------

    async def sync(self, state: NodeState) -> NodeOrders:
        """Answer an agent: at once if it has something new to do, else after `members.hold_s`. Raise `InputError`."""
        self.check_leading()
        if state.term > self.term:
            raise Unavailable(
                f"node {state.node} has obeyed a later start of a service (term {state.term}, not {self.term}), "
                "so this one must not lead it; stop this service"
            )
        try:
            node = self.members.admit(state, self.term)
        except OSError as error:
            raise Unavailable(f"the list of nodes cannot be written ({error.strerror}); make room") from None
        if node is None:  # it has something to get rid of first
            return self._answer({}, 0.0, joined=False)
        if node.instance != state.instance:
            node.instance, node.number, node.remarks = state.instance, 0, 0
            self.doors_of(node).fail(f"node {node.name}: its agent was started again; try again")
        if state.number > node.number:
            node.number = state.number
            node.changed.set()  # an earlier request of the agent need not wait any longer
            self._take(node, state)
        if not node.present:
            return self._answer({}, 0.0, joined=False)
        orders = await self._hold(node, state)
        self.check_leading()
        if not node.present or self.book.nodes.get(node.name) is not node:
            return self._answer({}, 0.0, joined=False)
        node.answered = since_boot()
        answer = self._answer(orders, self.lease_s, joined=True, heard=node.remarks)
        return replace(answer, leave=bool(node.dismissed), doors=self.doors_of(node).summons())

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
            most_checkpoint=self.checkpoints.most_bytes,
            pause_patience_s=self._options.pause_patience_s,
            gang_pause_s=self._options.gang_pause_s,
            separate_users=self._separate_users,
        )

    def _take(self, node: ClusterNode, state: NodeState) -> None:
        """Take everything that an agent says."""
        before = node.closed
        if state.pilot != node.record.pilot:  # the one before, which may have been told to leave, has ended
            node.dismissed = ""
        if state.leaving and not node.leaving and not node.dismissed:
            self._move_gangs(node, "the node leaves the cluster")
        node.heard, node.silent, node.leaving = True, False, state.leaving
        wrong_user = NOT_ROOT if self._separate_users and not state.as_root else ""
        node.unheard_s, node.trouble = 0.0, state.trouble[:300] or wrong_user
        node.as_root, node.release, node.witness = state.as_root, state.release, state.witness
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
            self.members.lose(node, f"node {node.name} left")

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
        """Wait until the agent has something new to do, at most `members.hold_s`."""
        until = since_boot() + self.members.hold_s
        while True:
            node.changed.clear()
            orders = self._orders(node)
            left = until - since_boot()
            news = _mark(orders) != state.seen or any(order.launch is not None for order in orders.values())
            news = news or self.doors_of(node).awaits_agent
            overtaken = state.instance == node.instance and state.number < node.number
            if news or overtaken or left <= 0.0 or self._closed or (node.dismissed and not node.leaving):
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

    def _note_start(self, gang: ClusterGang) -> None:
        nodes = [self.book.nodes.get(name) for name in gang.parts]
        if all(node is not None and node.shared for node in nodes):
            self.checkpoints.written_here(*gang.key)

    def _lose_node(self, node: ClusterNode, why: str) -> None:
        """Lose the gangs of a node, and the checkpoints that only this node has."""
        for gang in self._gangs_on(node.name):
            state = gang.parts[node.name].state
            report = state.report if state is not None else None
            if node.heard and not node.shared and report is not None and report.checkpoint >= 0:
                self._spawn(self.leave_checkpoint(gang.key, node.name, why))
        self._lose_gangs(node, why)

    async def leave_checkpoint(self, key: GangKey, node: str, why: str) -> None:
        """Note that the checkpoints of a gang stay on its node, or are lost with it."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.checkpoints.leave, *key, node, why)
            self.listener.note(f"job {key[0]}: {self.checkpoint_left(key[0])}")

    def checkpoint_left(self, job: str) -> str:
        return self.checkpoints.left(job)

    # ---- silence ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._leadership.leads():  # this process may have been stopped while another service took over
                    self.members.look()
                    for doors in self._doors.values():
                        doors.look()
            except Exception:  # the next look must happen
                log.exception("nodes could not be looked at")

    def node_rows(self) -> list[dict[str, Any]]:
        """Return the nodes as operators see them."""
        return self.members.rows(self.jobs_on)

    # ---- terminals and commands beside workers ---------------------------------------------------------------------

    async def open_door(self, key: GangKey, rank: int, request: Mapping[str, Any]) -> RelayedDoor:
        self.check_leading()
        gang = self._gangs.get(key)
        if gang is not None and not all(part.state is not None and part.state.ranks for part in gang.parts.values()):
            raise Unavailable(f"job {key[0]}: its agents have not reported its workers yet; try again")
        names = [name for name in gang.parts if self._has_worker(gang, name, rank)] if gang is not None else []
        node = self.book.nodes.get(names[0]) if names else None
        if node is None:
            raise WrongStatus(f"job {key[0]}: worker {rank} does not run; `carpool show {key[0]}` lists its workers")
        if node.silent or not node.heard:
            raise Unavailable(f"job {key[0]}: the agent of node {node.name} does not answer; try again")
        door = self.doors_of(node).open(key, rank, request)
        node.changed.set()
        return door

    def _has_worker(self, gang: ClusterGang, node: str, rank: int) -> bool:
        """Return whether a worker is on a node: by what its agent says, and only where it can be."""
        state = gang.parts[node].state
        told = state is not None and any(row.rank == rank for row in state.ranks)
        return told and rank in self.ranks_on(node, gang.key)

    def doors_of(self, node: ClusterNode) -> NodeDoors:
        """Return the connections to the doors of a node."""
        return self._doors.setdefault(node.name, NodeDoors(node.name))

    def doors_for(self, name: str, instance: str) -> NodeDoors:
        """Return the doors of a node for its agent. Raise `WrongStatus` for an agent that does not speak for it."""
        self.check_leading()
        node = self.book.nodes.get(name)
        if node is None or not node.present or node.instance != instance:
            raise WrongStatus(f"this agent does not speak for node {name} now; it must exchange first")
        return self.doors_of(node)

    # ---- what is recorded ------------------------------------------------------------------------------------------

    def gpu_use(self, gpu: GpuId) -> GpuUse | None:
        node = self.book.node_of(gpu)
        return node.use.pop(gpu, None) if node is not None else None

    def seconds_left(self, gpus: Iterable[GpuId]) -> float | None:
        nodes = {node.name: node for gpu in gpus if (node := self.book.node_of(gpu)) is not None}
        left = min((self.members.seconds_left(node) for node in nodes.values()), default=math.inf)
        return left if left < math.inf else None

    async def read_log(
        self, key: GangKey, rank: int, stream: str, *, offset: int = 0, limit: int, tail: int | None = None
    ) -> LogChunk:
        path = self.home.rank(*key, rank) / f"{stream}.log"
        return await asyncio.to_thread(read_log_file, path, offset, limit, tail)


def _mark(orders: Mapping[str, PartOrder]) -> str:
    """Return a name for orders, by which an agent says that it has them."""
    named = [(name, orders[name]) for name in sorted(orders)]
    switches = [(one.switch, one.paused, one.swap) for _, one in named]
    shown = [(name, one.want, one.how, one.address, one.port, one.accumulation, one.checkpoint) for name, one in named]
    return f"{zlib.crc32(repr((shown, switches)).encode()):08x}"


def _bytes(text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        found: int = ByteSize(0, 1 << 50).from_option(text)
        return found
    except FieldError as error:
        raise InputError(f"--executor agents: {error}") from None


def _seconds(text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        found: float = Duration(0.5, 1e6).from_option(text)
        return found
    except FieldError as error:
        raise InputError(f"--executor agents: {error}") from None
