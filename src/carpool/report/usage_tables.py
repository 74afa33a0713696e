"""Usage as a table and as CSV: what jobs used of the GPUs, and how that adds up to the hours of all GPUs.

`carpool usage` prints the service's answer with it, and `carpool simulate --usage` the accounts of a run.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from carpool.core.usage_report import BY
from carpool.errors import InputError, nearest
from carpool.report.console import new_console, print_table

COLUMNS = {
    "held": "held_gpu_s",
    "computed": "computed_gpu_s",
    "shared": "shared_gpu_s",
    "paused": "paused_gpu_s",
    "saved": "saved_gpu_s",
    "lost": "lost_gpu_s",
    "jobs": "jobs",
    "failed": "failed",
}
"""Fields of a row by the titles of their columns."""
NOBODY = "(none)"
UNKNOWN = "-"


def parse_keys(text: str, place: str) -> tuple[str, ...]:
    """Return the keys that a text such as `user,day` names."""
    keys = tuple(word.strip() for word in text.split(","))
    for key in keys:
        if key not in BY:
            raise InputError(f"{place} {key!a}: no such key; {nearest(key, BY)}")
    if len(set(keys)) < len(keys):
        raise InputError(f"{place} {text}: names a key twice; remove one")
    return keys


def print_usage(report: Mapping[str, Any]) -> None:
    """Print a report as a table in GPU hours, with what is left of the hours of all GPUs below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    by, gpus, total = report["by"], report["gpus"], report["total"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in by:
        table.add_column(name, overflow="fold")
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(*(Text(_name(row[name])) for name in by), *_cells(row))
    table.add_section()
    labels = [""] * (len(by) - 1)
    table.add_row("all jobs", *labels, *_cells(total))
    for name, what in (("idle", "idle_gpu_s"), ("closed", "closed_gpu_s"), ("all GPUs", "existed_gpu_s")):
        table.add_row(name, *labels, hours(gpus[what]))
    console = new_console()
    print_table(console, table, ("failed", "jobs", "computed", "paused"))
    for line in notes(report):
        console.print(line)


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return the notes that a reader of the table needs."""
    total, gpus = report["total"], report["gpus"]
    lines = ["in GPU hours; held + idle + closed = all GPUs"]
    shared = total["judged_gpu_s"] + total["unjudged_gpu_s"]
    if total["unjudged_gpu_s"]:
        known = total["judged_gpu_s"] / shared
        lines.append(f"saved: known for {known:.0%} of the hours in which jobs shared; the others were not seen alone")
    if gpus["away_gpu_s"]:
        lines.append(f"{hours(gpus['away_gpu_s'])} GPU hours more were on nodes that were away")
    return lines


def write_csv(report: Mapping[str, Any]) -> None:
    """Print the rows as CSV, in GPU-seconds, and a row for idle and closed GPUs each, so that `held_gpu_s` adds up."""
    fields = [*report["by"], *COLUMNS.values(), "judged_gpu_s", "unjudged_gpu_s"]
    writer = csv.DictWriter(sys.stdout, fields, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in report["rows"]:
        writer.writerow({name: "" if row[name] is None else row[name] for name in fields})
    for name in ("idle", "closed"):
        writer.writerow({report["by"][0]: f"({name})", "held_gpu_s": report["gpus"][f"{name}_gpu_s"]})


def hours(seconds: float) -> str:
    """Return GPU-seconds as GPU hours."""
    found = seconds / 3600.0
    return f"{found:.0f}" if abs(found) >= 1000 else f"{found:.1f}" if abs(found) >= 10 else f"{found:.2f}"


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    cells = []
    for title, name in COLUMNS.items():
        value = row[name]
        cells.append(UNKNOWN if value is None else str(value) if title == name else hours(value))
    return cells


def _name(value: Any) -> str:
    return str(value) if value != "" else NOBODY
