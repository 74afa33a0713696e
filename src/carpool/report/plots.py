"""Pictures of a run or a comparison, as PNG files. Matplotlib is imported on first use (extra `plots`).

A policy has the same colour in every picture. The colours are Okabe and Ito's, then Paul Tol's, which colour-blind
readers can tell apart.
"""

from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from itertools import chain, count
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.sim.timeline import Segment

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"
BLACK, INDIGO, TEAL, OLIVE, WINE, ROSE = "#000000", "#332288", "#44AA99", "#999933", "#882255", "#CC6677"
"""Paul Tol's muted colours, because there are more policies than colours by Okabe and Ito."""
POLICY_COLOURS = {
    "fifo": GREY,
    "sjf": SKY,
    "tiresias": ORANGE,
    "pollux": PURPLE,
    "sjf-ffs": GREEN,
    "sjf-bsbf": RED,
    "carpool": BLUE,
    "backfill": BLACK,
    "srtf": OLIVE,
    "srsf": ROSE,
    "las": WINE,
    "lucid": TEAL,
    "tesserae": INDIGO,
}
MODEL_COLOURS = {
    "bert": BLUE,
    "cifar10": ORANGE,
    "deepspeech2": GREEN,
    "imagenet": RED,
    "ncf": PURPLE,
    "yolov3": SKY,
    "generic": GREY,
}
SPARE = (BLUE, PURPLE, GREEN, ORANGE, SKY, RED, GREY, YELLOW)
MOST_BARS = 30_000
"""Largest number of bars in a Gantt chart; later periods are left out."""
PALE = 0.25
"""Share of its colour that a paused job keeps in a Gantt chart."""


def available() -> bool:
    """Return whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("pictures need matplotlib: pip install 'carpool[plots]'") from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def panels(number: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure and its panels side by side, with a shared vertical axis."""
    figure, axes = _figure(width, height)
    axes.remove()
    row = figure.subplots(1, number, sharey=True, squeeze=False)[0]
    for one in row:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(row)


def colours(names: Sequence[str], table: Mapping[str, str]) -> dict[str, str]:
    """Return a different colour for each name: its own, that of `sjf` for `sjf:skip=false`, or a spare one."""
    chosen = {name: table[name] for name in names if name in table}
    spare = chain(SPARE, (_hue(number) for number in count()))
    for name in names:
        if name not in chosen:
            own = table.get(name.partition(":")[0])
            while own is None or own in chosen.values():
                own = next(spare)
            chosen[name] = own
    return {name: chosen[name] for name in names}


