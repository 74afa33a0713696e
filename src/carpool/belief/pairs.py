"""What is believed about the slow-down of pairs: a small Gaussian process over (own class, mate's class).

A *kind* is a model at about one sub-batch (to a power of two); its *family* is the model. log ξ of a cell (own kind,
mate's kind) is the prior mean plus a residual that is correlated between cells that have a kind or a family in common,
so one observation teaches about its relatives. Conditioning on a cell with noise variance n is the update
g = v/(v + n), m += g·(y − m), v ·= 1 − g, carried to all cells at once. Plain Python: the same bits everywhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import exp, exp2, log, log2, sqrt
from operator import mul
from typing import NamedTuple

from carpool.belief.speeds import NOTICEABLE

EPISODE_SD = 0.10
"""Of log ξ from one episode of two jobs on a GPU."""
MEASURED_SD = 0.06
"""Of log ξ of a pair that was measured on purpose, as profiles hold them."""
TOTAL = 0.27
"""The covariance of a cell with itself, before scaling: the sum of its eight parts."""
PRIOR_CELLS = 4
"""The residuals' variance starts at `TOTAL` with the weight of so many cells."""
UNKNOWN_XI = 1.75
LEAST_UNKNOWN_XI = 1.5
"""Where nothing is known of a pair: below 1.5 Theorem 1 always shares, and an optimist's constant is a disaster."""
UNKNOWN_WEIGHT = 2
NEW_FAMILY = 1.1
MOST_PRECISION = 4 / EPISODE_SD**2
"""Beyond four episodes old ones fade, so that a belief can follow a change."""
MOST_CELLS = 256
"""So many cells teach their relatives. Those that come later learn from their own episodes only."""


class Kind(NamedTuple):
    """What a job is to its mates."""

    family: str
    size: int
    """log2 of the sub-batch, rounded."""


Cell = tuple[Kind, Kind]


@lru_cache(maxsize=4096)
def kind_of(model: str, samples: int) -> Kind:
    return Kind(model, round(log2(max(1, samples))))


PARTS = (0.02, 0.04, 0.03, 0.07, 0.04, 0.02, 0.03, 0.02)
"""How much of the residuals' variance two cells have in common for each of the `traits` that they share."""


def traits(cell: Cell) -> tuple[object, ...]:
    """Own kind and family, the mate's kind and family, and their combinations."""
    a, b = cell
    return (a, a.family, b, b.family, (a.family, b.family), (a, b.family), (a.family, b), cell)


def covariance(one: tuple[object, ...], two: tuple[object, ...]) -> float:
    """Of the residuals of two cells with these traits, before scaling."""
    return sum([part for part, mine, its in zip(PARTS, one, two, strict=True) if mine == its])


@dataclass(slots=True)
class Seen:
    """All episodes of one cell in one: the mean of log ξ, and its precision (the inverse of its variance)."""

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
        """The y of an episode that was added turned out to be so much more."""
        self.mean += change * min(1.0, precision / self.precision)


@dataclass(slots=True)
class Row:
    """A cell that was observed: what is known of it, and what of that is in use."""

    cell: Cell
    traits: tuple[object, ...]
    known: Seen
    used: Seen

    @property
    def is_news(self) -> bool:
        """Is more known than is in use, enough to matter?"""
        more = self.known.precision > 1.9 * self.used.precision
        return more or abs(self.known.mean - self.used.mean) > NOTICEABLE


