"""Fits how a task's statistical efficiency changes during its training, from the progress of each epoch.

`carpool fit --efficiency FILE` calls it. The file has one row for each task, batch and epoch: the progress so far, in
iterations of the smallest batch as the gradient noise scale counts them, and the iterations that were run. A whole
training becomes a few phases with one noise scale each, which is what a profile stores. The fit uses no random numbers:
phases come from dynamic programming over epochs, noise scales from a fixed grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.core.elastic import NoisePhase, Scaling
from carpool.core.model import sub_batch
from carpool.profile.fields import ProfileError
from carpool.profile.rows import Run, positive, read_table, whole
from carpool.profile.values import FitError

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

COLUMNS = ("app", "batch", "progress", "iteration")
PHASES = 8
"""Maximum number of phases. Half as many nearly double the error of efficiencies; more hardly reduce it."""
GRID = 400
"""Number of noise scales tried, from a tenth of the initial batch to a thousand times the largest."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """The progress of a training after an epoch."""

    progress: float
    iterations: int


def read_epochs(path: str | Path) -> dict[str, dict[int, list[Epoch]]]:
    """Read epochs in order, by task and batch."""
    found: dict[str, dict[int, list[Epoch]]] = {}
    for where, row in read_table(path, COLUMNS, "an efficiency table"):
        epoch = Epoch(positive(row["progress"], f"{where}: progress"), whole(row["iteration"], f"{where}: iteration"))
        epochs = found.setdefault(row["app"].strip(), {}).setdefault(whole(row["batch"], f"{where}: batch"), [])
        if epochs and (epoch.progress <= epochs[-1].progress or epoch.iterations <= epochs[-1].iterations):
            raise ProfileError(f"{where}: iteration: no progress since the epoch before; sort or fix the rows")
        epochs.append(epoch)
    return found


def fit_scaling(
    batches: Mapping[int, Sequence[Epoch]], runs: Sequence[Run], most_per_gpu: int | None, most_gpus: int | None
) -> tuple[Scaling, FitError]:
    """Return the limits and phases of a task, and the error of its efficiencies.

    Micro-batches range over those of the timed rows; `most_per_gpu` may lower their maximum.
    """
    import numpy as np

    sizes = sorted(batches)
    epochs = min(len(batches[size]) for size in sizes)
    initial = sizes[0]
    measured = np.array([_efficiencies(batches[size][:epochs], size / initial) for size in sizes]).T
    noises = np.geomspace(initial / 10, sizes[-1] * 1000, GRID)
    fitted = (noises[:, None] + initial) / (noises[:, None] + np.array(sizes))
    # Ratios, because a training's iterations are its progress divided by its efficiency.
    errors = (np.log(measured[:, None, :] / fitted[None, :, :]) ** 2).sum(axis=2)  # by epoch and noise
    ends, chosen = _phases(errors, min(PHASES, epochs))
    whole = batches[initial][epochs - 1].progress
    phases = [
        NoisePhase(round(batches[initial][end - 1].progress / whole, 5), float(f"{noises[noise]:.4g}"))
        for end, noise in zip(ends, chosen, strict=True)
    ]
    lengths = np.diff([0, *ends])
    off = np.abs(measured - np.repeat(fitted[chosen], lengths, axis=0))[:, 1:]  # at the initial batch it is 1 anyway
    error = FitError(round(float(np.median(off)), 5), round(float(np.quantile(off, 0.9)), 5), off.size)
    timed = [sub_batch(run.batch, run.accumulation) for run in runs]
    most = max(timed) if most_per_gpu is None else most_per_gpu
    return Scaling(initial, sizes[-1], min(*timed, most), most, tuple(phases), most_gpus), error


def _efficiencies(epochs: Sequence[Epoch], scale: float) -> list[float]:
    """Return the progress per iteration of each epoch, divided by that of as many samples in small batches."""
    steps = pairwise([Epoch(0.0, 0), *epochs])
    return [(new.progress - old.progress) / (new.iterations - old.iterations) / scale for old, new in steps]


def _phases(errors: "NDArray[float64]", count: int) -> tuple[list[int], list[int]]:
    """Divide the epochs into `count` phases with the least error. Return the end and the noise of each."""
    import numpy as np

    epochs = len(errors)
    summed = np.vstack([np.zeros(errors.shape[1]), np.cumsum(errors, axis=0)])
    cost = np.full((epochs + 1, epochs + 1), np.inf)  # of one phase from epoch to epoch
    for begin in range(epochs):
        cost[begin, begin + 1 :] = (summed[begin + 1 :] - summed[begin]).min(axis=1)
    best, cuts = cost[0], []
    for _ in range(count - 1):
        ways = best[:, None] + cost  # by where the last phase begins and ends
        cuts.append(ways.argmin(axis=0))
        best = ways.min(axis=0)
    ends = [epochs]
    for before in reversed(cuts):
        ends.append(int(before[ends[-1]]))
    ends.reverse()
    return ends, [int((summed[end] - summed[begin]).argmin()) for begin, end in zip([0, *ends], ends, strict=False)]
