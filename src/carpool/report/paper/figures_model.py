"""Figures 2 and 3: throughput of the six tasks, fitted and measured, and slow-downs of pairs.

Both come from the shipped profiles. The measured points of Figure 2 are drawn if CARPOOL_DATA has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from carpool.core.perf import Placement
from carpool.profile.rows import read_throughput
from carpool.profile.schema import load as load_profile
from carpool.report.paper.cells import ReportTable, ours, plain
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.drawing import GRID, log_axis, picture
from carpool.report.paper.plan import data_folder
from carpool.report.plots import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from carpool.sim.sweep import Mean

NODE_GPUS = 4
GANGS = {1: SKY, 2: ORANGE, 4: GREEN, 8: PURPLE, 12: BLUE, 16: RED}
BATCHES = {
    "bert": (4, 12),
    "cifar10": (32, 1024),
    "deepspeech2": (10, 80),
    "imagenet": (20, 200),
    "ncf": (32, 32768),
    "yolov3": (4, 16),
}
"""Ranges of samples per GPU over which the curves are drawn: about those that were measured."""
MATE = "cifar10"
TABLES = (
    ("gavel", "unknown", "V100 (Gavel)"),
    ("h200", "time-slicing", "H200, time-slicing"),
    ("h200", "mps", "H200, MPS"),
)
Points = dict[str, dict[int, list[tuple[int, float]]]]


def measured_points() -> Points | None:
    """Return samples per second by task, gang and batch at the most consolidated placement; None without the data."""
    folder = data_folder()
    path = folder / "pollux" / "throughput.csv" if folder else None
    if path is None or not path.is_file():
        return None
    times: dict[tuple[str, int, int], list[float]] = {}
    for run in read_throughput(path):
        if run.accumulation == 1 and run.gpus in GANGS and run.nodes == -(-run.gpus // NODE_GPUS):
            times.setdefault((run.task, run.gpus, run.batch), []).append(run.seconds)
    found: Points = {}
    for (task, gpus, batch), seconds in sorted(times.items()):
        found.setdefault(task, {}).setdefault(gpus, []).append((batch, gpus * batch / median(seconds)))
    return found


def throughput(folder: Path, config: PaperConfig, points: Points | None) -> None:
    """Draw Figure 2: throughput against the batch."""
    tasks = load_profile(config.setup.profile).core_tasks()
    shown = [name for name in BATCHES if name in tasks]
    with picture(folder, "figure2", 10.0, 6.2, rows=2, columns=3) as (figure, panels):
        for axes, name in zip(panels.flat, shown, strict=False):
            low, high = BATCHES[name]
            batches = sorted({max(1, round(low * (high / low) ** (step / 24))) for step in range(25)})
            for gpus, colour in GANGS.items():
                placement = Placement(gpus, -(-gpus // NODE_GPUS))
                speeds = [gpus * batch / tasks[name].iteration(batch, 1, placement) for batch in batches]
                axes.plot(batches, speeds, color=colour, linewidth=1.5, label=f"{gpus} GPU{'s' * (gpus > 1)}")
                for batch, speed in (points or {}).get(name, {}).get(gpus, []):
                    axes.plot([batch], [speed], marker="o", markersize=2.6, color=colour, alpha=0.7, linestyle="none")
            axes.set_title(name)
            log_axis(axes, "x", 2)
            log_axis(axes, "y", 10)
            axes.grid(**GRID)
        for axes in panels[-1]:
            axes.set_xlabel("samples per GPU")
        for axes in panels[:, 0]:
            axes.set_ylabel("samples per second")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=6, loc="outside upper center")


def fit_errors(config: PaperConfig) -> ReportTable:
    """Return the table of how well the curves of Figure 2 fit."""
    rows, data = [], []
    for name, task in sorted(load_profile(config.setup.profile).tasks.items()):
        if task.error is not None:
            error = task.error
            cells = (plain(name), plain(error.points), ours(Mean(100 * error.median, None), 1))
            rows.append((*cells, ours(Mean(100 * error.p90, None), 1)))
            data.append((name, error.points, error.median, error.p90))
    return ReportTable(
        name="figure2",
        title="Relative error of the fitted iteration time, in per cent",
        header=("task", "measured points", "median", "p90"),
        rows=tuple(rows),
        csv_header=("task", "points", "median", "p90"),
        csv_rows=tuple(data),
    )


@dataclass(frozen=True, slots=True)
class CifarPair:
    """A task and cifar10 sharing one GPU, at one choice of batches."""

    task: str
    where: str
    batch: int
    mate_batch: int
    xi: float
    mate_xi: float

    @property
    def together(self) -> float:
        """Sum of both relative speeds; above 1, sharing does more work than running one after the other."""
        return 1 / max(1.0, self.xi) + 1 / max(1.0, self.mate_xi)


def beside_cifar10() -> list[CifarPair]:
    found = []
    for profile, mechanism, where in TABLES:
        for pair in load_profile(profile).pairs:
            if pair.mechanism != mechanism or MATE not in (pair.a, pair.b):
                continue
            if pair.a == MATE and pair.b != MATE:
                found.append(CifarPair(pair.b, where, pair.batch_b, pair.batch_a, pair.xi_b, pair.xi_a))
            else:
                found.append(CifarPair(pair.a, where, pair.batch_a, pair.batch_b, pair.xi_a, pair.xi_b))
    return sorted(found, key=lambda one: (one.task, one.batch))


def pairs(folder: Path, found: Sequence[CifarPair]) -> None:
    """Draw Figure 3: throughput of pairs above, ξ of both below. A panel has small batches or saturating ones."""
    tasks = sorted({one.task for one in found})
    columns = _columns(found)
    with picture(folder, "figure3", 10.0, 6.4, rows=2, columns=len(columns)) as (figure, panels):
        for number, (title, shown) in enumerate(columns):
            by_task = {one.task: one for one in shown}
            _bars(
                panels[0][number],
                tasks,
                [(_speed(by_task, "own"), BLUE), (_speed(by_task, "mate"), ORANGE)],
                stacked=True,
            )
            panels[0][number].axhline(1.0, color="black", linewidth=0.9, linestyle=":")
            panels[0][number].set_title(title, fontsize=9)
            panels[0][number].set_ylim(0, 2.15)
            own = [max(1.0, by_task[task].xi) if task in by_task else 0.0 for task in tasks]
            mate = [max(1.0, by_task[task].mate_xi) if task in by_task else 0.0 for task in tasks]
            _bars(panels[1][number], tasks, [((tasks, own), BLUE), ((tasks, mate), ORANGE)], stacked=False)
            panels[1][number].axhline(1.0, color="black", linewidth=0.9, linestyle=":")
            panels[1][number].set_ylim(0, 1.1 * max(max(one.xi, one.mate_xi) for one in found))
        panels[0][0].set_ylabel("speed relative to alone")
        panels[1][0].set_ylabel("slow-down ξ")
        from matplotlib.patches import Patch

        handles = [Patch(color=BLUE, label="the task"), Patch(color=ORANGE, label=f"{MATE} beside it")]
        figure.legend(handles=handles, frameon=False, ncols=2, loc="outside upper center")


def _columns(found: Sequence[CifarPair]) -> list[tuple[str, list[CifarPair]]]:
    """Return the panels, one per table and batch size. Mixed batch sizes are shown in the table of numbers only."""
    columns = []
    for _, _, where in TABLES:
        shown = [one for one in found if one.where == where]
        batches: dict[str, set[int]] = {}
        for one in shown:
            batches.setdefault(one.task, set()).add(one.batch)
            batches.setdefault(MATE, set()).add(one.mate_batch)
        sizes = {task: sorted(known) for task, known in batches.items()}
        for number, batch in enumerate(sizes.get(MATE, ())):
            size = "" if len(sizes[MATE]) == 1 else "\nlarge batches" if number else "\nsmall batches"
            alike = [one for one in shown if (one.mate_batch, sizes[one.task].index(one.batch)) == (batch, number)]
            columns.append((f"{where}{size}", alike))
    return columns


Series = tuple[Sequence[str], Sequence[float]]


def _speed(by_task: dict[str, CifarPair], whose: str) -> Series:
    tasks = sorted(by_task)
    xis = [by_task[task].xi if whose == "own" else by_task[task].mate_xi for task in tasks]
    return tasks, [1 / max(1.0, xi) for xi in xis]


def _bars(axes: Any, tasks: Sequence[str], series: Sequence[tuple[Series, str]], stacked: bool) -> None:
    below = dict.fromkeys(tasks, 0.0)
    width = 0.7 if stacked else 0.38
    for number, ((names, heights), colour) in enumerate(series):
        shift = 0.0 if stacked else (number - 0.5) * 0.4
        places = [tasks.index(name) + shift for name in names]
        axes.bar(places, heights, width=width, bottom=[below[name] for name in names] if stacked else 0, color=colour)
        for name, height in zip(names, heights, strict=True):
            below[name] += height
    axes.set_xticks(range(len(tasks)), tasks, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


def pair_sheet(found: Sequence[CifarPair]) -> ReportTable:
    header = ("task", "measured on", "batch", f"{MATE}'s batch", "ξ of the task", f"ξ of {MATE}", "throughput of both")
    rows = [
        (
            plain(one.task),
            plain(one.where),
            plain(one.batch or "Gavel's"),
            plain(one.mate_batch or "Gavel's"),
            ours(Mean(one.xi, None)),
            ours(Mean(one.mate_xi, None)),
            ours(Mean(one.together, None)),
        )
        for one in found
    ]
    return ReportTable(
        name="figure3",
        title=f"Pairs with {MATE} on one GPU",
        header=header,
        rows=tuple(rows),
        csv_header=("task", "measured_on", "batch", "mate_batch", "xi", "mate_xi", "throughput"),
        csv_rows=tuple((o.task, o.where, o.batch, o.mate_batch, o.xi, o.mate_xi, o.together) for o in found),
        note="Throughput: the sum of both speeds relative to alone. A ξ below 1 is noise and counts as 1.",
    )
