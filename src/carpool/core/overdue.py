"""The paused jobs by the moment at which they will have been paused for too long.

A paused job is overdue once its pause has lasted for a time that is the same for all jobs, `least`, and once it has
lost `patience` times its time left to waits and pauses. A policy asks for the first such moment after every step, and
`least` changes a little with every job that ends, so the index keeps an order from which all moments can be bounded.
`State` creates it when a policy first uses it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from math import inf

from carpool.core.record import JobRecord

MOST_DRIFT_S = 600.0
"""Change of `least`, in seconds, after which the jobs are sorted again."""
SLACK_S = 1e-3
"""Bound on what rounding can do to a moment."""


class OverdueJobs:
    """The paused jobs, sorted by the moment at which they are overdue, for the `least` of the last sorting.

    With another `least`, each moment moves by the difference at most.
    """

    def __init__(self, patience: float, paused: Mapping[int, JobRecord]) -> None:
        """`paused`: the paused jobs by `seq`, as they are whenever a job is touched."""
        self.patience = patience
        self._paused = paused
        self._least = 0.0
        self._places = {record.seq: self._entry(record) for record in paused.values()}
        self._entries = sorted(self._places.values())

    def touch(self, record: JobRecord) -> None:
        """Enter a job again: it was paused or resumed, or its time left changed."""
        place = self._places.pop(record.seq, None)
        if place is not None:
            del self._entries[bisect_left(self._entries, place)]
        if record.seq in self._paused:
            entry = self._places[record.seq] = self._entry(record)
            insort(self._entries, entry)

    def first(self, least: float) -> float:
        """Return when the first of the jobs will be overdue; inf: none is paused."""
        soonest = inf
        for bound, record in self._by_bound(least):
            if bound >= soonest:
                break
            soonest = min(soonest, self._moment(record, least))
        return soonest

    def by(self, now: float, least: float) -> list[JobRecord]:
        """Return the jobs that are overdue at this time, and those that will be within the rounding error."""
        found = []
        for bound, record in self._by_bound(least):
            if bound > now:
                break
            if self._moment(record, least) - SLACK_S <= now:
                found.append(record)
        return found

    def _by_bound(self, least: float) -> Iterator[tuple[float, JobRecord]]:
        """Yield the jobs with a time before which they are not overdue, in the order of that time."""
        drift = abs(least - self._least)
        if drift > MOST_DRIFT_S:
            self._least, drift = least, 0.0
            self._places = {seq: self._entry(record) for seq, (_, _, record) in self._places.items()}
            self._entries = sorted(self._places.values())
        for moment, _, record in self._entries:
            yield moment - drift - SLACK_S, record

    def _entry(self, record: JobRecord) -> tuple[float, int, JobRecord]:
        return self._moment(record, self._least), record.seq, record

    def _moment(self, record: JobRecord, least: float) -> float:
        """Return when a job will be overdue if it stays paused."""
        since = record.paused_since
        lost = record.waited_s + record.paused_s
        return max(since + least, since - lost + self.patience * record.alone_left(since))
