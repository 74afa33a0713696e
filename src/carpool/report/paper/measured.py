"""The results of a real experiment for Table II, where the configuration names a file with them."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InputError, nearest
from carpool.report.paper.config import Config

COLUMNS = ("policy", "makespan_s", "mean_jct_s")


@dataclass(frozen=True)
class Measured:
    file: str
    rows: dict[str, tuple[float, float]]
    """Makespan and mean completion time in seconds, by policy."""


def read_measured(config: Config) -> Measured | None:
    """None where nothing was measured."""
    path = config.physical.measured
    if path is None:
        return None
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}; give a CSV file with {', '.join(COLUMNS)}") from None
    found = {}
    for line, row in enumerate(rows, start=2):
        found.update(_row(path, line, row, config.physical.policies))
    if not found:
        raise InputError(f"{path}: holds no rows; give a CSV file with {', '.join(COLUMNS)}")
    return Measured(Path(path).name, found)


def _row(path: str, line: int, row: dict[str, str], known: Sequence[str]) -> dict[str, tuple[float, float]]:
    name = row.get("policy") or ""
    if name not in known:
        raise InputError(f"{path}:{line}: policy: {name!r} is not one of Table II's: {nearest(name, known)}")
    try:
        makespan, jct = (float(row[column]) for column in COLUMNS[1:])
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}:{line}: give a number of seconds in {' and '.join(COLUMNS[1:])}") from None
    if not (makespan > 0 and jct > 0):
        raise InputError(f"{path}:{line}: seconds must be above 0; mend the row")
    return {name: (makespan, jct)}
