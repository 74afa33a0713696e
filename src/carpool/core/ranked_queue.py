"""The pending jobs where shares, guarantees or caps count: the rank of a job's tenant comes before the policy's key.

All jobs of a bucket have the same tenant and so the same rank. When the rank of a tenant changes, only the places of
its buckets change, not the jobs in them. `State` uses this queue instead of `Queue` while `Tenants.on`.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice

from carpool.core.queue import Entry, Queue, Scan, waiting_job
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape
from carpool.core.tenants import Rank, Tenants
from carpool.core.view import WaitingJob

Head = tuple[int, Rank, Entry, Shape]
"""−priority, the rank, the first entry of a bucket (no two are equal), the bucket's shape."""
Place = tuple[int, Rank, Entry, Shape, int]
"""The same for any entry of a bucket, with its index there."""


class RankedQueue(Queue):
    """A queue whose buckets are sorted by priority, rank and first entry."""

    def __init__(self, tenants: Tenants) -> None:
        super().__init__()
        self._tenants = tenants
        self._heads: list[Head] = []
        self._head_of: dict[Shape, Head] = {}
        self._shapes: dict[str | None, dict[Shape, None]] = {}
        """The shapes of the jobs of each group."""
        self.entitled: dict[Shape, Head] = {}
        """The heads of the buckets whose groups are entitled to have their jobs started."""
        self._first: list[Entry] = []  # the beginning of the queue, as last asked

    @property
    def in_order(self) -> Sequence[Entry]:
        return self.first(len(self))

    @property
    def waiting(self) -> Sequence[WaitingJob]:
        return self.first_waiting(len(self))

    def first(self, number: int) -> Sequence[Entry]:
        number = min(number, len(self))
        if len(self._first) < number:
            scan: Iterator[JobRecord] = iter(self.scan())
            self._first = [record.queue_entry for record in islice(scan, number)]  # type: ignore[misc]
        return self._first[:number]

    def first_waiting(self, number: int) -> Sequence[WaitingJob]:
        return [waiting_job(record) for *_, record in self.first(number)]

    def add(self, record: JobRecord, key: tuple[float, ...]) -> None:
        super().add(record, key)
        self._first = []
        self._place(record.shape)

    def remove(self, record: JobRecord) -> None:
        shape = record.shape
        super().remove(record)
        self._first = []
        self._place(shape)

    def rerank(self) -> None:
        """Move the buckets whose rank is another one now."""
        changed = self._tenants.changed
        if changed:
            for group in sorted(changed):
                for shape in self._shapes.get(group, ()):
                    self._place(shape, anew=True)
            changed.clear()

    def heads(self) -> Sequence[Head]:
        """Return the first entries of all buckets, in order."""
        return self._heads

    def _place(self, shape: Shape, *, anew: bool = False) -> None:
        """Put a bucket where its first entry and its rank belong, or drop it if it is empty."""
        before, bucket = self._head_of.get(shape), self.buckets.get(shape)
        if bucket is None:
            if before is not None:
                del self._heads[bisect_left(self._heads, before)]
                del self._head_of[shape]
                del self._shapes[shape.group][shape]
                self.entitled.pop(shape, None)
            return
        if before is not None and not anew and before[2] is bucket[0]:
            return
        head = (-shape.priority, self._tenants.rank(shape), bucket[0], shape)
        if before is not None:
            if before[2] is head[2] and before[1] == head[1]:
                return
            del self._heads[bisect_left(self._heads, before)]
        else:
            self._shapes.setdefault(shape.group, {})[shape] = None
        insort(self._heads, head)
        self._head_of[shape] = head
        if not head[1][0]:
            self.entitled[shape] = head
        elif self.entitled:
            self.entitled.pop(shape, None)
        self._first = []

    def scan(
        self, largest: int | None = None, without: Container[Shape] = (), held: Mapping[str, int] | None = None
    ) -> Scan:
        heads = [head for head in self._heads if largest is None or head[3].gpus <= largest]
        if without:
            heads = [head for head in heads if head[3] not in without]
        return RankedScan(heads, self.buckets, self._tenants, {} if held is None else held)


class RankedScan(Scan):
    """An iteration over a ranked queue. The heads of its buckets are sorted, so that a bucket whose rest is skipped
    costs little, however many there are. A heap holds the buckets that have been reached and not been skipped.

    A bucket whose group is not entitled to another of its jobs, because of what it holds in the plan by then, is put
    back where it belongs without that.
    """

    __slots__ = ("_ahead", "_buckets", "_held", "_last", "_next_head", "_reached", "_tenants")

    def __init__(
        self, heads: list[Head], buckets: Mapping[Shape, list[Entry]], tenants: Tenants, held: Mapping[str, int]
    ) -> None:
        self._ahead = iter(heads)
        self._next_head = next(self._ahead, None)
        self._buckets = buckets
        self._tenants = tenants
        self._held = held
        self._reached: list[Place] = []
        self._last: Place | None = None
        self._skip = False

    def __next__(self) -> JobRecord:
        last = self._last
        if last is not None and not self._skip:
            number, rank, _, shape, index = last
            bucket = self._buckets[shape]
            if index + 1 < len(bucket):
                heappush(self._reached, (number, rank, bucket[index + 1], shape, index + 1))
        self._skip = False
        last = self._next_place()
        while not last[1][0] and self._held and (rank := self._rank(last[3])) != last[1]:
            number, _, entry, shape, index = last
            heappush(self._reached, (number, rank, entry, shape, index))
            last = self._next_place()
        self._last = last
        return last[2][3]

    def _next_place(self) -> Place:
        reached, head = self._reached, self._next_head
        if reached and (head is None or reached[0] < head):  # the first three of each decide: no two are equal
            return heappop(reached)
        if head is None:
            self._last = None
            raise StopIteration
        self._next_head = next(self._ahead, None)
        return (*head, 0)

    def _rank(self, shape: Shape) -> Rank:
        held = self._held.get(shape.group or "")
        return self._tenants.rank(shape, None if held is None else held + shape.gpus)
