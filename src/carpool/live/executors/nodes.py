"""The nodes of a cluster: which there are, since when, which numbers their GPUs have, and when they last reported.

`nodes.json` in the home keeps what must outlive the service: the numbers of GPUs, which agent speaks for a node, and
which nodes are drained or lost. It is written before anything that depends on it is told to others. After a restart all
nodes that were not lost count as heard at that moment, so that none is given up before its lease has run out.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.gpu.counters import GpuUse
from carpool.live.clock import since_boot
from carpool.live.executors import wire
from carpool.live.executors.base import GpuSlot, NodeInventory
from carpool.live.executors.wire import DeviceRow, NodeState
from carpool.live.home import OWN_JSON_BYTES, read_json, sync_directory, write_private

SILENT_S = 2.0
"""Seconds without an exchange, beyond those for which one is held, after which nothing new is sent to a node."""
MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What is kept about a node on disk."""

    name: str
    identity: str
    """Name of the home of the agent that speaks for it."""
    boot: str
    address: str
    first_gpu: GpuId
    """Number of its first GPU in the cluster; the others follow."""
    devices: tuple[DeviceRow, ...]
    memory: int
    mechanism: str
    why: str = ""
    can_swap: bool = False
    ground: str = "hand"
    pilot: str = ""
    since: float = 0.0
    """When it joined, or was lost, in seconds since 1970."""
    drained: bool = False
    lost: str = ""
    """Why it is no part of the cluster; empty: it is one."""
    lease_s: float = 0.0
    """Longest lease by which its workers may run: of this service, or of an earlier one that had longer leases."""


