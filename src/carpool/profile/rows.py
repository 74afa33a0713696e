"""Readers of the input of `carpool fit`: throughput tables, measurement files and slow-down matrices.

Each reader checks every field; an error names file, line and remedy. A throughput table is CSV with the columns app,
nodes, gpus, local_bsz, step_time and optionally accumulation (or accum). A measurement file is JSON with `solo`, `pair`
and `group` rows. A matrix is CSV in which the row's task is slowed by the column's.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.field_types import shown
from carpool.fields import NotReadable, read_json_text
from carpool.profile.fields import ProfileError, ProfileFields
from carpool.profile.values import Group, GroupJob, Pair

GIB = 2**30
COLUMNS = ("app", "nodes", "gpus", "local_bsz", "step_time")


@dataclass(frozen=True, slots=True)
class Run:
    """One timed configuration: `batch` samples per GPU and iteration, in `accumulation` micro-batches."""

    task: str
    batch: int
    accumulation: int
    gpus: int
    nodes: int
    seconds: float
    memory_bytes: float | None = None


def read_runs(path: str | Path) -> list[Run]:
    """Read the timed rows of a throughput table (CSV) or of a measurement file (JSON)."""
    return read_solo(path) if str(path).endswith(".json") else read_throughput(path)


def read_throughput(path: str | Path) -> list[Run]:
    runs = []
    for where, row in read_table(path, COLUMNS, "a throughput table"):
        run = Run(
            task=row["app"].strip(),
            batch=whole(row["local_bsz"], f"{where}: local_bsz"),
            accumulation=whole(row.get("accumulation", row.get("accum", "1")), f"{where}: accum"),
            gpus=whole(row["gpus"], f"{where}: gpus"),
            nodes=whole(row["nodes"], f"{where}: nodes"),
            seconds=positive(row["step_time"], f"{where}: step_time"),
        )
        if run.nodes > run.gpus:
            raise ProfileError(f"{where}: nodes: {run.nodes} nodes for {run.gpus} GPUs; each node holds at least one")
        runs.append(run)
    return runs


def read_table(path: str | Path, columns: Sequence[str], what: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a CSV table of tasks, each with its location for messages."""
    lines = _csv(path)
    header = lines[0][1]
    missing = [column for column in columns if column not in header]
    if missing:
        raise ProfileError(f"{path}: line 1: no column {missing[0]}; {what} has {', '.join(columns)}")
    if not lines[1:]:
        raise ProfileError(f"{path}: no rows below the header; give a table with at least one task")
    for number, cells in lines[1:]:
        where = f"{path}: line {number}"
        if len(cells) != len(header):
            raise ProfileError(f"{where}: {len(cells)} fields, the header has {len(header)}; fix the row")
        row = dict(zip(header, cells, strict=True))
        if not row["app"].strip():
            raise ProfileError(f"{where}: app: empty; name the task")
        yield where, row


def read_solo(path: str | Path) -> list[Run]:
    """Read the `solo` rows of a measurement file: one GPU, with memory."""
    return [_solo(row) for row in _measurement(path).children("solo")]


def _solo(f: ProfileFields) -> Run:
    seconds, gib = f.number("iter_s", 0), f.number("mem_gib", 0)
    if seconds == 0:
        f.fail("iter_s", "0 s; measure it again")
    return Run(
        f.text("model"),
        f.whole("batch", 1),
        f.whole("accumulation", 1, default=f.whole("accum", 1, default=1)),
        1,
        1,
        seconds,
        gib * GIB,
    )


def read_pairs(
    path: str | Path, mechanism: str = "unknown", batches: Mapping[str, int] | None = None, source: str | None = None
) -> tuple[list[Pair], list[Group]]:
    """Read pairs and groups of a measurement file (JSON), or the pairs of a matrix (CSV; batch 0, as none is known).

    `batches` gives the batch at which each task ran beside others. Without it, and without a batch in the row, it is
    the batch whose accumulation was timed in the solo rows.
    """
    if not str(path).endswith(".json"):
        return _matrix_pairs(read_matrix(path), mechanism, source), []
    file = _measurement(path)
    ran_at = batches if batches is not None else _shared_batches(path)

    def batch(f: ProfileFields, key: str, task: str) -> int:
        if key in f:
            return f.whole(key, 0)
        if task not in ran_at:
            f.fail(key, f"missing, and no solo rows with accumulation tell the batch of {task}; add it")
        return ran_at[task]

    pairs = []
    for f in file.children("pair"):
        a, b = f.text("a"), f.text("b")
        xi_a, xi_b = f.number("xi_a", 0.1), f.number("xi_b", 0.1)
        pairs.append(Pair(a, batch(f, "batch_a", a), b, batch(f, "batch_b", b), mechanism, xi_a, xi_b, source=source))
    groups = []
    for f in file.children("group"):
        tasks, xi = f.texts("jobs"), f.numbers("xi", 0.1)
        if len(tasks) != len(xi):
            f.fail("xi", f"{len(xi)} values for {len(tasks)} jobs; give one for each job")
        jobs = tuple(GroupJob(task, batch(f, "batch", task)) for task in tasks)
        groups.append(Group(jobs, mechanism, xi, source))
    return pairs, groups


