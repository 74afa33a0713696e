"""The GPUs that nobody uses, and which of them to give to a gang: fewest nodes first, then best fit.

A set of nodes is an integer whose bit i stands for node i, and the free GPUs of a node likewise, so that picking
takes a few operations whatever the size of the cluster, and a draft can copy the whole thing for a what-if.
"""

from collections.abc import Iterable, Sequence

from carpool.core.model import GpuId, Node


def lowest(bits: int) -> int:
    """The number of the lowest set bit."""
    return (bits & -bits).bit_length() - 1


class Topology:
    """Where each GPU sits. Nodes keep their number for life; a lost node's number is not used again."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.present: dict[str, int] = {}
        self.node_of: dict[GpuId, int] = {}
        self.bit_of: dict[GpuId, int] = {}
        self.largest_memory = 0
        self.taken: dict[GpuId, int] = {}
        """What processes that are none of our jobs hold of a GPU's memory; GPUs without such are not listed."""
        self._eligible: dict[int, int] = {}

    def memory_of(self, gpu: GpuId) -> int:
        """What our jobs may use of a GPU's memory, all together."""
        memory = self.nodes[self.node_of[gpu]].memory
        return max(0, memory - self.taken[gpu]) if gpu in self.taken else memory

    def gpus_below(self, needed: int) -> list[GpuId]:
        """The GPUs on which strangers leave less than this."""
        return [gpu for gpu in self.taken if self.memory_of(gpu) < needed]

    def add(self, node: Node) -> int:
        number = self.present[node.id] = len(self.nodes)
        self.nodes.append(node)
        for index, gpu in enumerate(node.gpus):
            self.node_of[gpu] = number
            self.bit_of[gpu] = 1 << index
        self.largest_memory = max(self.largest_memory, node.memory)
        self._eligible.clear()
        return number

    def remove(self, node_id: str) -> int:
        number = self.present.pop(node_id)
        for gpu in self.nodes[number].gpus:
            del self.node_of[gpu], self.bit_of[gpu]
            self.taken.pop(gpu, None)
        self._eligible.clear()
        self.largest_memory = max((self.nodes[number].memory for number in self.present.values()), default=0)
        return number

    def with_memory(self, needed: int) -> int:
        """The nodes whose GPUs have at least this much memory."""
        mask = self._eligible.get(needed)
        if mask is None:
            numbers = self.present.values()
            mask = self._eligible[needed] = sum(1 << n for n in numbers if self.nodes[n].memory >= needed)
        return mask

    def wholly_with_memory(self, needed: int) -> int:
        """The nodes all of whose GPUs have at least this much memory to give."""
        mask = self.with_memory(needed)
        for gpu in self.gpus_below(needed):
            mask &= ~(1 << self.node_of[gpu])
        return mask

    def smallest_memory(self, mask: int) -> int:
        """The least that a GPU on the nodes of a mask has to give; 0 where there are none."""
        least = [self.nodes[n].memory for n in self.present.values() if mask >> n & 1]
        return min(least + [self.memory_of(gpu) for gpu in self.taken if mask >> self.node_of[gpu] & 1], default=0)

    def total(self, mask: int = -1) -> int:
        """How many GPUs the nodes of a mask have."""
        return sum(len(self.nodes[n].gpus) for n in self.present.values() if mask >> n & 1)

    def nodes_spanned(self, gpus: Sequence[GpuId]) -> int:
        if len(gpus) == 1:
            return 1
        node_of = self.node_of
        return len({node_of[gpu] for gpu in gpus})

    def most_consolidated(self, gpus: Iterable[GpuId], count: int) -> list[GpuId]:
        """`count` of the given GPUs on as few nodes as possible."""
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
    """An index of free GPUs by node, and of nodes by how many they have free."""

    __slots__ = ("by_count", "count", "of_node", "topology")

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.of_node: list[int] = []  # node number -> its free GPUs
        self.by_count: list[int] = [0]  # n -> the nodes with exactly n free GPUs
        self.count = 0

    def copy(self) -> "FreeGpus":
        other = FreeGpus(self.topology)
        other.of_node = self.of_node.copy()
        other.by_count = self.by_count.copy()
        other.count = self.count
        return other

    def add_node(self, number: int) -> None:
        size = len(self.topology.nodes[number].gpus)
        self.of_node.append(0)
        self.by_count += [0] * (size + 1 - len(self.by_count))
        self.by_count[0] |= 1 << number
        self._set(number, (1 << size) - 1)

    def remove_node(self, number: int) -> None:
        self._set(number, 0)
        self.by_count[0] &= ~(1 << number)

    def take(self, gpus: Iterable[GpuId]) -> None:
        topology, of_node = self.topology, self.of_node
        for gpu in gpus:
            number = topology.node_of[gpu]
            self._set(number, of_node[number] & ~topology.bit_of[gpu])

    def give(self, gpus: Iterable[GpuId]) -> None:
        topology, of_node = self.topology, self.of_node
        for gpu in gpus:
            number = topology.node_of[gpu]
            self._set(number, of_node[number] | topology.bit_of[gpu])

    def _set(self, number: int, bits: int) -> None:
        before, after = self.of_node[number].bit_count(), bits.bit_count()
        self.of_node[number] = bits
        if before != after:
            node = 1 << number
            self.by_count[before] ^= node
            self.by_count[after] ^= node
            self.count += after - before

    def pick(self, count: int, eligible: int = -1) -> tuple[GpuId, ...] | None:
        """The most consolidated free GPUs on eligible nodes, or None where there are not enough."""
        if count > self.count:
            return None
        picked: list[GpuId] = []
        while (short := count - len(picked)) > 0:
            number = self._best_fit(short, eligible)
            if number < 0:
                number = self._emptiest(eligible)  # whole nodes first: fewest in all
            if number < 0:
                return None
            picked += self._gpus(number, short)
            eligible &= ~(1 << number)
        return tuple(picked)

    def _best_fit(self, count: int, eligible: int) -> int:
        """The node with the fewest free GPUs that still has `count` of them, or −1."""
        by_count = self.by_count
        for free in range(count, len(by_count)):
            nodes = by_count[free] & eligible
            if nodes:
                return lowest(nodes)
        return -1

    def _emptiest(self, eligible: int) -> int:
        by_count = self.by_count
        for free in range(len(by_count) - 1, 0, -1):
            nodes = by_count[free] & eligible
            if nodes:
                return lowest(nodes)
        return -1

    def _gpus(self, number: int, at_most: int) -> list[GpuId]:
        gpus, bits = self.topology.nodes[number].gpus, self.of_node[number]
        picked: list[GpuId] = []
        while bits and len(picked) < at_most:
            picked.append(gpus[lowest(bits)])
            bits &= bits - 1
        return picked
