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


def line_up(blocks: Sequence[Block], waiting: Sequence[Waiting], now: float) -> float:
    """The sum of completion times, from now on, if each in turn gets the GPUs that are free soonest, for itself."""
    following, last = 0, len(blocks)
    moment, count = blocks[0] if blocks else NEVER
    given: list[Block] = []  # a heap: GPUs that somebody in the queue will have had
    total = 0.0
    for gpus, left, _, _ in waiting:
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
    return total - now * len(waiting)
