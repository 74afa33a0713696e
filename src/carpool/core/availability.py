"""When GPUs become free, and when a job is done that slows down and speeds up on the way.

`end_times` predicts with it for all running jobs; policies use it for their own what-ifs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

Until = tuple[float, float]
"""A moment, and the slow-down that lasts until then."""


class Availability:
    """The moments from which GPUs are free, one for each GPU, soonest first."""

    __slots__ = ("moments",)

    def __init__(self, moments: list[float] | None = None) -> None:
        self.moments = [] if moments is None else moments

    def copy(self) -> "Availability":
        return Availability(self.moments.copy())

    def add(self, moment: float, gpus: int) -> None:
        moments = self.moments
        if gpus == 1:
            insort(moments, moment)
        else:
            index = bisect_left(moments, moment)
            moments[index:index] = [moment] * gpus

    def remove(self, moment: float, gpus: int) -> None:
        """Take out GPUs that are there with exactly this moment."""
        moments = self.moments
        index = bisect_left(moments, moment)
        if gpus and (index + gpus > len(moments) or moments[index + gpus - 1] != moment):
            raise ValueError(f"{gpus} GPUs more than there are at {moment}")
        del moments[index : index + gpus]


def finish(start: float, work: float, steps: Iterable[Until]) -> float:
    """When `work` seconds of running alone are done, from `start` on, under slow-downs that last until some moment.

    Of several that hold at a time the worst counts, because a gang waits for its slowest worker.
    """
    ordered = sorted(steps)
    worst = [1.0] * (len(ordered) + 1)
    for index in range(len(ordered) - 1, -1, -1):
        worst[index] = max(worst[index + 1], ordered[index][1])
    for (until, _), slowdown in zip(ordered, worst, strict=False):
        if until > start:
            done = (until - start) / slowdown
            if done >= work:
                return start + work * slowdown
            work -= done
            start = until
    return start + work


def corrected(steps: Sequence[Until], believed: float, observed: float) -> list[Until]:
    """The slow-downs, stretched or shrunk so that the present one is what was observed."""
    if believed == observed or believed <= 1.0:
        return list(steps)
    factor = (observed - 1.0) / (believed - 1.0)
    return [(until, 1.0 + (xi - 1.0) * factor) for until, xi in steps]
