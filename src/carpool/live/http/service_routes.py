"""Routes on the service itself: GPUs, history, accuracy, the workload for replays, code snapshots and users."""

import asyncio
import os
import tempfile
from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from carpool import __version__
from carpool.core.model import Limits
from carpool.core.usage_report import BY
from carpool.errors import InputError
from carpool.live.accounts import installation_problem, uid_for
from carpool.live.errors import NoSuchJob, WrongStatus
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Forbidden, Json, answers, api_context, me
from carpool.live.http.auth import ADMIN, AGENT, Principal, digest, new_token

Me = Annotated[Principal, Depends(me)]
Context = Annotated[ApiContext, Depends(api_context)]
Name = Annotated[str, Path(pattern=messages.USER_NAME, max_length=32)]
router = APIRouter()
OPERATORS = {"max_jobs", "max_gpus", "max_priority", "group"}
"""Fields of a user that the operator decides. They outlive a token."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Type of the format in which Prometheus reads metrics."""
Before = Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", max_length=18)]

KEY = f"({'|'.join(BY)})"
USAGE_KEYS = f"^{KEY}(,{KEY}){{0,3}}$"
"""Keys of usage with commas between them."""


class NoSuchUser(NoSuchJob):
    def __init__(self, name: str) -> None:
        InputError.__init__(self, f"there is no user {name}; `carpool user list` lists them")


def admin_only(who: Principal) -> None:
    """Raise `Forbidden` for a user that is not the administrator."""
    if not who.admin:
        raise Forbidden("only the administrator may do this")


@router.get("/me", tags=["service"], responses=answers(model=messages.MeAnswer))
async def whoami(who: Me) -> Json:
    """Return the user that the token belongs to."""
    return Json({"name": who.name, "admin": who.admin})


@router.get("/status", tags=["service"], responses=answers(model=messages.ServiceInfo))
async def status(context: Context, who: Me) -> Json:
    """Return the version, the policy and other facts about the service."""
    return Json(
        {
            "version": __version__,
            "policy": context.policy,
            "policy_failure": context.service.queries.policy_failure(),
            "journal_problem": context.service.driver.journal_problem(),
            "jobs_per_gpu": context.jobs_per_gpu,
            "as_root": context.as_root,
            "started": context.started,
            "pid": os.getpid(),
            "home": str(context.home.path) if who.admin else None,
        }
    )


@router.get("/gpus", tags=["service"], responses=answers(model=dict[str, Any]))
async def gpus(context: Context, who: Me) -> Json:
    """Return the nodes, their GPUs with the jobs on them, and the mechanism by which jobs share."""
    return Json(context.service.queries.gpus())


@router.get("/history", tags=["service"], responses=answers(422, model=messages.HistoryPage))
async def history(
    context: Context, who: Me, limit: Annotated[int, Query(ge=1, le=10_000)] = 100, before: Before = None
) -> Json:
    """Return ended jobs, the latest end first, with their receipts: the time that sharing gained or cost them."""
    rows = await context.service.queries.history(limit=limit + 1, before=before)
    page = rows[:limit]
    return Json({"jobs": page, "next": page[-1]["job"] if len(page) < len(rows) else None})


@router.get("/retention", tags=["service"], responses=answers(model=dict[str, Any]))
async def retention(context: Context, who: Me) -> Json:
    """Return how long the files of ended jobs are kept, their sizes, and what is removed next; users see their own."""
    return Json(context.service.queries.retention(None if who.admin else who.name))


@router.get("/usage", tags=["service"], responses=answers(422, model=messages.UsageAnswer))
async def usage(
    context: Context,
    who: Me,
    by: Annotated[
        str, Query(pattern=USAGE_KEYS, max_length=40, description="user, group, project, day or several.")
    ] = "user",
    since: Annotated[date | None, Query(description="First day, in UTC; all that was counted without it.")] = None,
    until: Annotated[date | None, Query(description="Last day, in UTC.")] = None,
) -> Json:
    """Return what jobs used of the GPUs. As the queue, it is the same for all users."""
    keys = tuple(dict.fromkeys(by.split(",")))
    return Json(context.service.queries.usage(keys, since, until))


@router.get("/accuracy", tags=["service"], responses=answers(model=dict[str, Any]))
async def accuracy(context: Context, who: Me) -> Json:
    """Return how accurate the estimates of the service were."""
    return Json(await asyncio.to_thread(context.service.queries.accuracy))


@router.get("/workload", tags=["service"], responses=answers(model=messages.WorkloadAnswer))
async def workload(context: Context, who: Me) -> Json:
    """Return the finished jobs as the simulator reads them."""
    return Json({"jobs": await context.service.queries.workload()})