def _shared_batches(path: str | Path) -> dict[str, int]:
    found: dict[str, set[int]] = {}
    for run in read_solo(path):
        if run.accumulation > 1:
            found.setdefault(run.task, set()).add(run.batch)
    return {task: sizes.pop() for task, sizes in found.items() if len(sizes) == 1}


def _matrix_pairs(matrix: dict[tuple[str, str], float], mechanism: str, source: str | None) -> list[Pair]:
    names = sorted({name for name, _ in matrix})
    return [
        Pair(a, 0, b, 0, mechanism, matrix[a, b], matrix[b, a], source=source)
        for i, a in enumerate(names)
        for b in names[i:]
    ]


def merge_pairs(pairs: Iterable[Pair]) -> list[Pair]:
    """Merge runs of the same jobs, batches and mechanism into one pair: the mean, with the range as its interval.

    Files may name the two jobs in another order; the order of the first file is kept.
    """
    runs: dict[tuple[object, ...], list[Pair]] = {}
    for one in pairs:
        turned = one.turned()
        like = turned if one.key not in runs and turned.key in runs else one
        runs.setdefault(like.key, []).append(like)
    return [_merged(same) if len(same) > 1 else same[0] for same in runs.values()]


def _merged(same: list[Pair]) -> Pair:
    first = same[0]
    xi_a, xi_b = [p.xi_a for p in same], [p.xi_b for p in same]
    return Pair(
        *(first.a, first.batch_a, first.b, first.batch_b, first.mechanism),
        xi_a=sum(xi_a) / len(same),
        xi_b=sum(xi_b) / len(same),
        interval_a=(min(xi_a), max(xi_a)),
        interval_b=(min(xi_b), max(xi_b)),
        runs=len(same),
        source=", ".join(dict.fromkeys(p.source for p in same if p.source)) or None,
    )


def read_matrix(path: str | Path) -> dict[tuple[str, str], float]:
    """Read ξ by (task, mate) from a CSV matrix with names in the first row and the first column and no empty cell."""
    lines = _csv(path)
    columns = lines[0][1][1:]
    _check_names(f"{path}: line 1", columns)
    matrix: dict[tuple[str, str], float] = {}
    seen: list[str] = []
    for number, cells in lines[1:]:
        where, row = f"{path}: line {number}", cells[0].strip()
        if row not in columns:
            raise ProfileError(
                f"{where}: field 1: row {row!r} is not in the header; name it there: {', '.join(columns)}"
            )
        if row in seen:
            raise ProfileError(f"{where}: field 1: a second row for {row}; keep one of them")
        if len(cells) != len(columns) + 1:
            raise ProfileError(f"{where}: {len(cells) - 1} values for {len(columns)} columns; give one for each")
        seen.append(row)
        for column, cell in zip(columns, cells[1:], strict=True):
            matrix[row, column] = _slowdown(cell, f"{where}: {column}")
    absent = [name for name in columns if name not in seen]
    if absent:
        raise ProfileError(f"{path}: no row for {absent[0]}; the matrix needs a row for each column")
    return matrix


def _check_names(where: str, columns: list[str]) -> None:
    if not columns:
        raise ProfileError(f"{where}: no column names; the first row names the tasks after an empty field")
    for i, name in enumerate(columns):
        if not name.strip():
            raise ProfileError(f"{where}: field {i + 2}: empty name; name the task")
        if name in columns[:i]:
            raise ProfileError(f"{where}: field {i + 2}: {name} appears twice; keep one column for each task")


def _slowdown(text: str, where: str) -> float:
    xi = number(text, where)
    if xi < 1:
        raise ProfileError(
            f"{where}: {shown(text.strip())} is below 1; give the slow-down (shared time / time alone), 1 for none"
        )
    return xi


def _csv(path: str | Path) -> list[tuple[int, list[str]]]:
    """Return rows with their line numbers, without blank lines."""
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise ProfileError(f"{path}: line {reader.line_num}: not CSV ({error}); save it as plain CSV") from None
    if not rows:
        raise ProfileError(f"{path}: empty; give a CSV file with a header")
    return rows


def _measurement(path: str | Path) -> ProfileFields:
    text = _text(path)
    try:
        value: Any = read_json_text(text)
    except NotReadable as error:
        raise ProfileError(f"{path}: line {error.line}: not JSON ({error.problem}); give a measurement file") from None
    return ProfileFields(value, str(path))


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; check the path") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: not a text file in UTF-8; save it as such") from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot read it ({error.strerror}); check the path") from None


def number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ProfileError(f"{where}: {shown(text.strip())} is not a number; give one") from None
    if not math.isfinite(value):
        raise ProfileError(f"{where}: {shown(text.strip())} is not finite; measure it again or leave the row out")
    return value


def positive(text: str, where: str) -> float:
    value = number(text, where)
    if value <= 0:
        raise ProfileError(f"{where}: {shown(text.strip())} is not above 0; measure it again")
    return value


def whole(text: str, where: str) -> int:
    value = number(text, where)
    if value < 1 or value != int(value):
        raise ProfileError(f"{where}: {shown(text.strip())} is not a whole number of at least 1; fix it")
    return int(value)
