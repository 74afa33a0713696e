"""What would the queue do? A quick estimate of how long everybody who waits will have to.

The joint rule asks it before and after a move that it considers: the difference is what the move costs or saves
those who wait.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import inf

from carpool.core.outlook import Block

NEVER: Block = (inf, 1 << 60)


Waiting = tuple[int, float, int, int]
"""Of a job in the queue: the GPUs it wants, its time left alone, its order of submission, its priority. A plain tuple,
because many are made in every pass."""
_GPUS, LEFT, ORDER, PRIORITY = range(4)


class Lineup:
    """Each in turn gets the GPUs that are free soonest, for itself. A copy goes on from where the original stands, so
    that two lines with the same beginning need not both be played from the start."""

    __slots__ = ("_blocks", "_count", "_following", "_given", "_moment", "_now", "_size", "_total")

    def __init__(self, blocks: Sequence[Block], now: float) -> None:
        self._blocks = blocks
        self._now = now
        self._following = 0
        self._moment, self._count = blocks[0] if blocks else NEVER
        self._given: list[Block] = []  # a heap: GPUs that somebody in the queue will have had
        self._total = 0.0
        self._size = 0

    def __len__(self) -> int:
        """How many stand in it."""
        return self._size

    def copy(self) -> "Lineup":
        other = Lineup.__new__(Lineup)
        other._blocks, other._now = self._blocks, self._now
        other._following, other._moment, other._count = self._following, self._moment, self._count
        other._given, other._total, other._size = self._given.copy(), self._total, self._size
        return other

    @property
    def sum(self) -> float:
        """The sum of completion times, from now on."""
        return self._total - self._now * self._size

    def add(self, waiting: Sequence[Waiting]) -> "Lineup":
        blocks, given, now = self._blocks, self._given, self._now
        following, moment, count, total = self._following, self._moment, self._count, self._total
        last = len(blocks)
        for gpus, left, _, _ in waiting:
            if given and given[0][1] == gpus and given[0][0] <= moment:  # often: all the GPUs of somebody before
                end = given[0][0] + left
                total += end
                heapreplace(given, (end, gpus))
                continue
            need = gpus
            while True:
                if given and given[0][0] <= moment:
                    start, there = given[0]
                    if there > need:
                        heapreplace(given, (start, there - need))
                        break
                    heappop(given)
                    if there == need:
                        break
                    need -= there
                else:
                    start = moment
                    if count > need:
                        count -= need
                        break
                    following += 1
                    short = count < need
                    need -= count
                    moment, count = blocks[following] if following < last else NEVER
                    if not short:
                        break
            end = (start if start > now else now) + left
            total += end
            heappush(given, (end, gpus))
        self._following, self._moment, self._count, self._total = following, moment, count, total
        self._size += len(waiting)
        return self


def line_up(blocks: Sequence[Block], waiting: Sequence[Waiting], now: float) -> float:
    """The sum of completion times, from now on, of those who wait."""
    return Lineup(blocks, now).add(waiting).sum
