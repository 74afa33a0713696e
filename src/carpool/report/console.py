"""The Rich console that all tables are printed on, and tables that fit it without losing anything silently."""

import os
from collections.abc import Sequence
from typing import Any

PIPED_WIDTH = 140
"""Width of tables in characters if the output is not a terminal and `COLUMNS` does not say one."""
SHORT = 14
"""Width in characters up to which a column is never folded, and to which wider columns of text may be folded."""
REMEDY = "a wider terminal or --json shows them"
"""How to see the columns that a table leaves out, where the command has no option that chooses columns."""


def new_console() -> Any:
    """Return a console without markup, because texts contain names from users' files. Rich respects NO_COLOR."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PIPED_WIDTH
    return console


def print_table(console: Any, table: Any, less: Sequence[str] = (), remedy: str = REMEDY) -> None:
    """Print a table that fits the console; see `fit`."""
    for part in fit(console, table, less, remedy):
        console.print(part)


def fit(console: Any, table: Any, less: Sequence[str] = (), remedy: str = REMEDY) -> list[Any]:
    """Return a table that fits the console, and a line about what it leaves out, if anything.

    Columns with the titles `less` are left out, the first of them first, until the rest fits with long texts folded. If
    it does not fit without them either, all cells are folded: nothing is cut.
    """
    columns, gone = list(table.columns), []
    for title in less:
        if _needed(table, columns) <= console.width:
            break
        if any(column.header == title for column in columns):
            columns = [column for column in columns if column.header != title]
            gone.append(title)
    fits = _needed(table, columns) <= console.width
    found = _copy(table, columns)
    for column in found.columns:
        column.overflow = "fold"
        column.no_wrap = fits and (column.justify == "right" or _width(column) <= SHORT)
        column.min_width = None if column.no_wrap or not fits else SHORT - 1  # Rich counts padding that edges lack
    return [found, f"not shown: {', '.join(gone)}; {remedy}"] if gone else [found]


def _copy(table: Any, columns: Sequence[Any]) -> Any:
    """Return a table with some columns of another."""
    from rich.table import Table

    found = Table(box=table.box, pad_edge=table.pad_edge, show_edge=table.show_edge, show_header=table.show_header)
    for column in columns:
        found.add_column(column.header, justify=column.justify)
    for row, cells in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
        found.add_row(*cells, end_section=row.end_section)
    return found


def _needed(table: Any, columns: Sequence[Any]) -> int:
    """Return the width that some columns of a table need if long texts are folded."""
    widths = [_width(one) if one.justify == "right" else min(_width(one), SHORT) for one in columns]
    left, right = table.padding[3], table.padding[1]
    gaps: int = (left + right + 1) * (len(widths) - 1) if not table.pad_edge else (left + right + 1) * len(widths)
    return sum(widths) + gaps


def _width(column: Any) -> int:
    from rich.cells import cell_len

    texts = [column.header, *column.cells]
    return max(max(map(cell_len, str(text).splitlines()), default=0) for text in texts)
