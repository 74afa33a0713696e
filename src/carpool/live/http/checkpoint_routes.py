"""Routes by which agents that do not see the home bring checkpoints of stopped jobs, and fetch them for the next start.

Packing and unpacking may take longer than an agent waits for an answer: it goes on meanwhile, and the agent asks again.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from carpool.errors import InputError
from carpool.live.errors import NoSuchJob
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.executors.fetched_checkpoints import PIECE
from carpool.live.http import messages
from carpool.live.http.agent_routes import BODY, Context, Me, cluster_executor, own_node
from carpool.live.http.api import ApiContext, Json, answers

router = APIRouter(tags=["nodes"])
PATH = "/agents/checkpoint"
LARGE_BODIES = {f"/v1{PATH}": PIECE}
WAIT_S = 2.0
"""Seconds for which an answer waits for what takes long."""
JobName = Annotated[str, Query(pattern=r"^[0-9]{1,18}$", max_length=18)]
Attempt = Annotated[int, Query(ge=1, le=1_000_000)]
_Result = TypeVar("_Result")


async def _soon(cluster: ClusterExecutor, name: str, work: Callable[[], _Result]) -> _Result | None:
    """Do what takes long in a thread, once for each name at a time; None: it is still being done."""
    task = cluster.transfers.get(name)
    if task is None:
        task = cluster.transfers[name] = asyncio.create_task(asyncio.to_thread(work))
        task.add_done_callback(lambda _: cluster.transfers.pop(name, None))
    done, _ = await asyncio.wait({task}, timeout=WAIT_S)
    found: _Result | None = task.result() if done else None
    return found


def _uid(context: ApiContext, job: str) -> int | None:
    record = context.service.state.jobs.get(job)
    if record is None:
        raise NoSuchJob(job)
    return context.service.users.uid_of(record.job.user)


@router.post(PATH, responses=answers(403, 404, 422, 503, model=dict[str, Any]), openapi_extra={"requestBody": BODY})
async def receive(
    request: Request,
    context: Context,
    who: Me,
    job: JobName,
    attempt: Attempt,
    offset: Annotated[int, Query(ge=0, le=2**62)],
    size: Annotated[int, Query(ge=1, le=2**62)],
    sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$", max_length=64)],
) -> Json:
    """Append to the packed checkpoints of a job that stopped on the agent's node, if exactly `offset` bytes are here;
    return how many are, and whether all are here and in their place."""
    cluster, node = cluster_executor(context), own_node(context, who)
    if not cluster.has_whole(node, (job, attempt)):
        raise NoSuchJob(job)
    data, uid = b"".join([part async for part in request.stream()]), _uid(context, job)
    store = cluster.checkpoints
    found = await _soon(cluster, f"from {job}", lambda: store.receive((job, attempt), uid, offset, data, size, sha256))
    have, done = found if found is not None else (offset + len(data), False)
    return Json({"size": have, "done": done})


@router.post(f"{PATH}/left", responses=answers(403, 404, 422, 503, model=dict[str, Any]))
async def leave(message: messages.LeftCheckpoint, context: Context, who: Me, job: JobName, attempt: Attempt) -> Json:
    """Note that the checkpoints of a job that stopped on the agent's node stay there, and why."""
    cluster, node = cluster_executor(context), own_node(context, who)
    if not cluster.has_whole(node, (job, attempt)):
        raise NoSuchJob(job)
    await cluster.leave_checkpoint((job, attempt), node, message.why)
    return Json({"job": job})


@router.get(PATH, responses=answers(403, 404, 422, 503, model=dict[str, Any]))
async def offer(context: Context, who: Me, job: JobName) -> Json:
    """Return the size and the hash of the packed checkpoints of a job that starts on the agent's node; nothing while
    they are being packed."""
    cluster, node = cluster_executor(context), own_node(context, who)
    if not cluster.has_job(node, job):
        raise NoSuchJob(job)
    store = cluster.checkpoints
    found = await _soon(cluster, f"to {job}", lambda: (store.offer(job, node),))
    if found is None:
        return Json({})
    if found[0] is None:
        raise NoSuchJob(job)
    return Json({"size": found[0].size, "sha256": found[0].sha256})


@router.get(f"{PATH}/piece", responses=answers(403, 404, 422, 503), response_class=Response)
async def piece(context: Context, who: Me, job: JobName, offset: Annotated[int, Query(ge=0, le=2**62)]) -> Response:
    """Return a piece of the packed checkpoints of a job that starts on the agent's node."""
    cluster, node = cluster_executor(context), own_node(context, who)
    if not cluster.has_job(node, job):
        raise NoSuchJob(job)
    try:
        data = await asyncio.to_thread(cluster.checkpoints.read, job, offset)
    except OSError:
        raise InputError("the packed checkpoint is gone; ask for it again") from None
    return Response(data, media_type="application/octet-stream")


@router.delete(PATH, responses=answers(403, 404, 422, 503, model=dict[str, Any]))
async def take(context: Context, who: Me, job: JobName) -> Json:
    """Remove the packed checkpoints of a job that the agent has fetched."""
    cluster, node = cluster_executor(context), own_node(context, who)
    if not cluster.has_job(node, job):
        raise NoSuchJob(job)
    await asyncio.to_thread(cluster.checkpoints.taken, job)
    return Json({"job": job})
