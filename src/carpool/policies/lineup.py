"""What would the queue do? A quick estimate of how long everybody who waits will have to.

The joint rule asks it before and after a move that it considers: the difference is what the move costs or saves
those who wait.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

from carpool.core.outlook import Block

NEVER: Block = (inf, 1 << 60)


class Waiting(NamedTuple):
    """Of a job in the queue: how many GPUs it wants, and its time left alone."""

    gpus: int
    left: float
    order: int
    priority: int


def line_up(blocks: Sequence[Block], waiting: Sequence[Waiting], now: float) -> float:
    """The sum of completion times, counted from now, if each in turn gets the GPUs that are free soonest, for itself."""
    following = 0
    moment, count = blocks[0] if blocks else NEVER
    given: list[Block] = []  # a heap: GPUs that somebody in the queue will have had
    total = 0.0
    for gpus, left, _, _ in waiting:
        need = gpus
        start = now
        while need:
            if given and given[0][0] <= moment:
                start, there = given[0]
                if there > need:
                    heapreplace(given, (start, there - need))
                    need = 0
                else:
                    heappop(given)
                    need -= there
            else:
                start = moment
                if count > need:
                    count -= need
                    need = 0
                else:
                    need -= count
                    following += 1
                    moment, count = blocks[following] if following < len(blocks) else NEVER
        end = (start if start > now else now) + left
        total += end
        heappush(given, (end, gpus))
    return total - now * len(waiting)
