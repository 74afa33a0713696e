"""Strict reading of TOML tables: every value has a type, every name is known, and an error names its place.

`config.py` reads `paper.toml` with it.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NoReturn

from carpool.errors import InputError, nearest
from carpool.sim.sources import parse_seeds


class TomlTable:
    """One table of a TOML file. `close` raises an error if the table has names that were never read."""

    def __init__(self, values: Any, file: str, path: str = "") -> None:
        self.file, self.path = file, path
        if not isinstance(values, dict):
            raise InputError(f"{file}: {path}: must be a table; write [{path}]")
        self.values = values
        self._asked: set[str] = set()

    def fail(self, key: str, problem: str) -> NoReturn:
        where = f"{self.path}.{key}" if self.path else key
        raise InputError(f"{self.file}: {where}: {problem}")

    def has(self, key: str) -> bool:
        self._asked.add(key)
        return key in self.values

    def value(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        if not self.has(key):
            self.fail(key, f"is missing; give {wanted}")
        found = self.values[key]
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            self.fail(key, f"{found!r} must be {wanted}")
        return found

    def text(self, key: str) -> str:
        return str(self.value(key, str, "a text")).strip()

    def checked(self, key: str, check: Callable[[str], Any]) -> str:
        """Return a text that `check` accepts."""
        text = self.text(key)
        try:
            check(text)
        except InputError as error:
            self.fail(key, str(error))
        return text

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.value(key, bool, "true or false")) if self.has(key) else default

    def number(self, key: str, least: float, most: float = 1e9) -> float:
        wanted = f"a number from {least:g} to {most:g}"
        found = float(self.value(key, (int, float), wanted))
        if not least <= found <= most:
            self.fail(key, f"{found:g} must be {wanted}")
        return found

    def count(self, key: str, least: int = 1, most: int = 100_000) -> int:
        wanted = f"a whole number from {least} to {most}"
        found = int(self.value(key, int, wanted))
        if not least <= found <= most:
            self.fail(key, f"{found} must be {wanted}")
        return found

    def each(self, key: str, kind: type | tuple[type, ...], wanted: str) -> tuple[Any, ...]:
        found = self.value(key, list, f"a list of {wanted}")
        for item in found:
            if not isinstance(item, kind) or isinstance(item, bool):
                self.fail(key, f"{item!r} must be one of {wanted}")
        if not found:
            self.fail(key, f"is empty; give {wanted}")
        return tuple(found)

    def counts(self, key: str, least: int = 1, most: int = 100_000) -> tuple[int, ...]:
        found = self.each(key, int, "whole numbers")
        for item in found:
            if not least <= item <= most:
                self.fail(key, f"{item} must be from {least} to {most}")
        return found

    def numbers(self, key: str, length: int | None = None) -> tuple[float, ...]:
        found = tuple(float(item) for item in self.each(key, (int, float), "numbers"))
        if length is not None and len(found) != length:
            self.fail(key, f"has {len(found)} numbers; give {length}")
        for item in found:
            if not isfinite(item) or item <= 0:
                self.fail(key, f"{item:g} must be a number above 0")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        return self.each(key, str, "texts")

    def seeds(self, key: str) -> tuple[int, ...]:
        try:
            return tuple(parse_seeds(self.text(key)))
        except InputError:
            self.fail(key, f"{self.values[key]!r} names no seeds; write seeds such as 1-8")

    def child(self, key: str) -> "TomlTable":
        where = f"{self.path}.{key}" if self.path else key
        return TomlTable(self.value(key, dict, f"a table [{where}]"), self.file, where)

    def children(self, key: str) -> list["TomlTable"]:
        found = self.value(key, list, f"tables [[{key}]]")
        return [TomlTable(item, self.file, f"{key}[{number}]") for number, item in enumerate(found, start=1)]

    def among(self, key: str, found: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
        """Return `found` if all its names are known."""
        for item in found:
            if item not in known:
                self.fail(key, f"unknown name {item!r}: {nearest(item, known)}")
        return tuple(found)

    def rows(self, key: str, read: Callable[["TomlTable", str], Any]) -> dict[str, Any]:
        """Return the rows of a table whose keys may have any name."""
        child = self.child(key)
        return {name: read(child, name) for name in child.values}

    def close(self) -> None:
        for key in self.values:
            if key not in self._asked:
                self.fail(key, f"unknown name: {nearest(key, self._asked)}")
