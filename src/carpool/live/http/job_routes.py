"""Routes on jobs: submit, list, show, explain, read logs, change. They decide who may do what.

All users see the queue. Only the owner of a job and the administrator see its command, environment and logs, and only
they may change it.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from carpool.errors import InputError
from carpool.live import spec
from carpool.live.errors import NoSuchJob
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Forbidden, Json, answers, api_context, me
from carpool.live.http.auth import Principal
from carpool.live.service.queries import MAX_LOG_BYTES

Me = Annotated[Principal, Depends(me)]
Context = Annotated[ApiContext, Depends(api_context)]
Job = Annotated[str, Path(pattern=r"^[0-9]{1,18}$", max_length=18)]
MAX_ROWS = 10_000
SOME_JOBS = r"^[0-9]{1,18}(,[0-9]{1,18}){0,499}$"
"""Several ids of jobs with commas between them."""
PRIVATE = ("spec", "env", "command", "directory", "attempts", "note", "undelivered")
"""Fields of `show` that other users do not see: commands and paths may hold secrets, environments often do."""


async def read_job_ahead(request: Request, context: Context) -> None:
    """Read the row of a job that has ended before its route asks for it, because a database may take a while."""
    job = request.path_params.get("job")
    if job is not None:
        await context.service.queries.book.read_ahead([job])


router = APIRouter(tags=["jobs"], dependencies=[Depends(read_job_ahead)])


def own_job(context: ApiContext, who: Principal, job: str) -> None:
    owner = context.service.queries.owner(job)
    if not who.may_change(owner):
        raise Forbidden(f"job {job} belongs to {owner}; only the owner and the administrator may do this")


def _check_priority(context: ApiContext, who: Principal, priority: int) -> None:
    most = None if who.admin else context.service.queries.users().get(who.name, {}).get("max_priority")
    if most is not None and priority > most:
        raise Forbidden(
            f"priority: {priority} is above {most}, the limit of user {who.name}; ask the administrator to raise it"
        )


def _specs(request: messages.JobRequest) -> tuple[list[spec.Spec], str | None]:
    """Return the jobs that a request asks for, and the name of their code snapshot."""
    given = request.model_dump(exclude_unset=True)
    array, sweep, snapshot = (given.pop(name, None) for name in ("array", "sweep", "snapshot"))
    one = spec.parse(given)
    if array is not None and sweep is not None:
        raise InputError("sweep: cannot be given with array; add the indexes as a parameter, as in index=0-9")
    if sweep is not None:
        return spec.expand_sweep(one, sweep), snapshot
    return ([one] if array is None else spec.expand(one, array)), snapshot


@router.post("/jobs", status_code=201, responses=answers(403, 422, 503, ok=201, model=messages.SubmitAnswer))
async def submit(request: messages.JobRequest, context: Context, who: Me) -> Json:
    """Submit a job, or an array of jobs: all or none. They are on disk when the answer arrives."""
    specs, snapshot = _specs(request)
    context.service.terminals.check(specs)
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
    """Return what would happen to a job without submitting it; of several, also when the first and the last end."""
    specs, _ = _specs(request)
    context.service.terminals.check(specs)
    context.service.requests.check(specs)
    return Json(await context.service.queries.dry_run(specs, who.name))


@router.get("/jobs", responses=answers(422, model=messages.JobPage))
async def jobs(
    context: Context,
    who: Me,
    all: Annotated[bool, Query(description="Include the jobs that have ended.")] = False,
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 1000,
    before: Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", max_length=18)] = None,
    ids: Annotated[
        str | None, Query(pattern=SOME_JOBS, max_length=4000, description="Only these, ended or not: 7,8,12.")
    ] = None,
) -> Json:
    """Return running and waiting jobs in order of submission: the latest `limit`, or the latest before a job."""
    if ids is not None:
        return Json({"jobs": await context.service.queries.some(ids.split(",")), "next": None})
    rows = await context.service.queries.page(all, limit=limit + 1, before=before)
    page = rows[-limit:]
    return Json({"jobs": page, "next": page[0]["job"] if len(page) < len(rows) else None})


@router.get("/jobs/{job}", responses=answers(404, 422, model=messages.JobRow))
async def show(job: Job, context: Context, who: Me) -> Json:
    """Return all details of a job; of another user's job only what the queue shows, and its receipt."""
    row = context.service.queries.show(job)
    if not who.may_change(row["user"]):
        row = {key: value for key, value in row.items() if key not in PRIVATE}
    return Json(row)


@router.get("/jobs/{job}/explain", responses=answers(404, 422, model=messages.ExplainAnswer))
async def explain(job: Job, context: Context, who: Me) -> Json:
    """Return why a job waits or where it runs, its mates, and a forecast of its start and end."""
    return Json(context.service.queries.explain(job))


@router.get("/jobs/{job}/wait", responses=answers(404, 422, model=messages.WaitAnswer))
async def wait(
    job: Job, context: Context, who: Me, timeout_s: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False)] = 5.0
) -> Json:
    """Wait for the end of a job or for the timeout, and return its status."""
    context.service.queries.owner(job)
    with suppress(TimeoutError):
        await asyncio.wait_for(context.service.queries.wait(job), timeout_s)
    await context.service.queries.book.read_ahead([job])
    row = context.service.queries.show(job)
    return Json({key: row.get(key) for key in ("job", "name", "status", "exit_code", "reason")})


