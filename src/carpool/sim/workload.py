"""Workloads: the jobs of a run, where they came from, and the readers for the CSV formats we know.

A reader is chosen by the header. Every complaint names file, line and field and says what to do. Our own format
is `job, submitted_s, model, gpus, batch, iterations`, with optional columns for the rest of a `Job`.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NoReturn, TextIO

from carpool.core.model import Job
from carpool.core.perf import GENERIC
from carpool.errors import InputError, nearest

OWN_COLUMNS = ("job", "submitted_s", "model", "gpus", "batch", "iterations")
OPTIONAL_COLUMNS = (
    *("duration_s", "user", "can_shrink", "exclusive", "max_slowdown", "priority", "after", "retries"),
    *("elastic", "can_checkpoint"),
)
POLLUX_COLUMNS = ("name", "time", "app", "gpus", "batch", "iters")
PHILLY_COLUMNS = ("timestamp", "duration", "num_gpus")
MOST = 1e12
"""The largest number a field may hold: beyond it, sums of times lose their milliseconds."""
VALUES_SHOWN = 8


@dataclass(frozen=True)
class Workload:
    """Jobs in the order of their submission."""

    jobs: tuple[Job, ...]
    source: str = "jobs"
    lines: Mapping[str, int] | None = None
    """The line of each job in the file it came from."""

    def where(self, job_id: str) -> str:
        """How to point a person to a job."""
        if self.lines and job_id in self.lines:
            return f"{self.source}:{self.lines[job_id]}"
        return self.source

    def at_load(self, load: float) -> "Workload":
        """The same jobs arriving `load` times as fast."""
        if load == 1.0:
            return self
        return replace(self, jobs=tuple(replace(job, submitted=job.submitted / load) for job in self.jobs))


class Row:
    """One line of a CSV file, with complaints that name file, line and field."""

    __slots__ = ("_columns", "_source", "line", "values")

    def __init__(self, source: str, columns: Mapping[str, int]) -> None:
        self._source = source
        self._columns = columns
        self.line = 0
        self.values: Sequence[str] = ()

    def fail(self, field: str, problem: str) -> NoReturn:
        raise InputError(f"{self._source}:{self.line}: {field}: {problem}")

    def text(self, field: str, default: str | None = None) -> str:
        index = self._columns.get(field)
        value = self.values[index].strip() if index is not None else ""
        if not value:
            if default is None:
                self.fail(field, "is empty; give a value")
            return default
        if not value.isprintable():
            self.fail(field, f"{value!r} holds a line break or a control character; remove it")
        return value

    def number(self, field: str, *, least: float = 0.0, above: bool = False) -> float:
        value = self.values[self._columns[field]]
        try:
            number = float(value)
        except ValueError:
            number = least - 1.0
        if not least <= number <= MOST or (above and number == least):
            self._fail_range(field, f"a number {'above' if above else 'from'} {least:g}")
        return number

    def _fail_range(self, field: str, wanted: str) -> NoReturn:
        value = self.values[self._columns[field]].strip()
        if not value:
            self.fail(field, f"is empty; give {wanted}")
        shown = value if len(value) <= 40 else f"{value[:37]}..."
        self.fail(field, f"{shown!r} must be {wanted}{' up to' if ' from ' in wanted else ', at most'} {MOST:g}")

    def count(self, field: str, least: int = 1) -> int:
        value = self.values[self._columns[field]]
        try:
            number = int(value)
        except ValueError:
            try:
                exact = float(value)  # 2.0 or 1e3 will do
                number = int(exact) if exact.is_integer() else least - 1
            except (ValueError, OverflowError):
                number = least - 1
        if not least <= number <= MOST:
            self._fail_range(field, f"a whole number from {least}")
        return number

    def has(self, field: str) -> bool:
        index = self._columns.get(field)
        return index is not None and bool(self.values[index].strip())

    def flag(self, field: str, default: bool) -> bool:
        if not self.has(field):
            return default
        value = self.text(field).lower()
        if value not in ("true", "false", "yes", "no", "1", "0"):
            self.fail(field, f"{value!r} must be true or false")
        return value in ("true", "yes", "1")


def read(path: str | Path, select: Mapping[str, str] | None = None) -> Workload:
    """Read a workload file; `select` keeps the rows whose columns have the given values."""
    source = str(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _read(source, file, select or {})
    except FileNotFoundError:
        raise InputError(
            f"{source}: no such workload file; `carpool workload generate --out {source}` makes one"
        ) from None
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror}; give a CSV file") from None
    except UnicodeDecodeError:
        raise InputError(f"{source}: is not a text file in UTF-8; give a CSV file") from None


def _read(source: str, file: TextIO, select: Mapping[str, str]) -> Workload:
    rows = csv.reader(file)
    try:
        return _jobs(source, rows, select)
    except csv.Error as error:
        raise InputError(f"{source}:{rows.line_num}: is not CSV: {error}; check its quotes") from None


def _jobs(source: str, rows: Iterator[list[str]], select: Mapping[str, str]) -> Workload:
    header = [name.strip() for name in next(rows, [])]
    if not any(header):
        raise InputError(f"{source}:1: is empty; expected a header such as {', '.join(OWN_COLUMNS)}")
    columns = {name: index for index, name in enumerate(header)}
    if len(columns) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise InputError(f"{source}:1: column {twice!r} stands twice in the header; rename or remove one")
    reader = _reader_for(source, columns)
    for name in select:
        if name not in columns:
            raise InputError(f"{source}:1: no column {name!r} to select by: {nearest(name, header)}")
    seen: dict[str, dict[str, None]] = {name: {} for name in select}
    lines: dict[str, int] = {}
    jobs = []
    for line, job in reader(_rows(source, rows, columns, select, seen)):
        if job.id in lines:
            several = any(name in columns and name not in select for name in ("n", "seed"))
            remedy = (
                "the file holds several workloads, choose one with --select n=…,seed=…"
                if several
                else "give each job an id of its own"
            )
            raise InputError(f"{source}:{line}: job {job.id!r} stands already in line {lines[job.id]}; {remedy}")
        lines[job.id] = line
        jobs.append(job)
    if not jobs:
        raise InputError(_no_jobs(source, select, seen))
    jobs.sort(key=lambda job: job.submitted)
    workload = Workload(tuple(jobs), source, lines)
    check_dependencies(workload)
    return workload


def _no_jobs(source: str, select: Mapping[str, str], seen: Mapping[str, Iterable[str]]) -> str:
    if not any(seen.values()):
        return f"{source}: no jobs after the header; add a line for each job"
    chosen = ", ".join(f"{name}={value}" for name, value in select.items())
    there = "; ".join(f"{name} may be {', '.join(values)}" for name, values in seen.items())
    return f"{source}: no jobs with {chosen}; {there}"


def _rows(
    source: str,
    rows: Iterator[list[str]],
    columns: Mapping[str, int],
    select: Mapping[str, str],
    seen: Mapping[str, dict[str, None]],
) -> Iterator[Row]:
    """The rows that are selected. `seen` collects some values of the columns that select, for a message."""
    row = Row(source, columns)
    wanted = [(columns[name], value) for name, value in select.items()]
    width = len(columns)
    for values in rows:
        row.line = rows.line_num  # type: ignore[attr-defined]
        row.values = values
        if len(values) != width:
            if not any(value.strip() for value in values):
                continue
            problem = f"has {len(values)} field{'s' * (len(values) > 1)}, the header has {width}"
            raise InputError(f"{source}:{row.line}: {problem}; check its commas and quotes")
        if not wanted or all(_same(values[index], value) for index, value in wanted):
            yield row
        else:
            for name, some in seen.items():
                if len(some) < VALUES_SHOWN:
                    some[values[columns[name]].strip()] = None


def _same(value: str, wanted: str) -> bool:
    value = value.strip()
    if value == wanted:
        return True
    try:
        return float(value) == float(wanted)
    except ValueError:
        return False


Reader = Callable[[Iterable[Row]], Iterator[tuple[int, Job]]]


def _reader_for(source: str, columns: Mapping[str, int]) -> Reader:
    formats = ((OWN_COLUMNS, _own), (POLLUX_COLUMNS, _pollux), (PHILLY_COLUMNS, _philly))
    for names, reader in formats:
        if all(name in columns for name in names):
            return reader
    likely = max(formats, key=lambda entry: sum(name in columns for name in entry[0]))[0]
    missing = [name for name in likely if name not in columns]
    raise InputError(f"{source}:1: header lacks {', '.join(missing)}; expected at least {', '.join(likely)}")


def _own(rows: Iterable[Row]) -> Iterator[tuple[int, Job]]:
    for row in rows:
        yield (
            row.line,
            Job(
                id=row.text("job"),
                submitted=row.number("submitted_s"),
                model=row.text("model"),
                gpus=row.count("gpus"),
                batch=row.count("batch"),
                iterations=row.count("iterations"),
                user=row.text("user", ""),
                duration_s=row.number("duration_s", above=True) if row.has("duration_s") else None,
                can_shrink=row.flag("can_shrink", True),
                exclusive=row.flag("exclusive", False),
                max_slowdown=row.number("max_slowdown", least=1.0) if row.has("max_slowdown") else None,
                priority=row.count("priority", least=-(10**6)) if row.has("priority") else 0,
                after=tuple(dict.fromkeys(row.text("after", "").split())),
                retries=row.count("retries", least=0) if row.has("retries") else 0,
                elastic=row.flag("elastic", False),
                can_checkpoint=row.flag("can_checkpoint", True),
            ),
        )


def _pollux(rows: Iterable[Row]) -> Iterator[tuple[int, Job]]:
    """Pollux's batch is that of the whole gang; ours is per GPU. All its jobs are elastic."""
    for row in rows:
        gpus = row.count("gpus")
        job = Job(
            id=row.text("name"),
            submitted=row.number("time"),
            model=row.text("app"),
            gpus=gpus,
            batch=-(-row.count("batch") // gpus),
            iterations=row.count("iters"),
            duration_s=row.number("dur", above=True) if row.has("dur") else None,
            elastic=True,
        )
        yield row.line, job


def _philly(rows: Iterable[Row]) -> Iterator[tuple[int, Job]]:
    """Jobs of which only the duration is known: one iteration stands for about a second."""
    read = []
    for row in rows:
        stamp = row.text("timestamp")
        try:
            when = datetime.fromisoformat(stamp)
            if when.tzinfo is not None:
                when = when.astimezone(UTC).replace(tzinfo=None)
        except (ValueError, OverflowError):
            row.fail("timestamp", f"{stamp!r} must be a date and time such as 2017-10-09 07:01:55")
        read.append((when, row.line, row.number("duration", above=True), row.count("num_gpus")))
    first = min(entry[0] for entry in read) if read else None
    for when, line, duration, gpus in read:
        assert first is not None
        submitted = (when - first).total_seconds()
        yield line, Job(f"philly-{line}", submitted, GENERIC, gpus, 1, max(1, round(duration)), duration_s=duration)


def check_dependencies(workload: Workload) -> None:
    """Refuse jobs that wait for an unknown job or for each other."""
    waits = {job.id: job.after for job in workload.jobs if job.after}
    if not waits:
        return
    known = {job.id for job in workload.jobs}
    for name, after in waits.items():
        for other in after:
            if other not in known:
                problem = f"after: there is no job {other!r} to wait for: {nearest(other, known)}"
                raise InputError(f"{workload.where(name)}: {problem}")
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = error.args[1]
        shown = " → ".join(circle[:6]) + (" → …" if len(circle) > 6 else "")
        problem = f"after: jobs wait for each other in a circle ({shown}); remove one of these dependencies"
        raise InputError(f"{workload.where(circle[0])}: {problem}") from None


def check_ids(workload: Workload) -> None:
    """Refuse two jobs of one name."""
    known: set[str] = set()
    for job in workload.jobs:
        if job.id in known:
            raise InputError(f"{workload.where(job.id)}: job {job.id!r} is there twice; give each job an id of its own")
        known.add(job.id)


def write(workload: Workload, file: TextIO) -> None:
    """Write jobs in our own format, without the optional columns that nobody uses."""
    plain = Job("", 0.0, "", 1, 1, 1)
    used = [name for name in OPTIONAL_COLUMNS if any(_cell(job, name) != _cell(plain, name) for job in workload.jobs)]
    out = csv.writer(file, lineterminator="\n")
    out.writerow([*OWN_COLUMNS, *used])
    for job in workload.jobs:
        own = [job.id, _number(job.submitted), job.model, job.gpus, job.batch, job.iterations]
        out.writerow(own + [_cell(job, name) for name in used])


def _cell(job: Job, column: str) -> str:
    if column == "duration_s":
        return "" if job.duration_s is None else _number(job.duration_s)
    if column == "after":
        return " ".join(job.after)
    value = getattr(job, column)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    """As short as it can be without becoming another number."""
    short = f"{value:.10g}"
    return short if float(short) == value else repr(value)
