"""Fits the performance model to measured rows: eq. 3, 4 and 7 to iteration times, a straight line to memory.

`carpool fit` calls it. The result is the `tasks` part of a profile, with the error of each fit. The fit is
deterministic: fixed starts, no random numbers. scipy is imported on first use, because only fitting needs it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from carpool.core.model import sub_batch
from carpool.core.perf import AllReduce, Placement
from carpool.errors import InputError
from carpool.profile.fields import ProfileError
from carpool.profile.rows import GIB, Run, read_solo
from carpool.profile.values import FitError, Memory, TaskProfile

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

LOG_ERROR_SCALE = 0.05
"""Error above which a row counts linearly instead of squared, so that a few outliers do not dominate the fit."""
DELTA_STARTS = (1.1, 2.0, 4.0)
DELTA_MOST = 10.0
"""Maximum δ. Above it eq. 7 is within 7 % of the maximum of compute and communication, so δ cannot be determined."""
KNEE_STARTS = (1.2, 4.0)
KNEE_MOST = 8.0
KNEE_SUB_BATCHES = 4
"""Minimum number of sub-batches from which a bend between two slopes can be fitted."""
TIE, CLEARLY = 1e-9, 1e-3
"""Relative improvement of the cost required of a later start, and of the scaled search over the one in seconds."""
NAMES = ("alpha", "beta", "intra_base", "intra_per_gpu", "inter_base", "inter_per_gpu", "delta", "knee")
LEAST, MOST = [0.0] * 6 + [1.0, 1.0], [math.inf] * 6 + [DELTA_MOST, KNEE_MOST]
ONE_GPU, ONE_NODE, SEVERAL_NODES = range(3)


def fit_task(runs: Sequence[Run], bend: bool = False) -> TaskProfile:
    """Fit the constants of one task to its rows. They are rounded before the error is computed, as they are stored.

    With `bend`, eq. 3 may have a knee: on a large GPU, small batches all take as long as launching their kernels.
    """
    name = runs[0].task
    if len({run.batch / run.accumulation for run in runs}) < 2:
        raise ProfileError(f"task {name}: rows of one batch size only; eq. 3 needs at least two")
    kinds = [_kind(run) for run in runs]
    solution = _solve(runs, kinds, bend and len({run.batch / run.accumulation for run in runs}) >= KNEE_SUB_BATCHES)
    constants = {key: significant(float(value)) for key, value in zip(NAMES, solution, strict=True)}
    task = TaskProfile(
        alpha_s=constants["alpha"],
        beta_s=constants["beta"],
        intra=AllReduce(constants["intra_base"], constants["intra_per_gpu"]),
        inter=AllReduce(constants["inter_base"], constants["inter_per_gpu"]),
        delta=constants["delta"],
        knee=constants["knee"] if constants["knee"] > 1 else None,
    )
    return replace(task, error=_error(task, runs, kinds))


def _kind(run: Run) -> int:
    return ONE_GPU if run.gpus == 1 else ONE_NODE if run.nodes == 1 else SEVERAL_NODES


def _solve(runs: Sequence[Run], kinds: Sequence[int], bend: bool) -> "Array":
    """Return the best of several starts. Constants that the rows cannot determine stay 0 (δ and knee: 1).

    The search in seconds is the one that made `t4`. Its derivatives use steps of about 10⁻⁸; with batches of 10⁵
    samples β is not larger than that, and the search stops early. It is therefore repeated with every constant in units
    of its start. That result is used only if it is clearly better, so that published constants do not change.
    """
    np, _ = scipy()
    residuals = _residuals(np, runs, kinds)
    determined = np.array([*_determined(runs, kinds), bend])
    deltas = DELTA_STARTS if determined[NAMES.index("delta")] else (1.0,)
    knees = KNEE_STARTS if bend else (1.0,)
    starts = [np.array([*_start(runs, delta), knee]) for delta, knee in product(deltas, knees)]
    straight = [_solve(runs, kinds, bend=False)] if bend else []  # first, because a knee must be better than none

    def cost(p: "Array") -> float:
        off = residuals(p)
        return 0.5 * float(off @ off)

    def best(found: Iterable["Array"], gain: float) -> "Array":
        """Return the first, unless a later one lowers the cost by that share."""
        return reduce(lambda one, other: other if cost(other) < cost(one) * (1 - gain) else one, found)

    plain = best([*straight, *(_descend(residuals, determined, start, np.ones(len(NAMES))) for start in starts)], TIE)
    scaled = best([_descend(residuals, determined, start, start) for start in starts], TIE)
    return best([plain, scaled], CLEARLY)


def _descend(residuals: Callable[["Array"], "Array"], determined: "Array", start: "Array", units: "Array") -> "Array":
    """Run least squares from a start, with constants in the given units."""
    np, least_squares = scipy()
    low, high, units = np.array(LEAST), np.array(MOST), units[determined]

    def full(x: "Array") -> "Array":
        p: Array = low.copy()
        p[determined] = x * units
        return p

    x0 = start[determined] / units
    found = least_squares(
        lambda x: residuals(full(x)),
        x0,
        bounds=(low[determined] / units, high[determined] / units),
        x_scale=x0,
        ftol=1e-12,
        xtol=1e-12,
        gtol=1e-12,
        max_nfev=1000,
    )
    return full(found.x)


def _residuals(np: Any, runs: Sequence[Run], kinds: Sequence[int]) -> Callable[["Array"], "Array"]:
    """Return a function that computes robust, weighted log errors of eq. 7.

    One GPU, one node and several nodes have the same total weight. Tables list hundreds of multi-node placements and
    few one-GPU rows. Without weights the fit would neglect the latter, although most jobs run on one GPU and only those
    rows determine α and β and therefore the cost of accumulation.
    """
    batch, accumulation, gpus, seconds = (
        np.array([getattr(run, key) for run in runs], dtype=float)
        for key in ("batch", "accumulation", "gpus", "seconds")
    )
    last = batch // accumulation  # as in core.perf: the micro-batch whose backward pass overlaps the all-reduce
    larger = batch - last * accumulation  # number of micro-batches with one sample more
    kind = np.array(kinds)
    share = np.bincount(kind, minlength=3)
    weight = len(runs) / (np.count_nonzero(share) * share[kind])

    def residuals(p: "Array") -> "Array":
        alpha, beta, intra, intra_slope, inter, inter_slope, delta, knee = p
        compute, more = (_mean_of_power(np, alpha, beta * samples, knee) for samples in (last, last + 1))  # eq. 3
        communicate = np.choose(  # eq. 4
            kind, [0.0 * gpus, intra + intra_slope * (gpus - 2), inter + inter_slope * (gpus - 2)]
        )
        overlapped = _mean_of_power(np, compute, communicate, delta)
        error = np.log((larger * more + (accumulation - larger - 1) * compute + overlapped) / seconds)  # eq. 7
        robust = np.sqrt(2 * (np.sqrt(1 + (error / LOG_ERROR_SCALE) ** 2) - 1))
        result: Array = np.sign(error) * np.sqrt(weight) * robust * LOG_ERROR_SCALE
        return result

    return residuals


def _mean_of_power(np: Any, a: Any, b: Any, power: float) -> Any:
    """Return (a^p + b^p)^(1/p) without overflow."""
    longer = np.maximum(np.maximum(a, b), 1e-300)
    return longer * (1 + (np.minimum(a, b) / longer) ** power) ** (1 / power)


def _determined(runs: Sequence[Run], kinds: Sequence[int]) -> list[bool]:
    """Return which of the constants the rows determine."""
    counts = [{run.gpus for run, kind in zip(runs, kinds, strict=True) if kind == which} for which in range(3)]
    node, nodes = counts[ONE_NODE], counts[SEVERAL_NODES]
    return [True, True, bool(node), len(node) > 1, bool(nodes), len(nodes) > 1, bool(node or nodes)]


def _start(runs: Sequence[Run], delta: float) -> list[float]:
    """Rough constants: half of the fastest iteration is fixed cost, the rest of the slowest grows with the batch."""
    fewest = min(run.gpus for run in runs)
    alone = [run for run in runs if run.gpus == fewest]
    per_step = [run.seconds / run.accumulation for run in alone]
    alpha = 0.5 * min(per_step)
    beta = max((s - alpha) / (run.batch / run.accumulation) for s, run in zip(per_step, alone, strict=True)) / 2
    typical = median(run.seconds for run in runs)
    return [alpha, beta, 0.2 * typical, 0.02 * typical, 0.5 * typical, 0.01 * typical, delta]


def _error(task: TaskProfile, runs: Sequence[Run], kinds: Sequence[int]) -> FitError:
    """Relative errors of the core's own eq. 7, over every row."""
    core = task.core()
    errors = [
        abs(core.iteration(run.batch, run.accumulation, Placement(run.gpus, run.nodes)) / run.seconds - 1)
        for run in runs
    ]

    def of(which: int) -> float | None:
        some = [error for error, kind in zip(errors, kinds, strict=True) if kind == which]
        return significant(median(some), 4) if some else None

    return FitError(
        median=significant(median(errors), 4),
        p90=significant(_quantile(errors, 0.9), 4),
        points=len(runs),
        median_one_gpu=of(ONE_GPU),
        median_one_node=of(ONE_NODE),
        median_several_nodes=of(SEVERAL_NODES),
    )


