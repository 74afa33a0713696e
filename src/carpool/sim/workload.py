"""Workloads: the jobs of a simulation, and the readers and the writer of the CSV formats.

The header of a file chooses its reader. The columns of Carpool's own format are the fields of `carpool.job_schema`;
unknown columns are ignored. Every error names the file, the line and the column and says what to write instead.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NoReturn, TextIO

from carpool.core.model import Job
from carpool.core.perf import GENERIC
from carpool.errors import InputError, nearest
from carpool.field_types import FieldError, FieldType
from carpool.job_schema import COLUMNS, JobField

FIELD_TYPES = {one.name: one.type for one in COLUMNS}
OWN_COLUMNS = tuple(one.name for one in COLUMNS if one.column_required)
POLLUX_COLUMNS = ("name", "time", "app", "gpus", "batch", "iters")
PHILLY_COLUMNS = ("timestamp", "duration", "num_gpus")
VALUES_SHOWN = 8


@dataclass(frozen=True)
class Workload:
    """Jobs in order of submission."""

    jobs: tuple[Job, ...]
    source: str = "jobs"
    lines: Mapping[str, int] | None = None
    """Line of each job in its file."""

    def where(self, job_id: str) -> str:
        """Return the file and line of a job, for messages."""
        if self.lines and job_id in self.lines:
            return f"{self.source}:{self.lines[job_id]}"
        return self.source

    def at_load(self, load: float) -> "Workload":
        """Return the same jobs with the arrival rate multiplied by `load`."""
        if load == 1.0:
            return self
        return replace(self, jobs=tuple(replace(job, submitted=job.submitted / load) for job in self.jobs))


class CsvRow:
    """One line of a CSV file."""

    __slots__ = ("_columns", "_source", "line", "values")

    def __init__(self, source: str, columns: Mapping[str, int]) -> None:
        self._source = source
        self._columns = columns
        self.line = 0
        self.values: Sequence[str] = ()

    def fail(self, column: str, problem: str) -> NoReturn:
        raise InputError(f"{self._source}:{self.line}: {column}: {problem}")

    def value(self, column: str, kind: FieldType, *, required: bool = True) -> Any:
        """Return the value of a cell; None where it is empty or the file lacks the column."""
        index = self._columns.get(column)
        text = "" if index is None else self.values[index].strip()
        if not text:
            if required:
                self.fail(column, f"is empty; give {kind.wanted}")
            return None
        try:
            return kind.from_cell(text)
        except FieldError as error:
            self.fail(column, str(error))

    def repeated(self, column: str, kind: FieldType, known: dict[str, Any], *, required: bool = True) -> Any:
        """Return `value` for a column in which few different texts are repeated; `known` keeps what they mean."""
        text = self.values[self._columns[column]] if column in self._columns else ""
        if text not in known:
            known[text] = self.value(column, kind, required=required)
        return known[text]

    def job(self, among: Iterable[tuple[int, JobField, str]]) -> Job:
        """Return the job of a line in Carpool's own format, from the cells at the given indexes.

        Empty cells mean the default of `core.model.Job`.
        """
        values: dict[str, Any] = {}
        cells = self.values
        for index, one, attribute in among:
            text = cells[index]
            if not text or text.isspace():
                if one.column_required:
                    self.fail(one.name, f"is empty; give {one.type.wanted}")
                continue
            try:
                values[attribute] = one.type.from_cell(text)
            except FieldError as error:
                self.fail(one.name, str(error))
        return Job(**values)


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
        raise InputError(f"{source}:1: column {twice!r} is in the header twice; rename or remove one")
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
                "the file holds several workloads; select one with --select n=…,seed=…"
                if several
                else "give each job its own id"
            )
            raise InputError(f"{source}:{line}: job {job.id!r} is already in line {lines[job.id]}; {remedy}")
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
    there = "; ".join(f"{name} can be {', '.join(values)}" for name, values in seen.items())
    return f"{source}: no jobs with {chosen}; {there}"


def _rows(
    source: str,
    rows: Iterator[list[str]],
    columns: Mapping[str, int],
    select: Mapping[str, str],
    seen: Mapping[str, dict[str, None]],
) -> Iterator[CsvRow]:
    """Yield the selected rows. `seen` collects some values of the selecting columns, for a message."""
    row = CsvRow(source, columns)
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


Reader = Callable[[Iterable[CsvRow]], Iterator[tuple[int, Job]]]


def _reader_for(source: str, columns: Mapping[str, int], among: Sequence[JobField] = COLUMNS) -> Reader:
    present = [(columns[one.name], one, one.attribute or one.name) for one in among if one.name in columns]

    def own(rows: Iterable[CsvRow]) -> Iterator[tuple[int, Job]]:
        return ((row.line, row.job(present)) for row in rows)

    formats = ((OWN_COLUMNS, own), (POLLUX_COLUMNS, _pollux), (PHILLY_COLUMNS, _philly))
    for names, reader in formats:
        if all(name in columns for name in names):
            return reader
    likely = max(formats, key=lambda entry: sum(name in columns for name in entry[0]))[0]
    missing = [name for name in likely if name not in columns]
    raise InputError(f"{source}:1: header lacks {', '.join(missing)}; expected at least {', '.join(likely)}")


def _pollux(rows: Iterable[CsvRow]) -> Iterator[tuple[int, Job]]:
    """Yield the jobs of a Pollux file: its batch is that of the whole gang, ours is per GPU; all jobs are elastic."""
    for row in rows:
        gpus = row.value("gpus", FIELD_TYPES["gpus"])
        job = Job(
            id=row.value("name", FIELD_TYPES["job"]),
            submitted=row.value("time", FIELD_TYPES["submitted_s"]),
            model=row.value("app", FIELD_TYPES["model"]),
            gpus=gpus,
            batch=-(-row.value("batch", FIELD_TYPES["batch"]) // gpus),
            iterations=row.value("iters", FIELD_TYPES["iterations"]),
            duration_s=row.value("dur", FIELD_TYPES["duration_s"], required=False),
            elastic=True,
        )
        yield row.line, job


def _philly(rows: Iterable[CsvRow]) -> Iterator[tuple[int, Job]]:
    """Yield the jobs of a Philly file. It states only durations, so that one iteration stands for about a second.

    Its virtual clusters, which are shares of one cluster, are read as groups.
    """
    read = []
    groups: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for row in rows:
        stamp = row.value("timestamp", FIELD_TYPES["job"])
        try:
            when = datetime.fromisoformat(stamp)
            if when.tzinfo is not None:
                when = when.astimezone(UTC).replace(tzinfo=None)
        except (ValueError, OverflowError):
            row.fail("timestamp", f"{stamp!r} must be a date and time such as 2017-10-09 07:01:55")
        duration = row.value("duration", FIELD_TYPES["duration_s"])
        gpus = row.repeated("num_gpus", FIELD_TYPES["gpus"], sizes)
        group = row.repeated("cluster", FIELD_TYPES["group"], groups, required=False) or ""
        read.append((when, row.line, duration, gpus, group))
    first = min(entry[0] for entry in read) if read else None
    for when, line, duration, gpus, group in read:
        assert first is not None
        submitted, iterations = (when - first).total_seconds(), max(1, round(duration))
        yield line, Job(f"philly-{line}", submitted, GENERIC, gpus, 1, iterations, duration_s=duration, group=group)


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
    """Refuse two jobs with the same id."""
    known: set[str] = set()
    for job in workload.jobs:
        if job.id in known:
            raise InputError(f"{workload.where(job.id)}: job {job.id!r} exists twice; give each job its own id")
        known.add(job.id)


def write(workload: Workload, file: TextIO, among: Sequence[JobField] = COLUMNS) -> None:
    """Write jobs in Carpool's own format, without the optional columns in which all jobs have the default."""
    plain = Job("", 0.0, "", 1, 1, 1)
    used = [
        one
        for one in among
        if one.column_required or any(_value(job, one) != _value(plain, one) for job in workload.jobs)
    ]
    out = csv.writer(file, lineterminator="\n")
    out.writerow([one.name for one in used])
    for job in workload.jobs:
        values = ((one, _value(job, one)) for one in used)
        out.writerow(["" if value is None else one.type.to_cell(value) for one, value in values])


def _value(job: Job, one: JobField) -> Any:
    return getattr(job, one.attribute or one.name)
