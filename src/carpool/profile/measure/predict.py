"""Fits the predictors of slow-downs that were not measured: a task's busy share, and κ of a mechanism.

`conclude.py` calls it with the solo rows and the pairs of one mechanism. All fits are robust and deterministic. scipy
is imported on first use.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from carpool.core.model import sub_batch
from carpool.profile.fit import LOG_ERROR_SCALE, scipy, significant
from carpool.profile.rows import Run
from carpool.profile.values import Busy, Kappa, Pair

KAPPA_MOST = 5.0


def fit_busy(runs: Sequence[Run]) -> Busy | None:
    """Fit t(b) = (α⁴ + (β·b)⁴)^¼ to the micro-batches, or return None if all rows have the same sub-batch."""
    steps = [(sub_batch(run.batch, run.accumulation), run.seconds / run.accumulation) for run in runs]
    if len({b for b, _ in steps}) < 2:
        return None
    np, least_squares = scipy()
    samples, seconds = (np.array(column, dtype=float) for column in zip(*steps, strict=True))

    def residuals(logs: object) -> object:
        alpha, beta = np.exp(logs)
        return np.log((alpha**4 + (beta * samples) ** 4) ** 0.25 / seconds)

    start = np.log([seconds.min(), (seconds / samples).min()])
    found = least_squares(residuals, start, loss="soft_l1", f_scale=LOG_ERROR_SCALE)
    alpha, beta = np.exp(found.x)
    return Busy(significant(float(alpha)), significant(float(beta)))


def fit_kappa(pairs: Sequence[Pair], busy: Mapping[str, Busy]) -> Kappa | None:
    """Fit κ of one mechanism by robust least squares on log ξ of both jobs of every pair. ξ below 1 counts as 1."""
    rows = []
    for pair in pairs:
        if pair.a in busy and pair.b in busy:
            product = busy[pair.a].share(pair.batch_a) * busy[pair.b].share(pair.batch_b)
            rows += [(product, max(1.0, xi)) for xi in (pair.xi_a, pair.xi_b)]
    if not rows:
        return None
    np, least_squares = scipy()
    products, xis = (np.array(column) for column in zip(*rows, strict=True))

    def residuals(kappa: object) -> object:
        return np.log((1 + kappa * products) / xis)

    found = least_squares(residuals, [0.5], bounds=(0, KAPPA_MOST), loss="soft_l1", f_scale=LOG_ERROR_SCALE)
    kappa = significant(float(found.x[0]), 4)
    error = median(abs((1 + kappa * product) / xi - 1) for product, xi in rows)
    return Kappa(kappa, significant(error, 3), len(pairs))
