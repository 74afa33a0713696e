"""Routes for pictures: GPUs over time, forecasts, a job's trace and what-if. All users may look at them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Json, answers, api_context

Context = Annotated[ApiContext, Depends(api_context)]
router = APIRouter(tags=["pictures"])


@router.get("/timeline", responses=answers(422, model=dict[str, Any]))
async def timeline(
    context: Context,
    since: Annotated[
        float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Only what lasted beyond this moment.")
    ] = None,
) -> Json:
    """Return which jobs held which GPUs during the last hour, and how: starting, running or paused."""
    return Json(context.service.pictures.timeline(since))


@router.get("/forecast", responses=answers(model=dict[str, Any]))
async def forecast(context: Context) -> Json:
    """Return when each job is expected to start and end ([believed, early, late]), and the places of the next hour."""
    return Json(context.service.pictures.forecast())


@router.get("/jobs/{job}/trace", responses=answers(404, 422, model=dict[str, Any]))
async def trace(context: Context, job: Annotated[str, Path(pattern=r"^[0-9]{1,18}$", max_length=18)]) -> Json:
    """Return a job's progress and slow-down over time ([moment, progress, slow-down, measured]), and its places."""
    await context.service.queries.book.read_ahead([job])
    return Json(context.service.pictures.trace(job))


@router.post("/what-if", responses=answers(422, model=dict[str, Any]))
async def what_if(context: Context, request: messages.WhatIfRequest) -> Json:
    """Return what the service's policy and another one would do with the jobs that finished here, simulated."""
    return Json(await context.service.pictures.replayed(request.policy))


@router.get("/policies", responses=answers(model=messages.PolicyList))
async def policies(context: Context) -> Json:
    """Return the built-in policies by name, with a line about each."""
    return Json({"policies": context.service.pictures.policies()})
