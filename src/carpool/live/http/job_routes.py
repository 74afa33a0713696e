"""The routes of jobs: submit, look, explain, read logs, change. Who may do what is decided here.

Everybody sees the queue; logs, commands and environments belong to a job's owner and the administrator, and so does
the right to change it. An environment is shown to nobody else in any answer.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from carpool.live import spec
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Forbidden, Json, answers, api_context, me
from carpool.live.http.auth import Principal
from carpool.live.service import logs

router = APIRouter(tags=["jobs"])
Me = Annotated[Principal, Depends(me)]
Context = Annotated[ApiContext, Depends(api_context)]
Job = Annotated[str, Path(pattern=r"^[0-9]{1,18}$", max_length=18)]
MOST_ROWS = 10_000
PRIVATE = ("spec", "env", "command", "directory", "attempts", "note")
"""What `show` keeps from other users: commands and paths may hold secrets, environments often do."""


def _own(context: ApiContext, who: Principal, job: str) -> None:
    owner = context.service.queries.owner(job)
    if not who.may_change(owner):
        raise Forbidden(f"job {job} belongs to {owner}; only they and the administrator may do this")


def _check_priority(context: ApiContext, who: Principal, priority: int) -> None:
    most = None if who.admin else context.service.queries.users().get(who.name, {}).get("max_priority")
    if most is not None and priority > most:
        raise Forbidden(
            f"priority: {priority} is above {most}, the highest that the administrator lets {who.name} have"
        )


def _specs(request: messages.JobRequest) -> tuple[list[spec.Spec], str | None]:
    """Return the jobs that a request asks for, and the name of their code snapshot."""
    given = request.model_dump(exclude_unset=True)
    array, snapshot = given.pop("array", None), given.pop("snapshot", None)
    one = spec.parse(given)
    return ([one] if array is None else spec.expand(one, array)), snapshot


@router.post("/jobs", status_code=201, responses=answers(403, 422, 503, ok=201, model=messages.SubmitAnswer))
async def submit(request: messages.JobRequest, context: Context, who: Me) -> Json:
    """Queue a job, or an array of them: all or none. They are on disk when the answer comes."""
    specs, snapshot = _specs(request)
    _check_priority(context, who, specs[0].priority)
    if snapshot is None:
        jobs = await context.service.requests.submit(specs, who.name)
    else:
        with context.uploads.taken(snapshot, who.name) as directory:
            specs = [replace(one, directory=str(directory), snapshot=True) for one in specs]
            jobs = await context.service.requests.submit(specs, who.name)
    return Json({"job": jobs[0], "jobs": jobs}, 201)


@router.post("/jobs/dry-run", responses=answers(422, model=dict[str, Any]))
async def dry_run(request: messages.JobRequest, context: Context, who: Me) -> Json:
    """What would happen to a job, without queueing it."""
    return Json(context.service.queries.dry_run(_specs(request)[0][0], who.name))


@router.get("/jobs", responses=answers(422, model=messages.JobPage))
async def jobs(
    context: Context,
    who: Me,
    all: Annotated[bool, Query(description="Also those that ended.")] = False,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 1000,
    before: Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", max_length=18)] = None,
) -> Json:
    """The queue and what runs, in order of submission; the latest `limit` of them, or of those before a job."""
    rows = context.service.queries.jobs(all, limit=limit + 1, before=before)
    page = rows[-limit:]
    return Json({"jobs": page, "next": page[0]["job"] if len(page) < len(rows) else None})


@router.get("/jobs/{job}", responses=answers(404, 422, model=messages.JobRow))
async def show(job: Job, context: Context, who: Me) -> Json:
    """All that is known of a job; of another user's, what the queue shows, and its receipt."""
    row = context.service.queries.show(job)
    if not who.may_change(row["user"]):
        row = {key: value for key, value in row.items() if key not in PRIVATE}
    return Json(row)


