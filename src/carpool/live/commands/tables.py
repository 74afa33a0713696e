"""Tables and lines about live jobs for a terminal. Text that users wrote is made harmless first."""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from carpool.errors import InputError, nearest
from carpool.live.text import clock, demand_text, printable, size, span
from carpool.report.console import fit, new_console, print_table

Row = Mapping[str, Any]
COLOURS = {
    "running": "green",
    **dict.fromkeys(("starting", "stopping", "pausing", "resuming"), "cyan"),
    "failed": "red",
    **dict.fromkeys(("paused", "cancelled"), "yellow"),
}
HOLDING = ("running", "starting", "pausing", "paused", "resuming", "stopping")
"""The statuses of jobs that the table lists first."""
CHOOSE = "--format chooses columns"
"""How to see the columns that a table of jobs leaves out."""


def new_table(*columns: str, right: Sequence[str] = ()) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _text(value: object, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(value), style)


# ---- the queue -------------------------------------------------------------------------------------------------------


TITLES = {"gpus": "GPUs", "waited_s": "waited", "ran_s": "ran", "progress": "done", "reason": "why"}
"""Titles of columns that differ from the field's name."""
FIELDS = {title: name for name, title in TITLES.items()}
"""The fields by these titles: users may write what the table shows."""
CELLS: dict[str, Callable[[Row], Any]] = {
    "status": lambda row: _text(row["status"], COLOURS.get(row["status"], "")),
    "waited_s": lambda row: _text(span(row["waited_s"])),
    "ran_s": lambda row: _text(span(_ran(row, time.time()))),
    "progress": lambda row: _text(_share(row.get("progress"))),
    "on": lambda row: _text(" ".join(map(str, row.get("on") or ()))),
    "mates": lambda row: _text(" ".join(map(str, row.get("mates") or ()))),
    "reason": lambda row: _text(why(row)),
    "submitted": lambda row: _text(clock(row["submitted"], time.time())),
    "started": lambda row: _text(clock(row["started"], time.time())),
    "finished": lambda row: _text(clock(row["finished"], time.time())),
}
"""Cells of columns that are not shown as plain text."""
COLUMNS = (
    *("job", "name", "user", "group", "project", "status", "gpus", "submitted", "started", "finished", "exit_code"),
    *("reason", "priority", "held", "model", "array_job", "array_index", "attempt", "waited_s", "ran_s", "limit_s"),
    *("limit_left_s", "pauses", "paused_s", "progress", "measured", "watched", "reported_iteration_s", "peak_memory"),
    *("on", "mates", "batch", "iterations", "alone_estimate_s"),
)
"""All fields of jobs: where there is no job, they cannot be seen from the rows."""
USUAL = ("job", "name", "user", "status", "gpus", "waited_s", "ran_s", "progress", "on", "reason")
LESS = ("on", "waited")
"""Titles of the columns that a narrow terminal leaves out."""


def columns_of(text: str | None) -> tuple[str, ...]:
    """Return the columns that `--format` names; empty: the usual ones."""
    words = [word.strip() for word in text.split(",")] if text else []
    return tuple(FIELDS.get(word, word) for word in words)


def sort_column(text: str | None) -> str | None:
    """Return the column that `--sort` names, with its minus."""
    if not text:
        return None
    name = text.removeprefix("-")
    return text[: len(text) - len(name)] + FIELDS.get(name, name)


def check_columns(rows: Sequence[Row], columns: Sequence[str], sort: str | None) -> None:
    """Refuse columns that no job has."""
    known = {*COLUMNS, *(name for row in rows for name in row)}
    for option, names in (("--format", columns), ("--sort", [sort.removeprefix("-")] if sort else [])):
        for name in names:
            if name not in known:
                raise InputError(f"{option} {ascii(name)[:40]}: no such column; {nearest(name, known)}")


def sort(rows: Sequence[Row], by: str | None) -> list[Row]:
    """Return the rows sorted by a column, downwards with a minus before it; without one running jobs come first."""
    if not by:
        return order(rows)
    name = by.removeprefix("-")

    def key(row: Row) -> tuple[bool, Any, int]:
        value = row[name]
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)  # ids are numbers, although they are texts
        number = isinstance(value, int | float)
        return not number, value if number else str(value), int(row["job"])

    known = sorted((row for row in rows if row.get(name) is not None), key=key, reverse=by != name)
    return known + [row for row in rows if row.get(name) is None]


def jobs_table(rows: Sequence[Row], limit: int = 50, columns: Sequence[str] = (), console: Any = None) -> Any:
    """Return a table of jobs in their order, and below it what a narrow terminal leaves out. `columns` are all kept."""
    from rich.console import Group

    chosen = columns or USUAL
    table = new_table(*(TITLES.get(name, name) for name in chosen), right=("GPUs", "waited", "ran", "done"))
    for row in rows[:limit]:
        table.add_row(*(CELLS[name](row) if name in CELLS else _plain(row, name) for name in chosen))
    return Group(*fit(console or new_console(), table, () if columns else LESS, CHOOSE))