class PairBelief:
    """log ξ of any cell. Answers depend on what is in use only, and that changes in `take_up` alone."""

    def __init__(self, prior: Callable[[Cell], float | None]) -> None:
        self.prior = prior
        """log ξ from what is known of both jobs alone; None: nothing is."""
        self._priors: dict[Cell, float | None] = {}
        self.rows: dict[Cell, Row] = {}
        self._families: set[str] = set()
        self._teachers: list[Row] = []
        self._late: set[Cell] = set()
        self._unknown = log(UNKNOWN_XI)
        self._scale = 1.0
        self._factor: list[list[float]] = []  # Cholesky factor of the teachers' covariance, noise included, by rows
        self._weights: list[dict[object, float]] = [{} for _ in PARTS]
        """What each trait adds to log ξ, for each of the parts."""

    @classmethod
    def remembering(
        cls, prior: Callable[[Cell], float | None], rows: Iterable[tuple[Cell, Seen, Seen]]
    ) -> "PairBelief":
        """A belief that knows these cells: what is known of each, and what of that is in use."""
        belief = cls(prior)
        for cell, known, used in rows:
            belief.rows[cell] = Row(cell, traits(cell), known, used)
            belief._enlist(belief.rows[cell])
        belief._calibrate()
        belief._factorise(0)
        belief._weigh()
        return belief

    # ---- answers -----------------------------------------------------------------------------------------------------

    def xi(self, cell: Cell) -> float:
        """The believed slow-down: a family that nobody has seen share counts as somewhat worse."""
        xi = exp(self.mean(cell))
        if not self.has_seen(cell):
            xi *= NEW_FAMILY
        return max(1.0, xi)

    def has_seen(self, cell: Cell) -> bool:
        """Have both families been seen to share?"""
        return cell[0].family in self._families and cell[1].family in self._families

    def mean(self, cell: Cell) -> float:
        mean = self._prior(cell)
        for weights, trait in zip(self._weights, traits(cell), strict=True):
            mean += weights.get(trait, 0.0)
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
        solved = self._solve(traits(cell), len(self._teachers))
        explained: float = sum(map(mul, solved, solved))
        return self._scale * TOTAL - explained

    def _solve(self, cell_traits: tuple[object, ...], teachers: int) -> list[float]:
        """The factor's inverse times a cell's covariance with the first so many teachers."""
        solved: list[float] = []
        for number in range(teachers):
            known = self._factor[number]
            shared = self._scale * covariance(cell_traits, self._teachers[number].traits)
            solved.append((shared - sum(map(mul, known, solved))) / known[-1])
        return solved

    def _own(self, cell: Cell) -> Seen | None:
        """What a cell knows for itself that came too late to teach others."""
        return self.rows[cell].used if cell in self._late else None

    def _prior(self, cell: Cell) -> float:
        if cell not in self._priors:
            self._priors[cell] = self.prior(cell)
        known = self._priors[cell]
        return self._unknown if known is None else known

    # ---- learning ----------------------------------------------------------------------------------------------------

    def row(self, cell: Cell) -> Row:
        """The notes on a cell, to be added to; they count from the next `take_up` on."""
        row = self.rows.get(cell)
        if row is None:
            row = self.rows[cell] = Row(cell, traits(cell), Seen(), Seen())
        return row

    def take_up(self) -> None:
        """Let all that is known count."""
        changed = [n for n, row in enumerate(self._teachers) if row.used.precision != row.known.precision]
        first = changed[0] if changed else len(self._teachers)
        for row in self.rows.values():
            if row.used.precision == 0.0:
                self._enlist(row)
            row.used = Seen(row.known.mean, row.known.precision)
        if self._calibrate():
            first = 0
        self._factorise(first)
        self._weigh()

    def _enlist(self, row: Row) -> None:
        self._families.update((row.cell[0].family, row.cell[1].family))
        if len(self._teachers) < MOST_CELLS:
            self._teachers.append(row)
        else:
            self._late.add(row.cell)

    def _calibrate(self) -> bool:
        """Set what cells without a prior count as, and the size of residuals; tell whether the latter changed."""
        rows = [row for row in self.rows.values() if row.used.precision > 0.0]
        weights = [TOTAL / (TOTAL + row.used.variance) for row in rows]  # what is hardly known says little here
        means: float = sum(map(mul, weights, [row.used.mean for row in rows]))
        mean = (UNKNOWN_WEIGHT * log(UNKNOWN_XI) + means) / (UNKNOWN_WEIGHT + sum(weights))
        self._unknown = max(mean, log(LEAST_UNKNOWN_XI))
        residuals = [(row.used.mean - self._prior(row.cell)) ** 2 - row.used.variance for row in rows]
        squares: float = sum(map(mul, weights, [max(0.0, square) for square in residuals]))
        variance = (PRIOR_CELLS * TOTAL + squares) / (PRIOR_CELLS + sum(weights))
        scale = exp2(round(2.0 * log2(variance / TOTAL)) / 2.0)  # in steps, as every change costs a new factor
        changed = scale != self._scale
        self._scale = scale
        return changed

    def _factorise(self, first: int) -> None:
        """Compute the rows of the Cholesky factor from `first` on."""
        del self._factor[first:]
        for number in range(first, len(self._teachers)):
            row = self._teachers[number]
            solved = self._solve(row.traits, number)
            own = self._scale * TOTAL + row.used.variance
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
                weights[trait] = weights.get(trait, 0.0) + self._scale * part * weight
