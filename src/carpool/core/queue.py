"""The pending jobs: one bucket for each shape, sorted by the policy's sort key.

A scan returns them in the overall order. Where a job finds no place, the policy lets the scan skip all jobs of its
shape, so that the cost of a scan depends on the number of shapes, not on the number of jobs.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain

from carpool.core.record import JobRecord
from carpool.core.shapes import Shape
from carpool.core.view import WaitingJob

Entry = tuple[int, tuple[float, ...], int, JobRecord]
"""−priority, the policy's sort key, the job's `seq`, the job."""

Impatience = tuple[float, int, JobRecord]
"""When a job's patience ends, the job's `seq`, the job."""


class Queue:
    """The pending jobs. Only `queueing` adds and removes them."""

    def __init__(self) -> None:
        self.buckets: dict[Shape, list[Entry]] = {}
        self._size = 0
        self._in_order: list[Entry] | None = None
        self._waiting: list[WaitingJob] | None = None
        self._patience = 0.0
        self._by_patience: list[Impatience] | None = None
        self._impatience: dict[int, Impatience] = {}  # the entries of `_by_patience`, by `seq`

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self.scan())

    @property
    def in_order(self) -> Sequence[Entry]:
        """All entries in the overall order. The list is kept from the first use on, so that policies that look at one
        job of a shape do not pay for it."""
        if self._in_order is None:
            self._in_order = sorted(chain.from_iterable(self.buckets.values()))
        return self._in_order

    @property
    def waiting(self) -> Sequence[WaitingJob]:
        """What the jobs wait for, in the overall order; kept from the first use on."""
        if self._waiting is None:
            self._waiting = [waiting_job(record) for *_, record in self.in_order]
        return self._waiting

    def first(self, number: int) -> Sequence[Entry]:
        """Return the first entries in the overall order."""
        return self.in_order[:number]

    def first_waiting(self, number: int) -> Sequence[WaitingJob]:
        """Return what the first jobs wait for."""
        return self.waiting[:number]

    def forget_waiting(self) -> None:
        """Forget what the jobs wait for: their expected start-up changed."""
        self._waiting = None

    def forget_orders(self) -> None:
        """Forget the lists that are kept in order: so many jobs are about to move that sorting again costs less."""
        self._in_order = self._waiting = self._by_patience = None

    def by_patience(self, patience: float) -> Sequence[Impatience]:
        """All jobs in the order of the moments at which their submission will be `patience` times their time left ago;
        kept from the first use on."""
        if self._by_patience is None or patience != self._patience:
            self._patience = patience
            records = [entry[3] for bucket in self.buckets.values() for entry in bucket]
            self._impatience = {record.seq: impatience(record, patience) for record in records}
            self._by_patience = sorted(self._impatience.values())
        return self._by_patience

    def add(self, record: JobRecord, key: tuple[float, ...]) -> None:
        """Add a job with its sort key."""
        entry = record.queue_entry = (-record.shape.priority, key, record.seq, record)
        bucket = self.buckets.get(record.shape)
        if bucket is None:
            self.buckets[record.shape] = [entry]
        else:
            insort(bucket, entry)
        self._size += 1
        if self._in_order is not None:
            place = bisect_left(self._in_order, entry)
            self._in_order.insert(place, entry)
            if self._waiting is not None:
                self._waiting.insert(place, waiting_job(record))
        if self._by_patience is not None:
            entered = self._impatience[record.seq] = impatience(record, self._patience)
            insort(self._by_patience, entered)

    def remove(self, record: JobRecord) -> None:
        """Remove a job."""
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
            place = bisect_left(self._in_order, entry)
            del self._in_order[place]
            if self._waiting is not None:
                del self._waiting[place]
        if self._by_patience is not None:
            del self._by_patience[bisect_left(self._by_patience, self._impatience.pop(record.seq))]

    def scan(
        self, largest: int | None = None, without: Container[Shape] = (), held: Mapping[str, int] | None = None
    ) -> "Scan":
        """Iterate over the pending jobs in order, except gangs of more than `largest` GPUs and some shapes. What groups
        hold does not count here."""
        buckets = self.buckets.items()
        if largest is None:
            return Scan([bucket for shape, bucket in buckets if shape not in without])
        return Scan([bucket for shape, bucket in buckets if shape.gpus <= largest and shape not in without])


def waiting_job(record: JobRecord) -> WaitingJob:
    """Return what a pending job waits for."""
    left = (record.job.iterations - record.done) * record.alone_iteration_s
    return record.shape.gpus, left + record.startup_s, record.seq, record.shape.priority


def impatience(record: JobRecord, patience: float) -> Impatience:
    """Return when a pending job will have been submitted `patience` times its time left ago."""
    left = (record.job.iterations - record.done) * record.alone_iteration_s
    return record.job.submitted + patience * left, record.seq, record


class Scan:
    """An iteration over the queue that can skip the rest of a bucket."""

    __slots__ = ("_heads", "_open", "_skip")

    def __init__(self, buckets: list[list[Entry]]) -> None:
        self._heads = [(bucket[0], 0, bucket) for bucket in buckets]
        heapify(self._heads)
        self._open = False  # the first head has been returned
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
        """Skip the other jobs of the shape that was returned last."""
        self._skip = True
