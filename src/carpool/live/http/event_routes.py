"""What happens, as server-sent events: a stream that stays open, and that a client resumes after the last event it saw.

A user sees what the queue shows to all, and the limits of their own; the administrator also sees the notes. The stream
ends when the token is revoked or the service no longer leads.
"""

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import StreamingResponse

from carpool.live.http.api import ApiContext, answers, api_context, me
from carpool.live.http.auth import Principal
from carpool.live.http.following import while_valid
from carpool.live.service.feed import FeedPart

router = APIRouter(tags=["events"])
Number = Annotated[str | None, Header(pattern=r"^[0-9]{1,18}$", max_length=18)]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Messages with the number of the event as `id`, its kind as `event`, and JSON as `data`.",
        "content": {"text/event-stream": {"schema": {"description": "A message for each event."}}},
    }
}


@router.get("/events", responses={**answers(422), **STREAM}, response_class=StreamingResponse)
async def events(
    context: Annotated[ApiContext, Depends(api_context)],
    who: Annotated[Principal, Depends(me)],
    last_event_id: Number = None,
    after: Annotated[
        int | None, Query(ge=0, le=10**18, description="The same as Last-Event-ID, which wins if both are given.")
    ] = None,
    job: Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", max_length=18, description="Only of this job.")] = None,
    wait_s: Annotated[
        float | None,
        Query(ge=0, le=86_400, allow_inf_nan=False, description="Seconds after which the stream ends; 0: at once."),
    ] = None,
) -> StreamingResponse:
    """Return what happens as server-sent events, from now on or after the event with the given number.

    The first message is `Hello`. `Gap` says that events before the next one are no longer known.
    """
    resumed = int(last_event_id) if last_event_id is not None else after
    stream = _messages(context, who, resumed, job, wait_s)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _messages(
    context: ApiContext, who: Principal, after: int | None, job: str | None, wait_s: float | None
) -> AsyncIterator[bytes]:
    feed = context.service.feed
    until = None if wait_s is None else time.monotonic() + wait_s
    yield _message("Hello", feed.last if after is None else after, {"last": feed.last})
    async with aclosing(while_valid(context, who, feed.follow(after, until))) as parts:
        async for part in parts:
            yield _encoded(part, who, job)


def _encoded(part: FeedPart, who: Principal, job: str | None) -> bytes:
    seen = [one for one in part.events if one.visible_to(who.name, who.admin) and (job is None or one.concerns(job))]
    pieces = [one.encoded for one in seen]
    if part.gap:
        pieces.insert(0, _message("Gap", part.events[0].seq - 1 if part.events else part.last, {}))
    if not seen or seen[-1].seq != part.last:  # what was left out need not be sent again after a break
        pieces.append(f"id: {part.last}\n: quiet\n\n".encode())
    return b"".join(pieces)


def _message(kind: str, number: int, data: dict[str, Any]) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps({'seq': number, 'kind': kind, **data})}\n\n".encode()
