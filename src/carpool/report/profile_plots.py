"""Pictures of a profile: fitted iteration times with the measured points, and the matrix of slow-downs.

`carpool profiles show NAME --plots FOLDER` calls it. Matplotlib is imported on first use (extra `plots`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carpool.core.model import sub_batch
from carpool.core.perf import Placement
from carpool.errors import InputError
from carpool.profile.matrix import Matrix, matrix
from carpool.profile.measure.conclude import timed_under
from carpool.profile.values import Profile, TaskProfile
from carpool.report.plots import BLUE, GREY, ORANGE

ONE_GPU = Placement(1, 1)
COLUMNS = 3
WORST = 3.0
"""Slow-down from which on cells have the darkest colour."""
MIN_WIDTH = 4.2
"""Minimum width of a matrix in inches, so that its title is not cut off."""


def _figure(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("pictures need matplotlib: pip install 'carpool[plots]'") from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def solo_points(profile: Profile) -> dict[str, list[tuple[int, int, float]]]:
    """Return (batch, accumulation, seconds) of every job that ran alone, by task, under the mechanism of its fit."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for point in profile.points:
        if point.gpus == 1:
            found.setdefault(point.task, []).append((point.batch, point.accumulation, point.iter_s))
    under = timed_under(profile.raw)
    for done in profile.raw:
        setting = done.samples[0].setting
        if len(done.samples) == 1 and done.request.mechanism == under[setting.task]:
            found.setdefault(setting.task, []).append((setting.batch, setting.accumulation, done.samples[0].iter_s))
    return found


def fits(path: Path, profile: Profile) -> None:
    """Draw the time of a micro-batch against its samples for each task: measured points and the fitted line."""
    points = solo_points(profile)
    rows = math.ceil(len(profile.tasks) / COLUMNS)
    figure, grid = _figure(9.0, 2.7 * rows, rows, min(COLUMNS, len(profile.tasks)))
    cells = list(grid.flat)
    for axes, (name, task) in zip(cells, profile.tasks.items(), strict=False):
        _fit(axes, name, task, points.get(name, []))
    for axes in cells[len(profile.tasks) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("ms per micro-batch")
    for axes in grid[-1]:
        axes.set_xlabel("samples per micro-batch")
    figure.savefig(path)


def _fit(axes: Any, name: str, task: TaskProfile, points: Sequence[tuple[int, int, float]]) -> None:
    core = task.core()
    sizes = [sub_batch(batch, accumulation) for batch, accumulation, _ in points] or [1, 64]
    low, high = min(sizes), max(sizes)
    line = sorted({round(low * (high / low) ** (i / 60)) for i in range(61)})
    axes.plot(line, [1000 * core.iteration(b, 1, ONE_GPU) for b in line], color=GREY, linewidth=1.5, label="fitted")
    for whole, colour, marker, label in ((True, BLUE, "o", "whole batch"), (False, ORANGE, "^", "accumulated")):
        some = [(b, s, t) for b, s, t in points if (s == 1) == whole]
        if some:
            x, y = [sub_batch(b, s) for b, s, _ in some], [1000 * t / s for _, s, t in some]
            axes.scatter(x, y, s=22, color=colour, marker=marker, label=label, zorder=3)
    error = f", median error {100 * task.error.median:.0f} %" if task.error else ""
    axes.set_title(name + error, fontsize=9, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, frameon=False)


def slowdowns(path: Path, profile: Profile) -> None:
    """Draw one matrix for each mechanism: the row is slowed down by the column."""
    found = {mechanism: matrix(profile, mechanism) for mechanism in profile.pair_mechanisms()}
    side = max(MIN_WIDTH, 1.8 + 0.42 * max(len(one.labels) for one in found.values()))
    figure, grid = _figure(side * len(found), side + 0.3, 1, len(found))
    for axes, (mechanism, one) in zip(grid.flat, found.items(), strict=True):
        _matrix(axes, f"ξ under {mechanism}: row slowed down by column", one)
    figure.savefig(path)


def _matrix(axes: Any, title: str, found: Matrix) -> None:
    values = [[math.nan if xi is None else xi for xi in row] for row in found.rows]
    axes.imshow(values, cmap="YlOrRd", vmin=1.0, vmax=WORST)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = "–" if math.isnan(value) else f"{value:.2f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if value > 2.2 else "black")
    axes.set_xticks(range(len(found.labels)), found.labels, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(found.labels)), found.labels, fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
