"""The Rich console that all tables are printed on."""

import os
from typing import Any

PIPED_WIDTH = 140
"""Width of tables in characters if the output is not a terminal and `COLUMNS` does not say one."""


def new_console() -> Any:
    """Return a console without markup, because texts contain names from users' files."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PIPED_WIDTH
    return console
