"""Events as plain data and back, for journals and event logs.

Both directions follow from the fields of the event's dataclass: a new kind of event needs no line here. The module does
no IO: callers turn the data into JSON lines or database rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from carpool.core import renames
from carpool.core.events import EVENTS, Event
from carpool.core.model import Allocation, Job

Decoder = Callable[[Any], Any]
Builder = Callable[[dict[str, Any]], Any]
PLAIN = (bool, int, float, str)
"""Types that are written as they are."""
WRITABLE = "use numbers, strings, enums, dataclasses or tuples"
OLD_NAMES: dict[type, Mapping[str, str]] = {Job: renames.JOB_FIELDS, Allocation: renames.ALLOCATION_FIELDS}
_NAMES: dict[type, tuple[str, ...]] = {}
_BUILDERS: dict[type, Builder] = {}
_EVENT_BUILDERS: dict[str, Builder] = {}


class UnknownEvent(ValueError):
    """A journal or event log holds a kind of event that this release does not have."""

    def __init__(self, kind: str, release: str | None = None) -> None:
        self.kind = kind
        self.release = release
        """The release that wrote the event, where it is known."""
        writer = f"Carpool {release}" if release else "another release of Carpool"
        super().__init__(
            f"event {kind!r} is unknown to this release; {writer} wrote it: use that release or a later one"
        )


def encode(event: Event) -> dict[str, Any]:
    """Return an event as a dictionary of plain values."""
    return {"event": type(event).__name__, **plain(event)}


def decode(data: Mapping[str, Any]) -> Event:
    """Return the event that `encode` wrote. Raise `UnknownEvent` where this release has no such kind of event."""
    values = {**data}
    kind = values.pop("event")
    build = _EVENT_BUILDERS.get(kind) or _event_builder(kind)
    event: Event = build(values)
    return event


def _event_builder(kind: str) -> Builder:
    cls = EVENTS.get(kind) or EVENTS.get(renames.EVENTS.get(kind, ""))
    if cls is None:
        raise UnknownEvent(kind)
    build = _EVENT_BUILDERS[kind] = builder(cls)
    return build


def decode_job(data: Mapping[str, Any]) -> Job:
    """Return the job that `plain` wrote."""
    job: Job = builder(Job)({**data})
    return job


def plain(value: Any) -> Any:
    """Return an event or a value of `core.model` as dictionaries, lists, strings and numbers."""
    cls = type(value)
    if cls in PLAIN or value is None:
        return value
    if cls is tuple:
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return {name: plain(getattr(value, name)) for name in _names(cls)}


def _names(cls: type) -> tuple[str, ...]:
    names = _NAMES.get(cls)
    if names is None:
        if not is_dataclass(cls):
            raise TypeError(f"a value of type {cls.__name__} cannot be written; {WRITABLE}")
        names = _NAMES[cls] = tuple(field.name for field in fields(cls))
    return names


def builder(cls: type) -> Builder:
    """Return the function that makes a dataclass from the dictionary that `plain` wrote, which it may change."""
    build = _BUILDERS.get(cls)
    if build is None:
        build = _BUILDERS[cls] = _new_builder(cls)
    return build


def _new_builder(cls: type) -> Builder:
    hints, names = get_type_hints(cls), _names(cls)
    nested = [(name, found) for name in names if (found := _decoder(hints[name])) is not None]
    old_names = renames.EVENT_FIELDS if issubclass(cls, Event) else OLD_NAMES.get(cls, {})

    def build(values: dict[str, Any]) -> Any:
        for name, decode_field in nested:
            if name in values:
                values[name] = decode_field(values[name])
        try:
            return cls(**values)
        except TypeError:  # a release that had other names wrote it
            return cls(**renames.renamed(values, old_names))

    return build


def _decoder(hint: Any) -> Decoder | None:
    """Return what turns plain data into a value of this type; None: it is plain already."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in PLAIN or hint is NoneType:
        return None
    if is_dataclass(hint):
        build = builder(hint)  # type: ignore[arg-type]
        return lambda data: build({**data})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if origin in (Union, UnionType) and len(set(arguments) - {NoneType}) == 1:
        inner = _decoder(next(kind for kind in arguments if kind is not NoneType))
        return None if inner is None else lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[1:] == (...,):
        item = _decoder(arguments[0])
        return tuple if item is None else lambda values: tuple([item(value) for value in values])
    raise TypeError(f"a field of type {hint} cannot be written; {WRITABLE}")