def _plain(row: Row, name: str) -> Any:
    value = row.get(name)
    return _text("" if value is None else value)


def order(rows: Sequence[Row]) -> list[Row]:
    """Return running, waiting and ended jobs in this order; of the ended ones the latest first."""
    ranks = {**dict.fromkeys(HOLDING, 0), "pending": 1}
    return sorted(rows, key=lambda row: (ranks.get(row["status"], 2), -(row["finished"] or 0.0), int(row["job"])))


def why(row: Row) -> str:
    """Return the reason for a job's status, or its mates."""
    mates = row.get("mates") or ()
    if mates and row["status"] in ("running", "starting"):
        return "shares with " + ", ".join(str(mate) for mate in mates)
    return str(row.get("reason") or "")


def _ran(row: Row, now: float) -> float | None:
    if row["started"] is None or "ran_s" in row:  # rows of journals before release 0.1 lack it
        return row["ran_s"] if row["started"] is not None else None
    return float(row["finished"] or now) - float(row["started"])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def counts(rows: Sequence[Row]) -> str:
    """Return one line with the number of jobs in each status."""
    found: dict[str, int] = {}
    for row in rows:
        found[row["status"]] = found.get(row["status"], 0) + 1
    return ", ".join(f"{number} {status}" for status, number in found.items()) or "no jobs"


def print_jobs(rows: Sequence[Row], limit: int, columns: Sequence[str] = ()) -> None:
    console = new_console()
    if rows:
        console.print(jobs_table(rows, limit, columns, console))
    console.print(counts(rows) + (f"; the first {limit} are shown (--limit)" if len(rows) > limit else ""))


def watch(render: Callable[[], Any], until: Callable[[], bool] = lambda: False) -> None:
    """Show a table that refreshes in a terminal; print it once elsewhere."""
    console = new_console()
    if not sys.stdout.isatty():
        console.print(render())
        return
    from rich.live import Live

    try:
        with Live(render(), console=console, auto_refresh=False, screen=False) as live:
            while not until():
                time.sleep(1.0)
                live.update(render(), refresh=True)
    except KeyboardInterrupt:
        return


# ---- one job ---------------------------------------------------------------------------------------------------------


def print_job(row: Row) -> None:
    console, now = new_console(), time.time()
    table = new_table("", "")
    table.show_header = False
    for name, value in _facts(row, now):
        if value not in (None, "", "-"):
            table.add_row(_text(name, "bold"), _text(value))
    console.print(table)
    attempts = row.get("attempts") or ()
    if attempts:
        console.print(_attempts(attempts, now))
    for line in (row.get("receipt") or {}).get("sentences", ()):
        console.print(printable(line))


def _facts(row: Row, now: float) -> list[tuple[str, Any]]:
    spec = row.get("spec") or {}
    return [
        ("job", f"{row['job']} {row['name']}".strip()),
        ("user", row["user"]),
        ("project", row.get("project")),
        ("status", row["status"] + (f" ({row['reason']})" if row.get("reason") else "")),
        ("command", " ".join(spec.get("command", ()))),
        ("directory", spec.get("directory")),
        ("environment", " ".join(sorted(spec.get("env") or ()))),
        ("GPUs", f"{row['gpus']}" + (f" on {' '.join(row['on'])}" if row.get("on") else "")),
        ("shares with", ", ".join(map(str, row.get("mates") or ()))),
        ("model", row.get("model")),
        ("priority", row.get("priority") or None),
        ("submitted", clock(row["submitted"], now)),
        ("started", clock(row["started"], now)),
        ("finished", clock(row["finished"], now)),
        ("exit code", row["exit_code"]),
        ("done", _share(row.get("progress"))),
        ("speed", _speed(row)),
        ("demand alone", demand_text(row["demand"]) if row.get("demand") else None),
        ("peak memory", size(row.get("peak_memory") or None)),
        ("paused", _paused(row)),
        ("limit", _limit(row)),
        ("report dropped", row.get("report_dropped")),
        ("checkpoint", row.get("checkpoint_left")),
        *(("notice", f"did not arrive ({line})") for line in row.get("undelivered") or ()),
        *(("files", line) for line in _files(row.get("files"), now)),
        *(("estimate", line) for line in estimate_lines(row.get("estimates") or {}, now)),
    ]


def _files(files: Row | None, now: float) -> list[str]:
    """Return how long the files of an ended job are kept, and what was removed."""
    lines = []
    for what in ("files", "checkpoints") if files else ():
        assert files is not None
        name = "logs and code" if what == "files" else what
        gone, left = files["removed"].get(what), files.get(f"{what}_kept_s")
        if gone:
            lines.append(f"{name} removed {clock(gone['at'], now)}: {gone['why']}")
        elif left is not None:
            told = files.get(f"{what}_why")
            why = f" ({told})" if told else ""
            lines.append(f"{name} kept for {span(left)} more{why}; `carpool prune` removes them now")
    return lines


