"""The nodes and their free GPUs, and which of them a gang gets: fewest nodes first, then best fit.

A set of nodes is an integer whose bit i stands for node i; the free GPUs of a node are a set of the same form. So a
pick takes a few operations on a cluster of any size, and a draft can copy the index for a what-if.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from carpool.core.model import GpuId, Node


def lowest(bits: int) -> int:
    """Return the number of the lowest set bit."""
    return (bits & -bits).bit_length() - 1


class Topology:
    """The nodes and their GPUs. A node keeps its number; the number of a lost node is not used again."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """All nodes by number, lost ones included."""
        self.present: dict[str, int] = {}
        """The number of each node that is part of the cluster now, by its id."""
        self.node_of: dict[GpuId, int] = {}
        """The number of each GPU's node."""
        self.bit_of: dict[GpuId, int] = {}
        """The bit that stands for a GPU in the set of its node's free GPUs."""
        self.largest_memory = 0
        """Bytes of the largest GPU."""
        self.least_memory = 0
        """Bytes of the smallest GPU."""
        self.taken: dict[GpuId, int] = {}
        """Bytes that processes other than jobs hold on a GPU; GPUs without such processes are left out."""
        self.can_swap: set[int] = set()
        """The numbers of the nodes that can move the memory of a paused job to main memory."""
        self.closed: set[int] = set()
        """The numbers of the nodes on which nothing new may start."""
        self.kept = 0
        """The GPUs that closures cover, one bit each, whether their nodes are there or not."""
        self.closed_gpus = 0
        """The GPUs of closed nodes and of closures, one bit each."""
        self.hidden: dict[int, int] = {}
        """The closed GPUs of nodes that have some, in the form of `FreeGpus.of_node`."""
        self._eligible: dict[int, int] = {}
        self._totals: dict[int, int] = {}

    def is_closed(self, gpu: GpuId) -> bool:
        """Return whether nothing new may start on a GPU."""
        return bool(self.closed_gpus >> gpu & 1)

    def closed_of(self, number: int) -> int:
        """Return the GPUs of a node that are closed with it or covered by closures, in the form of `hidden`."""
        gpus = enumerate(self.nodes[number].gpus)
        return sum(1 << index for index, gpu in gpus if number in self.closed or self.kept >> gpu & 1)

    def hide(self, number: int, bits: int) -> None:
        """Note which GPUs of a node are closed."""
        for index, gpu in enumerate(self.nodes[number].gpus):
            self.closed_gpus = self.closed_gpus & ~(1 << gpu) | (bits >> index & 1) << gpu
        if bits:
            self.hidden[number] = bits
        else:
            self.hidden.pop(number, None)

    def memory_of(self, gpu: GpuId) -> int:
        """Return the bytes that all jobs together may use on a GPU."""
        memory = self.nodes[self.node_of[gpu]].memory
        return max(0, memory - self.taken[gpu]) if gpu in self.taken else memory

    @property
    def equal_memory(self) -> bool:
        """Whether jobs may use the same number of bytes on every GPU."""
        return self.least_memory == self.largest_memory and not self.taken

    def gpus_below(self, needed: int) -> list[GpuId]:
        """Return the GPUs on which other processes leave less than this many bytes."""
        return [gpu for gpu in self.taken if self.memory_of(gpu) < needed]

    def add(self, node: Node) -> int:
        """Add a node and return its number."""
        number = self.present[node.id] = len(self.nodes)
        self.nodes.append(node)
        if node.can_swap:
            self.can_swap.add(number)
        for index, gpu in enumerate(node.gpus):
            self.node_of[gpu] = number
            self.bit_of[gpu] = 1 << index
        self.largest_memory = max(self.largest_memory, node.memory)
        self.least_memory = min(self.least_memory or node.memory, node.memory)
        self._eligible.clear()
        self._totals.clear()
        return number

    def remove(self, node_id: str) -> int:
        """Remove a node and return its number."""
        number = self.present.pop(node_id)
        self.can_swap.discard(number)
        for gpu in self.nodes[number].gpus:
            del self.node_of[gpu], self.bit_of[gpu]
            self.taken.pop(gpu, None)
        self._eligible.clear()
        self._totals.clear()
        memories = [self.nodes[number].memory for number in self.present.values()]
        self.largest_memory, self.least_memory = max(memories, default=0), min(memories, default=0)
        return number

    def set_swap(self, number: int, can_swap: bool) -> None:
        """Note whether a node can move the memory of a paused job to main memory."""
        self.nodes[number] = replace(self.nodes[number], can_swap=can_swap)
        if can_swap:
            self.can_swap.add(number)
        else:
            self.can_swap.discard(number)

    def with_memory(self, needed: int) -> int:
        """Return the nodes whose GPUs have at least this many bytes."""
        mask = self._eligible.get(needed)
        if mask is None:
            numbers = self.present.values()
            mask = self._eligible[needed] = sum(1 << n for n in numbers if self.nodes[n].memory >= needed)
        return mask

    def wholly_with_memory(self, needed: int) -> int:
        """Return the nodes on all of whose GPUs jobs may use at least this many bytes."""
        mask = self.with_memory(needed)
        for gpu in self.gpus_below(needed):
            mask &= ~(1 << self.node_of[gpu])
        return mask

    def smallest_memory(self, mask: int) -> int:
        """Return the bytes that jobs may use on the smallest GPU of these nodes; 0: there are no nodes."""
        least = [self.nodes[n].memory for n in self.present.values() if mask >> n & 1]
        return min(least + [self.memory_of(gpu) for gpu in self.taken if mask >> self.node_of[gpu] & 1], default=0)

    def total(self, mask: int = -1) -> int:
        """Return the number of GPUs that these nodes have."""
        total = self._totals.get(mask)
        if total is None:
            numbers = self.present.values()
            total = self._totals[mask] = sum(len(self.nodes[n].gpus) for n in numbers if mask >> n & 1)
        return total

    def total_open(self, mask: int = -1) -> int:
        """Return the number of GPUs of these nodes on which jobs may start."""
        return self.total(mask) - sum(bits.bit_count() for n, bits in self.hidden.items() if mask >> n & 1)

    def by_node(self, gpus: Iterable[GpuId]) -> list[tuple[int, int]]:
        """Return the nodes of some GPUs and these GPUs in the form of `FreeGpus.of_node`. A node comes again where its
        GPUs are not beside each other, which those of a gang mostly are."""
        node_of, bit_of = self.node_of, self.bit_of
        found: list[tuple[int, int]] = []
        last, bits = -1, 0
        for gpu in gpus:
            number = node_of[gpu]
            if number != last:
                if bits:
                    found.append((last, bits))
                last, bits = number, 0
            bits |= bit_of[gpu]
        if bits:
            found.append((last, bits))
        return found

    def nodes_spanned(self, gpus: Sequence[GpuId]) -> int:
        """Return the number of nodes on which these GPUs are."""
        if len(gpus) == 1:
            return 1
        node_of = self.node_of
        return len({node_of[gpu] for gpu in gpus})

    def most_consolidated(self, gpus: Collection[GpuId], count: int) -> list[GpuId]:
        """Return `count` of the given GPUs on as few nodes as possible."""
        if len(gpus) == 1:
            return [*gpus][:count]
        by_node: dict[int, list[GpuId]] = {}
        for gpu in sorted(gpus):
            by_node.setdefault(self.node_of[gpu], []).append(gpu)
        picked: list[GpuId] = []
        groups = list(by_node.values())
        while len(picked) < count:
            short = count - len(picked)
            fitting = [group for group in groups if len(group) >= short]
            group = min(fitting, key=len) if fitting else max(groups, key=len)
            groups.remove(group)
            picked += group[:short]
        return picked


