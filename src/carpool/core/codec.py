"""Events as plain data and back, for journals and event logs. No IO: callers turn the data into JSON lines or rows."""

from dataclasses import fields, is_dataclass
from typing import Any

from carpool.core import events as ev
from carpool.core import renames
from carpool.core.model import Allocation, Decision, Job, Limits, Node
from carpool.core.renames import renamed

EVENTS = {
    cls.__name__: cls
    for cls in (
        ev.Submitted,
        ev.Planned,
        ev.Started,
        ev.Progressed,
        ev.Observed,
        ev.Retuned,
        ev.Checkpointed,
        ev.Stopped,
        ev.Requeued,
        ev.Finished,
        ev.Failed,
        ev.Cancelled,
        ev.Held,
        ev.Released,
        ev.ConstraintsChanged,
        ev.PriorityChanged,
        ev.LimitsChanged,
        ev.NodeJoined,
        ev.MemoryTaken,
        ev.NodeLost,
    )
}


def encode(event: ev.Event) -> dict[str, Any]:
    """An event as a dictionary of plain values."""
    return {"event": type(event).__name__, **plain(event)}


def decode(data: dict[str, Any]) -> ev.Event:
    """The event that `encode` wrote."""
    values = renamed(data, renames.EVENT_FIELDS)
    name = values.pop("event")
    cls = EVENTS[renames.EVENTS.get(name, name)]
    if cls is ev.Submitted:
        values["job"] = decode_job(values["job"])
    elif cls is ev.Planned:
        values["decisions"] = tuple(_decision(decision) for decision in values["decisions"])
    elif cls is ev.LimitsChanged:
        values["limits"] = Limits(**values["limits"])
    elif cls is ev.NodeJoined:
        node = values["node"]
        values["node"] = Node(node["id"], tuple(node["gpus"]), node["memory"])
    return cls(**values)


def decode_job(data: dict[str, Any]) -> Job:
    """The job that `plain` wrote."""
    values = renamed(data, renames.JOB_FIELDS)
    return Job(**{**values, "after": tuple(values["after"])})


def _decision(data: dict[str, Any]) -> Decision:
    allocation = data["allocation"]
    if allocation is not None:
        allocation = renamed(allocation, renames.ALLOCATION_FIELDS)
        allocation = Allocation(tuple(allocation["gpus"]), allocation["accumulation"], allocation.get("batch"))
    return Decision(data["job"], allocation, data["why"])


def plain(value: Any) -> Any:
    """A value of `core.model` or an event as dictionaries, lists and numbers."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value
