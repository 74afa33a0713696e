"""What would the queue do? A quick estimate of how long everybody who waits will have to.

The joint rule asks it before and after a move that it considers: the difference is what the move costs or saves
those who wait.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

NEVER = (inf, 1 << 60)
"""So many GPUs, which nobody lives to see free."""

Waiting = tuple[int, float, int, int]
"""Of a job in the queue: the GPUs it wants, its time left alone, its order of submission, its priority. A plain tuple,
because many are made in every pass."""
_GPUS, LEFT, ORDER, PRIORITY = range(4)


class QueueEstimate:
    """Each in turn gets the GPUs that are free soonest, for itself. A copy goes on from where the original stands, so
    that two lines with the same beginning need not both be played from the start."""

    __slots__ = ("_given", "_moments", "_now", "_size", "_taken", "_total")

    def __init__(self, moments: Sequence[float], now: float) -> None:
        """`moments` are those from which the GPUs are free, soonest first."""
        self._moments = moments
        self._now = now
        self._taken = 0  # so many of the moments
        self._given = [NEVER]  # a heap: when somebody in the queue will have had how many GPUs
        self._total = 0.0
        self._size = 0

    def __len__(self) -> int:
        """How many stand in it."""
        return self._size

    def copy(self) -> "QueueEstimate":
        other = QueueEstimate.__new__(QueueEstimate)
        other._moments, other._now, other._taken = self._moments, self._now, self._taken
        other._given, other._total, other._size = self._given.copy(), self._total, self._size
        return other

    @property
    def sum(self) -> float:
        """The sum of completion times, from now on."""
        return self._total - self._now * self._size

    def add(self, waiting: Sequence[Waiting]) -> "QueueEstimate":
        moments, given, now = self._moments, self._given, self._now
        taken, total = self._taken, self._total
        last = len(moments)
        soonest, there = given[0]
        for gpus, left, _, _ in waiting:
            final = taken + gpus - 1
            if final < last and (start := moments[final]) < soonest:  # mostly: before anybody in the queue is done
                taken = final + 1
            else:
                need = gpus
                while need > 0:
                    if taken < last and moments[taken] < soonest:
                        start = moments[taken]
                        taken += 1
                        need -= 1
                    else:
                        start = soonest
                        if there > need:
                            given[0] = (soonest, there - need)
                        else:
                            heappop(given)
                        need -= there
                        soonest, there = given[0]
            end = (start if start > now else now) + left
            total += end
            heappush(given, (end, gpus))
            if end <= soonest:
                soonest, there = given[0]
        self._taken, self._total = taken, total
        self._size += len(waiting)
        return self


def line_up(moments: Sequence[float], waiting: Sequence[Waiting], now: float) -> float:
    """The sum of completion times, from now on, of those who wait."""
    return QueueEstimate(moments, now).add(waiting).sum
