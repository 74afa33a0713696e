"""Tables of the report as values: what each cell shows, and what the CSV file beside the table holds.

`tables.py` fills them and `page.py` renders them as HTML.
"""

from dataclasses import dataclass
from typing import Any

from carpool.sim.sweep import Mean

CLOSE, FAR = 10.0, 30.0
"""Deviations in per cent up to which a number counts as close, and above which it counts as far."""
PAPER = "paper"
"""CSS class of a cell with one of the paper's own numbers."""


@dataclass(frozen=True, slots=True)
class TableCell:
    """A text, a smaller line below it, and a CSS class for its kind."""

    text: str
    small: str = ""
    kind: str = ""


@dataclass(frozen=True)
class ReportTable:
    """One table: grouped columns for the page, one value per row for the CSV file."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    csv_header: tuple[str, ...]
    csv_rows: tuple[tuple[Any, ...], ...]
    groups: tuple[tuple[str, int], ...] = ()
    """Headings above the columns, each with the number of columns that it spans."""
    note: str = ""


def plain(text: object, kind: str = "") -> TableCell:
    return TableCell(str(text), kind=kind)


def missing() -> TableCell:
    return TableCell("–", kind="missing")


def paper(value: float | None, digits: int = 2) -> TableCell:
    """Return a cell with a number that the paper prints."""
    return missing() if value is None else TableCell(show(value, digits), kind=PAPER)


def ours(found: Mean | None, digits: int = 2, printed: float | None = None) -> TableCell:
    """Return a cell with our mean, its standard error and, if the paper prints a number, the deviation from it."""
    if found is None:
        return missing()
    text = show(found.value, digits)
    if found.error is not None:
        text += f" ± {show(found.error, digits)}"
    if printed is None:
        return TableCell(text)
    off = deviation(found.value, printed)
    kind = "close" if abs(off) <= CLOSE else "far" if abs(off) > FAR else "off"
    return TableCell(text, signed(off), kind)


def deviation(value: float, printed: float) -> float:
    """Return the deviation from `printed` in per cent."""
    return 100.0 * (value / printed - 1.0)


def signed(value: float, digits: int = 0) -> str:
    """Return per cent with a sign, a typographic minus, and no sign before zero."""
    text = f"{value:+.{digits}f} %"
    return text[1:] if float(text[:-2]) == 0.0 else text.replace("-", "−")


def show(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def lower(found: Mean | None, digits: int = 0) -> str:
    """Return a reduction in words, such as `17 ± 3 % lower` or `4 ± 2 % higher`."""
    if found is None:
        return "–"
    size = show(abs(found.value), digits)
    error = "" if found.error is None else f" ± {show(found.error, digits)}"
    direction = "" if float(size) == 0.0 else " lower" if found.value > 0 else " higher"
    return f"{size}{error} %{direction}"


def percent(found: Mean | None, digits: int = 0) -> str:
    if found is None:
        return "–"
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error} %".replace("-", "−")
