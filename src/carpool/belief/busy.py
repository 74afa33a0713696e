"""How busy a job keeps its GPU, and what that says about a pair nobody has seen together.

`busy` is the share of an iteration in which the GPU works, from a sweep over batches of a job that runs alone. Two jobs
disturb each other the more, the busier both are: ξ = 1 + κ·u_a·u_b. Not to be confused with the `demand` by which
groups of three and more are judged. The belief takes its prior from here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

KAPPA = {"time-slicing": 1.15, "mps": 0.46, "unknown": 1.0}
"""Fitted to pairs on one H200. Where nobody knows the mechanism, two busy jobs count as alternating: ξ = 2."""
HUBER = 0.15
"""An error in log ξ beyond this counts linearly: a few odd pairs must not bend κ."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """t(B) = (α⁴ + (βB)⁴)^¼: flat while launching kernels takes the time, then proportional to the batch."""

    alpha_s: float
    beta_s: float

    def time(self, samples: float) -> float:
        return (self.alpha_s**4 + (self.beta_s * samples) ** 4) ** 0.25

    def busy(self, samples: float) -> float:
        """u in (0, 1]."""
        work = self.beta_s * samples
        return work / self.time(samples) if work > 0.0 else 0.0


def fit_sweep(points: Iterable[tuple[int, float]]) -> Sweep | None:
    """The sweep through (batch, seconds) by least squares on log t; None with fewer than three batches."""
    measured = [(samples, seconds) for samples, seconds in points if samples > 0 and seconds > 0.0]
    if len({samples for samples, _ in measured}) < 3:
        return None

    def at(log_knee: float) -> tuple[float, float]:
        """Squared error and log β where α = β·knee; β has a closed form then."""
        knee = exp(log_knee)
        rest = [log(seconds) - 0.25 * log(knee**4 + float(samples) ** 4) for samples, seconds in measured]
        log_beta = sum(rest) / len(rest)
        return sum((r - log_beta) ** 2 for r in rest), log_beta

    sizes = [samples for samples, _ in measured]
    log_knee = _least(lambda x: at(x)[0], log(min(sizes)) - 3.0, log(max(sizes)) + 3.0)
    beta = exp(at(log_knee)[1])
    return Sweep(beta * exp(log_knee), beta)


class SeenPair(NamedTuple):
    busy: float
    mate_busy: float
    xi: float


def predicted(kappa: float, busy: float, mate_busy: float) -> float:
    return 1.0 + kappa * busy * mate_busy


def fit_kappa(pairs: Sequence[SeenPair]) -> float | None:
    """κ of one GPU model and mechanism, by robust least squares on log ξ; None without pairs."""
    if not pairs:
        return None

    def cost(kappa: float) -> float:
        errors = (abs(log(max(1.0, p.xi)) - log(predicted(kappa, p.busy, p.mate_busy))) for p in pairs)
        return sum(e * e if e <= HUBER else HUBER * (2.0 * e - HUBER) for e in errors)

    return _least(cost, 0.0, 10.0)


def _least(cost: Callable[[float], float], low: float, high: float, parts: int = 60) -> float:
    """Where a function of one variable is least: a grid, then ever finer ones around its best point."""
    while high - low > 1e-7 * max(1.0, abs(low)):
        step = (high - low) / parts
        best = min((low + step * n for n in range(parts + 1)), key=cost)
        low, high = best - step, best + step
    return (low + high) / 2.0
