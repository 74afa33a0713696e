"""Measured iteration times of jobs alone, by model, batch, accumulation and placement.

A configuration that was measured has its own time. For other configurations of the same model, the predicted time is
corrected by the average error of the predictions that were checked. The belief adds times from jobs that report while
they run alone, and from jobs that end without a report.
"""

from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import NamedTuple

ALONE_SD = 0.10
"""Prior standard deviation of the logarithm of a predicted time."""
CHECKS = 5
"""Weight of that prior, as a number of checked predictions."""
NOTICEABLE = 0.01
"""Smallest change of a logarithm that takes effect at once: a smaller one is not worth recomputing all answers."""

NOTICEABLE_STARTUP_S = 0.1
"""Shortest start-up that counts, and smallest change of one that takes effect at once."""
LATEST = 0.3
"""Weight of the latest start in the mean of a family."""


class SpeedKey(NamedTuple):
    """The configuration that an iteration time belongs to."""

    model: str
    batch: int
    accumulation: int
    gpus: int
    nodes: int


@dataclass(slots=True)
class LogTimes:
    """Logarithms of times, one per attempt, as count, mean and sum of squared deviations."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    used: float | None = None
    """The mean that answers are based on. It lags behind `mean` by small changes."""

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    def take_back(self, value: float) -> None:
        """Undo `add`, because the attempt that it came from has a better value now."""
        self.count -= 1
        if not self.count:
            self.mean = self.squares = 0.0
            return
        after = value - self.mean
        self.mean -= after / self.count
        self.squares = max(0.0, self.squares - after * (value - self.mean))

    def take_up(self) -> bool:
        """Use the current mean if it moved enough. Return whether it did."""
        if self.used is not None and abs(self.mean - self.used) <= NOTICEABLE:
            return False
        self.used = self.mean
        return True

    @property
    def sd(self) -> float:
        """Standard deviation of one more time. The prior keeps it from vanishing after two equal times."""
        return sqrt((CHECKS * ALONE_SD**2 + self.squares) / (CHECKS + max(0, self.count - 1)))


@dataclass(slots=True)
class StartUps:
    """Seconds from a claim to the first iteration, by family and over all jobs. The latest ones count most."""

    mean_s: dict[str, float] = field(default_factory=dict)
    overall_s: float | None = None
    """Mean over the jobs of all families; None: no job has started."""
    silent: set[str] = field(default_factory=set)
    """Families whose latest job did not report when it was up."""

    def add(self, family: str, seconds: float) -> bool:
        """Add what one start took, unless it took no time. Return whether an answer changed noticeably."""
        if seconds < NOTICEABLE_STARTUP_S:
            return False
        before, overall = self.mean_s.get(family), self.overall_s
        self.mean_s[family] = seconds if before is None else before + LATEST * (seconds - before)
        self.overall_s = seconds if overall is None else overall + LATEST * (seconds - overall)
        moved = abs(self.mean_s[family] - (overall or 0.0 if before is None else before))
        return moved > NOTICEABLE_STARTUP_S or abs(self.overall_s - (overall or 0.0)) > NOTICEABLE_STARTUP_S


@dataclass(slots=True)
class Speeds:
    """Measured iteration times, and how wrong predictions were."""

    times: dict[SpeedKey, LogTimes] = field(default_factory=dict)
    ratios: dict[str, LogTimes] = field(default_factory=dict)
    """Measured ÷ predicted time, by model."""
    checked: int = 0
    squared_error: float = 0.0

    @property
    def error_sd(self) -> float:
        """Typical error of a prediction: standard deviation of the logarithm of the iteration time alone."""
        return sqrt((CHECKS * ALONE_SD**2 + self.squared_error) / (CHECKS + self.checked))

    def check(self, measured_s: float, predicted_s: float) -> None:
        """Record the first measurement of a job whose time was predicted."""
        self.checked += 1
        self.squared_error += log(measured_s / predicted_s) ** 2

    def seconds(self, place: SpeedKey, predicted_s: float) -> float | None:
        """Return the iteration time derived from measurements, or None if this model was never measured."""
        measured = self.times.get(place)
        if measured is not None and measured.used is not None:
            return exp(measured.used)
        ratio = self.ratios.get(place.model)
        return None if ratio is None or ratio.used is None else predicted_s * exp(ratio.used)

    def add(self, place: SpeedKey, log_s: float, predicted_s: float, instead_of: float | None = None) -> bool:
        """Add an attempt's time, replacing its earlier value `instead_of`. Return whether answers changed."""
        changed = False
        for times, shift in (
            (self.times.setdefault(place, LogTimes()), 0.0),
            (self.ratios.setdefault(place.model, LogTimes()), log(predicted_s)),
        ):
            if instead_of is not None:
                times.take_back(instead_of - shift)
            times.add(log_s - shift)
            changed |= times.take_up()
        return changed
