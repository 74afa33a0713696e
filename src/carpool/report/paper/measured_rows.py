"""Files of measured figures: one line per case. Every error names its line and column."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from carpool.errors import InputError


@dataclass(frozen=True)
class MeasuredRow:
    """One line of a file; its errors name line and column."""

    path: Path
    line: int
    values: Mapping[str, str | None]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def value(self, column: str, read: Callable[[str], float], fits: Callable[[float], bool], wanted: str) -> float:
        text = self.values[column] or ""
        try:
            found = read(text)
        except ValueError:
            found = float("nan")
        if not (isfinite(found) and fits(found)):
            raise InputError(f"{self.where}: {column}: {text!r} must be {wanted}; fix the row")
        return found

    def count(self, column: str, least: int = 1) -> int:
        wanted = f"a whole number of at least {least}"
        return int(self.value(column, int, lambda number: number >= least, wanted))

    def share(self, column: str) -> float:
        return self.value(column, float, lambda part: 0 <= part <= 1, "a share from 0 to 1")

    def seconds(self, column: str, may_be_zero: bool = False) -> float:
        if may_be_zero:
            return self.value(column, float, lambda s: s >= 0, "a number of seconds, 0 or above")
        return self.value(column, float, lambda s: s > 0, "a number of seconds above 0")


def read_rows(path: Path, columns: Sequence[str], remedy: str) -> Iterator[MeasuredRow]:
    """Yield the rows of a file. `remedy`: where a right file comes from."""
    empty = True
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            for column in columns:
                if column not in (rows.fieldnames or ()):
                    raise InputError(f"{path}:1: {column}: this column is missing; {remedy}")
            for row in rows:
                if None in row:
                    last = (rows.fieldnames or [""])[-1]
                    raise InputError(f"{path}:{rows.line_num}: {last}: more values follow; write numbers with a point")
                empty = False
                yield MeasuredRow(path, rows.line_num, row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {problem}; {remedy}") from None
    if empty:
        raise InputError(f"{path}:2: policy: there are no rows; {remedy}")
