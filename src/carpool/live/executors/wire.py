"""The messages between an agent and the service: what is here, and what shall be here. Both ends use this module.

Every exchange carries everything, so a message that is lost, or comes twice, changes nothing. `read` makes the values
below from JSON that the other end wrote, and refuses what has another type; names that this release does not know are
ignored, so that releases can be mixed. Durations cross the wire, moments do not: the clocks of two machines differ.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from carpool.channel import Report
from carpool.errors import InputError
from carpool.gpu.counters import GpuUse
from carpool.live.executors.base import GangEnded, GangKey, Launch

HOLD_S, LONGEST_HOLD_S = 1.0, 5.0
"""Seconds for which the service holds an exchange in which nothing is new: in a small cluster, and in a large one."""
MAX_NUMBER = 2**53
"""Largest whole number that JSON carries exactly."""
MAX_ITEMS = 100_000


class Phase(StrEnum):
    """How far the part of a gang on one node is."""

    UNKNOWN = "unknown"  # the agent has no trace of it
    PREPARING = "preparing"
    READY = "ready"  # its wrappers wait for the other parts
    UP = "up"
    GONE = "gone"


class Want(StrEnum):
    """What the service wants of a part."""

    KEEP = "keep"  # leave it as it is, and report it
    READY = "ready"  # prepare it and wait
    GO = "go"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class RankRow:
    """What is recorded about one worker."""

    rank: int
    pid: int | None = None
    started: float | None = None
    exit_code: int | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class PartState:
    """A part as it is."""

    phase: Phase
    port: int = 0
    """Free port of this node, where the part is ready."""
    started_ago_s: float | None = None
    """Seconds since all its workers run; None: they never did."""
    ended: GangEnded | None = None
    ended_ago_s: float | None = None
    report: Report | None = None
    """Latest report of the first worker here."""
    ranks: tuple[RankRow, ...] = ()
    switch: int = 0
    """Number of the latest request to pause or resume that is carried out."""
    swapped: bool = False
    delay: str = ""
    """Why it could not be started so far; empty: nothing hindered it."""


@dataclass(frozen=True, slots=True)
class PartOrder:
    """A part as it shall be."""

    want: Want
    how: str = ""
    """The `StopMode`."""
    launch: Launch | None = None
    """What to start; given until the agent has it. GPUs are numbered within the node."""
    user: str = ""
    """Name of the account that the launch's uid belongs to where the service runs; empty: it has none there."""
    address: str = ""
    """Where the workers of all parts meet."""
    port: int = 0
    accumulation: int = 0
    """0: as it is."""
    switch: int = 0
    """Number of the latest request to pause or resume; 0: there was none."""
    paused: bool = False
    swap: bool = False
    checkpoint: int = 0
    """Number of the latest request for a checkpoint; 0: there was none."""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One GPU of a node."""

    index: int
    uuid: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that happened on a node: a note for the operator, or a fault that hit gangs. Repeated until the service
    has it."""

    number: int
    text: str
    gangs: tuple[str, ...] = ()
    fault: bool = False


@dataclass(frozen=True, slots=True)
class NodeState:
    """What an agent says about its node: the request of an exchange."""

    node: str
    identity: str
    """Random name of the agent's home."""
    boot: str
    """Id of this boot of the machine."""
    instance: str
    """Random name of the agent's process."""
    number: int
    """Number of this request of the process: one that was overtaken on its way is not believed."""
    address: str
    """Address at which other nodes reach this one."""
    memory: int
    """Bytes of memory on each GPU."""
    mechanism: str
    release: str
    devices: tuple[DeviceRow, ...]
    why: str = ""
    can_swap: bool = False
    ground: str = "hand"
    """Where the node comes from."""
    pilot: str = ""
    """Name of what keeps the agent alive there, in the words of its ground."""
    as_root: bool = False
    leaving: bool = False
    """The agent ends for good as soon as no part is left."""
    term: int = 0
    """Highest term that the agent has obeyed."""
    seen: str = ""
    """Mark of the orders that the agent carries out, as the last answer gave it."""
    shared: str = ""
    """What the agent read where the service wrote its proof of a shared home."""
    parts: Mapping[str, PartState] | None = None
    """Parts that are here; None: the agent has just started and has not looked."""
    taken: Mapping[str, int] = field(default_factory=dict)
    """Bytes that processes other than jobs hold, by the number of the GPU within the node."""
    use: Mapping[str, GpuUse] = field(default_factory=dict)
    """Counters of the GPUs since the last exchange."""
    remarks: tuple[Remark, ...] = ()
    witness: str = ""
    """Whether its ground can be asked from the node: `answers` or `silent`; empty: there is no ground to ask."""
    trouble: str = ""
    """Why nothing can start there now; empty: it can."""


@dataclass(frozen=True, slots=True)
class NodeOrders:
    """What the service wants of a node: the answer of an exchange."""

    term: int
    """Number of the service's start. An agent obeys the highest that it has seen."""
    number: int
    """Number of this answer: one that was overtaken on its way is dropped."""
    lease_s: float
    """Seconds from the moment the request left, for which workers may run without another answer."""
    mark: str
    """Name of these orders."""
    orders: Mapping[str, PartOrder] = field(default_factory=dict)
    heard: int = 0
    """Number of the latest remark that is known."""
    home: str = ""
    """The service's home directory, for agents that see it."""
    proof: str = ""
    """Name of a file there that an agent reads to prove that it sees it."""
    as_root: bool = False
    joined: bool = False
    """The node is part of the cluster."""
    leave: bool = False
    """The agent shall leave the cluster, as if its operator had asked it to."""
    told: str = ""
    """One sentence for the agent's operator; empty: nothing to say."""
    most_checkpoint: int = 0
    """Bytes of the largest checkpoint folder that the service fetches from nodes that do not see its home; 0: none."""
    doors: bool = False
    """The agent shall ask which doors of workers are wanted, with `DoorsHere`."""
    pause_patience_s: float = 600.0
    """Seconds without a service after which a paused gang goes on; as agents had it before services told them."""
    gang_pause_s: float = 240.0
    """The same for a gang of several workers without the training library."""
    separate_users: bool = False
    """Jobs run under their users' ids, so that they cannot share by MPS."""


