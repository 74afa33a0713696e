"""Progress of commands that take a while: on standard error, on a terminal only, and gone once they are done.

Nothing is shown where standard error is not a terminal, or with `quiet`. `carpool paper` and `carpool profile`, which
show more, draw their own bars.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import IO, Any

DELAY_S = 1.0
"""Seconds after which the reason of a wait is shown."""


def shows(quiet: bool = False) -> bool:
    """Return whether progress is shown."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def progress_bar(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar of steps; the context manager yields the function to call after each step."""
    if not shows(quiet):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with _bar(what, total, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as advance:
        yield lambda: advance(1)


@contextmanager
def sending(what: str, file: IO[bytes], size: int, quiet: bool = False) -> Iterator[Any]:
    """Show a bar of the bytes that are read of a file; the context manager yields the file to read."""
    if not shows(quiet):
        yield file
        return
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

    with _bar(what, size, BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()) as advance:
        yield CountedFile(file, advance)


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[None]:
    """Show the reason of a wait, if it takes more than a moment."""
    if not shows(quiet):
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(f"{what} …")
    timer = Timer(DELAY_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


class CountedFile:
    """A file that reports how many of its bytes were read."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._advance(len(data))
        return data


@contextmanager
def _bar(what: str, total: int, *columns: Any) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(what, *columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda number: progress.advance(task, number)
