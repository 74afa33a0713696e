"""Routes on drained and reserved GPUs."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path

from carpool.core.closures import choose, overlap
from carpool.core.model import Closure
from carpool.errors import InputError, nearest
from carpool.gpu_names import gpu_number, named_gpus
from carpool.live.errors import NoSuchJob
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Json, answers, api_context, me
from carpool.live.http.auth import Principal
from carpool.live.http.service_routes import admin_only
from carpool.live.text import clock

Me = Annotated[Principal, Depends(me)]
Context = Annotated[ApiContext, Depends(api_context)]
ClosureName = Annotated[str, Path(max_length=1000)]
LATE_S = 60.0
"""Seconds by which the time of a drain may have passed: the request took a while, or clocks differ."""
router = APIRouter(tags=["nodes"])


class NoSuchClosure(NoSuchJob):
    def __init__(self, name: str) -> None:
        InputError.__init__(self, f"nothing is drained or reserved as {name!a}; `carpool reservations` shows what is")


@router.get("/closures", responses=answers(model=messages.ClosureList))
async def closures(context: Context, who: Me) -> Json:
    """Return the GPUs that are drained or reserved, now or later, and the jobs that are there."""
    return Json({"closures": context.service.queries.closures()})


@router.post("/drains", status_code=201, responses=answers(403, 422, 503, ok=201, model=messages.ClosureAnswer))
async def drain(request: messages.DrainRequest, context: Context, who: Me) -> Json:
    """Let nothing new start on a node or a GPU. Without a time, jobs there run to their ends; with one, nothing starts
    that would run into it, and what is still there then saves and moves, or is paused."""
    admin_only(who)
    now = context.service.clock.now()
    if request.at is not None and request.at < now - LATE_S:
        raise InputError("at: that time has passed; 0s empties the GPUs now, and without a time jobs there may finish")
    begins = now if request.at is None else max(now, request.at)
    closure = Closure(request.gpus, _gpus(context, request.gpus), begins, lets_finish=request.at is None)
    return await _set(context, closure)


@router.delete("/drains/{name}", responses=answers(403, 404, 422, 503, model=messages.ClosureAnswer))
async def undrain(name: ClosureName, context: Context, who: Me) -> Json:
    """Let jobs start again on what was drained under this name."""
    return await _remove(context, who, name, reserves=False)


@router.post("/reservations", status_code=201, responses=answers(403, 422, 503, ok=201, model=messages.ClosureAnswer))
async def reserve(request: messages.ReservationRequest, context: Context, who: Me) -> Json:
    """Reserve GPUs for a group for some time, by name or by number. For a number, the GPUs that other jobs leave
    soonest are chosen. No job of others that would run into it starts."""
    admin_only(who)
    now = context.service.clock.now()
    if request.end <= max(now, request.start):
        raise InputError("end: a reservation must end after it begins, and later than now")
    _known_group(context, request.group)
    used = [int(name[1:]) for name in context.service.state.closures if name[:1] == "r" and name[1:].isdecimal()]
    name, begins = f"r{max(used, default=0) + 1}", max(now, request.start)
    asked = Closure(name, (), begins, request.end, request.group)
    number = gpu_number(request.gpus)
    gpus = _gpus(context, request.gpus) if number is None else _choose(context, number, asked)
    made = replace(asked, gpus=gpus)
    _free_for(context, made)
    return await _set(context, made)


@router.delete("/reservations/{name}", responses=answers(403, 404, 422, 503, model=messages.ClosureAnswer))
async def unreserve(name: ClosureName, context: Context, who: Me) -> Json:
    """Take a reservation back."""
    return await _remove(context, who, name, reserves=True)


def _gpus(context: ApiContext, text: str) -> tuple[int, ...]:
    nodes: dict[str, dict[int, int]] = {}
    for node in context.service.executor.nodes():
        nodes[node.id] = {slot.index: slot.id for slot in node.slots}
    return named_gpus(text, nodes)


def _known_group(context: ApiContext, group: str) -> None:
    """Refuse a group that has no settings, users or jobs: GPUs reserved for it would be nobody's."""
    known = [row["name"] for row in context.service.queries.groups()["groups"] if row["name"]]
    if group not in known:
        remedy = f"{nearest(group, known)}; `carpool group set` makes one"
        raise InputError(f"group: there is no group {group!a}: {remedy}")


def _free_for(context: ApiContext, made: Closure) -> None:
    """Refuse GPUs that another group has reserved for a part of the time: neither group could use them."""
    for other in context.service.state.closures.values():
        if other.group in (None, made.group) or not overlap(other, made) or set(other.gpus).isdisjoint(made.gpus):
            continue
        until = clock(other.end, context.service.clock.now())
        raise InputError(f"gpus: group {other.group} has reserved some of them as {other.id} until {until}")


def _choose(context: ApiContext, number: int, closure: Closure) -> tuple[int, ...]:
    found = choose(context.service.state, number, closure)
    if found is None:
        remedy = "`carpool reservations` shows what is closed at that time"
        raise InputError(f"gpus: {number} GPUs are not there, or not open; {remedy}")
    return found


async def _set(context: ApiContext, closure: Closure) -> Json:
    await context.service.requests.set_closure(closure)
    context.service.due_events.look()
    return Json(_row(context, closure.id), 201)


async def _remove(context: ApiContext, who: Principal, name: str, *, reserves: bool) -> Json:
    admin_only(who)
    closure = context.service.state.closures.get(name)
    if closure is None or (closure.group is not None) is not reserves:
        raise NoSuchClosure(name)
    row = _row(context, name)
    await context.service.requests.remove_closure(name)
    return Json(row)


def _row(context: ApiContext, name: str) -> dict[str, Any]:
    return next(row for row in context.service.queries.closures() if row["name"] == name)
