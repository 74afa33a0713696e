"""Running jobs that may take a guest, indexed so that a policy finds the best one without looking at all.

A *lone* host runs at full speed with all its GPUs to itself: the moment at which it would end alone is fixed, so
lone hosts of one kind stay sorted by the time they have left. The others (starting up, or sharing some of their GPUs)
are few; for each of them the index keeps the GPUs that have room. The state fills it once a policy asks for it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from carpool.core.model import GpuId, Job
from carpool.core.record import JobRecord


class HostKind(NamedTuple):
    """What matters of a lone host to a guest, besides the time it has left."""

    model: str
    batch: int
    accum: int
    max_slowdown: float | None
    memory_left: int
    """On the smallest of its GPUs."""


class LoneHosts:
    """The lone hosts of one kind, by the time at which they end."""

    __slots__ = ("entries", "kind", "sample")

    def __init__(self, kind: HostKind, sample: Job) -> None:
        self.kind = kind
        self.sample = sample
        self.entries: list[tuple[float, int, JobRecord]] = []

    def ending_after(self, time: float) -> Iterator[JobRecord]:
        entries = self.entries
        for index in range(bisect_left(entries, (time,)), len(entries)):
            yield entries[index][2]


class LonePlace(NamedTuple):
    """Where a lone host stands in the index."""

    group: LoneHosts
    entry: tuple[float, int, JobRecord]


class OtherHost(NamedTuple):
    """A job with room on some of its GPUs that is not a lone host."""

    record: JobRecord
    kind: HostKind
    alone_on: tuple[GpuId, ...]
    """Its GPUs that hold nobody else."""
    crowds: tuple[tuple[tuple[JobRecord, ...], tuple[GpuId, ...]], ...]
    """Its GPUs that hold several jobs and have room for more, by who is there; each such set is listed under the
    first job in it only."""


class Hosts:
    def __init__(self) -> None:
        self.lone: dict[HostKind, LoneHosts] = {}
        self.others: dict[int, OtherHost] = {}  # by order of submission

    def add_lone(self, record: JobRecord, kind: HostKind) -> None:
        group = self.lone.get(kind)
        if group is None:
            group = self.lone[kind] = LoneHosts(kind, record.job)
        entry = (record.end(), record.order, record)
        insort(group.entries, entry)
        record.index_entry = LonePlace(group, entry)

    def add_other(self, host: OtherHost) -> None:
        self.others[host.record.order] = host
        host.record.index_entry = host

    def discard(self, record: JobRecord) -> None:
        place = record.index_entry
        record.index_entry = None
        if isinstance(place, LonePlace):
            entries = place.group.entries
            del entries[bisect_left(entries, place.entry)]
            if not entries:
                del self.lone[place.group.kind]
        elif place is not None:
            del self.others[record.order]
