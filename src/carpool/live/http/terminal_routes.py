"""Routes to the terminals of jobs, and to commands beside their workers, for the owner and the administrator.

A terminal is two kinds of requests: a stream of server-sent events with what it prints, which a client resumes after
the last byte that it saw, and requests with what is typed, which are numbered, so that repeating one is harmless. Both
pass the gate like every other request, so a page of another site can use neither.
"""

import base64
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import StreamingResponse

from carpool.errors import InputError
from carpool.live.errors import Unavailable
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Json, answers
from carpool.live.http.auth import Principal
from carpool.live.http.following import is_valid, while_valid
from carpool.live.http.job_routes import Context, Job, Me, own_job, read_job_ahead

log = logging.getLogger("carpool.api")
router = APIRouter(tags=["terminals"], dependencies=[Depends(read_job_ahead)])
CommandName = Annotated[str, Path(pattern=r"^[0-9]{1,18}$", max_length=18)]
Rank = Annotated[int, Query(ge=0, le=100_000)]
NO_STORE = {"Cache-Control": "no-store"}


def _stream(description: str) -> dict[int | str, dict[str, Any]]:
    content = {"text/event-stream": {"schema": {"description": "A message for each piece."}}}
    return {200: {"description": description, "content": content}}


OUTPUT = _stream(
    "`Hello` with the attempt and the offset, then `Output` messages with base64 as `data` and the next offset as "
    "`id`, and `End` when the worker has ended; `Away` with a `reason` when it cannot be reached, so ask again."
)
COMMAND = _stream(
    "`Hello` with the name of the command, then `Output` messages with `stream` and base64 as `data`, and `End` with "
    "`exit_code`, or `Lost` with a `reason`. Closing the stream ends the command."
)


@router.get(
    "/jobs/{job}/terminal", responses={**answers(403, 404, 409, 422, 503), **OUTPUT}, response_class=StreamingResponse
)
async def follow(
    job: Job,
    context: Context,
    who: Me,
    attempt: Annotated[int | None, Query(ge=1, le=1_000_000, description="Attempt that the offset belongs to.")] = None,
    offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
    tail: Annotated[int | None, Query(ge=0, le=10_000, description="Begin with this many lines at the end.")] = None,
) -> StreamingResponse:
    """Follow what the terminal of a job prints, until the worker has ended. An offset of an earlier attempt is 0."""
    own_job(context, who, job)
    number = _attempt(context, job)
    start = offset if attempt in (None, number) else 0
    return StreamingResponse(
        _output(context, who, job, number, start, tail), media_type="text/event-stream", headers=NO_STORE
    )


def _attempt(context: ApiContext, job: str) -> int:
    """Return the attempt to show: that of a job which has ended is shown, too."""
    last = context.service.queries.last_attempt(job)
    if last and context.service.queries.is_over(job, last):
        return last
    return context.service.terminals.attempt(job)


async def _output(
    context: ApiContext, who: Principal, job: str, attempt: int, offset: int, tail: int | None
) -> AsyncIterator[bytes]:
    yield _message("Hello", offset, {"attempt": attempt})
    try:
        said = context.service.terminals.follow(job, attempt, offset, tail)
        async with aclosing(while_valid(context, who, said)) as pieces:
            async for piece in pieces:
                offset = piece.next
                data = {"data": base64.b64encode(piece.data).decode()}
                yield _message("Output", offset, data) if piece.data else _quiet(offset)
        if is_valid(context, who):
            yield _message("End", offset, {})
    except Unavailable as error:  # the client asks again
        yield _message("Away", offset, {"reason": str(error)})


@router.post("/jobs/{job}/terminal", responses=answers(403, 404, 409, 422, 503, model=messages.TypedAnswer))
async def type_keys(job: Job, request: messages.KeysRequest, context: Context, who: Me) -> Json:
    """Type into the terminal of a job, or tell it the size of the window. `taken` is false while there is no room."""
    own_job(context, who, job)
    context.service.terminals.attempt(job)
    return Json({"taken": await context.service.terminals.type(job, _keys(request))})


@router.post(
    "/jobs/{job}/exec", responses={**answers(403, 404, 409, 422, 503), **COMMAND}, response_class=StreamingResponse
)
async def run(
    job: Job, request: messages.CommandRequest, context: Context, who: Me, rank: Rank = 0
) -> StreamingResponse:
    """Run a command beside a running worker, with its user, folder, environment and GPUs, and follow its output."""
    own_job(context, who, job)
    _check_size(request)
    log.info("%s runs a command beside job %s", who.name, job)
    said = context.service.terminals.run(job, rank, request.model_dump())
    first = await anext(said)  # a refusal is an answer with a status
    return StreamingResponse(
        _command_output(context, who, first, said), media_type="text/event-stream", headers=NO_STORE
    )


async def _command_output(
    context: ApiContext, who: Principal, first: dict[str, Any], said: AsyncGenerator[dict[str, Any], None]
) -> AsyncIterator[bytes]:
    try:
        async with aclosing(said), aclosing(while_valid(context, who, said)) as parts:  # the command ends with them
            yield _message("Hello", 0, first)
            number = 0
            async for one in parts:
                number += 1
                yield _message("End" if "exit_code" in one else "Output", number, one) if one else _quiet(number)
    except InputError as error:  # the stream ends without an exit code
        yield _message("Lost", 0, {"reason": str(error)})


@router.post("/jobs/{job}/exec/{command}", responses=answers(403, 404, 409, 422, 503, model=messages.TypedAnswer))
async def type_to_command(
    job: Job, command: CommandName, request: messages.KeysRequest, context: Context, who: Me, rank: Rank = 0
) -> Json:
    """Type to a command beside a worker, tell it the size of the window, or end its input with `ends`."""
    own_job(context, who, job)
    return Json({"taken": await context.service.terminals.type_to(job, rank, command, _keys(request))})


def _keys(request: messages.KeysRequest) -> dict[str, Any]:
    try:
        base64.b64decode(request.data, validate=True)
    except ValueError:
        raise InputError("data: must be base64") from None
    _check_size(request)
    return request.model_dump(exclude_none=True)


def _check_size(request: messages.KeysRequest | messages.CommandRequest) -> None:
    if (request.rows is None) != (request.columns is None):
        raise InputError("rows: give rows and columns together")


def _message(kind: str, number: int, data: dict[str, Any]) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _quiet(number: int) -> bytes:
    return f"id: {number}\n: quiet\n\n".encode()
