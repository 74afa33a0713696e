"""Where tables are printed."""

from typing import Any

PIPED_WIDTH = 140


def new_console() -> Any:
    """Names come from people's files, so nothing in a text is taken for markup."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH  # nobody's window to fit into
    return console
