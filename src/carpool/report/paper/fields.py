"""Strict reading of the TOML file with the paper's settings."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from carpool.errors import InputError, nearest
from carpool.field_types import AnyText, WholeNumber
from carpool.fields import Fields
from carpool.sim.sources import parse_seeds

MAX_COUNT = 100_000


class TomlTable(Fields):
    """One table of a TOML file."""

    def text(self, key: str, default: str | None = None) -> str:
        return super().text(key, default).strip()

    def checked(self, key: str, check: Callable[[str], Any]) -> str:
        """Return a text that `check` accepts."""
        text = self.text(key)
        try:
            check(text)
        except InputError as error:
            self.fail(key, str(error))
        return text

    def count(self, key: str, low: int = 1, high: int = MAX_COUNT) -> int:
        return self.whole(key, low, high)

    def counts(self, key: str, low: int = 1, high: int = MAX_COUNT) -> tuple[int, ...]:
        return self._filled(key, self.items(key, WholeNumber(low, high)))

    def positive_numbers(self, key: str, length: int | None = None) -> tuple[float, ...]:
        """Return numbers above 0, `length` of them where that is given."""
        found: tuple[float, ...] = self._filled(key, self.numbers(key, 0.0))
        if length is not None and len(found) != length:
            self.fail(key, f"has {len(found)} numbers; give {length}")
        if 0.0 in found:
            self.fail(key, "0 must be a number above 0")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        return self._filled(key, self.items(key, AnyText()))

    def children(self, key: str) -> list[Self]:
        """Return the tables of a list, which must have at least one."""
        return list(self._filled(key, tuple(super().children(key))))

    def seeds(self, key: str) -> tuple[int, ...]:
        text = self.text(key)
        try:
            return tuple(parse_seeds(text))
        except InputError:
            self.fail(key, f"{text!r} must be seeds such as 1-8")

    def among(self, key: str, found: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
        """Return `found` if all of it is known."""
        for item in found:
            if item not in known:
                self.fail(key, f"unknown name {item!r}: {nearest(item, known)}")
        return tuple(found)

    def rows(self, key: str, read: Callable[["TomlTable", str], Any]) -> dict[str, Any]:
        """Return the rows of a table whose names may be anything."""
        child = self.child(key)
        return {name: read(child, name) for name in child}

    def _filled(self, key: str, found: tuple[Any, ...]) -> tuple[Any, ...]:
        if not found:
            self.fail(key, "is empty; give at least one value")
        return found