@dataclass
class ClusterNode:
    """A node as the running service knows it."""

    record: NodeRecord
    answered: float = field(default_factory=since_boot)
    """When the last lease was granted: at the latest, when this service started."""
    met: float = field(default_factory=since_boot)
    """When this service took it over from an earlier one, or admitted it."""
    heard: bool = False
    """Its agent has spoken to this service."""
    silent: bool = False
    unheard_s: float = 0.0
    """Seconds for which this service listened and heard nothing from it."""
    leaving: bool = False
    trouble: str = ""
    """Why its agent can start nothing; empty: it can."""
    dismissed: str = ""
    """Why it shall leave the cluster; empty: it shall not."""
    ends_at: float | None = None
    """When its ground takes it back, in seconds since 1970; None: not known, or never."""
    witness: str = ""
    """Whether its agent can ask its ground."""
    shared: bool = False
    """It sees the service's home."""
    as_root: bool = False
    release: str = ""
    instance: str = ""
    number: int = 0
    """Number of the latest request of this instance."""
    remarks: int = 0
    """Number of the latest remark of this instance."""
    taken: dict[GpuId, int] = field(default_factory=dict)
    use: dict[GpuId, GpuUse] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its orders may be others than before."""
    _shown: tuple[NodeRecord, str, NodeInventory] | None = None

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def present(self) -> bool:
        return not self.record.lost

    @property
    def silent_s(self) -> float:
        """Seconds since it was granted its last lease."""
        return since_boot() - self.answered

    @property
    def closed(self) -> str:
        """Why nothing new may start there; empty: it may."""
        if self.record.drained:
            return "it is drained, and its agent is silent" if self.silent and self.present else "it is drained"
        if self.leaving or self.dismissed:
            return f"it leaves the cluster: {self.dismissed}" if self.dismissed else "it leaves the cluster"
        if self.silent or not self.heard:
            return "its agent is silent"
        return self.trouble

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        first = self.record.first_gpu
        return tuple(range(first, first + len(self.record.devices)))

    @property
    def inventory(self) -> NodeInventory:
        record = self.record
        if self._shown is not None and self._shown[:2] == (record, self.closed):
            return self._shown[2]
        slots = tuple(
            GpuSlot(gpu, record.name, row.index, row.uuid, row.device)
            for gpu, row in zip(self.gpus, record.devices, strict=True)
        )
        found = NodeInventory(
            record.name, slots, record.memory, record.mechanism, record.why, record.can_swap, closed=self.closed
        )
        self._shown = record, self.closed, found
        return found


class NodeBook:
    """All nodes that were ever part of the cluster."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.nodes: dict[str, ClusterNode] = {}
        self._owners: dict[GpuId, str] = {}
        """The node to which each number of a GPU was given last."""
        self._texts: dict[str, tuple[NodeRecord, str]] = {}

    def load(self) -> None:
        """Read the nodes of earlier services. Raise `InputError` for a file that cannot be read: without the numbers of
        GPUs, jobs would be looked for in the wrong places."""
        data = read_json(self._path, OWN_JSON_BYTES)
        if data is None and not self._path.exists():
            return
        try:
            records = [wire.read(NodeRecord, one) for one in data["nodes"]]
        except (InputError, KeyError, TypeError) as error:
            raise InputError(f"{self._path}: cannot be read ({error}); restore it from a backup") from None
        self.nodes = {record.name: ClusterNode(record) for record in records}
        self._owners = {gpu: node.name for node in self.nodes.values() for gpu in node.gpus}

    def save(self) -> None:
        """Write the nodes; durable on return."""
        texts = ",\n".join([self._text(node.record) for node in self.nodes.values()])
        write_private(self._path, f'{{"nodes": [\n{texts}\n]}}\n')
        sync_directory(self._path.parent)

    def _text(self, record: NodeRecord) -> str:
        """Return a record as JSON. Many nodes may join at once, and each writes all."""
        known, text = self._texts.get(record.name, (None, ""))
        if known is not record:
            text = json.dumps(wire.plain(record))
            self._texts[record.name] = record, text
        return text

    @property
    def present(self) -> list[ClusterNode]:
        return [node for node in self.nodes.values() if node.present]

    def places(self, gpus: Iterable[GpuId]) -> dict[GpuId, tuple[str, int]]:
        """Return the node of each GPU and the GPU's number within it; GPUs of no node are left out."""
        nodes = {gpu: node for gpu in gpus if (node := self.node_of(gpu)) is not None}
        return {gpu: (node.name, gpu - node.record.first_gpu) for gpu, node in nodes.items()}

    def node_of(self, gpu: GpuId) -> ClusterNode | None:
        node = self.nodes.get(self._owners.get(gpu, ""))
        return node if node is not None and node.present and gpu in node.gpus else None

    # ---- changes ---------------------------------------------------------------------------------------------------

    def admit(self, state: NodeState, lease_s: float) -> ClusterNode:
        """Make a node part of the cluster, or part of it again, with the same numbers for its GPUs if it has as many
        as before."""
        if not 0 < len(state.devices) <= MAX_DEVICES:
            raise InputError(f"node {state.node}: has {len(state.devices)} GPUs; start its agent with --gpus")
        known = self.nodes.get(state.node)
        same = known is not None and len(known.record.devices) == len(state.devices)
        first = known.record.first_gpu if known is not None and same else self._next_gpu()
        drained = known is not None and known.record.drained
        earlier_s = known.record.lease_s if known is not None else 0.0
        record = replace(_record(state, first, drained), lease_s=max(lease_s, earlier_s))
        before = dict(self.nodes)
        node = self.nodes[state.node] = ClusterNode(record)
        if known is not None:
            node.changed = known.changed
        self._owners |= dict.fromkeys(node.gpus, node.name)
        self._save_or(before)
        return node

    def refresh(self, node: ClusterNode, state: NodeState) -> bool:
        """Take what an agent says about its node; return whether the scheduler must be told."""
        known = node.record
        new = _record(state, known.first_gpu, known.drained)
        new = replace(new, since=known.since, lease_s=known.lease_s)
        if new == node.record:
            return False
        before = node.record
        node.record = new
        try:
            self.save()
        except OSError:
            node.record = before
            raise
        return (before.memory, before.can_swap, before.mechanism) != (new.memory, new.can_swap, new.mechanism)

    def change(self, node: ClusterNode, **changes: Any) -> None:
        """Change what is kept about a node; durable on return."""
        before = node.record
        node.record = replace(before, **changes)
        try:
            self.save()
        except OSError:
            node.record = before
            raise

    def _save_or(self, before: dict[str, ClusterNode]) -> None:
        try:
            self.save()
        except OSError:
            self.nodes = before
            raise

    def _next_gpu(self) -> GpuId:
        return max((node.gpus[-1] + 1 for node in self.nodes.values()), default=0)


def same_node(node: ClusterNode, state: NodeState) -> bool:
    """Return whether an agent speaks for the node as it is known: the same home, boot and number of GPUs."""
    record = node.record
    return (record.identity, record.boot, len(record.devices)) == (state.identity, state.boot, len(state.devices))


def _record(state: NodeState, first_gpu: GpuId, drained: bool) -> NodeRecord:
    named = {one.name for one in fields(NodeRecord)} & {one.name for one in fields(NodeState)}
    values = {name: getattr(state, name) for name in named}
    return NodeRecord(name=state.node, first_gpu=first_gpu, drained=drained, since=time.time(), **values)


def by_gpu(node: ClusterNode, told: Mapping[str, Any]) -> Iterator[tuple[GpuId, Any]]:
    """Yield what an agent told about its GPUs, with their numbers in the cluster."""
    for index, value in told.items():
        if index.isdecimal() and len(index) < 6 and int(index) < len(node.gpus):
            yield node.gpus[int(index)], value