class FreeGpus:
    """The index of free GPUs by node, and of nodes by their number of free GPUs.

    Free GPUs that are closed do not count: their node is listed as if it had only the others.
    """

    __slots__ = ("by_count", "count", "of_node", "topology")

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.of_node: list[int] = []
        """The free GPUs of each node, by its number."""
        self.by_count: list[int] = [0]
        """The nodes with exactly n free GPUs, by n."""
        self.count = 0
        """Number of free GPUs."""

    def copy(self) -> "FreeGpus":
        """Return a copy to be changed independently."""
        other = FreeGpus(self.topology)
        other.of_node = self.of_node.copy()
        other.by_count = self.by_count.copy()
        other.count = self.count
        return other

    def add_node(self, number: int) -> None:
        """Add a node of the topology, all of whose GPUs are free."""
        size = len(self.topology.nodes[number].gpus)
        self.of_node.append(0)
        self.by_count += [0] * (size + 1 - len(self.by_count))
        self.by_count[0] |= 1 << number
        self._set(number, (1 << size) - 1)

    def remove_node(self, number: int) -> None:
        """Remove a node."""
        self._set(number, 0)
        self.by_count[0] &= ~(1 << number)

    def take(self, gpus: Iterable[GpuId]) -> None:
        """Mark GPUs as used."""
        for number, bits in self.topology.by_node(gpus):
            self._set(number, self.of_node[number] & ~bits)

    def give(self, gpus: Iterable[GpuId]) -> None:
        """Mark GPUs as free."""
        for number, bits in self.topology.by_node(gpus):
            self._set(number, self.of_node[number] | bits)

    def hide(self, number: int, bits: int) -> None:
        """Note which GPUs of a node are closed, and count its free ones again."""
        free = self.of_node[number]
        self._set(number, 0)
        self.topology.hide(number, bits)
        self._set(number, free)

    def _set(self, number: int, bits: int) -> None:
        free, by_count, hidden = self.of_node[number], self.by_count, self.topology.hidden
        self.of_node[number] = bits
        if hidden and number in hidden:
            free, bits = free & ~hidden[number], bits & ~hidden[number]
        before, after = free.bit_count(), bits.bit_count()
        if before != after:
            node = 1 << number
            by_count[before] ^= node
            by_count[after] ^= node
            self.count += after - before

    def pick(self, count: int, eligible: int = -1) -> tuple[GpuId, ...] | None:
        """Return the most consolidated free GPUs on eligible nodes; None: there are not enough."""
        if count > self.count:
            return None
        picked: list[GpuId] = []
        while True:
            short = count - len(picked)
            number = self._best_fit(short, eligible)
            if number >= 0:
                return (*picked, *self._gpus(number, short))
            number = self._emptiest(eligible)  # taking the emptiest nodes first uses the fewest nodes
            if number < 0:
                return None
            picked += self._gpus(number, short)
            eligible &= ~(1 << number)

    def _best_fit(self, count: int, eligible: int) -> int:
        """Return the node with the fewest free GPUs among those that have at least `count`; −1: there is none."""
        for nodes in self.by_count[count:]:
            nodes &= eligible
            if nodes:
                return (nodes & -nodes).bit_length() - 1  # `lowest`, without the call
        return -1

    def _emptiest(self, eligible: int) -> int:
        """Return the node with the most free GPUs; −1: no GPU is free."""
        for nodes in self.by_count[:0:-1]:
            nodes &= eligible
            if nodes:
                return (nodes & -nodes).bit_length() - 1
        return -1

    def _gpus(self, number: int, at_most: int) -> list[GpuId]:
        gpus, bits = self.topology.nodes[number].gpus, self.of_node[number]
        if self.topology.hidden:
            bits &= ~self.topology.hidden.get(number, 0)
        if bits.bit_count() == len(gpus):
            return list(gpus[:at_most])
        picked: list[GpuId] = []
        while bits and len(picked) < at_most:
            picked.append(gpus[(bits & -bits).bit_length() - 1])  # `lowest`, without the call
            bits &= bits - 1
        return picked
