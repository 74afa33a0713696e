"""A quick estimate of how long all waiting jobs will have to wait.

The joint rule makes it before and after a move that it considers: the difference is what the move costs or saves the
jobs that wait.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from carpool.core.view import WaitingJob

NEVER = (inf, 1 << 60)
"""Sentinel of the heap: more GPUs than any job wants, which are never free."""

GPUS, LEFT, SEQ, PRIORITY = range(4)
"""The places in a `WaitingJob`."""


class QueueEstimate:
    """Each job in turn gets the GPUs that are free soonest, for itself.

    A copy continues from where the original stands, so that two queues with the same beginning share its estimate.
    """

    __slots__ = ("_given", "_is_heap", "_moments", "_now", "_size", "_soonest", "_taken", "_total", "horizon")

    def __init__(self, moments: Sequence[float], now: float) -> None:
        """`moments` are the times from which the GPUs are free, soonest first."""
        self._moments = moments
        self._now = now
        self._taken = 0  # number of moments in use
        self._given = [NEVER]  # when a job of the queue gives back how many GPUs
        self._is_heap = False  # mostly, all jobs get GPUs before one gives some back: then the order does not matter
        self._soonest = inf
        self._total = 0.0
        self._size = 0
        self.horizon = -inf
        """The latest start: the estimate stays as it is where GPUs that are free later than this are free at another
        time that is later than this, too."""

    def __len__(self) -> int:
        """Number of jobs in the estimate."""
        return self._size

    def copy(self) -> "QueueEstimate":
        other = QueueEstimate.__new__(QueueEstimate)
        other._moments, other._now, other._taken = self._moments, self._now, self._taken
        other._given, other._is_heap, other._soonest = self._given.copy(), self._is_heap, self._soonest
        other._total, other._size = self._total, self._size
        other.horizon = self.horizon
        return other

    @property
    def sum(self) -> float:
        """Sum of completion times, counted from now."""
        return self._total - self._now * self._size

    def add(self, waiting: Sequence[WaitingJob]) -> "QueueEstimate":
        """Append jobs to the queue, and return the estimate itself."""
        moments, given, now = self._moments, self._given, self._now
        taken, total, horizon, soonest = self._taken, self._total, self.horizon, self._soonest
        last, is_heap = len(moments), self._is_heap
        for gpus, left, _, _ in waiting:
            final = taken + gpus - 1
            if final < last and (start := moments[final]) < soonest:
                taken = final + 1
            else:
                if not is_heap:
                    is_heap = True
                    heapify(given)
                need = gpus
                while need > 0:
                    if taken < last and moments[taken] < soonest:
                        start = moments[taken]
                        taken += 1
                        need -= 1
                    else:
                        start, there = given[0]
                        if there > need:
                            given[0] = (start, there - need)
                        else:
                            heappop(given)
                        need -= there
                        soonest = given[0][0]
            if start > horizon:
                horizon = start
            end = (start if start > now else now) + left
            total += end
            if end < soonest:
                soonest = end
            if is_heap:
                heappush(given, (end, gpus))
            else:
                given.append((end, gpus))
        self._soonest, self._is_heap = soonest, is_heap
        self._taken, self._total, self.horizon = taken, total, horizon
        self._size += len(waiting)
        return self


def queue_sum(moments: Sequence[float], waiting: Sequence[WaitingJob], now: float) -> float:
    """Return the sum of completion times of the waiting jobs, counted from now."""
    return QueueEstimate(moments, now).add(waiting).sum
