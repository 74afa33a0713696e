"""What a user submits: one job's command, size and wishes, checked field by field.

`parse` makes a `Spec` from plain data (a request's JSON, a job file); the service keeps specs as that same JSON. The
scheduler knows only a part of it, the `core.model.Job` that the service derives.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from carpool.errors import InputError, nearest
from carpool.units import parse_bytes

MOST_GPUS = 4096
MOST_ITERATIONS = 10**12
MOST_BATCH = 10**7
MOST_SECONDS = 10**9
MOST_ARRAY = 10_000
MOST_WORDS = 10_000
MOST_TEXT = 131_072
"""Characters of one word of a command or one value of the environment."""
RESERVED = ("CARPOOL_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the scheduler sets itself; a job that set them would not find its place in its gang."""
ARRAY_VARIABLE = "CARPOOL_ARRAY_INDEX"


@dataclass(frozen=True, slots=True)
class Spec:
    """Times are seconds, sizes are bytes; None: not said."""

    command: tuple[str, ...]
    directory: str
    """Where the command runs; an absolute path."""
    gpus: int = 1
    batch: int = 1
    """Samples per GPU per iteration."""
    iterations: int | None = None
    model: str | None = None
    """The name under which profiles know this kind of training."""
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    time_s: float | None = None
    """How long it runs alone, as its owner believes."""
    priority: int = 0
    exclusive: bool = False
    max_slowdown: float | None = None
    after: tuple[str, ...] = ()
    retries: int = 0
    can_shrink: bool | None = None
    """May the batch be split? None: by the training library's own verdict. True: the owner allows it."""
    cpus: int | None = None
    """Cores for each worker."""
    memory: int | None = None
    """Main memory for each worker."""
    grace_s: float = 30.0
    """How long a worker may take to save and leave before it is killed."""
    snapshot: bool = False
    """Was the directory copied at submit, so that later edits do not matter?"""
    array_index: int | None = None

    def to_json(self) -> str:
        return json.dumps(self.plain(), separators=(",", ":"), sort_keys=True)

    def plain(self) -> dict[str, Any]:
        """What `parse` reads; what was not said is left out."""
        data = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        return {**data, "command": list(self.command), "after": list(self.after), "env": dict(self.env)}


NAMES = tuple(f.name for f in fields(Spec))


def from_json(text: str) -> Spec:
    return parse(json.loads(text))


def parse(data: Mapping[str, Any]) -> Spec:
    """A checked spec from plain data. Raises `InputError` naming the field that is wrong."""
    if not isinstance(data, Mapping):
        raise InputError("a job must be an object with the fields of `carpool submit`")
    for key in data:
        if key not in NAMES:
            raise InputError(f"{_shown(key)}: no such field; {nearest(str(key), NAMES)}")
    given = {key: value for key, value in data.items() if value is not None}
    for key in ("command", "directory"):
        if key not in given:
            raise InputError(f"{key}: is missing")
    values = {key: _READERS[key](key, value) for key, value in given.items()}
    return Spec(**values)


def expand(spec: Spec, array: str) -> list[Spec]:
    """The members of `--array 0-9` or `0,3,7-8`: each has its index in its name and in `CARPOOL_ARRAY_INDEX`."""
    indexes: list[int] = []
    for part in array.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not match:
            raise InputError(f"array {_shown(array)}: write indexes such as 0-9 or 1,4,7-8")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first or len(indexes) + last - first >= MOST_ARRAY:
            raise InputError(f"array {_shown(array)}: write rising ranges of at most {MOST_ARRAY} indexes in all")
        indexes += range(first, last + 1)
    if len(set(indexes)) != len(indexes):
        raise InputError(f"array {_shown(array)}: names an index twice")
    return [replace(spec, name=f"{spec.name}[{i}]" if spec.name else "", array_index=i) for i in indexes]


# ---- one reader for each kind of field ------------------------------------------------------------------------------


def _shown(value: object) -> str:
    """Input in a message: short, and harmless in a terminal."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _text(key: str, value: Any, most: int = MOST_TEXT) -> str:
    if not isinstance(value, str):
        raise InputError(f"{key}: {_shown(value)} must be text")
    if len(value) > most:
        raise InputError(f"{key}: is {len(value)} characters long; {most} are allowed")
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"{key}: {_shown(value)} holds a character that no command can have")
    return value


def _word(key: str, value: Any) -> str:
    """A name that people see in tables: no control characters, so that it cannot move a terminal's cursor."""
    text = _text(key, value, 200)
    if not text.isprintable():
        raise InputError(f"{key}: {_shown(value)} holds control characters; use plain text")
    return text


def _directory(key: str, value: Any) -> str:
    path = _text(key, value, 4096)
    if not path.startswith("/"):
        raise InputError(f"{key}: {_shown(value)} must be an absolute path")
    return path


def _command(key: str, value: Any) -> tuple[str, ...]:
    words = _list(key, value)
    if not words or len(words) > MOST_WORDS:
        raise InputError(f"{key}: must be a list of 1 to {MOST_WORDS} words")
    command = tuple(_text(f"{key}[{i}]", word) for i, word in enumerate(words))
    if not command[0]:
        raise InputError(f"{key}: its first word is empty; name a program")
    return command


def _after(key: str, value: Any) -> tuple[str, ...]:
    return tuple(_word(key, job) for job in _list(key, value))


def _list(key: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(f"{key}: {_shown(value)} must be a list")
    return value


def _env(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InputError(f"{key}: must map names to values")
    env = {}
    for name, text in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,199}", name):
            raise InputError(f"{key}: {_shown(name)} is no name of an environment variable")
        if name.startswith("CARPOOL_") or name in RESERVED:
            raise InputError(f"{key}: {name} is set by the scheduler; leave it out")
        env[name] = _text(f"{key}: {name}", text)
    return env


def _whole(low: int, high: int) -> Any:
    def read(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{key}: {_shown(value)} must be a whole number from {low} to {high}")
        return value

    return read


def _number(low: float, high: float) -> Any:
    def read(key: str, value: Any) -> float:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fine or not low <= value <= high:
            raise InputError(f"{key}: {_shown(value)} must be a number from {low:g} to {high:g}")
        return float(value)

    return read


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{key}: {_shown(value)} must be true or false")
    return value


def _bytes(key: str, value: Any) -> int:
    if isinstance(value, str):
        value = parse_bytes(value, key)
    size: int = _whole(2**20, 2**50)(key, value)
    return size


_READERS: dict[str, Any] = {
    "command": _command,
    "directory": _directory,
    "gpus": _whole(1, MOST_GPUS),
    "batch": _whole(1, MOST_BATCH),
    "iterations": _whole(1, MOST_ITERATIONS),
    "model": _word,
    "name": _word,
    "env": _env,
    "time_s": _number(0.001, MOST_SECONDS),
    "priority": _whole(-1000, 1000),
    "exclusive": _flag,
    "max_slowdown": _number(1.0, 1000.0),
    "after": _after,
    "retries": _whole(0, 1000),
    "can_shrink": _flag,
    "cpus": _whole(1, 4096),
    "memory": _bytes,
    "grace_s": _number(0.0, 86_400.0),
    "snapshot": _flag,
    "array_index": _whole(0, 10**9),
}