@router.get("/jobs/{job}/explain", responses=answers(404, 422, model=messages.ExplainAnswer))
async def explain(job: Job, context: Context, who: Me) -> Json:
    """Why it waits or shares, with whom, and when it starts and ends."""
    return Json(context.service.queries.explain(job))


@router.get("/jobs/{job}/wait", responses=answers(404, 422, model=messages.JobStatusAnswer))
async def wait(
    job: Job, context: Context, who: Me, timeout_s: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False)] = 5.0
) -> Json:
    """The job's row once it has ended, or as it is after the timeout."""
    context.service.queries.owner(job)
    with suppress(TimeoutError):
        await asyncio.wait_for(context.service.queries.wait(job), timeout_s)
    row = context.service.queries.show(job)
    return Json({key: row.get(key) for key in ("job", "status", "exit_code", "reason")})


LOG_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Bytes of the log as they were written.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "Carpool-Next": {"description": "The offset of what follows.", "schema": {"type": "integer"}},
            "Carpool-Ended": {"description": "1: this attempt is over, its log whole.", "schema": {"type": "integer"}},
            "Carpool-Attempt": {"description": "Which attempt this is.", "schema": {"type": "integer"}},
            "Carpool-Last-Attempt": {"description": "The job's latest attempt.", "schema": {"type": "integer"}},
        },
    }
}


@router.get("/jobs/{job}/logs", responses={**answers(403, 404, 422), **LOG_ANSWER}, response_class=Response)
async def read_log(
    job: Job,
    context: Context,
    who: Me,
    rank: Annotated[int, Query(ge=0, le=100_000)] = 0,
    stream: Literal["stdout", "stderr"] = "stdout",
    attempt: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=logs.MOST_BYTES)] = logs.MOST_BYTES,
    tail: Annotated[int | None, Query(ge=0, le=100_000, description="Only the last so many lines.")] = None,
) -> Response:
    """A worker's output from an offset on; to follow it, ask again from `Carpool-Next`, for the same attempt."""
    _own(context, who, job)
    last = context.service.queries.last_attempt(job)
    number = attempt or max(1, last)
    over = context.service.queries.is_over(job, number)  # asked first: what was written before its end is then read
    path = context.service.queries.log_file(job, rank, stream, number)
    part = await asyncio.to_thread(logs.read, path, offset, limit, tail)
    headers = {"Carpool-Next": str(part.next), "Carpool-Ended": str(int(over and part.last))}
    headers |= {"Carpool-Attempt": str(number), "Carpool-Last-Attempt": str(last)}
    return Response(part.data, media_type="application/octet-stream", headers=headers)


async def _changed(context: ApiContext, job: str) -> Json:
    row = context.service.queries.show(job)
    return Json({key: row[key] for key in ("job", "status", "held")})


CHANGE = answers(403, 404, 409, 422, 503, model=messages.JobStatusAnswer)


@router.post("/jobs/{job}/cancel", responses=CHANGE)
async def cancel(job: Job, context: Context, who: Me) -> Json:
    """Stop the whole gang for good."""
    _own(context, who, job)
    await context.service.requests.cancel(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/hold", responses=CHANGE)
async def hold(job: Job, context: Context, who: Me) -> Json:
    """Keep a waiting job from starting."""
    _own(context, who, job)
    await context.service.requests.hold(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/release", responses=CHANGE)
async def release(job: Job, context: Context, who: Me) -> Json:
    """Let a held job start again."""
    _own(context, who, job)
    await context.service.requests.release(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/requeue", responses=CHANGE)
async def requeue(job: Job, context: Context, who: Me) -> Json:
    """Stop a running job (it saves first) and put it back into the queue."""
    _own(context, who, job)
    await context.service.requests.requeue(job)
    return await _changed(context, job)


@router.put("/jobs/{job}/priority", responses=CHANGE)
async def set_priority(job: Job, request: messages.PriorityRequest, context: Context, who: Me) -> Json:
    """Change a job's place in the queue: higher goes first."""
    _own(context, who, job)
    _check_priority(context, who, request.priority)
    await context.service.requests.set_priority(job, request.priority)
    return await _changed(context, job)
