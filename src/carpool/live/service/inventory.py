"""The cluster's GPUs as the executor lists them: labels for users, and what the estimator must know."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.core import events as ev
from carpool.core.model import GpuId, Node
from carpool.core.state import State
from carpool.live.executors.base import Executor, GpuSlot, NodeInventory

NO_NODES = "time-slicing"
"""Mechanism that is assumed before the first node has joined: the slower one."""


@dataclass(frozen=True)
class Inventory:
    """Reads the executor's nodes, which may change while the service runs."""

    executor: Executor

    @property
    def nodes(self) -> Sequence[NodeInventory]:
        return self.executor.nodes()

    @property
    def by_name(self) -> list[NodeInventory]:
        """The nodes as users see them: by name, numbers in it by their value, whichever joined first."""
        return sorted(self.nodes, key=lambda node: _in_order(node.id))

    @property
    def slots(self) -> list[GpuSlot]:
        return [slot for node in self.nodes for slot in node.slots]

    @property
    def mechanism(self) -> str:
        """Mechanism of the first node; clusters with several mechanisms are not estimated apart."""
        return next((node.mechanism for node in self.nodes), NO_NODES)

    @property
    def node_gpus(self) -> int:
        """Number of GPUs of the largest node; 1 before the first node has joined."""
        return max((len(node.slots) for node in self.nodes), default=1)

    def labels(self) -> Mapping[GpuId, str]:
        """Return the name of each GPU as users see it."""
        return {slot.id: slot.label for slot in self.slots}

    def label(self, gpu: GpuId) -> str:
        return self.labels().get(gpu, f"GPU {gpu}")

    def changes(self, state: State, now: float) -> list[ev.Event]:
        """Return the events that bring the state's nodes up to date."""
        present = {node.id: node for node in _known_nodes(state)}
        wanted = {inventory.id: inventory.node for inventory in self.nodes}
        lost = [name for name, node in present.items() if not _is_same(wanted.get(name), node)]
        joined = [node for name, node in wanted.items() if not _is_same(present.get(name), node)]
        closed = {node.id for node in self.nodes if node.closed}
        shut = {state.topology.nodes[number].id for number in state.topology.closed} - {*lost}
        swap = [n for n in wanted.values() if _is_same(present.get(n.id), n) and present[n.id].can_swap != n.can_swap]
        return [
            *(ev.NodeLost(now, name) for name in lost),
            *(ev.NodeJoined(now, node) for node in joined),
            *(ev.SwapChanged(now, node.id, node.can_swap) for node in swap),
            *(ev.NodeClosed(now, name) for name in sorted(closed - shut)),
            *(ev.NodeOpened(now, name) for name in sorted(shut - closed)),
        ]

    def describe_changes(self, state: State) -> list[str]:
        """Say how the GPUs of known nodes differ from those in the state."""
        wanted = {inventory.id: inventory.node for inventory in self.nodes}
        lines = []
        for node in _known_nodes(state):
            count = len(wanted[node.id].gpus) if node.id in wanted else 0
            if not _is_same(wanted.get(node.id), node):
                lines.append(f"the GPUs of {node.id} changed: {len(node.gpus)} before, {count} now")
        return lines


def _is_same(one: Node | None, other: Node) -> bool:
    """Return whether a node has the GPUs and the memory of another."""
    return one is not None and (one.id, one.gpus, one.memory) == (other.id, other.gpus, other.memory)


def _known_nodes(state: State) -> list[Node]:
    return [state.topology.nodes[number] for number in state.topology.present.values()]


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key of a name: node2 comes before node10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name) if part]
