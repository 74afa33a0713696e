"""Jobs in the order of a number that changes now and then: the base of several indexes."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from math import inf

from carpool.core.record import JobRecord

Entry = tuple[float, int, JobRecord]
"""The number of a job, its `seq` and the job."""


class SortedJobs:
    """Some jobs, each with a number, in the order of these numbers."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._places: dict[int, Entry] = {}

    def put(self, record: JobRecord, number: float | None) -> None:
        """Enter a job with its number, instead of what it had before; None: it is no longer among the jobs."""
        entries, seq = self.entries, record.seq
        place = self._places.get(seq)
        if place is not None:
            if place[0] == number:
                return
            del self._places[seq]
            del entries[bisect_left(entries, place)]
        if number is not None:
            entry = self._places[seq] = (number, seq, record)
            insort(entries, entry)

    def above(self, number: float) -> Sequence[Entry]:
        """Return the jobs with a larger number."""
        return self.entries[bisect_right(self.entries, (number, inf)) :]


class LongWaits:
    """The jobs that hold GPUs, by how long they waited for them. `State` creates it when a policy first uses it."""

    def __init__(self) -> None:
        self._by_wait = SortedJobs()

    def touch(self, record: JobRecord) -> None:
        """Enter a job again: it got GPUs or gave them back."""
        self._by_wait.put(record, record.waited_s if record.gpus else None)

    def longer_than(self, seconds: float) -> list[JobRecord]:
        """Return the jobs that waited for longer than this."""
        return [record for _, _, record in self._by_wait.above(seconds)]