def _paused(row: Row) -> str | None:
    """Return how long and how often a job was paused."""
    if not row.get("pauses"):
        return None
    return f"{span(row['paused_s'])} in {row['pauses']} pause{'' if row['pauses'] == 1 else 's'}"


def _limit(row: Row) -> str | None:
    """Return a job's time limit and what is left of it."""
    if row.get("limit_s") is None:
        return None
    then = "goes back into the queue" if (row.get("spec") or {}).get("requeue") else "ends"
    left = "" if row["finished"] is not None else f"; it {then} after {span(row['limit_left_s'])} more of computing"
    return f"{span(row['limit_s'])}{left}"


def _speed(row: Row) -> str | None:
    seconds = row.get("reported_iteration_s")
    if not seconds:
        return None
    return f"{seconds:.3g} s per iteration" + (" (watched)" if row.get("watched") else "")


def _attempts(attempts: Sequence[Row], now: float) -> Any:
    table = new_table("attempt", "rank", "pid", "started", "exit", right=("attempt", "rank", "pid", "exit"))
    for attempt in attempts:
        ranks: Sequence[Row] = attempt.get("ranks") or ({},)
        for rank in ranks:
            code = rank.get("exit_code")
            table.add_row(
                _text(attempt.get("attempt", "")),
                _text(rank.get("rank", "")),
                _text(rank.get("pid") or ""),
                _text(clock(rank.get("started") or attempt.get("started"), now)),
                _text("" if code is None else code),
            )
    return table


def estimate_lines(estimates: Mapping[str, Any], now: float) -> list[str]:
    """Return a line for each estimate, with its range and its source."""
    lines = []
    for name, estimate in estimates.items():
        if isinstance(estimate, Mapping) and "value" in estimate:
            shown = _moment if name in ("start", "end") else lambda value, now: span(value)
            between = f" ({shown(estimate['low'], now)} to {shown(estimate['high'], now)})" if "low" in estimate else ""
            source = f", from {estimate['source']}" if estimate.get("source") else ""
            lines.append(f"{name} {shown(estimate['value'], now)}{between}{source}")
    return lines


def _moment(at: float | None, now: float) -> str:
    return "unknown" if at is None else clock(at, now)


def dry_run_lines(answer: Row) -> list[str]:
    """Return the answer of a dry run as lines: the service's sentences, where it has written some."""
    sentences = answer.get("sentences")
    if sentences:
        return [printable(line) for line in sentences]
    where = answer.get("where")
    lines = [f"would start on {' '.join(map(str, where))}" if where else "would wait"]
    mates = answer.get("mates")
    lines += [f"would share with {', '.join(map(str, mates))}"] if mates else []
    estimates = {name: answer[name] for name in ("start", "end") if isinstance(answer.get(name), Mapping)}
    return [printable(line) for line in lines + estimate_lines(estimates, time.time())]


# ---- the machine -----------------------------------------------------------------------------------------------------


def print_gpus(answer: Row) -> None:
    console = new_console()
    sizes = ("memory", "reserved", "other processes")
    table = new_table("GPU", "model", *sizes, "jobs", right=sizes)
    for gpu in gpus_of(answer):
        jobs = ", ".join(_resident(job) for job in gpu.get("jobs") or ())
        table.add_row(
            _text(gpu.get("gpu", gpu.get("index", ""))),
            _text(gpu.get("name") or "logical"),
            _text(size(gpu.get("memory") or None)),
            _text(size(gpu.get("reserved") or gpu.get("used") or None)),
            _text(size(gpu.get("foreign") or None)),
            _text(", ".join(filter(None, (jobs, gpu.get("closed")))) or "free"),
        )
    print_table(console, table, ("other processes", "reserved", "memory"))
    if answer.get("mechanism") != "logical":
        console.print(printable(f"sharing: {answer.get('mechanism', 'unknown')}" + _because(answer)))


def _because(answer: Row) -> str:
    why = answer.get("why") or answer.get("note")
    return f" ({why})" if why else ""


def _resident(job: Any) -> str:
    if isinstance(job, Mapping):
        return f"{job.get('job')} {job.get('name') or ''}".strip()
    return str(job)


def gpus_of(answer: Row) -> list[Row]:
    """Return all GPUs of all nodes."""
    return [gpu for node in answer.get("nodes", ()) for gpu in node.get("gpus", ())]


def cluster_of(gpus: Mapping[str, Any]) -> str:
    """Return the nodes that there are as the simulator writes clusters."""
    sizes = [len(node.get("gpus", ())) for node in gpus.get("nodes", ())]
    if not sizes or not gpus_of(gpus):
        raise InputError("this service has no GPUs; give a cluster with --cluster, such as 1x4")
    return "+".join(f"{len(list(alike))}x{size}" for size, alike in groupby(sizes) if size)
