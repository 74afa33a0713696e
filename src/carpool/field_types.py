"""Types of input fields: what a value may be, how it is written in each format, and what is wrong with one that is not.

`job_schema` describes a job with these types, and the command line, the HTTP API, job files and workload files read
values through them. A type does not depend on a file or an option: it raises `FieldError` with the problem and the
remedy, and the caller adds the place. No third-party package is imported here.
"""

import json
import re
import reprlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from carpool.errors import InputError, on_one_line
from carpool.units import parse_bytes, parse_duration

MAX_TEXT = 131_072
"""Number of characters that one word of a command or one environment variable may have."""
MAX_WORDS = 10_000
"""Number of words that a command may have."""
MAX_ARRAY = 10_000
"""Number of jobs that one array may have."""
RESERVED_PREFIX = "CARPOOL_"
SHELL_WORD = re.compile(r"\|\|?|&&?|;|[0-9]?>>?(?:&[0-9])?|<")
"""Words of a command that mean something to a shell only."""
RESERVED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the scheduler sets: a worker finds its place in its gang by them."""
UNBOUNDED = 10**300
"""Upper bound of a number that has none: every finite number of this size is wrong anyway."""
_PLAIN_DIGITS = 10**7
_BITS = 1000
"""Largest number that is shown in a message."""
_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxlist, _BOUNDED.maxdict, _BOUNDED.maxtuple = 3, 20, 20, 20
_BOUNDED.maxset = _BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 80


class FieldError(ValueError):
    """A value that its field cannot have. The message says what is wrong and what to write instead."""

    def __init__(self, message: str) -> None:
        super().__init__(on_one_line(message))


def shown(value: object, most: int = 60) -> str:
    """Return the value for a message: short, on one line, and harmless in a terminal. Only a part of a large value is
    read: a few lines of YAML can stand for a list that does not fit in memory."""
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    elif isinstance(value, str):
        text = ascii(value[: most + 1])
    elif isinstance(value, int) and value.bit_length() > _BITS:
        text = f"a number of {value.bit_length()} bits"
    else:
        text = _BOUNDED.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _figure(number: float) -> str:
    return str(number) if isinstance(number, int) and abs(number) < _PLAIN_DIGITS else f"{number:g}"


def _range(low: float, high: float) -> str:
    return f"from {_figure(low)}" + (f" to {_figure(high)}" if high < UNBOUNDED else "")


class FieldType(ABC):
    """A kind of value. Subclasses override the methods for the formats in which it is written differently."""

    metavar: ClassVar[str] = "TEXT"
    repeatable: ClassVar[bool] = False
    """Whether the option may be given several times on the command line."""

    @property
    @abstractmethod
    def wanted(self) -> str:
        """What a value must be, as a noun phrase for messages and documentation."""

    @abstractmethod
    def check(self, value: Any) -> Any:
        """Return the value of a JSON field. Raises `FieldError`."""

    def from_option(self, text: str) -> Any:
        """Return the value that a command-line option gives."""
        return self.check(text)

    def from_file(self, value: Any) -> Any:
        """Return the value of a field in a YAML or TOML file."""
        return self.check(value)

    def from_cell(self, text: str) -> Any:
        """Return the value of a CSV cell that is not empty."""
        return self.from_option(text)

    def to_cell(self, value: Any) -> str:
        """Return the value as CSV text."""
        return str(value)

    def to_json(self, value: Any) -> Any:
        """Return the value as JSON holds it."""
        return value

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values that `check` accepts."""

    def fail(self, value: object) -> FieldError:
        return FieldError(f"{shown(value, 40)} must be {self.wanted}")


