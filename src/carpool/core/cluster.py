"""The residents of each GPU, their reserved memory, and the index of free GPUs.

Owned by `State`. Only `claims` and `transitions` enter and remove jobs and nodes.
"""

from collections.abc import Collection

from carpool.core.free import FreeGpus, Topology
from carpool.core.model import GpuId, Node
from carpool.core.record import JobRecord
from carpool.core.view import JobView


class Cluster:
    """The nodes of the cluster and what their GPUs hold."""

    def __init__(self, resident_per_gpu: int) -> None:
        self.resident_per_gpu = resident_per_gpu
        self.topology = Topology()
        self.free = FreeGpus(self.topology)
        self.residents: dict[GpuId, tuple[JobRecord, ...]] = {}
        """The jobs on each GPU, in the order in which they came. Equal tuples mean the same cell."""
        self.memory: dict[GpuId, int] = {}
        """Bytes reserved on each GPU."""
        self.by_load = [0] * (resident_per_gpu + 1)
        """The GPUs that hold n jobs, one bit each, by n. Paused jobs count."""
        self.idle: set[GpuId] = set()
        """The GPUs that hold jobs, all of them paused."""
        self.with_paused: set[GpuId] = set()
        """The GPUs that hold a paused job, whether others compute there or not."""

    def join(self, node: Node) -> None:
        """Add a node."""
        if node.id in self.topology.present or any(gpu in self.residents for gpu in node.gpus):
            raise ValueError(f"node {node.id} or one of its GPUs is part of the cluster already")
        self.free.add_node(self.topology.add(node))
        for gpu in node.gpus:
            self.residents[gpu] = ()
            self.memory[gpu] = 0
            self.by_load[0] |= 1 << gpu

    def set_closed(self, number: int, closed: bool) -> None:
        """Let nothing new start on a node, or let it again."""
        if closed is not (number in self.topology.closed):
            self.free.set_closed(number, closed)
            self.topology.set_closed(number, closed)

    def lose(self, name: str) -> None:
        """Remove a node whose GPUs hold no jobs."""
        self.set_closed(self.topology.present[name], False)
        gpus = self.topology.nodes[self.topology.present[name]].gpus
        self.free.remove_node(self.topology.remove(name))
        for gpu in gpus:
            del self.residents[gpu], self.memory[gpu]
            self.by_load[0] ^= 1 << gpu

    def enter(self, record: JobRecord) -> None:
        """Make a job a resident of its GPUs, with the memory that it reserves."""
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
        if self.idle:
            self.idle.difference_update(record.gpus)

    def leave(self, record: JobRecord) -> None:
        """Remove a job from its GPUs."""
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
        if self.with_paused:
            self.note_activity(record.gpus)

    def note_activity(self, gpus: tuple[GpuId, ...]) -> None:
        """Find out which of these GPUs hold paused jobs, and which hold no others: a job of theirs left, was paused or
        resumed."""
        for gpu in gpus:
            there = self.residents[gpu]
            active = sum([record.active for record in there])
            if active < len(there):
                self.with_paused.add(gpu)
            else:
                self.with_paused.discard(gpu)
            if there and not active:
                self.idle.add(gpu)
            else:
                self.idle.discard(gpu)

    def reserve(self, record: JobRecord, memory: int) -> None:
        """Change the memory that a job reserves on each of its GPUs."""
        for gpu in record.gpus:
            self.memory[gpu] += memory - record.memory
        record.memory = memory

    def mates(self, record: JobRecord) -> list[JobRecord]:
        """Return the other jobs on a job's GPUs, each once."""
        residents = self.residents
        if len(record.gpus) == 1:
            return [mate for mate in residents[record.gpus[0]] if mate is not record]
        found = {mate.seq: mate for gpu in record.gpus for mate in residents[gpu] if mate is not record}
        return list(found.values())

    def shared_cells(self, record: JobView) -> Collection[tuple[JobRecord, ...]]:
        """Return the residents, itself included, of each cell in which a job has mates."""
        residents = self.residents
        if len(record.gpus) == 1:
            there = residents[record.gpus[0]]
            return (there,) if len(there) > 1 else ()
        return {residents[gpu] for gpu in record.gpus if len(residents[gpu]) > 1}