@router.post(
    "/snapshots",
    tags=["jobs"],
    status_code=201,
    responses=answers(422, ok=201, model=messages.CodeSnapshotAnswer),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload(request: Request, context: Context, who: Me) -> Json:
    """Upload a code snapshot (a gzipped tar archive of a directory) for the job that is submitted next."""
    async with context.uploads.turn(who.name):
        return await _receive(request, context, who)


async def _receive(request: Request, context: ApiContext, who: Principal) -> Json:
    with tempfile.TemporaryFile() as packed:
        async for part in request.stream():
            packed.write(part)
        packed.seek(0)
        name = await asyncio.to_thread(context.uploads.add, packed, who.name)
    return Json({"snapshot": name}, 201)


METRICS: dict[int | str, dict[str, Any]] = {
    **answers(),
    200: {"description": "Metrics for Prometheus.", "content": {"text/plain": {"schema": {"type": "string"}}}},
}


async def metrics(context: Context) -> Response:
    """Return metrics as Prometheus reads them. A user of its own needs no other right."""
    return Response(context.service.metrics.text(), media_type=CONTENT_TYPE)


# ---- users ----------------------------------------------------------------------------------------------------------


def shown_user(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a user without the hash of the token."""
    shown = {key: row.get(key) for key in ("uid", "group", "max_jobs", "max_gpus", "max_priority", "added")}
    return {"name": name, "role": row.get("role", "user"), "revoked": bool(row.get("revoked")), **shown}


@router.get("/users", tags=["users"], responses=answers(403, model=messages.UserList))
async def users(context: Context, who: Me) -> Json:
    """Return all users, including revoked ones."""
    admin_only(who)
    rows = sorted(context.service.queries.users().items())
    return Json({"users": [shown_user(name, row) for name, row in rows if row.get("role") != AGENT]})


@router.post(
    "/users",
    tags=["users"],
    status_code=201,
    responses=answers(403, 409, 422, 503, ok=201, model=messages.NewUserAnswer),
)
async def add_user(request: messages.UserRequest, context: Context, who: Me) -> Json:
    """Add a user, or give one whose token was revoked a new token. The answer holds the token, which is not kept and
    cannot be shown again. Limits and the group that a revoked user had stay unless they are named."""
    admin_only(who)
    name = request.name
    known = context.service.queries.users().get(name)
    if name == ADMIN or (known and not known.get("revoked")):
        raise WrongStatus(f"user {name} already exists; revoke the user first to create a new token")
    token = new_token()
    row = {
        "token_hash": digest(token),
        "role": "user",
        "uid": _uid(context, name, request.uid),
        "revoked": False,
        **{field: (known or {}).get(field) for field in OPERATORS},
        **request.model_dump(include=OPERATORS, exclude_unset=True),
    }
    await context.service.requests.put_user(name, row)
    await context.service.requests.set_limits(name, Limits(row["max_jobs"], row["max_gpus"]))
    context.keyring.add(name, row["token_hash"])
    warning = "" if row["uid"] is None else await asyncio.to_thread(installation_problem, row["uid"])
    return Json({**shown_user(name, row), "token": token, "warning": warning}, 201)


def _uid(context: ApiContext, name: str, uid: int | None) -> int | None:
    """Return the uid that a user's jobs run under. Only a service that runs as root can choose one."""
    if not context.as_root:
        if uid is not None:
            raise InputError("uid: this service does not run as root, so all jobs run as its own user; leave --uid out")
        return None
    if uid is not None:
        return uid
    users = context.service.queries.users()
    found = uid_for(name, (row.get("uid") for row in users.values()), users.get(name, {}).get("uid"))
    if found == 0:
        raise InputError(f"uid: the login name {name} belongs to root; give another name, or --uid")
    return found


@router.delete("/users/{name}", tags=["users"], responses=answers(403, 404, 422, 503, model=messages.UserAnswer))
async def revoke(name: Name, context: Context, who: Me) -> Json:
    """Revoke a user's token. Their jobs go on; cancel them if that is not wanted."""
    admin_only(who)
    row = {**known_user(context, name), "token_hash": "", "revoked": True}
    context.keyring.revoke(name)  # first, so that it holds until the next start even where it cannot be written
    await context.service.requests.put_user(name, row)
    return Json(shown_user(name, row))


@router.put("/users/{name}/limits", tags=["users"], responses=answers(403, 404, 422, 503, model=messages.UserAnswer))
async def limit(name: Name, request: messages.LimitsRequest, context: Context, who: Me) -> Json:
    """Change limits of a user: null removes a limit, and one that is left out stays."""
    admin_only(who)
    row = {**known_user(context, name), **request.model_dump(exclude_unset=True)}
    await context.service.requests.put_user(name, row)
    await context.service.requests.set_limits(name, Limits(row.get("max_jobs"), row.get("max_gpus")))
    return Json(shown_user(name, row))


def known_user(context: ApiContext, name: str) -> dict[str, Any]:
    """Return the row of a user. Raise `NoSuchUser`."""
    row = context.service.queries.users().get(name)
    if row is None:
        raise NoSuchUser(name)
    return dict(row)
