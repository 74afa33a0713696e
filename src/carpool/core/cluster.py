"""Who is on which GPU: residents, reserved memory, and the index of free GPUs.

Owned by `State`, which alone enters and removes jobs; everybody else reads.
"""

from collections.abc import Collection

from carpool.core.free import FreeGpus, Topology
from carpool.core.model import GpuId, Node
from carpool.core.record import JobRecord
from carpool.core.view import JobView


class Cluster:
    def __init__(self, jobs_per_gpu: int) -> None:
        self.topology = Topology()
        self.free = FreeGpus(self.topology)
        self.residents: dict[GpuId, tuple[JobRecord, ...]] = {}
        self.memory: dict[GpuId, int] = {}
        """Bytes reserved on each GPU."""
        self.by_load = [0] * (jobs_per_gpu + 1)
        """n -> the GPUs that hold n jobs, one bit each."""

    def join(self, node: Node) -> None:
        if node.id in self.topology.present or any(gpu in self.residents for gpu in node.gpus):
            raise ValueError(f"node {node.id} or one of its GPUs is here already")
        self.free.add_node(self.topology.add(node))
        for gpu in node.gpus:
            self.residents[gpu] = ()
            self.memory[gpu] = 0
            self.by_load[0] |= 1 << gpu

    def lose(self, name: str) -> None:
        """Take out a node on which nobody is left."""
        gpus = self.topology.nodes[self.topology.present[name]].gpus
        self.free.remove_node(self.topology.remove(name))
        for gpu in gpus:
            del self.residents[gpu], self.memory[gpu]
            self.by_load[0] ^= 1 << gpu

    def enter(self, record: JobRecord) -> None:
        """Put a job on its GPUs with the memory it reserves."""
        unused = []
        for gpu in record.gpus:
            before = self.residents[gpu]
            self.residents[gpu] = (*before, record)
            self.memory[gpu] += record.memory
            bit = 1 << gpu
            self.by_load[len(before)] ^= bit
            self.by_load[len(before) + 1] ^= bit
            if not before:
                unused.append(gpu)
        if unused:
            self.free.take(unused)

    def leave(self, record: JobRecord) -> None:
        """Take a job off its GPUs."""
        unused = []
        for gpu in record.gpus:
            before = self.residents[gpu]
            after = tuple([other for other in before if other is not record]) if len(before) > 1 else ()
            self.residents[gpu] = after
            self.memory[gpu] -= record.memory
            bit = 1 << gpu
            self.by_load[len(after) + 1] ^= bit
            self.by_load[len(after)] ^= bit
            if not after:
                unused.append(gpu)
        if unused:
            self.free.give(unused)

    def reserve(self, record: JobRecord, memory: int) -> None:
        """Let a job hold another amount of memory."""
        for gpu in record.gpus:
            self.memory[gpu] += memory - record.memory
        record.memory = memory

    def mates(self, record: JobRecord) -> list[JobRecord]:
        """The other jobs on a job's GPUs, each once."""
        residents = self.residents
        if len(record.gpus) == 1:
            return [mate for mate in residents[record.gpus[0]] if mate is not record]
        found = {mate.seq: mate for gpu in record.gpus for mate in residents[gpu] if mate is not record}
        return list(found.values())

    def shared_cells(self, record: JobView) -> Collection[tuple[JobRecord, ...]]:
        """The different sets of jobs, itself included, with which a job shares GPUs."""
        residents = self.residents
        if len(record.gpus) == 1:
            there = residents[record.gpus[0]]
            return (there,) if len(there) > 1 else ()
        return {residents[gpu] for gpu in record.gpus if len(residents[gpu]) > 1}
