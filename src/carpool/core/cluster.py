"""The residents of each GPU, their reserved memory, and the index of free GPUs.

Owned by `State`. Only `claims` and `transitions` enter and remove jobs and nodes.
"""

from collections.abc import Collection, Iterable

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
        self._by_load: list[int] | None = None
        self.in_use = 0
        """Number of GPUs that hold jobs."""
        self.places = 0
        """Number of places that jobs hold on GPUs: more than there are GPUs in use where jobs are beside each other."""
        self.idle: set[GpuId] = set()
        """The GPUs that hold jobs, all of them paused."""
        self.with_paused: set[GpuId] = set()
        """The GPUs that hold a paused job, whether others compute there or not."""

    @property
    def by_load(self) -> list[int]:
        """The GPUs that hold n jobs, one bit each, by n; paused jobs count. Kept from the first use on, so that
        policies that never share do not pay for it."""
        if self._by_load is None:
            self._by_load = [0] * (self.resident_per_gpu + 1)
            for gpu, there in self.residents.items():
                self._by_load[len(there)] |= 1 << gpu
        return self._by_load

    def join(self, node: Node) -> None:
        """Add a node."""
        if node.id in self.topology.present or any(gpu in self.residents for gpu in node.gpus):
            raise ValueError(f"node {node.id} or one of its GPUs is part of the cluster already")
        number = self.topology.add(node)
        self.free.add_node(number)
        for gpu in node.gpus:
            self.residents[gpu] = ()
            self.memory[gpu] = 0
            if self._by_load is not None:
                self._by_load[0] |= 1 << gpu
        if self.topology.kept:
            self._hide(number, self.topology.closed_of(number))

    def set_closed(self, number: int, closed: bool) -> None:
        """Close a node, so that nothing new starts there, or open it."""
        (self.topology.closed.add if closed else self.topology.closed.discard)(number)
        self._hide(number, self.topology.closed_of(number))

    def set_kept(self, kept: int) -> None:
        """Close these GPUs, one bit each, so that nothing new starts there, and open those that were closed before."""
        self.topology.kept = kept
        for number in self.topology.present.values():
            self._hide(number, self.topology.closed_of(number))

    def _hide(self, number: int, bits: int) -> None:
        before = self.topology.hidden.get(number, 0)
        if bits != before:
            self.free.hide(number, bits)

    def lose(self, name: str) -> None:
        """Remove a node whose GPUs hold no jobs."""
        number = self.topology.present[name]
        self.topology.closed.discard(number)
        self._hide(number, 0)
        gpus = self.topology.nodes[self.topology.present[name]].gpus
        self.free.remove_node(self.topology.remove(name))
        for gpu in gpus:
            del self.residents[gpu], self.memory[gpu]
            if self._by_load is not None:
                self._by_load[0] ^= 1 << gpu

    def enter(self, record: JobRecord) -> int:
        """Make a job a resident of its GPUs, with the memory that it reserves. Return the number of residents of the
        fullest of them."""
        residents, reserved, needed, gpus = self.residents, self.memory, record.memory, record.gpus
        self.places += len(gpus)
        if self._by_load is not None:
            self._change_load(gpus, 1)
        unused, alone, most = [], (record,), 1
        last: tuple[JobRecord, ...] = ()
        joined: tuple[JobRecord, ...] = alone
        for gpu in gpus:
            reserved[gpu] += needed
            before = residents[gpu]
            if before:
                if before is not last:  # GPUs of one cell share one tuple where they can: comparing them costs less
                    last, joined = before, (*before, record)
                    most = max(most, len(joined))
                residents[gpu] = joined
            else:
                residents[gpu] = alone
                unused.append(gpu)
        if unused:
            self.in_use += len(unused)
            self.free.take(unused)
        if self.idle:
            self.idle.difference_update(gpus)
        return most

    def _change_load(self, gpus: Iterable[GpuId], change: int) -> None:
        """Note that these GPUs are about to hold so many jobs more."""
        by_load, residents = self.by_load, self.residents
        last, bits = 0, 0
        for gpu in gpus:
            load = len(residents[gpu])
            if load != last and bits:
                by_load[last] ^= bits
                by_load[last + change] ^= bits
                bits = 0
            last = load
            bits |= 1 << gpu
        by_load[last] ^= bits
        by_load[last + change] ^= bits

    def leave(self, record: JobRecord) -> None:
        """Remove a job from its GPUs."""
        residents, reserved, held, gpus = self.residents, self.memory, record.memory, record.gpus
        self.places -= len(gpus)
        if self._by_load is not None:
            self._change_load(gpus, -1)
        unused = []
        last: tuple[JobRecord, ...] = ()
        left = last
        for gpu in gpus:
            reserved[gpu] -= held
            before = residents[gpu]
            if before is not last:  # as in `enter`
                last = before
                left = () if len(before) == 1 else tuple([other for other in before if other is not record])
            residents[gpu] = left
            if not left:
                unused.append(gpu)
        if unused:
            self.in_use -= len(unused)
            self.free.give(unused)
        if self.with_paused:
            self.note_activity(gpus)

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
        if self.places == self.in_use:  # no job has a mate
            return []
        residents = self.residents
        if len(record.gpus) == 1:
            there = residents[record.gpus[0]]
            return [mate for mate in there if mate is not record] if len(there) > 1 else []
        found: dict[int, JobRecord] = {}
        last: tuple[JobRecord, ...] = ()
        for gpu in record.gpus:
            there = residents[gpu]
            if there is not last and len(there) > 1:
                last = there
                for mate in there:
                    if mate is not record:
                        found[mate.seq] = mate
        return list(found.values())

    def shared_cells(self, record: JobView) -> Collection[tuple[JobRecord, ...]]:
        """Return the residents, itself included, of each cell in which a job has mates."""
        residents = self.residents
        if len(record.gpus) == 1:
            there = residents[record.gpus[0]]
            return (there,) if len(there) > 1 else ()
        return {residents[gpu] for gpu in record.gpus if len(residents[gpu]) > 1}