def fit_memory(
    paths: Sequence[str | Path], activation_scale: float = 2.0, context_gib: float = 0.7
) -> dict[str, Memory]:
    """Fit mem(b) = m0 + m1·b to the solo rows of measurement files.

    The line is fitted to rows without accumulation. There the gradients seem to be freed before the forward pass, so
    the peak does not include them: rows with accumulation lie above the line, for bert by the size of its gradients.
    The median of that excess, if positive, is added to the static part, because batches are split by accumulation.
    `activation_scale` multiplies the slope: 2 converts activations from 16 to 32 bits. Weights, gradients and optimizer
    state have 32 bits under autocast already.
    """
    runs = [run for path in paths for run in read_solo(path)]
    tasks = sorted({run.task for run in runs})
    return {
        task: memory_line([run for run in runs if run.task == task], activation_scale, round(context_gib * GIB))
        for task in tasks
    }


def memory_line(runs: Sequence[Run], activation_scale: float, context: int) -> Memory:
    plain = [(run.batch, run.memory_bytes or 0.0) for run in runs if run.accumulation == 1]
    if len({batch for batch, _ in plain}) < 2:
        raise ProfileError(
            f"task {runs[0].task}: memory of one batch size only; measure at least two, without accumulation"
        )
    intercept, slope = _line(plain)
    excess = [
        (run.memory_bytes or 0.0) - intercept - slope * sub_batch(run.batch, run.accumulation)
        for run in runs
        if run.accumulation > 1
    ]
    gradients = max(0, round(median(excess))) if excess else 0
    source = (
        f"{len(plain)} rows without accumulation: {intercept / GIB:.3f} GiB + {slope / GIB:.5g} GiB a sample; "
        f"static part + {gradients / GIB:.3f} GiB gradients kept during accumulation ({len(excess)} rows) "
        f"+ {context / GIB:.2f} GiB CUDA context; slope × {activation_scale:g} for activations"
    )
    return Memory(
        static_bytes=round(intercept) + gradients + context,
        bytes_per_sample=significant(slope * activation_scale),
        source=source,
        context_bytes=context,
        gradient_bytes=gradients,
    )


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line by least squares, with intercept and slope not below 0."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if slope < 0:
        return mean_y, 0.0
    intercept = mean_y - slope * mean_x
    if intercept < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return intercept, slope


def significant(value: float, digits: int = 6) -> float:
    """Round to significant digits. A value that a bound left just above 0 becomes 0."""
    return 0.0 if abs(value) < 1e-12 else float(f"{value:.{digits}g}")


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def scipy() -> tuple[Any, Any]:
    try:
        import numpy as np
        from scipy.optimize import least_squares
    except ImportError:
        raise InputError("fitting needs numpy and scipy; install them with: pip install 'carpool[fit]'") from None
    return np, least_squares
