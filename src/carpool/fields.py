"""Strict reading of JSON and TOML documents: every value is taken by name and type, and unknown names are refused.

The readers of profiles, raw measurements and the paper's settings use `Fields`, so that a wrong file is refused with
its name, the path of the field and a remedy, instead of failing later inside a simulation. The checks of single values
are those of `field_types`; `job_schema` reads jobs with the same types.
"""

import json
import tomllib
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from carpool.errors import InputError, nearest
from carpool.field_types import UNBOUNDED, AnyText, FieldError, FieldType, RealNumber, WholeNumber, YesNo, shown

T = TypeVar("T")
MAX_DOTS = 100
"""Number of dots in a line of TOML. The reader's time grows with the square of a key's parts."""


def read_json_text(text: str, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> Any:
    """Return the value of a JSON text from outside. Raise `NotReadable`, also where the text is nested deeper or holds
    longer numbers than can be read. `unique` makes an object of its pairs."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise NotReadable(error.lineno, error.msg) from None
    except RecursionError:
        raise NotReadable(1, "nested too deep") from None
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise NotReadable(1, str(error).partition(";")[0]) from None


def read_toml_text(text: str) -> dict[str, Any]:
    """Return the value of a TOML text from outside. Raise `NotReadable`."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            raise NotReadable(number, f"more than {MAX_DOTS} dots in a line")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotReadable(None, str(error)) from None
    except RecursionError:
        raise NotReadable(None, "nested too deep") from None
    except ValueError as error:  # a date that does not exist, a number of thousands of digits
        raise NotReadable(None, str(error).partition(";")[0]) from None


class NotReadable(ValueError):
    """A text that is not JSON or TOML, or that is too large or too deep to be read."""

    def __init__(self, line: int | None, problem: str) -> None:
        self.line, self.problem = line, problem
        super().__init__(problem if line is None else f"line {line}: {problem}")


class Fields:
    """One object of a document. `done` refuses the names that were not read."""

    error: ClassVar[type[InputError]] = InputError
    """Class of the errors that are raised."""

    def __init__(self, value: object, file: str, path: str = "") -> None:
        self.file, self.path = file, path
        if not isinstance(value, dict):
            self.fail("", f"{shown(value, 40)} must be an object with named values")
        self._values: dict[str, Any] = dict(value)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Any:
        return iter(self._values)

    def value(self, key: str, kind: FieldType, default: object = None) -> Any:
        """Return a checked value, or the default where the field is missing; without a default it is required."""
        self._known.append(key)
        if key not in self._values:
            if default is None:
                self.fail(key, f"is missing; give {kind.wanted}")
            return default
        return self._check(key, kind, self._values[key])

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.value(key, AnyText(), default))

    def number(self, key: str, low: float, high: float = UNBOUNDED, *, default: float | None = None) -> float:
        return float(self.value(key, RealNumber(low, high), default))

    def whole(self, key: str, low: int, high: int = UNBOUNDED, *, default: int | None = None) -> int:
        return int(self.value(key, WholeNumber(low, high), default))

    def flag(self, key: str, default: bool | None = None) -> bool:
        return bool(self.value(key, YesNo(), default))

    def maybe(self, key: str, read: Callable[[str], T]) -> T | None:
        """Return `read(key)`, or None where the field is missing or null."""
        if self._values.get(key) is None:
            self._known.append(key)
            return None
        return read(key)

    def items(self, key: str, kind: FieldType) -> tuple[Any, ...]:
        """Return the checked values of a list."""
        return tuple(self._check(f"{key}[{i}]", kind, item) for i, item in enumerate(self.sequence(key)))

    def numbers(self, key: str, low: float) -> tuple[float, ...]:
        return self.items(key, RealNumber(low, UNBOUNDED))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; empty where the field is missing."""
        return self.items(key, AnyText()) if self.has(key) else ()

    def sequence(self, key: str) -> list[Any]:
        """Return a list as it is in the document."""
        if not self.has(key):
            self.fail(key, "is missing; give a list")
        value = self._values[key]
        if not isinstance(value, list):
            self.fail(key, f"{shown(value, 40)} must be a list")
        return value

    def has(self, key: str) -> bool:
        """Return whether the field is there; it counts as read."""
        self._known.append(key)
        return key in self._values

    def child(self, key: str) -> Self:
        if not self.has(key):
            self.fail(key, "is missing; give an object with named values")
        return type(self)(self._values[key], self.file, self.at(key))

    def children(self, key: str) -> list[Self]:
        """Return a list of objects; empty where the field is missing."""
        items = self.sequence(key) if self.has(key) else []
        return [type(self)(item, self.file, f"{self.at(key)}[{i}]") for i, item in enumerate(items)]

    def named(self, key: str) -> dict[str, Self]:
        """Return an object of objects by name; empty where the field is missing."""
        if not self.has(key):
            return {}
        inner = self.child(key)
        return {name: type(self)(value, self.file, inner.at(name)) for name, value in inner._values.items()}

    def named_texts(self, key: str) -> dict[str, str]:
        """Return an object of texts by name; empty where the field is missing."""
        if not self.has(key):
            return {}
        inner = self.child(key)
        return {name: inner.text(name) for name in inner}

    def done(self) -> None:
        """Refuse the names that were not read."""
        for key in self._values:
            if key not in self._known:
                self.fail(key, f"no such field; {nearest(key, dict.fromkeys(self._known))}")

    def at(self, key: str) -> str:
        """Return the path of a field from the top of the document."""
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, problem: str) -> NoReturn:
        where = self.at(key) if key else self.path
        raise self.error(f"{self.file}: {where}: {problem}" if where else f"{self.file}: {problem}")

    def _check(self, key: str, kind: FieldType, value: Any) -> Any:
        try:
            return kind.check(value)
        except FieldError as error:
            self.fail(key, str(error))
