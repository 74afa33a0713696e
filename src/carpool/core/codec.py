"""Events as plain data and back, for journals and event logs. No IO: callers turn the data into JSON lines or rows."""

from dataclasses import fields, is_dataclass
from typing import Any

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Job, Limits, Node

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
        ev.Finished,
        ev.Failed,
        ev.Cancelled,
        ev.Rekeyed,
        ev.LimitsChanged,
        ev.NodeJoined,
        ev.NodeLost,
    )
}


def encode(event: ev.Event) -> dict[str, Any]:
    """An event as a dictionary of plain values."""
    return {"event": type(event).__name__, **_plain(event)}


def decode(data: dict[str, Any]) -> ev.Event:
    """The event that `encode` wrote."""
    values = dict(data)
    cls = EVENTS[values.pop("event")]
    if cls is ev.Submitted:
        job = values["job"]
        values["job"] = Job(**{**job, "after": tuple(job["after"])})
    elif cls is ev.Planned:
        values["decisions"] = tuple(_decision(decision) for decision in values["decisions"])
    elif cls is ev.LimitsChanged:
        values["limits"] = Limits(**values["limits"])
    elif cls is ev.NodeJoined:
        node = values["node"]
        values["node"] = Node(node["id"], tuple(node["gpus"]), node["memory"])
    return cls(**values)


def _decision(data: dict[str, Any]) -> Decision:
    allocation = data["allocation"]
    if allocation is not None:
        allocation = Allocation(tuple(allocation["gpus"]), allocation["accum"], allocation.get("batch"))
    return Decision(data["job"], allocation, data["why"])


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
