"""Strict reading of JSON: every value is read by name and type, and an unknown field is an error.

The profile schema uses it to refuse an invalid file with its name, the path of the field and a remedy, before a
simulation starts. `ProfileError` is the only error of this package that a user sees.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from carpool.errors import InputError

T = TypeVar("T")


class ProfileError(InputError):
    """A profile, table or measurement file that cannot be used."""


class Fields:
    """One JSON object of a file, read field by field. `done` refuses fields that were not read."""

    def __init__(self, value: object, file: str, path: str = "") -> None:
        self.file, self.path = file, path
        if not isinstance(value, dict):
            self._fail(f"expected an object, found {_kind(value)}")
        self._values: dict[str, Any] = dict(value)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            self._fail(f"expected text, found {_kind(value)}", key)
        return value

    def number(self, key: str, at_least: float, default: float | None = None) -> float:
        return self._number(self._take(key, default), at_least, key)

    def whole(self, key: str, at_least: int, default: int | None = None) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(f"expected a whole number, found {_kind(value)}", key)
        if value < at_least:
            self._fail(f"{value} is too small; give at least {at_least}", key)
        return value

    def flag(self, key: str) -> bool:
        value = self._take(key, None)
        if not isinstance(value, bool):
            self._fail(f"expected true or false, found {_kind(value)}", key)
        return value

    def maybe(self, key: str, read: Callable[[str], T]) -> T | None:
        """Return `read(key)` if the field is present and not null, else None."""
        if self._values.get(key) is None:
            self._known.append(key)
            return None
        return read(key)

    def numbers(self, key: str, at_least: float) -> tuple[float, ...]:
        return tuple(self._number(item, at_least, f"{key}[{i}]") for i, item in enumerate(self._list(key)))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, empty if the field is missing."""
        items = self._list(key) if key in self else self._absent(key)
        for i, item in enumerate(items):
            if not isinstance(item, str):
                self._fail(f"expected text, found {_kind(item)}", f"{key}[{i}]")
        return tuple(items)

    def child(self, key: str) -> "Fields":
        return Fields(self._take(key, None), self.file, self._at(key))

    def children(self, key: str) -> "list[Fields]":
        """Return a list of objects, empty if the field is missing."""
        items = self._list(key) if key in self else self._absent(key)
        return [Fields(item, self.file, f"{self._at(key)}[{i}]") for i, item in enumerate(items)]

    def named(self, key: str) -> "dict[str, Fields]":
        """Return an object of objects by name, empty if the field is missing."""
        if key not in self:
            self._absent(key)
            return {}
        inner = self.child(key)
        return {name: Fields(value, self.file, inner._at(name)) for name, value in inner._values.items()}

    def named_texts(self, key: str) -> dict[str, str]:
        if key not in self:
            self._absent(key)
            return {}
        inner = self.child(key)
        return {name: inner.text(name) for name in inner._values}

    def done(self) -> None:
        for key in self._values:
            if key not in self._known:
                self._fail(f"unknown field; known here: {', '.join(sorted(self._known))}", key)

    def fail(self, key: str, problem: str) -> NoReturn:
        self._fail(problem, key)

    def _number(self, value: object, at_least: float, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"expected a number, found {_kind(value)}", key)
        if not math.isfinite(value):
            self._fail(f"{value} is not a finite number; measure or fit it again", key)
        if value < at_least:
            self._fail(f"{value:g} is too small; give at least {at_least:g}", key)
        return float(value)

    def _list(self, key: str) -> list[Any]:
        value = self._take(key, None)
        if not isinstance(value, list):
            self._fail(f"expected a list, found {_kind(value)}", key)
        return value

    def _absent(self, key: str) -> list[Any]:
        self._known.append(key)
        return []

    def _take(self, key: str, default: object) -> Any:
        self._known.append(key)
        if key in self._values:
            return self._values[key]
        if default is None:
            self._fail("missing; add it", key)
        return default

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _fail(self, problem: str, key: str = "") -> NoReturn:
        where = self._at(key) if key else self.path
        raise ProfileError(f"{self.file}: {where}: {problem}" if where else f"{self.file}: {problem}")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
