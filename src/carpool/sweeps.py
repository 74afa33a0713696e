"""Parameter sweeps: a job for every combination of values, filled into the command where it says `{name}`.

`carpool submit --sweep lr=0.1,0.01 --sweep seed=1-5` makes ten jobs. The type of the field is here; `live.spec` makes
the jobs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar

from carpool.field_types import MAX_ARRAY, FieldError, FieldType, Label, shown

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
Values = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepValues(FieldType):
    """Values by the name of a parameter. As text, values are separated by commas, and `1-5` stands for five numbers."""

    metavar: ClassVar[str] = "NAME=VALUES"
    repeatable: ClassVar[bool] = True

    @property
    def wanted(self) -> str:
        return "parameters and their values, such as {lr: [0.1, 0.01], seed: 1-5}"

    def check(self, value: Any) -> dict[str, Values]:
        if not isinstance(value, Mapping):
            raise self.fail(value)
        found = {self._name(name): self._values(name, values) for name, values in value.items()}
        if not found or prod(map(len, found.values())) > MAX_ARRAY:
            raise FieldError(f"must have parameters with at most {MAX_ARRAY} combinations in all")
        return found

    def from_option(self, text: str) -> dict[str, Values]:
        name, equals, values = text.partition("=")
        if not equals:
            raise FieldError(f"{shown(text, 40)} must be a parameter and its values, such as lr=0.1,0.01 or seed=1-5")
        return self.check({name: values})

    def _name(self, name: Any) -> str:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise FieldError(f"{shown(name, 40)} must be a name of letters, digits and underscores")
        return name

    def _values(self, name: str, given: Any) -> Values:
        words = given if isinstance(given, list | tuple) else [given]
        found: list[str] = []
        for word in words:
            if isinstance(word, bool) or not isinstance(word, str | int | float):
                raise FieldError(f"{name}: {shown(word, 40)} must be a number or text")
            for value in word.split(",") if isinstance(word, str) and words is not given else [str(word)]:
                found += self._expand(name, value.strip())
        if not found:
            raise FieldError(f"{name}: has no value; write values such as 0.1,0.01 or 1-5")
        if len(set(found)) != len(found):
            raise FieldError(f"{name}: a value is given twice; write each once")
        return tuple(Label().check(value) for value in found)

    def _expand(self, name: str, value: str) -> Sequence[str]:
        span = RANGE.fullmatch(value)
        if span is None:
            if not value:
                raise FieldError(f"{name}: a value is empty; write values such as 0.1,0.01 or 1-5")
            return [value]
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + MAX_ARRAY:
            raise FieldError(f"{name}: {value} must be a rising range of at most {MAX_ARRAY} numbers")
        return [str(number) for number in range(first, last + 1)]

    def to_json(self, value: Mapping[str, Values]) -> dict[str, list[str]]:
        return {name: list(values) for name, values in value.items()}

    def json_schema(self) -> dict[str, Any]:
        values = {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 1}
        names = {"pattern": f"^{NAME.pattern}$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": values, "minProperties": 1}


def combinations(sweep: Mapping[str, Values]) -> list[dict[str, str]]:
    """Return the value of every parameter for each job; the last parameter changes first."""
    return [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text in which `{name}` is replaced by the value of that parameter. Other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
