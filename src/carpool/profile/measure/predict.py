"""Fits what predicts slow-downs that nobody measured: a task's busy share, κ of a mechanism, and demands for groups.

`conclude.py` calls it with the solo rows and the pairs of one mechanism. All fits are robust and deterministic; scipy
is imported on first use.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from carpool.core.model import sub_batch
from carpool.profile.fit import LOG_ERROR_SCALE, scipy, significant
from carpool.profile.rows import Run
from carpool.profile.values import Busy, Demand, Kappa, Pair

KAPPA_MOST = 5.0
DEMAND_LEAST, DEMAND_MOST = 0.05, 1.5
DEMAND_START = 0.6


def fit_busy(runs: Sequence[Run]) -> Busy | None:
    """t(b) = (α⁴ + (β·b)⁴)^¼ over the micro-steps; None where all rows are of one sub-batch."""
    steps = [(sub_batch(run.batch, run.accum), run.seconds / run.accum) for run in runs]
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
    """κ of one mechanism: robust least squares on log ξ, over both jobs of every pair; ξ below 1 counts as 1."""
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


def fit_demands(pairs: Sequence[Pair]) -> dict[str, Demand]:
    """max(1, u_a + u_b) fitted to the pairs in which every task is at its largest batch, where it saturates the GPU."""
    largest: dict[str, int] = {}
    for pair in pairs:
        for task, batch in ((pair.a, pair.batch_a), (pair.b, pair.batch_b)):
            largest[task] = max(largest.get(task, 0), batch)
    saturating = [p for p in pairs if (p.batch_a, p.batch_b) == (largest[p.a], largest[p.b])]
    names = sorted(largest)
    if not saturating:
        return {}
    np, least_squares = scipy()
    index = {name: i for i, name in enumerate(names)}
    a, b = ([index[getattr(pair, key)] for pair in saturating] for key in "ab")
    logs = np.log([math.sqrt(max(1.0, pair.xi_a) * max(1.0, pair.xi_b)) for pair in saturating])

    def residuals(demand: Any) -> object:
        return np.log(np.maximum(1.0, demand[a] + demand[b])) - logs

    start = np.full(len(names), DEMAND_START)
    found = least_squares(residuals, start, bounds=(DEMAND_LEAST, DEMAND_MOST), loss="soft_l1", f_scale=LOG_ERROR_SCALE)
    return {
        name: Demand(saturating[0].mechanism, largest[name], significant(float(found.x[i]), 4))
        for name, i in index.items()
    }
