"""Events of the journal as users see them: plain data, without anything that only some users may see.

`service.feed` hands them to the API. All users see the queue, so they see what happens to jobs and nodes. Notes are for
the administrator, and limits for the user that they concern.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from carpool.core import codec
from carpool.core import events as ev
from carpool.core.model import GpuId, JobId

Row = dict[str, Any]
NOTE = "Note"
"""Kind of a note for operators."""
SUBMITTED = ("user", "model", "gpus", "batch", "iterations", "priority", "after")
"""Fields of a submitted job that all users see in the queue."""


def shown_event(event: ev.Event, labels: Mapping[GpuId, str]) -> Row:
    """Return the fields of an event that users see; `labels` name the GPUs."""
    row: Row = {"at": event.at}
    if isinstance(event, ev.Submitted):
        job = event.job
        return {**row, "job": job.id, **{name: codec.plain(getattr(job, name)) for name in SUBMITTED}}
    if isinstance(event, ev.Planned):
        return {**row, "decisions": [_decision(one, labels) for one in event.decisions]}
    if isinstance(event, ev.NodeJoined):
        return {**row, "node": event.node.id, "gpus": len(event.node.gpus)}
    if isinstance(event, ev.MemoryTaken):
        return {**row, "gpu": labels.get(event.gpu, f"GPU {event.gpu}"), "memory": event.memory}
    return {field.name: codec.plain(getattr(event, field.name)) for field in fields(event)}


def _decision(decision: Any, labels: Mapping[GpuId, str]) -> Row:
    place = decision.allocation
    on = [labels.get(gpu, f"GPU {gpu}") for gpu in place.gpus] if place else []
    row: Row = {"job": decision.job, "why": decision.why, "on": on}
    return {**row, "paused": bool(place and not place.active), "accumulation": place.accumulation if place else None}


def only_for(event: ev.Event) -> str | None:
    """Return the one user besides the administrator who may see an event; None: all may."""
    return event.user if isinstance(event, ev.LimitsChanged) else None


def jobs_of(event: ev.Event) -> tuple[JobId, ...]:
    """Return the jobs that an event is about."""
    if isinstance(event, ev.Planned):
        return tuple(decision.job for decision in event.decisions)
    if isinstance(event, ev.Submitted):
        return (event.job.id,)
    job = getattr(event, "job", None)
    return (job,) if isinstance(job, str) else ()
