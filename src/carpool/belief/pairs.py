"""The belief about slow-downs of pairs: a small Gaussian process over pairs of job classes.

A *job class* is a model at a sub-batch rounded to a power of two; its *family* is the model. A *cell* is a pair (own
class, mate's class). log ξ of a cell is a prior mean plus a residual. Residuals of cells that share a class or a family
are correlated, so one observation also informs related cells. Conditioning on a cell with noise variance n is the
update g = v/(v + n), m += g·(y − m), v ·= 1 − g, applied to all cells at once. The code is plain Python so that results
are bit-identical everywhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import exp, exp2, log, log2, sqrt
from operator import mul
from typing import NamedTuple

from carpool.belief.speeds import NOTICEABLE

FOUR_IN_FIVE = 1.2816
"""Number of standard deviations around the mean that contain four out of five normally distributed values."""
EPISODE_SD = 0.10
"""Standard deviation of log ξ from one episode of two jobs on a GPU."""
MEASURED_SD = 0.06
"""Standard deviation of log ξ of a pair in a profile."""
TOTAL = 0.27
"""Variance of a cell's residual before scaling: the sum of its eight parts."""
PRIOR_CELLS = 4
"""Weight, in cells, of `TOTAL` as the prior of the residuals' variance."""
UNKNOWN_WEIGHT = 2
"""Weight, in cells, of `UnknownPairs` when it is re-estimated."""
NEW_FAMILY = 1.1
"""Factor on ξ of a family that was never observed sharing."""
MOST_PRECISION = 4 / EPISODE_SD**2
"""Maximum precision of a cell, that of four episodes. Older episodes fade, so that a belief can follow a change."""
MOST_CELLS = 256
"""Maximum number of cells that inform related cells. Later cells learn from their own episodes only."""


class UnknownPairs(NamedTuple):
    """Mean and standard deviation of log ξ over pairs about which nothing is known."""

    mean: float = log(1.75)
    sd: float = sqrt(TOTAL)


class JobClass(NamedTuple):
    """A family at a sub-batch size: what a job looks like to its mates."""

    family: str
    size: int
    """Rounded log2 of the sub-batch."""


Cell = tuple[JobClass, JobClass]


SCRIPT = "script:"
"""Beginning of the models of jobs that are known by what they run."""


def is_script(model: str) -> bool:
    """Return whether a job with this model is known by what it runs."""
    return model.startswith(SCRIPT)


def is_python_script(model: str) -> bool:
    """Return whether a job with this model runs a Python script, which is most likely a training."""
    return is_script(model) and ".py:" in model


@lru_cache(maxsize=4096)
def job_class(model: str, samples: int) -> JobClass:
    """Return the class of a model at a sub-batch. The part of a script's model after a slash decides only how long a
    job takes (`carpool.live.service.families`)."""
    if model.startswith(SCRIPT):
        model = model.partition("/")[0]
    return JobClass(model, round(log2(max(1, samples))))


PARTS = (0.02, 0.04, 0.03, 0.07, 0.04, 0.02, 0.03, 0.02)
"""Covariance that two cells have for each of the `traits` that they share."""


def traits(cell: Cell) -> tuple[object, ...]:
    """Return the own class and family, the mate's class and family, and their combinations."""
    a, b = cell
    return (a, a.family, b, b.family, (a.family, b.family), (a, b.family), (a.family, b), cell)


def covariance(one: tuple[object, ...], two: tuple[object, ...]) -> float:
    """Return the covariance of the residuals of two cells with these traits, before scaling."""
    return sum([part for part, mine, its in zip(PARTS, one, two, strict=True) if mine == its])


@dataclass(slots=True)
class Evidence:
    """All episodes of one cell combined: the mean of log ξ and its precision (1 ÷ variance)."""

    mean: float = 0.0
    precision: float = 0.0

    def add(self, y: float, precision: float) -> None:
        self.precision += precision
        self.mean += (y - self.mean) * precision / self.precision
        self.precision = min(self.precision, MOST_PRECISION)

    @property
    def variance(self) -> float:
        return 1.0 / self.precision

    def revise(self, change: float, precision: float) -> None:
        """Correct the mean after an episode's log ξ changed by `change`."""
        self.mean += change * min(1.0, precision / self.precision)


@dataclass(slots=True)
class CellEvidence:
    """The evidence on one cell: all of it, and the part that answers are based on."""

    cell: Cell
    traits: tuple[object, ...]
    known: Evidence
    used: Evidence
    spread: float = 1.0
    """Standard deviation of its residual, as a multiple of the usual one; see `PairBelief.spread`."""

    @property
    def is_news(self) -> bool:
        """Whether the evidence differs enough from what is in use to matter."""
        more = self.known.precision > 1.9 * self.used.precision
        return more or abs(self.known.mean - self.used.mean) > NOTICEABLE