@dataclass(frozen=True, slots=True)
class WholeNumber(FieldType):
    low: int
    high: int
    metavar: ClassVar[str] = "INTEGER"
    unit: ClassVar[str] = ""

    @property
    def wanted(self) -> str:
        return f"a whole number {self.unit}{_range(self.low, self.high)}"

    def check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise self.fail(value)
        return value

    def from_option(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = self._exact(text)
        if not self.low <= number <= self.high:
            raise self.fail(text)
        return number

    def _exact(self, text: str) -> int:
        """Return the number that `2.0` or `1e3` stands for."""
        try:
            exact = float(text)
        except ValueError:
            raise self.fail(text) from None
        if not exact.is_integer():
            raise self.fail(text)
        return int(exact)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class RealNumber(FieldType):
    low: float
    high: float
    metavar: ClassVar[str] = "NUMBER"
    unit: ClassVar[str] = ""

    @property
    def wanted(self) -> str:
        return f"a number {self.unit}{_range(self.low, self.high)}"

    def check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise self.fail(value)
        return float(value)

    def from_option(self, text: str) -> float:
        return self.from_cell(text)

    def from_cell(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise self.fail(text) from None
        if not self.low <= number <= self.high:
            raise self.fail(text)
        return number

    def to_cell(self, value: float) -> str:
        """Return the shortest text that is read as the same number."""
        short = f"{value:.10g}"
        return short if float(short) == value else repr(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Duration(RealNumber):
    """Seconds in JSON and CSV; `45m` or `2h` where a person writes them."""

    metavar: ClassVar[str] = "DURATION"
    unit: ClassVar[str] = "of seconds "

    def from_option(self, text: str) -> float:
        try:
            return self.check(parse_duration(text))
        except InputError as error:
            raise FieldError(str(error)) from None

    def from_file(self, value: Any) -> float:
        return self.from_option(value) if isinstance(value, str) else self.check(value)


@dataclass(frozen=True, slots=True)
class ByteSize(WholeNumber):
    """Bytes in JSON; `16GiB` where a person writes them."""

    metavar: ClassVar[str] = "SIZE"
    unit: ClassVar[str] = "of bytes "

    def from_option(self, text: str) -> int:
        try:
            return self.check(parse_bytes(text, ""))
        except InputError as error:
            raise FieldError(str(error)) from None

    def from_file(self, value: Any) -> int:
        return self.from_option(value) if isinstance(value, str) else self.check(value)


@dataclass(frozen=True, slots=True)
class YesNo(FieldType):
    metavar: ClassVar[str] = ""

    @property
    def wanted(self) -> str:
        return "true or false"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(value)
        return value

    def from_option(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in ("true", "false", "yes", "no", "1", "0"):
            raise self.fail(text)
        return word in ("true", "yes", "1")

    def to_cell(self, value: bool) -> str:
        return str(value).lower()

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(FieldType):
    """Text that a command or an environment variable can hold, of at most `most` characters."""

    most: int = MAX_TEXT

    @property
    def wanted(self) -> str:
        return f"a text of at most {_figure(self.most)} characters"

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise FieldError(f"{shown(value, 40)} must be text; put quotes around it")
        if len(value) > self.most:
            raise FieldError(f"is {len(value)} characters long; write at most {self.most}")
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise FieldError(f"{shown(value)} holds a character that no command can have; remove it")
        return value

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.most}


@dataclass(frozen=True, slots=True)
class AnyText(FieldType):
    """Text without further rules."""

    @property
    def wanted(self) -> str:
        return "a text"

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.fail(value)
        return value

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string"}


@dataclass(frozen=True, slots=True)
class Label(Text):
    """Text on one line without control characters: tables show it, and it must not move a terminal's cursor."""

    most: int = 200
    pattern: str = ""
    example: str = ""

    @property
    def wanted(self) -> str:
        return self.example or f"a text of at most {self.most} printable characters"

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self.most:
            return Text.check(self, value)
        if not value.isprintable():
            raise FieldError(f"{shown(value)} holds a line break or other control characters; remove them")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise self.fail(value)
        return value

    def from_cell(self, text: str) -> str:
        return self.check(text.strip())

    def json_schema(self) -> dict[str, Any]:
        return {**Text.json_schema(self), **({"pattern": f"^{self.pattern}$"} if self.pattern else {})}


@dataclass(frozen=True, slots=True)
class AbsolutePath(Text):
    most: int = 4096
    metavar: ClassVar[str] = "DIRECTORY"

    @property
    def wanted(self) -> str:
        return "an absolute path"

    def check(self, value: Any) -> str:
        path = Text.check(self, value)
        if not path.startswith("/"):
            raise self.fail(value)
        return path

    def json_schema(self) -> dict[str, Any]:
        return {**Text.json_schema(self), "pattern": "^/"}


@dataclass(frozen=True, slots=True)
class CommandLine(FieldType):
    """A program and its arguments: a list of words. In a job file also text: one line is split into words and run
    without a shell, several lines are a script for `sh -e`."""

    @property
    def wanted(self) -> str:
        return f"a list of 1 to {MAX_WORDS} words, the first of which names a program"

    def check(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not 1 <= len(value) <= MAX_WORDS:
            raise self.fail(value)
        words = tuple(_item(Text(), word, f"word {number}") for number, word in enumerate(value, 1))
        if not words[0]:
            raise FieldError("the first word is empty; name a program")
        return words

    def from_file(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, str):
            return self.check(value)
        if len(value.strip().splitlines()) > 1:
            return self.check(("sh", "-e", "-c", value))
        try:
            words = shlex.split(value)
            shell = next((word for word in words if SHELL_WORD.fullmatch(word)), None)
            if shell is not None:
                raise FieldError(f"{shell!a} needs a shell; write a list: [sh, -c, '…'], or several lines after `|`")
            return self.check(words)
        except ValueError as error:
            if isinstance(error, FieldError):
                raise
            raise FieldError(f"{error}; close the quotes, or write a list of words") from None

    def to_json(self, value: tuple[str, ...]) -> list[str]:
        return list(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "array", "items": Text().json_schema(), "minItems": 1, "maxItems": MAX_WORDS}


JOB_ID = Label(18, pattern="[0-9]{1,18}", example="the id of a job, such as 12")


@dataclass(frozen=True, slots=True)
class JobIds(FieldType):
    """Ids of other jobs. A running service numbers its jobs; a workload file may name them freely."""

    most: int = 1000
    metavar: ClassVar[str] = "JOB"
    repeatable: ClassVar[bool] = True

    @property
    def wanted(self) -> str:
        return f"a list of at most {self.most} job ids, such as [3, 5]"

    def check(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > self.most:
            raise self.fail(value)
        return tuple(JOB_ID.check(job) for job in value)

    def from_option(self, text: str) -> tuple[str, ...]:
        return self.check([job.strip() for job in text.split(",")])

    def from_file(self, value: Any) -> tuple[str, ...]:
        jobs = value if isinstance(value, list) else [value]
        return self.check([str(job) if type(job) is int else job for job in jobs])

    def from_cell(self, text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text.split()))

    def to_cell(self, value: tuple[str, ...]) -> str:
        return " ".join(value)

    def to_json(self, value: tuple[str, ...]) -> list[str]:
        return list(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "array", "items": JOB_ID.json_schema(), "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class Variables(FieldType):
    """Environment variables by name."""

    metavar: ClassVar[str] = "NAME[=VALUE]"
    repeatable: ClassVar[bool] = True

    @property
    def wanted(self) -> str:
        return "a mapping of names to values, such as {SEED: 3}"

    def check(self, value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise self.fail(value)
        return {self._name(name): _item(Text(), text, str(name)) for name, text in value.items()}

    def _name(self, name: Any) -> str:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,199}", name):
            raise FieldError(f"{shown(name)} must be a name of letters, digits and underscores")
        if name.startswith(RESERVED_PREFIX) or name in RESERVED_VARIABLES:
            raise FieldError(f"{name} is set by the scheduler; leave it out")
        return name

    def from_file(self, value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise self.fail(value)
        numbers = {name: str(text) if type(text) in (int, float) else text for name, text in value.items()}
        return self.check(numbers)

    def to_json(self, value: Mapping[str, str]) -> dict[str, str]:
        return dict(value)

    def json_schema(self) -> dict[str, Any]:
        names = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "maxLength": 200}
        return {"type": "object", "propertyNames": names, "additionalProperties": Text().json_schema()}


@dataclass(frozen=True, slots=True)
class ArrayIndexes(FieldType):
    """Indexes of an array of jobs, as text: `0-9` or `1,4,7-8`."""

    metavar: ClassVar[str] = "RANGE"

    @property
    def wanted(self) -> str:
        return "indexes such as 0-9 or 1,4,7-8"

    def check(self, value: Any) -> str:
        text = Label(1000).check(value)
        self.indexes(text)
        return text

    def indexes(self, text: str) -> list[int]:
        """Return the indexes that the text names."""
        found: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
            if not match:
                raise self.fail(text)
            first = int(match[1])
            last = int(match[2]) if match[2] else first
            if last < first or len(found) + last - first >= MAX_ARRAY:
                raise FieldError(f"{shown(text)} must be rising ranges of at most {MAX_ARRAY} indexes in all")
            found += range(first, last + 1)
        if len(set(found)) != len(found):
            raise FieldError(f"{shown(text)} names an index twice; write each once")
        return found

    def from_file(self, value: Any) -> str:
        return self.check(str(value) if type(value) is int else value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": 1000}


def _item(kind: FieldType, value: Any, name: str) -> Any:
    try:
        return kind.check(value)
    except FieldError as error:
        raise FieldError(f"{shown(name)[1:-1]}: {error}") from None
