"""The common parts of the report's pictures: the style, the colour of each policy, and files as PNG and SVG."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.report.paper.config import PaperConfig
from carpool.report.plots import POLICY_COLOURS, colours

GRID = {"alpha": 0.25, "linewidth": 0.6}
PAPER_MARK = {"linestyle": "none", "marker": "D", "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 1.3}
"""Style of the paper's own numbers in a picture: hollow diamonds."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "carpool",
    "svg.fonttype": "path",
}


@contextmanager
def picture(
    folder: Path, name: str, width: float, height: float, rows: int = 1, columns: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, an array of rows and columns, and write both files at the end."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("pictures need matplotlib: pip install 'carpool[plots]'") from None
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False)
        figure.savefig(folder / f"{name}.png")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def log_axis(axes: Any, which: str, base: int) -> None:
    """Make an axis logarithmic, after drawing. Its labels are plain numbers: 1, 2, 5, 10 … or powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    few = base == 2 or high > 2000 * low
    axis.set_major_locator(LogLocator(base=base, subs=(1.0,) if few else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_locator(NullLocator())


def short(value: float) -> str:
    """Return the label of a number on an axis: 0.5, 200, 20k, 1M. Powers of two keep up to six digits."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4 and value % 1000 == 0:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def policy_colours(config: PaperConfig) -> dict[str, str]:
    """Return colours by the policy's name in the configuration. Two settings of one policy share a colour."""
    families = {row.name: row.spec.partition(":")[0] for row in config.policies}
    chosen = colours(list(dict.fromkeys(families.values())), POLICY_COLOURS)
    return {name: chosen[family] for name, family in families.items()}


def second_of_family(config: PaperConfig) -> set[str]:
    """Return the policies that are another setting of an earlier one; they are drawn dashed or hatched."""
    seen: set[str] = set()
    found = set()
    for row in config.policies:
        family = row.spec.partition(":")[0]
        if family in seen:
            found.add(row.name)
        seen.add(family)
    return found


def grouped_bars(
    axes: Any, config: PaperConfig, names: Sequence[str], groups: Sequence[str], heights: Mapping[str, Sequence[float]]
) -> None:
    """Draw a group of bars for each of `groups`, one bar per policy."""
    palette, hatched = policy_colours(config), second_of_family(config)
    width = 0.84 / len(names)
    for number, name in enumerate(names):
        places = [place - 0.42 + width * (number + 0.5) for place in range(len(groups))]
        axes.bar(
            places,
            heights[name],
            width=width * 0.9,
            color=palette[name],
            hatch="////" if name in hatched else None,
            edgecolor="white" if name in hatched else None,
            linewidth=0,
            label=config.policy(name).label,
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