@dataclass(frozen=True, slots=True)
class DoorOrder:
    """A door of a worker (`live/door.py`) that shall be opened."""

    number: int
    key: str
    """Name of the gang."""
    rank: int
    request: str
    """What to ask at the door, as JSON."""


@dataclass(frozen=True, slots=True)
class DoorsHere:
    """The doors that an agent keeps open for the service: the request for those that are wanted."""

    instance: str
    life: str = ""
    """Name of the table that the numbers are from; empty: the agent has heard of none."""
    after: int = 0
    """Number up to which orders have come."""
    open: tuple[int, ...] = ()
    leaves: bool = False
    """The agent asks no more until it is called again."""


@dataclass(frozen=True, slots=True)
class DoorsWanted:
    """The doors that shall be open: all others are closed."""

    life: str
    number: int
    """Number up to which this answer has all orders."""
    new: tuple[DoorOrder, ...] = ()
    open: tuple[int, ...] = ()


def key_text(key: GangKey) -> str:
    """Return a gang's name as the messages have it."""
    return f"{key[0]}-{key[1]}"


def read_key(text: str) -> GangKey:
    """Return the gang that a name stands for. Raise `InputError`."""
    job, _, attempt = text.partition("-")
    if not (job.isascii() and job.isdigit() and len(job) <= 18 and attempt.isascii() and attempt.isdigit()):
        raise InputError(f"{ascii(text)[:40]} names no gang; use matching releases of agent and service")
    return job, int(attempt[:18])


# ---- JSON ------------------------------------------------------------------------------------------------------------

Value = TypeVar("Value")
Reader = Callable[[Any, str], Any]
_READERS: dict[Any, Reader] = {}


def plain(value: Any) -> Any:
    """Return a message as dictionaries, lists, strings and numbers."""
    return asdict(value)


def read(kind: type[Value], data: Any) -> Value:
    """Return the message that `plain` wrote at the other end. Raise `InputError` that names the wrong field."""
    found: Value = _reader(kind)(data, kind.__name__)
    return found


def read_text(kind: type[Value], text: bytes) -> Value:
    """Return the message that a JSON text holds. Raise `InputError`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("the body is not JSON") from None
    return read(kind, data)


def _refuse(place: str, wanted: str) -> InputError:
    return InputError(f"{place[:200]}: is not {wanted}; use matching releases of agent and service")


def _reader(hint: Any) -> Reader:
    found = _READERS.get(hint)
    if found is None:
        found = _READERS[hint] = _new_reader(hint)
    return found


def _new_reader(hint: Any) -> Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (bool, int, float, str):
        return _SCALARS[hint]
    if is_dataclass(hint):
        return _object_reader(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_reader(hint)
    if origin in (Union, UnionType):
        inner = _reader(next(kind for kind in arguments if kind is not NoneType))
        return lambda data, place: None if data is None else inner(data, place)
    if origin is tuple:
        return _list_reader(_reader(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(_reader(arguments[1]))
    raise TypeError(f"a field of type {hint} cannot cross the wire")


def _read_whole(data: Any, place: str) -> int:
    if type(data) is not int or abs(data) > MAX_NUMBER:
        raise _refuse(place, "a whole number")
    return data


def _read_real(data: Any, place: str) -> float:
    if type(data) not in (int, float) or not math.isfinite(data) or abs(data) > 2**1000:
        raise _refuse(place, "a number")
    return float(data)


def _read_text(data: Any, place: str) -> str:
    if not isinstance(data, str):
        raise _refuse(place, "a text")
    return data


def _read_truth(data: Any, place: str) -> bool:
    if not isinstance(data, bool):
        raise _refuse(place, "true or false")
    return data


_SCALARS: dict[Any, Reader] = {bool: _read_truth, int: _read_whole, float: _read_real, str: _read_text}


def _enum_reader(kind: type[Enum]) -> Reader:
    def read_member(data: Any, place: str) -> Enum:
        try:
            return kind(data)
        except ValueError:
            raise _refuse(place, f"one of {', '.join(str(member.value) for member in kind)}") from None

    return read_member


def _list_reader(item: Reader) -> Reader:
    def read_list(data: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(data, list) or len(data) > MAX_ITEMS:
            raise _refuse(place, "a list")
        return tuple([item(one, f"{place}[{number}]") for number, one in enumerate(data)])

    return read_list


def _mapping_reader(item: Reader) -> Reader:
    def read_mapping(data: Any, place: str) -> dict[str, Any]:
        if not isinstance(data, dict) or len(data) > MAX_ITEMS:
            raise _refuse(place, "an object")
        return {name: item(one, f"{place}.{name}") for name, one in data.items()}

    return read_mapping


def _object_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {one.name: _reader(hints[one.name]) for one in fields(kind)}
    needed = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]

    def read_object(data: Any, place: str) -> Any:
        if not isinstance(data, dict):
            raise _refuse(place, "an object")
        for name in needed:
            if name not in data:
                raise _refuse(f"{place}.{name}", "given")
        return kind(**{name: found(data[name], f"{place}.{name}") for name, found in readers.items() if name in data})

    return read_object
