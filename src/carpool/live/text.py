"""Durations, times and sizes in words, and text of users made harmless for a terminal."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,32}m")
_CONTROL = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]",
    re.DOTALL,
)


FAR_S = 1e9
"""Seconds beyond which no date is shown; the calendar of Python ends in the year 9999."""


def printable(text: object) -> str:
    """Return a text with control characters spelt out, so that a name cannot move the cursor or hide a line."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in shown)


def demand_text(demand: Mapping[str, Any]) -> str:
    """Return what a job uses of a GPU, in words."""
    if not demand["gpm"]:
        return f"a GPU {demand['sm']:.0%} of the time"
    rest = f", {demand['dram']:.0%} of its memory bandwidth and its tensor cores {demand['tensor']:.0%} of the time"
    return f"{demand['sm']:.0%} of a GPU's multiprocessors{rest}"


def harmless(data: bytes) -> bytes:
    """Return a log for a terminal: line ends, tabs and colours stay, other control sequences are removed."""
    return b"".join(
        part if _COLOUR.fullmatch(part) else b"" if _CONTROL.fullmatch(part) else part for part in _pieces(data)
    )


def _pieces(data: bytes) -> list[bytes]:
    pieces, end = [], 0
    for found in _CONTROL.finditer(data):
        pieces += [data[end : found.start()], found[0]]
        end = found.end()
    return [*pieces, data[end:]]


def how_it_ended(job: str, status: str) -> str:
    """Say how a job ended: `job 4 was cancelled`, `job 5 has failed`."""
    return f"job {printable(job)} {'was' if status == 'cancelled' else 'has'} {status}"


def span(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return "-"
    sign, rest = ("-", -seconds) if seconds < 0 else ("", seconds)
    if rest >= FAR_S * 100:
        return f"{sign}{rest / 86400:.1e} d"  # not a number of hundreds of digits
    if rest < 9.95:
        return f"{sign}{rest:.1f} s"
    whole = round(rest)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            more = whole % size // smaller
            return f"{sign}{whole // size} {unit}" + (f" {more} {name}" if more and whole < 100 * size else "")
    return f"{sign}{whole} s"


def clock(at: float | None, now: float) -> str:
    """Return the time of day, with the date if it is not today."""
    if at is None:
        return "-"
    if at - now > FAR_S:
        return "in more than 30 years"
    moment, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    return moment.strftime("%H:%M:%S" if moment.date() == today.date() else "%a %d %b %H:%M")


def size(count: float | None) -> str:
    """Return a number of bytes in GiB, MiB or KiB."""
    if count is None:
        return "-"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1024:.0f} KiB"
