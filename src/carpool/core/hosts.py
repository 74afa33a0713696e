"""The running jobs that may take a guest, indexed so that a policy finds the best host without looking at all of them.

A *lone* host runs at full speed and shares none of its GPUs: the time at which it ends is fixed, so the lone hosts of
one kind stay sorted by the time they have left. The other hosts (starting, or sharing some of their GPUs) are few; for
each of them the index keeps the GPUs that have room. Cells of several jobs have an index of their own,
`shared_cells`. `State` creates the index when a policy first uses it.

There are two such indexes. For policies that do not pause jobs, a paused resident counts like any other. For those that
do, only active residents count: a host is alone where its mates are paused.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from carpool.core.cluster import Cluster
from carpool.core.model import GpuId, Job, Status
from carpool.core.offers import Offers, offer_of
from carpool.core.record import JobRecord
from carpool.core.shared_cells import SharedCells, describe_cell
from carpool.core.view import CellKind, HostKind, OtherHost, SharedCell

MOST_TOUCHED = 10_000
"""Number of jobs that changed after which the index is brought up to date even if no policy asks for it."""


class LoneHosts:
    """The lone hosts of one kind, sorted by the time at which they end."""

    __slots__ = ("entries", "kind", "sample")

    def __init__(self, kind: HostKind, sample: Job) -> None:
        self.kind = kind
        self.sample = sample
        self.entries: list[tuple[float, int, JobRecord]] = []

    def ending_after(self, time: float) -> Iterator[JobRecord]:
        """Iterate over the hosts that end at this time or later, soonest first."""
        entries = self.entries
        for index in range(bisect_left(entries, (time,)), len(entries)):
            yield entries[index][2]


class PartlyFreeHosts:
    """The hosts of one kind that are not lone and have some GPUs to themselves."""

    __slots__ = ("_places", "running", "sample", "starting")

    def __init__(self, sample: Job) -> None:
        self.sample = sample
        self.running: dict[float, list[tuple[float, int, OtherHost]]] = {}
        """The running hosts by slow-down, with the time at which they end at their present pace and their `seq`; the
        soonest come first. At one slow-down that is the order of their time left alone, too, whatever the time."""
        self.starting: dict[int, OtherHost] = {}
        """The hosts that do not run yet, by `seq`."""
        self._places: dict[int, tuple[float, tuple[float, int, OtherHost]]] = {}

    def __len__(self) -> int:
        return len(self._places) + len(self.starting)

    def add(self, record: JobRecord, host: OtherHost) -> None:
        if not record.computing:
            self.starting[record.seq] = host
            return
        entry = (record.end(), record.seq, host)
        self._places[record.seq] = record.slowdown, entry
        entries = self.running.get(record.slowdown)
        if entries is None:
            self.running[record.slowdown] = [entry]
        else:
            insort(entries, entry)

    def discard(self, seq: int) -> None:
        if self.starting.pop(seq, None) is not None:
            return
        slowdown, entry = self._places.pop(seq)
        entries = self.running[slowdown]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self.running[slowdown]


class LoneEntry(NamedTuple):
    """The place of a lone host in the index."""

    group: LoneHosts
    entry: tuple[float, int, JobRecord]


class Hosts:
    """The index of all running jobs that may take a guest."""

    def __init__(self, cluster: Cluster, jobs_per_gpu: int, *, only_active: bool = False) -> None:
        self.cluster = cluster
        self.jobs_per_gpu = jobs_per_gpu
        self.only_active = only_active
        self.lone: dict[HostKind, LoneHosts] = {}
        self.others: dict[int, OtherHost] = {}
        """The hosts that are not lone, by `seq`."""
        self.partly_free: dict[HostKind, PartlyFreeHosts] = {}
        """The same hosts by kind."""
        self._lone_entries: dict[int, LoneEntry] = {}
        self._shared = SharedCells()
        self._offers: Offers | None = None
        self._touched: dict[int, JobRecord] = {}  # jobs to enter again, in the order of their last change

    @property
    def offers(self) -> Offers:
        """What each of these hosts offers; kept from the first use on."""
        if self._offers is None:
            self._offers = Offers()
            for group in self.lone.values():
                for _, seq, record in group.entries:
                    self._offers.by_seq[seq] = offer_of(record, group.kind)
            for seq, other in self.others.items():
                self._offers.by_seq[seq] = offer_of(other.record, other)
        return self._offers

    @property
    def cells(self) -> dict[CellKind, list[SharedCell]]:
        """The cells of several jobs with room for another, by kind."""
        return self._shared.by_kind

    @property
    def cell_kinds_version(self) -> int:
        """Number of times that a kind of cell appeared or disappeared."""
        return self._shared.kinds_version

    def touch(self, record: JobRecord) -> None:
        """Note that a job or its mates changed. Many jobs start and end before a policy asks for hosts."""
        self._touched.pop(record.seq, None)
        self._touched[record.seq] = record
        if len(self._touched) > MOST_TOUCHED:
            self.refresh()

    def refresh(self) -> "Hosts":
        """Enter the jobs again that were touched."""
        if self._touched:
            for record in self._touched.values():
                self._update(record)
            self._touched.clear()
        return self

    def _update(self, record: JobRecord) -> None:
        self._discard(record)
        if self.jobs_per_gpu > 2:
            self._shared.update(record, self.describe_cells(record))
        entry = self.describe(record) if record.gpus else None
        if self._offers is not None:
            self._offers.update(record, entry)
        if isinstance(entry, OtherHost):
            self._add_other(record, entry)
        elif entry is not None:
            self._add_lone(record, entry)

    def describe(self, record: JobRecord) -> HostKind | OtherHost | None:
        """Return the entry of a job in the index: the kind of a lone host, another host, or None."""
        if self.jobs_per_gpu == 1 or record.shape.exclusive or record.status is Status.CANCELLING:
            return None
        if record.batch is not None:  # a job whose batch the scheduler chose does not share
            return None
        if self.only_active and not record.active:
            return None
        job = record.job
        alone_on = self._alone_on(record)
        if not alone_on:
            return None
        kind = HostKind(
            job.model, job.batch, record.accumulation, job.max_slowdown, self._memory_left(record, alone_on)
        )
        if len(alone_on) == len(record.gpus) and record.computing:
            return kind
        return OtherHost(record, kind, alone_on)

    def _alone_on(self, record: JobRecord) -> tuple[GpuId, ...]:
        """Return the GPUs on which a job is the only one that counts, and another may join it."""
        cluster = self.cluster
        if self.only_active or cluster.topology.closed_gpus or cluster.resident_per_gpu == 1:
            return tuple([gpu for gpu in record.gpus if len(self._counted(gpu)) == 1 and self._has_room(gpu)])
        residents = cluster.residents  # the usual case, and asked often
        return tuple([gpu for gpu in record.gpus if len(residents[gpu]) == 1])

    def _counted(self, gpu: GpuId) -> tuple[JobRecord, ...]:
        """Return the residents of a GPU that count."""
        there = self.cluster.residents[gpu]
        if not self.only_active or len(there) == 1:
            return there
        return tuple([record for record in there if record.active])

    def _has_room(self, gpu: GpuId) -> bool:
        cluster, there = self.cluster, self.cluster.residents[gpu]
        if len(there) >= cluster.resident_per_gpu or cluster.topology.is_closed(gpu):
            return False
        return not any(record.shape.exclusive for record in there)  # a paused one keeps others out, too

    def _memory_left(self, record: JobRecord, alone_on: tuple[GpuId, ...]) -> int:
        topology = self.cluster.topology
        memory_of = topology.memory_of
        if self.only_active:
            used = self.cluster.memory
            return min([memory_of(gpu) - used[gpu] for gpu in alone_on])
        if topology.equal_memory:
            return topology.largest_memory - record.memory
        return min([memory_of(gpu) for gpu in alone_on]) - record.memory

    def describe_cells(self, record: JobRecord) -> list[tuple[CellKind, SharedCell]]:
        """Return the cells of several jobs in which a job is a resident and that have room for another."""
        if self.only_active and not record.active:
            return []
        found: dict[tuple[JobRecord, ...], list[GpuId]] = {}
        for gpu in record.gpus:
            there = self._counted(gpu)
            if 1 < len(there) < self.jobs_per_gpu and self._has_room(gpu):
                found.setdefault(there, []).append(gpu)
        memory_of, used = self.cluster.topology.memory_of, self.cluster.memory
        return [
            describe_cell(there, gpus, min([memory_of(gpu) - used[gpu] for gpu in gpus]))
            for there, gpus in found.items()
            if not any(other.status is Status.CANCELLING for other in there)
        ]

    def _add_lone(self, record: JobRecord, kind: HostKind) -> None:
        group = self.lone.get(kind)
        if group is None:
            group = self.lone[kind] = LoneHosts(kind, record.job)
        entry = (record.end(), record.seq, record)
        insort(group.entries, entry)
        self._lone_entries[record.seq] = LoneEntry(group, entry)

    def _add_other(self, record: JobRecord, entry: OtherHost) -> None:
        self.others[record.seq] = entry
        group = self.partly_free.get(entry.kind)
        if group is None:
            group = self.partly_free[entry.kind] = PartlyFreeHosts(record.job)
        group.add(record, entry)

    def _discard(self, record: JobRecord) -> None:
        place = self._lone_entries.pop(record.seq, None)
        if place is not None:
            entries = place.group.entries
            del entries[bisect_left(entries, place.entry)]
            if not entries:
                del self.lone[place.group.kind]
            return
        other = self.others.pop(record.seq, None)
        if other is None:
            return
        group = self.partly_free[other.kind]
        group.discard(record.seq)
        if not group:
            del self.partly_free[other.kind]
