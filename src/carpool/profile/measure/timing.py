"""Computes iteration times from a worker's reports: the mean over a window, and its error.

A report contains the number of the last iteration and the time of its end, so a window's mean is exact however rarely
the report is read. `session.py` collects the stamps and asks after each one whether the window may end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import stdev

Stamp = tuple[int, float]
"""An iteration and the time at which it ended."""

PARTS = 10
FEWEST_PARTS = 4
STUDENT = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""97.5 % quantiles of Student's distribution, by degrees of freedom."""
UNSURE = 9.99
"""Error assigned to a window that is too short to estimate it."""


@dataclass(frozen=True, slots=True)
class Timing:
    iter_s: float
    error: float
    iterations: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Windows:
    """The length of a window: at least `least_s`, then until every job's error is below `precision`, at most `most_s`.

    A job so slow that it does not end `iterations` within `most_s` is waited for, up to `patience_s`.
    """

    least_s: float = 1.2
    most_s: float = 3.0
    precision: float = 0.02
    warm_up_s: float = 0.4
    warm_up_iterations: int = 2
    iterations: int = 5
    patience_s: float = 60.0

    def over(self, seconds: float, timings: Sequence[Timing | None]) -> bool:
        known = [timing for timing in timings if timing is not None and timing.iterations >= self.iterations]
        if len(known) < len(timings):
            return seconds >= self.patience_s
        precise = all(timing.error <= self.precision for timing in known)
        return seconds >= (self.least_s if precise else self.most_s)


def timing(stamps: Sequence[Stamp]) -> Timing | None:
    """Compute the timing of one window, or None if no iteration ended in it."""
    if len(stamps) < 2:
        return None
    (first, began), (last, ended) = stamps[0], stamps[-1]
    if last <= first or ended <= began:
        return None
    mean = (ended - began) / (last - first)
    return Timing(mean, _error(stamps, mean), last - first, ended - began)


def _error(stamps: Sequence[Stamp], mean: float) -> float:
    """Estimate the relative error from the spread of the means of up to ten parts of equal length."""
    parts = min(PARTS, len(stamps) - 1)
    if parts < FEWEST_PARTS:
        return UNSURE
    at = [stamps[round(i * (len(stamps) - 1) / parts)] for i in range(parts + 1)]
    means = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairwise(at)]
    return STUDENT[parts - 1] * stdev(means) / math.sqrt(parts) / mean