class PairBelief:
    """The belief about log ξ of any cell. Answers change only in `take_up`."""

    def __init__(
        self,
        prior: Callable[[Cell], float | None],
        unknown: UnknownPairs | None = None,
        prior_sd: Callable[[Cell], float | None] = lambda cell: None,
    ) -> None:
        self.prior = prior
        """log ξ from what is known of both jobs alone, or None."""
        self.unknown = unknown or UnknownPairs()
        """Mean and spread of pairs without a prior, before any observation."""
        self.prior_sd = prior_sd
        """Standard deviation of that log ξ; None: as observed residuals have it."""
        self._priors: dict[Cell, float | None] = {}
        self.rows: dict[Cell, CellEvidence] = {}
        self._families: set[str] = set()
        self._teachers: list[CellEvidence] = []
        self._late: set[Cell] = set()
        self._unknown = self.unknown
        self._scale = 1.0
        self._factor: list[list[float]] = []  # Cholesky factor of the teachers' covariance, noise included, by rows
        self._weights: list[dict[object, float]] = [{} for _ in PARTS]
        """Contribution of each trait to log ξ, for each of the parts."""

    @classmethod
    def remembering(cls, like: "PairBelief", rows: Iterable[tuple[Cell, Evidence, Evidence]]) -> "PairBelief":
        """Make a belief with the prior of another and the given evidence: for each cell all of it, and what is used."""
        belief = cls(like.prior, like.unknown, like.prior_sd)
        for cell, known, used in rows:
            belief.rows[cell] = CellEvidence(cell, traits(cell), known, used)
            belief._enlist(belief.rows[cell])
        belief._calibrate()
        belief._factorise(0)
        belief._weigh()
        return belief

    # ---- answers -----------------------------------------------------------------------------------------------------

    def xi(self, cell: Cell) -> float:
        """Return the believed slow-down, increased a little for families never observed sharing."""
        xi = exp(self.mean(cell))
        if not self.has_seen(cell):
            xi *= NEW_FAMILY
        return max(1.0, xi)

    def has_seen(self, cell: Cell) -> bool:
        """Return whether both families were observed sharing."""
        return cell[0].family in self._families and cell[1].family in self._families

    def is_observed(self, cell: Cell) -> bool:
        """Return whether answers about this very cell are based on an observation of it."""
        row = self.rows.get(cell)
        return row is not None and row.used.precision > 0.0

    def mean(self, cell: Cell) -> float:
        mean, spread = self._prior(cell), self.spread(cell)
        for weights, trait in zip(self._weights, traits(cell), strict=True):
            mean += spread * weights.get(trait, 0.0)
        own = self._own(cell)
        if own is None:
            return mean
        variance = self._taught_variance(cell)
        return mean + variance / (variance + own.variance) * (own.mean - mean)

    def variance(self, cell: Cell) -> float:
        variance = self._taught_variance(cell)
        own = self._own(cell)
        return variance if own is None else variance / (1.0 + variance * own.precision)

    def _taught_variance(self, cell: Cell) -> float:
        spread = self.spread(cell)
        solved = self._solve(traits(cell), spread, len(self._teachers))
        explained: float = sum(map(mul, solved, solved))
        return spread**2 * self._scale * TOTAL - explained

    def spread(self, cell: Cell) -> float:
        """Return the standard deviation of a cell's residual before observations, as a multiple of the usual one.

        Residuals of priors that err more, or less, are the same process on another scale.
        """
        sd = self._unknown.sd if self._known_prior(cell) is None else self.prior_sd(cell)
        return 1.0 if sd is None else sd / sqrt(self._scale * TOTAL)

    def _solve(self, cell_traits: tuple[object, ...], spread: float, teachers: int) -> list[float]:
        """Return the factor's inverse times a cell's covariance with the first `teachers` teachers."""
        solved: list[float] = []
        for number in range(teachers):
            known, teacher = self._factor[number], self._teachers[number]
            shared = spread * teacher.spread * self._scale * covariance(cell_traits, teacher.traits)
            solved.append((shared - sum(map(mul, known, solved))) / known[-1])
        return solved

    def _own(self, cell: Cell) -> Evidence | None:
        """Return the evidence of a cell that is not a teacher, if it has any."""
        return self.rows[cell].used if cell in self._late else None

    def _prior(self, cell: Cell) -> float:
        known = self._known_prior(cell)
        return self._unknown.mean if known is None else known

    def _known_prior(self, cell: Cell) -> float | None:
        if cell not in self._priors:
            self._priors[cell] = self.prior(cell)
        return self._priors[cell]

    def forget_priors(self) -> None:
        """Ask for all priors again, because what is known of jobs alone changed."""
        self._priors.clear()
        if self._teachers:
            self._calibrate()
            self._factorise(0)
            self._weigh()

    # ---- learning ----------------------------------------------------------------------------------------------------

    def row(self, cell: Cell) -> CellEvidence:
        """Return the evidence on a cell, to add to. It takes effect at the next `take_up`."""
        row = self.rows.get(cell)
        if row is None:
            row = self.rows[cell] = CellEvidence(cell, traits(cell), Evidence(), Evidence())
        return row

    def take_up(self) -> None:
        """Base answers on all evidence."""
        changed = [n for n, row in enumerate(self._teachers) if row.used.precision != row.known.precision]
        first = changed[0] if changed else len(self._teachers)
        for row in self.rows.values():
            if row.used.precision == 0.0:
                self._enlist(row)
            row.used = Evidence(row.known.mean, row.known.precision)
        if self._calibrate():
            first = 0
        self._factorise(first)
        self._weigh()

    def _enlist(self, row: CellEvidence) -> None:
        self._families.update((row.cell[0].family, row.cell[1].family))
        if len(self._teachers) < MOST_CELLS:
            self._teachers.append(row)
        else:
            self._late.add(row.cell)

    def _calibrate(self) -> bool:
        """Re-estimate the prior of unknown cells and the scale of residuals. Return whether rows of the factor that
        were computed before have changed."""
        before = self._unknown.sd
        rows = [row for row in self.rows.values() if row.used.precision > 0.0]
        weights = [TOTAL / (TOTAL + row.used.variance) for row in rows]  # uncertain cells count little
        means: float = sum(map(mul, weights, [row.used.mean for row in rows]))
        count = sum(weights)
        mean = (UNKNOWN_WEIGHT * self.unknown.mean + means) / (UNKNOWN_WEIGHT + count)
        apart: float = sum(map(mul, weights, [(row.used.mean - mean) ** 2 for row in rows]))
        sd = sqrt((PRIOR_CELLS * self.unknown.sd**2 + apart) / (PRIOR_CELLS + count))
        self._unknown = UnknownPairs(mean, exp2(round(4.0 * log2(sd)) / 4.0))  # in steps, as the scale below
        usual = [self._known_prior(row.cell) is not None and self.prior_sd(row.cell) is None for row in rows]
        weights = [weight for weight, one in zip(weights, usual, strict=True) if one]
        rows = [row for row, one in zip(rows, usual, strict=True) if one]
        residuals = [(row.used.mean - self._prior(row.cell)) ** 2 - row.used.variance for row in rows]
        squares: float = sum(map(mul, weights, [max(0.0, square) for square in residuals]))
        variance = (PRIOR_CELLS * TOTAL + squares) / (PRIOR_CELLS + sum(weights))
        scale = exp2(round(2.0 * log2(variance / TOTAL)) / 2.0)  # in steps, because every change requires a new factor
        changed = scale != self._scale or self._unknown.sd != before
        self._scale = scale
        return changed

    def _factorise(self, first: int) -> None:
        """Compute the rows of the Cholesky factor from row `first`."""
        del self._factor[first:]
        for number in range(first, len(self._teachers)):
            row = self._teachers[number]
            row.spread = self.spread(row.cell)
            solved = self._solve(row.traits, row.spread, number)
            own = row.spread**2 * self._scale * TOTAL + row.used.variance
            self._factor.append([*solved, sqrt(own - sum(map(mul, solved, solved)))])

    def _weigh(self) -> None:
        """Solve (covariance + noise) · weights = residuals, and add the weights up by trait."""
        solved: list[float] = []
        for row, known in zip(self._teachers, self._factor, strict=True):
            residual = row.used.mean - self._prior(row.cell)
            solved.append((residual - sum(map(mul, known, solved))) / known[-1])
        for number in range(len(solved) - 1, -1, -1):
            known = self._factor[number]
            weight = solved[number] = solved[number] / known[-1]
            for index in range(number):
                solved[index] -= known[index] * weight
        self._weights = [{} for _ in PARTS]
        for row, weight in zip(self._teachers, solved, strict=True):
            for part, weights, trait in zip(PARTS, self._weights, row.traits, strict=True):
                weights[trait] = weights.get(trait, 0.0) + row.spread * self._scale * part * weight
