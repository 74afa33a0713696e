"""When GPUs become free, and when a job whose slow-down changes on the way is done.

`end_times` uses it to predict the ends of running jobs; policies use it for their own what-ifs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

Until = tuple[float, float]
"""A time and the slow-down that lasts until then."""

Change = tuple[float, float, int]
"""A time from which GPUs are free, the time from which they will be free instead, and the number of these GPUs."""


class Availability:
    """The times from which GPUs are free, one for each GPU, soonest first."""

    __slots__ = ("moments",)

    def __init__(self, moments: list[float] | None = None) -> None:
        self.moments = [] if moments is None else moments

    def copy(self) -> "Availability":
        """Return a copy to be changed independently."""
        return Availability(self.moments.copy())

    def add(self, moment: float, gpus: int) -> None:
        """Add GPUs that are free from this time on."""
        moments = self.moments
        if gpus == 1:
            insort(moments, moment)
        else:
            index = bisect_left(moments, moment)
            moments[index:index] = [moment] * gpus

    def remove(self, moment: float, gpus: int) -> None:
        """Remove GPUs that were added with exactly this time."""
        moments = self.moments
        index = bisect_left(moments, moment)
        if gpus and (index + gpus > len(moments) or moments[index + gpus - 1] != moment):
            raise ValueError(f"fewer than {gpus} GPUs become free at {moment}")
        del moments[index : index + gpus]

    def change(self, changes: Iterable[Change]) -> None:
        """Let GPUs be free at other times."""
        for before, after, gpus in changes:
            self.remove(before, gpus)
            self.add(after, gpus)

    def first_after(self, changes: Sequence[Change], number: int) -> list[float]:
        """Return the first `number` moments, or a few more, as they would be with some changes.

        The changes remove at most as many moments as they name GPUs, so no later moments are needed.
        """
        first = Availability(self.moments[: number + sum([gpus for _, _, gpus in changes])])
        for before, after, gpus in changes:
            index = bisect_left(first.moments, before)
            del first.moments[index : index + gpus]
            first.add(after, gpus)
        return first.moments


def finish(start: float, work: float, steps: Iterable[Until]) -> float:
    """Return when a job that has `work` seconds left alone at `start` is done, under slow-downs that end on the way.

    Where several hold at the same time the worst counts, because a gang waits for its slowest worker.
    """
    ordered = sorted(steps)
    if len(ordered) == 1:  # mostly: one mate
        until, slowdown = ordered[0][0], max(1.0, ordered[0][1])
        done = max(0.0, until - start) / slowdown
        return start + work * slowdown if done >= work else max(start, until) + (work - done)
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
    """Return the slow-downs, scaled so that the present one is the one that was observed."""
    if believed == observed or believed <= 1.0:
        return list(steps)
    factor = (observed - 1.0) / (believed - 1.0)
    return [(until, 1.0 + (xi - 1.0) * factor) for until, xi in steps]