def _hue(number: int) -> str:
    """Return one of an unlimited number of colours, each far from those just before."""
    red, green, blue = hls_to_rgb(number * 0.618 % 1.0, (0.35, 0.6)[number % 2], 0.6 + 0.4 / (1 + number // 20))
    return f"#{round(255 * red):02X}{round(255 * green):02X}{round(255 * blue):02X}"


def jct_cdf(path: Path, jcts_s: Mapping[str, Sequence[float]], title: str = "") -> None:
    """Draw the share of jobs done within a time, one line per policy."""
    figure, axes = _figure(6.4, 4.0)
    palette = colours(list(jcts_s), POLICY_COLOURS)
    for policy, times in jcts_s.items():
        ordered = sorted(times)
        hours = [max(time, 1.0) / 3600 for time in ordered]
        shares = [100.0 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
        axes.step(hours, shares, where="post", color=palette[policy], linewidth=1.8, label=policy)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("job completion time (hours)")
    axes.set_ylabel("jobs done (%)")
    axes.set_ylim(0, 100)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def queue_by_model(path: Path, queue_s: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the mean queuing time of each model, one bar per policy."""
    models = sorted({model for queues in queue_s.values() for model in queues})
    palette = colours(list(queue_s), POLICY_COLOURS)
    figure, axes = _figure(max(5.0, 1.1 * len(models) + 1.5), 3.8)
    width = 0.8 / len(queue_s)
    for number, (policy, queues) in enumerate(queue_s.items()):
        positions = [place - 0.4 + width * (number + 0.5) for place in range(len(models))]
        heights = [queues.get(model, 0.0) / 3600 for model in models]
        axes.bar(positions, heights, width=width * 0.92, color=palette[policy], label=policy)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("mean queuing time (hours)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(frameon=False, ncols=min(5, len(queue_s)), loc="outside upper center")
    figure.savefig(path)


def gantt(path: Path, segments: Sequence[Segment], model_of: Mapping[str, str], gpus: int, title: str) -> None:
    """Draw the jobs on each GPU over time, coloured by model. The row of a shared GPU is split between its jobs.

    A job that is paused is pale and hatched.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    shown = segments[:MOST_BARS]
    if len(shown) < len(segments):
        title += f" (the first {shown[-1].start / 3600:.0f} hours)"
    figure, axes = _figure(10.0, min(14.0, max(2.5, 1.2 + 0.11 * gpus)))
    models = sorted({model_of[job] for segment in shown for job in segment.jobs})
    palette = colours(models, MODEL_COLOURS)
    bars: dict[bool, tuple[list[Any], list[str]]] = {False: ([], []), True: ([], [])}
    for segment in shown:
        height = 0.86 / len(segment.jobs)
        for lane, job in enumerate(segment.jobs):
            low, left, right = segment.gpu + 0.07 + lane * height, segment.start / 3600, segment.end / 3600
            boxes, faces = bars[job in segment.paused]
            boxes.append([(left, low), (right, low), (right, low + height * 0.94), (left, low + height * 0.94)])
            faces.append(palette[model_of[job]])
    axes.add_collection(PolyCollection(bars[False][0], facecolors=bars[False][1], edgecolors="white", linewidths=0.15))
    boxes, faces = bars[True]
    pale = [_pale(face) for face in faces]
    axes.add_collection(PolyCollection(boxes, facecolors=pale, edgecolors=faces, linewidths=0.0, hatch="/" * 7))
    axes.set_xlim(*_span(shown, cut=len(shown) < len(segments)))
    axes.set_ylim(gpus, 0)
    axes.set_xlabel("time (hours)")
    axes.set_ylabel("GPU")
    axes.set_title(title, fontsize=10)
    legend = [Patch(color=palette[model], label=model) for model in models]
    if boxes:
        legend.append(Patch(facecolor=_pale(GREY), edgecolor=GREY, linewidth=0.0, hatch="/" * 7, label="paused"))
    figure.legend(handles=legend, frameon=False, loc="outside right upper", title="a split row is\na shared GPU")
    figure.savefig(path)


def _pale(colour: str) -> str:
    """Return a lighter colour of the same hue."""
    parts = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - PALE * (255 - part)):02X}" for part in parts)


def _span(shown: Sequence[Segment], cut: bool) -> tuple[float, float]:
    """Return the time axis in hours: from the first start, or from 0 if that is near, to the last complete bar."""
    if not shown:
        return 0.0, 1.0
    first, last = shown[0].start / 3600, shown[-1].start / 3600 if cut else max(s.end for s in shown) / 3600
    return (first if first > 0.1 * last else min(0.0, first)), max(last, first + 1e-6)


def mean_jct(path: Path, bars: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> None:
    """Draw the mean completion time by case and policy: {case: {policy: (seconds, standard error)}}."""
    policies = list(next(iter(bars.values())))
    palette = colours(policies, POLICY_COLOURS)
    figure, axes = _figure(max(5.0, 1.6 * len(bars) + 2.5), 3.8)
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        positions = [place - 0.4 + width * (number + 0.5) for place in range(len(bars))]
        heights = [case[policy][0] / 3600 for case in bars.values()]
        errors = [(case[policy][1] or 0.0) / 3600 for case in bars.values()]
        axes.bar(positions, heights, width=width * 0.92, color=palette[policy], label=policy, yerr=errors, capsize=2)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_ylabel("mean completion time (hours)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(frameon=False, ncols=min(5, len(policies)), loc="outside upper center")
    figure.savefig(path)
