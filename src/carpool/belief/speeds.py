"""How long an iteration takes alone: measured times by model, batch, accumulation and placement.

A measured place answers for itself. Other places of the same model take what was predicted for them, times how wrong
the predictions of its measured places were. The belief feeds this from jobs that report while alone, and from those
that end without ever having reported.
"""

from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import NamedTuple

ALONE_SD = 0.10
"""Of the logarithm of a prediction, before anybody has checked one."""
CHECKS = 5
"""The weight of that, in checked predictions."""
NOTICEABLE = 0.01
"""A change of a logarithm below this is kept for later: it is not worth a new look at everything."""


class Place(NamedTuple):
    """What an iteration time belongs to."""

    model: str
    batch: int
    accumulation: int
    gpus: int
    nodes: int


@dataclass(slots=True)
class Times:
    """Logarithms of times, one for each launch, as count, mean and sum of squared deviations."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    used: float | None = None
    """The mean that answers go by: small changes are kept for later."""

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    def take_back(self, value: float) -> None:
        """Undo `add`: the launch that it came from says something better now."""
        self.count -= 1
        if not self.count:
            self.mean = self.squares = 0.0
            return
        after = value - self.mean
        self.mean -= after / self.count
        self.squares = max(0.0, self.squares - after * (value - self.mean))

    def take_up(self) -> bool:
        """Let the mean count if it moved enough; tell whether it did."""
        if self.used is not None and abs(self.mean - self.used) <= NOTICEABLE:
            return False
        self.used = self.mean
        return True

    @property
    def sd(self) -> float:
        """Of one more of them; the prior's weight keeps it from vanishing after two that agree."""
        return sqrt((CHECKS * ALONE_SD**2 + self.squares) / (CHECKS + max(0, self.count - 1)))


@dataclass(slots=True)
class Speeds:
    """Measured iteration times, and how wrong predictions were."""

    times: dict[Place, Times] = field(default_factory=dict)
    ratios: dict[str, Times] = field(default_factory=dict)
    """By model: measured over predicted."""
    checked: int = 0
    squared_error: float = 0.0

    @property
    def error_sd(self) -> float:
        """How wrong a prediction is, typically: of the logarithm of the iteration time alone."""
        return sqrt((CHECKS * ALONE_SD**2 + self.squared_error) / (CHECKS + self.checked))

    def check(self, measured_s: float, predicted_s: float) -> None:
        """A job whose speed was predicted has been measured for the first time."""
        self.checked += 1
        self.squared_error += log(measured_s / predicted_s) ** 2

    def seconds(self, place: Place, predicted_s: float) -> float | None:
        """From what was measured; None: nothing of this model was."""
        measured = self.times.get(place)
        if measured is not None and measured.used is not None:
            return exp(measured.used)
        ratio = self.ratios.get(place.model)
        return None if ratio is None or ratio.used is None else predicted_s * exp(ratio.used)

    def add(self, place: Place, log_s: float, predicted_s: float, instead_of: float | None = None) -> bool:
        """A launch took this long for an iteration, `instead_of` what it seemed to take before. Did answers change?"""
        changed = False
        for times, shift in (
            (self.times.setdefault(place, Times()), 0.0),
            (self.ratios.setdefault(place.model, Times()), log(predicted_s)),
        ):
            if instead_of is not None:
                times.take_back(instead_of - shift)
            times.add(log_s - shift)
            changed |= times.take_up()
        return changed
