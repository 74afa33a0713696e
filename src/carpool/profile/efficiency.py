"""Fits how a task's statistical efficiency changes along its training, from measured gradient statistics.

`carpool fit --efficiency FILE` comes here. The file has one row for each task, batch and epoch, with the squared norm and the
variance of the gradient; a whole training becomes a few phases with one noise scale each, which is all that a
profile keeps. No random numbers: phases come from dynamic programming over epochs, noise scales from a fixed grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.core.elastic import Phase, Scaling
from carpool.core.model import sub_batch
from carpool.profile.fields import ProfileError
from carpool.profile.rows import Run, number, read_table, whole
from carpool.profile.values import FitError

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

COLUMNS = ("app", "batch", "progress", "grad_sqr", "grad_var")
PHASES = 8
"""So many phases at most: a ninth lowers the error of no task by more than 0.1 points of efficiency."""
GRID = 400
"""Noise scales that are tried, from a tenth of the initial batch to a thousand times the largest."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Gradient statistics of one epoch at one batch: variance over squared norm, in units of the initial batch."""

    progress: float
    ratio: float


def read_epochs(path: str | Path) -> dict[str, dict[int, list[Epoch]]]:
    """task -> batch -> epochs in order."""
    found: dict[str, dict[int, list[Epoch]]] = {}
    for where, row in read_table(path, COLUMNS, "an efficiency table"):
        progress, square, variance = [_from_zero(row[column], f"{where}: {column}") for column in COLUMNS[2:]]
        ratio = variance / square if square > 0.0 else float("inf")
        batches = found.setdefault(row["app"].strip(), {})
        batches.setdefault(whole(row["batch"], f"{where}: batch"), []).append(Epoch(progress, ratio))
    return found


def _from_zero(text: str, where: str) -> float:
    value = number(text, where)
    if value < 0.0:
        raise ProfileError(f"{where}: {text.strip()} is below 0; measure it again")
    return value


def fit_scaling(
    batches: Mapping[int, Sequence[Epoch]], runs: Sequence[Run], most_per_gpu: int | None, most_gpus: int | None
) -> tuple[Scaling, FitError]:
    """The limits of a task and its phases, and how far efficiencies are off. Micro-steps are as small and as large as
    in the timed rows, unless `most_per_gpu` says less."""
    import numpy as np

    sizes = sorted(batches)
    epochs = min(len(batches[size]) for size in sizes)
    initial = sizes[0]
    scale = np.array(sizes) / initial
    ratio = np.array([[epoch.ratio for epoch in batches[size][:epochs]] for size in sizes]).T
    with np.errstate(invalid="ignore"):
        measured = (ratio + 1.0) / (ratio + scale)
    measured[~np.isfinite(ratio)] = 1.0
    noises = np.geomspace(initial / 10, sizes[-1] * 1000, GRID)
    fitted = (noises[:, None] + initial) / (noises[:, None] + np.array(sizes))
    errors = ((measured[:, None, :] - fitted[None, :, :]) ** 2).sum(axis=2)  # by epoch and noise
    ends, chosen = _phases(errors, min(PHASES, epochs))
    whole = batches[initial][epochs - 1].progress
    phases = [
        Phase(round(batches[initial][end - 1].progress / whole, 5), float(f"{noises[noise]:.4g}"))
        for end, noise in zip(ends, chosen, strict=True)
    ]
    lengths = np.diff([0, *ends])
    off = np.abs(measured - np.repeat(fitted[chosen], lengths, axis=0))[:, 1:]  # at the initial batch it is 1 anyway
    error = FitError(round(float(np.median(off)), 5), round(float(np.quantile(off, 0.9)), 5), off.size)
    timed = [sub_batch(run.batch, run.accum) for run in runs]
    most = max(timed) if most_per_gpu is None else most_per_gpu
    return Scaling(initial, sizes[-1], min(*timed, most), most, tuple(phases), most_gpus), error


def _phases(errors: "NDArray[float64]", count: int) -> tuple[list[int], list[int]]:
    """Cut the epochs into `count` phases with the least error: where each ends, and which noise it has."""
    import numpy as np

    epochs = len(errors)
    summed = np.vstack([np.zeros(errors.shape[1]), np.cumsum(errors, axis=0)])
    spans = [[summed[end] - summed[begin] for end in range(epochs + 1)] for begin in range(epochs)]
    cost = np.array([[span.min() if end > begin else 0.0 for end, span in enumerate(row)] for begin, row in enumerate(spans)])
    best = cost[0].copy()
    cuts: list[list[int]] = []
    for _ in range(count - 1):
        before = [
            min(range(1, end), key=lambda cut, end=end: best[cut] + cost[cut][end], default=0) for end in range(epochs + 1)
        ]
        best = np.array([best[cut] + cost[cut][end] if cut else np.inf for end, cut in enumerate(before)])
        cuts.append(before)
    ends = [epochs]
    for before in reversed(cuts):
        ends.append(before[ends[-1]])
    ends.reverse()
    begins = [0, *ends[:-1]]
    return ends, [int(spans[begin][end].argmin()) for begin, end in zip(begins, ends, strict=True)]
