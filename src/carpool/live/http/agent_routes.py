"""Routes of agents, and those by which operators look at nodes and change them.

An agent's token is good for these paths and for no other, and speaks for one node only. The exchange is in
`carpool.live.executors.wire`; logs are appended by offset, so that repeating a request repeats nothing.
"""

import asyncio
import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from carpool.errors import InputError
from carpool.live.errors import NoSuchJob, WrongStatus
from carpool.live.executors import wire
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.grounds.base import HAND
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Forbidden, Json, answers, api_context, me, status_of
from carpool.live.http.auth import AGENT, Principal, digest, new_token
from carpool.live.http.code_snapshot import pack_again
from carpool.live.http.gate import App, Receive, Refused, Send, parse

router = APIRouter(tags=["nodes"])
Me = Annotated[Principal, Depends(me)]
Context = Annotated[ApiContext, Depends(api_context)]
NodeName = Annotated[str, Path(pattern=messages.NODE_NAME, max_length=63)]
SYNC = "/v1/agents/sync"
LARGE_BODIES = {SYNC: 16 << 20, "/v1/agents/logs": 1 << 20}
"""Paths whose bodies are read as they arrive, with their limits in bytes."""
BODY = {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


class NoSuchNode(NoSuchJob):
    def __init__(self, name: str) -> None:
        InputError.__init__(self, f"there is no node {name}; `carpool nodes` lists them")


def cluster_executor(context: ApiContext) -> ClusterExecutor:
    executor = context.service.executor
    if not isinstance(executor, ClusterExecutor):
        raise WrongStatus("this service runs jobs on its own machine; start it with `--executor agents`")
    return executor


def _admin_only(who: Principal) -> None:
    if not who.admin:
        raise Forbidden("only the administrator may do this")


def own_node(context: ApiContext, who: Principal) -> str:
    if who.pilot and context.keeper is not None:
        return context.keeper.node_of(who.pilot)
    if not who.node:
        raise Forbidden("only agents may do this, with their own tokens; `carpool nodes add` makes one")
    return who.node


# ---- agents ----------------------------------------------------------------------------------------------------------


@router.post(
    "/agents/sync",
    responses=answers(403, 409, 422, 503, model=dict[str, Any]),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def sync(request: Request, context: Context, who: Me) -> Json:
    """Exchange what is on a node for what shall be there. Held for a second or a few where nothing is new."""
    return Json(await _exchange(context, who, await request.body()))


async def _exchange(context: ApiContext, who: Principal, body: bytes) -> dict[str, Any]:
    node = own_node(context, who)
    try:
        state = wire.read(wire.NodeState, parse(body))
    except Refused as error:
        raise InputError(error.sentence) from None
    except (ValueError, RecursionError):
        raise InputError("the body is not JSON") from None
    if state.node != node:
        raise Forbidden(f"this token speaks for node {node} only; `carpool nodes add` makes one for another node")
    found: dict[str, Any] = wire.plain(await cluster_executor(context).sync(state))
    return found


def with_quick_exchange(app: App, context: ApiContext) -> App:
    """Return an application that answers exchanges without the framework, which takes three times as long as they do.
    Everything else, and everything that is refused, goes the usual way."""

    async def answer(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope.get("path") != SYNC or scope.get("method") != "POST":
            await app(scope, receive, send)
            return
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body, status = b"".join(parts), 200
        try:
            found = await _exchange(context, scope["state"]["principal"], body)
        except (InputError, Forbidden) as error:
            status, found = status_of(error), {"error": " ".join(str(error).split())}
        data = json.dumps(found, separators=(",", ":")).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    return answer


@router.post(
    "/agents/logs",
    responses=answers(403, 404, 422, 503, model=dict[str, int]),
    openapi_extra={"requestBody": BODY},
)
async def append_log(
    request: Request,
    context: Context,
    who: Me,
    job: Annotated[str, Query(pattern=r"^[0-9]{1,18}$", max_length=18)],
    attempt: Annotated[int, Query(ge=1, le=1_000_000)],
    rank: Annotated[int, Query(ge=0, le=100_000)],
    stream: Literal["stdout", "stderr"],
    offset: Annotated[int, Query(ge=0, le=2**62)],
) -> Json:
    """Append to the copy of a worker's log, if the copy has exactly `offset` bytes; return how many it has."""
    cluster, node = cluster_executor(context), own_node(context, who)
    if rank not in cluster.ranks_on(node, (job, attempt)):
        raise NoSuchJob(job)
    data = b"".join([part async for part in request.stream()])
    directory = context.home.rank(job, attempt, rank)
    return Json({"size": await asyncio.to_thread(append_to_log, directory / f"{stream}.log", offset, data)})


def append_to_log(path: Any, offset: int, data: bytes) -> int:
    """Append to a file of this size; return its size. Blocks."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path.name}: is not a regular file")
        if found.st_size == offset:
            offset += os.pwrite(descriptor, data, offset)
            return offset
        return found.st_size
    finally:
        os.close(descriptor)


@router.get("/agents/snapshot", responses=answers(403, 404, 422), response_class=Response)
async def snapshot(
    context: Context, who: Me, job: Annotated[str, Query(pattern=r"^[0-9]{1,18}$", max_length=18)]
) -> Response:
    """Return the code snapshot of a job that runs on the agent's node, as a gzipped tar archive."""
    cluster, node = cluster_executor(context), own_node(context, who)
    directory = context.home.snapshot(job)
    if not cluster.has_job(node, job) or not directory.is_dir():
        raise NoSuchJob(job)

    def read() -> bytes:
        with tempfile.TemporaryFile() as packed:
            pack_again(directory, packed)
            packed.seek(0)
            return packed.read()

    return Response(await asyncio.to_thread(read), media_type="application/octet-stream")


# ---- operators -------------------------------------------------------------------------------------------------------


@router.get("/nodes", responses=answers(409, model=dict[str, Any]))
async def nodes(context: Context, who: Me) -> Json:
    """Return the nodes of the cluster: state, ground, GPUs, lease, since when."""
    found: dict[str, Any] = {"nodes": list(_rows(context))}
    if context.keeper is not None:
        found["ground"] = context.keeper.row()
    return Json(found)


def _rows(context: ApiContext) -> Iterator[dict[str, Any]]:
    cluster, users = cluster_executor(context), context.service.queries.users()
    tokens = {row.get("node"): row for row in users.values() if row.get("role") == AGENT}
    for row in cluster.node_rows():
        token = tokens.pop(row["node"], {})
        own = row["ground"] == HAND
        state = "revoked" if token.get("revoked") or not token else "valid"
        closed = context.service.queries.closed_on(row["node"])
        yield {**row, "token": state if own else "of its pilot", "closed": closed}
    for name, token in tokens.items():
        if not token.get("revoked"):
            yield {"node": name, "state": "awaited", "gpus": 0, "token": "valid"}


@router.post("/nodes", status_code=201, responses=answers(403, 409, 422, 503, ok=201, model=dict[str, Any]))
async def add(request: messages.NodeRequest, context: Context, who: Me) -> Json:
    """Make a join token for a node. The answer holds it; it is not kept and cannot be shown again."""
    _admin_only(who)
    cluster_executor(context)
    name, known = f"{AGENT}:{request.name}", context.service.queries.users()
    if name in known and not known[name].get("revoked"):
        raise WrongStatus(f"node {request.name} has a token; revoke it first to make a new one")
    token = new_token()
    row: dict[str, Any] = {"token_hash": digest(token), "role": AGENT, "node": request.name, "revoked": False}
    await context.service.requests.put_user(name, row)
    context.keyring.add(name, row["token_hash"], node=request.name)
    return Json({"node": request.name, "token": token}, 201)


@router.delete("/nodes/{name}/token", responses=answers(403, 404, 422, 503, model=dict[str, Any]))
async def revoke(name: NodeName, context: Context, who: Me) -> Json:
    """Revoke a node's token. Its agent hears nothing more, and its workers end with its lease."""
    _admin_only(who)
    row = context.service.queries.users().get(f"{AGENT}:{name}")
    if row is None:
        raise NoSuchNode(name)
    context.keyring.revoke(f"{AGENT}:{name}")
    await context.service.requests.put_user(f"{AGENT}:{name}", {**row, "token_hash": "", "revoked": True})
    return Json({"node": name, "revoked": True})


@router.put("/nodes/{name}", responses=answers(403, 404, 409, 422, 503, model=dict[str, Any]))
async def change(name: NodeName, request: messages.NodeChange, context: Context, who: Me) -> Json:
    """Drain a node, so that nothing new starts there, let it be used again, or give it up as lost."""
    _admin_only(who)
    cluster = cluster_executor(context)
    with contextlib.suppress(OSError):
        if request.state == "lost":
            cluster.members.give_up(name)
        else:
            cluster.members.drain(name, request.state == "drained")
        return Json(next(row for row in _rows(context) if row["node"] == name))
    raise WrongStatus("the list of nodes cannot be written; make room and try again")