LOG_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Bytes of the log.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "Carpool-Next": {"description": "Offset of the bytes that follow.", "schema": {"type": "integer"}},
            "Carpool-Ended": {
                "description": "1: the attempt has ended and its log is complete.",
                "schema": {"type": "integer"},
            },
            "Carpool-Attempt": {"description": "Number of this attempt.", "schema": {"type": "integer"}},
            "Carpool-Last-Attempt": {"description": "Number of the latest attempt.", "schema": {"type": "integer"}},
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
    limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = MAX_LOG_BYTES,
    tail: Annotated[
        int | None, Query(ge=0, le=100_000, description="Return only this many lines from the end.")
    ] = None,
) -> Response:
    """Return the output of a worker from an offset on. To follow it, repeat with the offset in `Carpool-Next`."""
    own_job(context, who, job)
    last = context.service.queries.last_attempt(job)
    number = attempt or max(1, last)
    over = context.service.queries.is_over(
        job, number
    )  # before reading: then everything written before the end is read
    part = await context.service.queries.read_log(
        job, rank, stream, attempt=number, offset=offset, limit=limit, tail=tail
    )
    headers = {"Carpool-Next": str(part.next), "Carpool-Ended": str(int(over and part.last))}
    headers |= {"Carpool-Attempt": str(number), "Carpool-Last-Attempt": str(last)}
    return Response(part.data, media_type="application/octet-stream", headers=headers)


async def _changed(context: ApiContext, job: str) -> Json:
    await context.service.queries.book.read_ahead([job])
    return Json(context.service.queries.status(job))


CHANGE = answers(403, 404, 409, 422, 503, model=messages.JobStatusAnswer)


@router.post("/jobs/cancel", responses=answers(422, 503, model=messages.ChangesAnswer))
async def cancel_all(request: messages.JobsRequest, context: Context, who: Me) -> Json:
    """Stop all workers of many jobs for good. Jobs that cannot be cancelled are in `refused`, and stop no other."""
    refused: dict[str, Exception] = {}
    await context.service.queries.book.read_ahead(request.jobs)
    for job in dict.fromkeys(request.jobs):
        try:
            own_job(context, who, job)
        except (Forbidden, NoSuchJob) as error:
            refused[job] = error
    own = [job for job in dict.fromkeys(request.jobs) if job not in refused]
    refused |= await context.service.requests.cancel_all(own)
    await context.service.queries.book.read_ahead(own)
    done = [context.service.queries.status(job) for job in own if job not in refused]
    return Json({"jobs": done, "refused": [{"job": job, "error": str(why)} for job, why in refused.items()]})


@router.post("/jobs/{job}/cancel", responses=CHANGE)
async def cancel(job: Job, context: Context, who: Me) -> Json:
    """Stop all workers of a job for good."""
    own_job(context, who, job)
    await context.service.requests.cancel(job)
    return await _changed(context, job)


@router.delete("/jobs/{job}/files", responses=answers(403, 404, 409, 422, model=messages.PrunedAnswer))
async def prune(job: Job, context: Context, who: Me) -> Json:
    """Remove the logs, the code snapshot and the checkpoints of a job that has ended."""
    own_job(context, who, job)
    return Json({"job": job, "bytes": await context.service.requests.prune(job, who.name)})


@router.post("/jobs/{job}/hold", responses=CHANGE)
async def hold(job: Job, context: Context, who: Me) -> Json:
    """Keep a waiting job from starting until it is released."""
    own_job(context, who, job)
    await context.service.requests.hold(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/release", responses=CHANGE)
async def release(job: Job, context: Context, who: Me) -> Json:
    """Allow a held job to start."""
    own_job(context, who, job)
    await context.service.requests.release(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/pause", responses=CHANGE)
async def pause(job: Job, context: Context, who: Me) -> Json:
    """Let a running job stand still on its GPUs until it is resumed; it keeps its memory."""
    own_job(context, who, job)
    await context.service.requests.pause(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/resume", responses=CHANGE)
async def resume(job: Job, context: Context, who: Me) -> Json:
    """Let a job that its owner paused go on."""
    own_job(context, who, job)
    await context.service.requests.resume(job)
    return await _changed(context, job)


@router.post("/jobs/{job}/requeue", responses=CHANGE)
async def requeue(job: Job, context: Context, who: Me) -> Json:
    """Stop a running job after it has saved, and put it back into the queue."""
    own_job(context, who, job)
    await context.service.requests.requeue(job)
    return await _changed(context, job)


@router.put("/jobs/{job}/priority", responses=CHANGE)
async def set_priority(job: Job, request: messages.PriorityRequest, context: Context, who: Me) -> Json:
    """Change the priority of a job; a higher one starts first."""
    own_job(context, who, job)
    _check_priority(context, who, request.priority)
    await context.service.requests.set_priority(job, request.priority)
    return await _changed(context, job)
