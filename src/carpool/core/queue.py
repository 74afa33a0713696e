"""The pending jobs, bucketed by shape and sorted in the policy's order within each bucket.

A scan yields them in the overall order. When a job finds no place, the policy tells the scan to pass over all
jobs alike, so that a pass costs as much as there are shapes, however many jobs wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain

from carpool.core.record import JobRecord
from carpool.core.shapes import Shape

Entry = tuple[int, tuple[float, ...], int, JobRecord]  # −priority, the policy's key, order of submission, the job


class Queue:
    def __init__(self) -> None:
        self.buckets: dict[Shape, list[Entry]] = {}
        self._size = 0
        self._in_order: list[Entry] | None = None
        self._by_age: list[tuple[int, JobRecord]] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self.scan())

    @property
    def in_order(self) -> Sequence[Entry]:
        """All of them in the overall order. Kept from the first time that somebody asks, so that policies that look at
        one job of a shape do not pay for it."""
        if self._in_order is None:
            self._in_order = sorted(chain.from_iterable(self.buckets.values()))
        return self._in_order

    @property
    def by_age(self) -> Sequence[tuple[int, JobRecord]]:
        """All of them by their order of submission; kept likewise."""
        if self._by_age is None:
            self._by_age = sorted((record.seq, record) for *_, record in self.in_order)
        return self._by_age

    def add(self, record: JobRecord, key: tuple[float, ...]) -> None:
        entry = record.queue_entry = (-record.shape.priority, key, record.seq, record)
        bucket = self.buckets.get(record.shape)
        if bucket is None:
            self.buckets[record.shape] = [entry]
        else:
            insort(bucket, entry)
        self._size += 1
        if self._in_order is not None:
            insort(self._in_order, entry)
        if self._by_age is not None:
            insort(self._by_age, (record.seq, record))

    def remove(self, record: JobRecord) -> None:
        bucket = self.buckets[record.shape]
        entry: Entry = record.queue_entry  # type: ignore[assignment]
        if bucket[0] is entry:
            del bucket[0]
        else:
            del bucket[bisect_left(bucket, entry)]
        if not bucket:
            del self.buckets[record.shape]
        record.queue_entry = None
        self._size -= 1
        if self._in_order is not None:
            del self._in_order[bisect_left(self._in_order, entry)]
        if self._by_age is not None:
            del self._by_age[bisect_left(self._by_age, (record.seq,))]

    def scan(self, largest: int | None = None) -> "Scan":
        """All pending jobs in order, except gangs of more than `largest` GPUs."""
        return Scan([b for s, b in self.buckets.items() if largest is None or s.gpus <= largest])


class Scan:
    """An iteration over the queue that can leave out the rest of a bucket."""

    __slots__ = ("_heads", "_open", "_skip")

    def __init__(self, buckets: list[list[Entry]]) -> None:
        self._heads = [(bucket[0], 0, bucket) for bucket in buckets]
        heapify(self._heads)
        self._open = False  # the head has been handed out
        self._skip = False

    def __iter__(self) -> "Scan":
        return self

    def __next__(self) -> JobRecord:
        heads = self._heads
        if self._open:
            _, index, bucket = heads[0]
            if self._skip or index + 1 == len(bucket):
                heappop(heads)
            else:
                heapreplace(heads, (bucket[index + 1], index + 1, bucket))
            self._skip = False
        if not heads:
            self._open = False
            raise StopIteration
        self._open = True
        return heads[0][0][3]

    def skip_alike(self) -> None:
        """Pass over the other jobs of the shape that was just handed out."""
        self._skip = True
