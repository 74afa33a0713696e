"""Routes by which agents reach the terminals of their nodes' workers, and commands beside them: they ask which doors
the service wants open, and bring what the doors say. See `carpool.live.executors.relayed_doors`."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from carpool.live.executors import wire
from carpool.live.http.agent_routes import BODY, Context, Me, cluster_executor, own_node
from carpool.live.http.api import Json, answers

router = APIRouter(tags=["nodes"])
SAID = "/v1/agents/doors/said"
LARGE_BODIES = {SAID: 1 << 20}
"""Paths whose bodies are read as they arrive, with their limits in bytes."""


@router.post(
    "/agents/doors",
    responses=answers(403, 409, 422, 503, model=dict[str, Any]),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def doors(request: Request, context: Context, who: Me) -> Json:
    """Exchange the doors that an agent keeps open for those that are wanted. Held for a second if nothing is new."""
    node = own_node(context, who)
    here = wire.read_text(wire.DoorsHere, await request.body())
    return Json(wire.plain(await cluster_executor(context).doors_for(node, here.instance).fetch(here)))


@router.post(
    "/agents/doors/said",
    responses=answers(403, 404, 409, 422, 503, model=dict[str, int]),
    openapi_extra={"requestBody": BODY},
)
async def said(
    request: Request,
    context: Context,
    who: Me,
    door: Annotated[int, Query(ge=1, le=2**53)],
    offset: Annotated[int, Query(ge=0, le=2**53)],
    instance: Annotated[str, Query(pattern=r"^[0-9a-f]{1,64}$", max_length=64)],
    last: Annotated[bool, Query(description="Nothing follows these bytes.")] = False,
) -> Json:
    """Take what a door said, as far as there is room; return how many bytes of it came so far."""
    own = cluster_executor(context).doors_for(own_node(context, who), instance)
    data = b"".join([part async for part in request.stream()])
    return Json({"size": own.bring(door, offset, data, last=last)})
