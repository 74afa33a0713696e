"""Fits demands: the share of a GPU that each task needs, which bounds the slow-down of several jobs on a GPU.

At the largest measured batches, where a GPU is saturated, ξ of a pair is about max(1, u_a + u_b); the demands u are
fitted to that. At another batch the work of an iteration is proportional to the batch, so u follows from the iteration
time there. `carpool fit` calls it with the pairs of one mechanism and the solo runs.
"""

from collections.abc import Iterable, Sequence
from statistics import median

from carpool.profile.fit import scipy, significant
from carpool.profile.rows import Run
from carpool.profile.values import Demand, Pair

LIKELY = 0.8


def fit_demands(pairs: Sequence[Pair], runs: Iterable[Run]) -> dict[str, tuple[Demand, ...]]:
    """Return the demands of every task at every batch that ran alone; none if the pairs have no batches."""
    largest: dict[str, int] = {}
    for pair in pairs:
        for task, batch in ((pair.a, pair.batch_a), (pair.b, pair.batch_b)):
            largest[task] = max(largest.get(task, 0), batch)
    saturating = [p for p in pairs if (p.batch_a, p.batch_b) == (largest[p.a], largest[p.b]) and min(largest.values())]
    seconds = _seconds(runs)
    fitted = _fit(saturating)
    demands = {}
    for task, u in fitted.items():
        alone = seconds.get(task, {})
        if largest[task] in alone:
            sample_s = alone[largest[task]] / largest[task]
            demands[task] = tuple(
                Demand(saturating[0].mechanism, batch, significant(u * sample_s * batch / time, 4))
                for batch, time in sorted(alone.items())
            )
    return demands


def _seconds(runs: Iterable[Run]) -> dict[str, dict[int, float]]:
    """Return seconds per iteration on one GPU without accumulation, by task and batch."""
    times: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        if run.gpus == run.accumulation == 1:
            times.setdefault(run.task, {}).setdefault(run.batch, []).append(run.seconds)
    return {task: {batch: median(values) for batch, values in batches.items()} for task, batches in times.items()}


def _fit(pairs: Sequence[Pair]) -> dict[str, float]:
    names = sorted({task for pair in pairs for task in (pair.a, pair.b)})
    if not pairs or len(pairs) < len(names):
        return {}
    np, least_squares = scipy()
    a, b = [names.index(pair.a) for pair in pairs], [names.index(pair.b) for pair in pairs]
    xi_a, xi_b = np.array([pair.xi_a for pair in pairs]), np.array([pair.xi_b for pair in pairs])

    def residuals(u):  # type: ignore[no-untyped-def]
        together = np.maximum(1.0, u[a] + u[b])
        return np.concatenate([together - xi_a, together - xi_b])

    found = least_squares(residuals, np.full(len(names), LIKELY), bounds=(0.0, np.inf))
    return {name: float(u) for name, u in zip(names, found.x, strict=True)}
