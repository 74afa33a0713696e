"""Routes on groups: weights, guarantees, caps and time limits, how strongly shares count, and users in groups."""

from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path

from carpool.core.model import UserGroup
from carpool.core.tenants import settings_problem
from carpool.errors import InputError
from carpool.live.http import messages
from carpool.live.http.api import ApiContext, Json, answers, api_context, me
from carpool.live.http.auth import Principal
from carpool.live.http.service_routes import Name, admin_only, known_user, shown_user

Me = Annotated[Principal, Depends(me)]
Context = Annotated[ApiContext, Depends(api_context)]
GroupPath = Annotated[str, Path(pattern=messages.GROUP_NAME, max_length=32)]
router = APIRouter()


@router.get("/groups", tags=["users"], responses=answers(model=messages.GroupList))
async def groups(context: Context, who: Me) -> Json:
    """Return the groups, what each holds and used, and how strongly shares count."""
    return Json(context.service.queries.groups())


@router.put("/groups/{name}", tags=["users"], responses=answers(403, 422, 503, model=messages.GroupAnswer))
async def describe(name: GroupPath, request: messages.GroupRequest, context: Context, who: Me) -> Json:
    """Describe a group: what is left out stays as it is, and null removes a cap or a time limit."""
    admin_only(who)
    present = context.service.state.tenants.settings.get(name, UserGroup(name))
    changed = replace(present, **request.model_dump(exclude_unset=True))
    if problem := settings_problem(changed):
        raise InputError(problem)
    await context.service.requests.set_group(changed)
    return Json(_row(context, name))


def _row(context: ApiContext, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = context.service.queries.groups()["groups"]
    return next(row for row in rows if row["name"] == name)


@router.put("/fair-share", tags=["users"], responses=answers(403, 422, 503, model=messages.FairShareAnswer))
async def fair_share(request: messages.FairShareRequest, context: Context, who: Me) -> Json:
    """Choose how strongly groups and users that used less than their share go first, and how fast usage decays."""
    admin_only(who)
    present = context.service.state.tenants.fair_share
    changed = replace(present, **request.model_dump(exclude_unset=True))
    await context.service.requests.set_fair_share(changed)
    return Json(asdict(changed))


@router.put("/users/{name}/group", tags=["users"], responses=answers(403, 404, 422, 503, model=messages.UserAnswer))
async def join(name: Name, request: messages.MembershipRequest, context: Context, who: Me) -> Json:
    """Move a user to a group. Jobs that exist stay with the group that they were submitted for."""
    admin_only(who)
    row = {**known_user(context, name), "group": request.group}
    await context.service.requests.put_user(name, row)
    return Json(shown_user(name, row))
