"""The HTTP API: a FastAPI application around a `Service`, documented at `/openapi.json`.

Routes are thin: they check whose job it is, call the service and answer in JSON. Every failure ends as
`{"error": "one sentence"}` with a status that says whose fault it is. `carpool serve` runs the application.
"""

import json
import logging
import math
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from carpool import __version__
from carpool.errors import InputError
from carpool.live.errors import NoSuchJob, Unavailable, WrongStatus
from carpool.live.home import Home
from carpool.live.http import messages
from carpool.live.http.auth import Keyring, Principal
from carpool.live.http.code_snapshot import MAX_PACKED, Uploads
from carpool.live.http.gate import HEALTH, App, Gate
from carpool.live.service.ground_keeper import GroundKeeper
from carpool.live.service.service import Service

log = logging.getLogger("carpool.api")
PROBLEMS = {
    400: "The host, the path or the body of the request is malformed.",
    401: "The token is missing or unknown.",
    403: "The job belongs to another user, or only the administrator may do this.",
    404: "The job, the user or the file does not exist.",
    409: "The status of the job does not allow this.",
    413: "The body is too large.",
    422: "A field is invalid, or the job could never run here.",
    503: "The service cannot write its journal at the moment, for example because the disk is full.",
}


@dataclass(frozen=True)
class ApiContext:
    """The objects that the routes work with."""

    service: Service
    home: Home
    keyring: Keyring
    policy: str = ""
    jobs_per_gpu: int = 2
    as_root: bool = False
    hosts: tuple[str, ...] = ()
    keeper: GroundKeeper | None = None
    """Gets nodes from a ground; None: operators start all agents."""
    started: float = field(default_factory=time)

    def leads(self) -> bool:
        """Return whether the service may answer as the leader."""
        return self.service.store.leadership.leads()

    @cached_property
    def uploads(self) -> Uploads:
        return Uploads(self.home.path / "uploads")


class Forbidden(Exception):
    """The user may not do that; the message says who may."""


STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (Forbidden, 403),
    (NoSuchJob, 404),
    (WrongStatus, 409),
    (Unavailable, 503),
    (InputError, 422),
)
"""Statuses of refusals; the first that fits counts."""


def status_of(error: Exception) -> int:
    """Return the HTTP status of a refusal."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


class Json(JSONResponse):
    """Plain data as JSON. FastAPI would validate every row, which takes longer than making them."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        except ValueError:
            return json.dumps(finite(content), separators=(",", ":")).encode()


def finite(value: Any) -> Any:
    """Return the value with infinite numbers replaced by None, because JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def answers(*codes: int, ok: int = 200, model: Any = None) -> dict[int | str, dict[str, Any]]:
    """Return the documented answers of a route. Every route has 400, 401 and 413, which the gate gives."""
    documented: dict[int | str, dict[str, Any]] = {
        code: {"model": messages.ErrorAnswer, "description": PROBLEMS[code]} for code in sorted({400, 401, 413, *codes})
    }
    if model is not None:
        documented[ok] = {"model": model}
    return documented


def me(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def api_context(request: Request) -> ApiContext:
    found: ApiContext = request.app.state.context
    return found


def create_app(context: ApiContext) -> App:
    """Return the application, wrapped in its gate."""
    from carpool.live.http import (
        agent_routes,
        checkpoint_routes,
        closure_routes,
        dashboard,
        door_routes,
        event_routes,
        job_routes,
        picture_routes,
        service_routes,
        tenant_routes,
        terminal_routes,
    )

    app = FastAPI(
        title="Carpool",
        version=__version__,
        description="Submit, inspect and change jobs. Paths below /v1 need `Authorization: Bearer TOKEN`.",
        docs_url=None,  # the page would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Json,
    )
    app.state.context = context
    _answer_errors(app)

    @app.get(HEALTH, responses={200: {"model": messages.HealthAnswer}, 400: answers()[400], 413: answers()[413]})
    async def health() -> Json:
        """Return ok. It needs no token and reveals nothing else."""
        return Json({"status": "ok"})

    app.include_router(job_routes.router, prefix="/v1")
    app.include_router(terminal_routes.router, prefix="/v1")
    app.include_router(service_routes.router, prefix="/v1")
    app.include_router(tenant_routes.router, prefix="/v1")
    app.include_router(closure_routes.router, prefix="/v1")
    app.include_router(event_routes.router, prefix="/v1")
    app.include_router(picture_routes.router, prefix="/v1")
    app.include_router(agent_routes.router, prefix="/v1")
    app.include_router(door_routes.router, prefix="/v1")
    app.include_router(checkpoint_routes.router, prefix="/v1")
    app.add_api_route("/metrics", service_routes.metrics, responses=service_routes.METRICS, tags=["service"])
    open_paths = dashboard.add_to(app)
    _document_security(app)
    large = {"/v1/snapshots": MAX_PACKED, **agent_routes.LARGE_BODIES, **door_routes.LARGE_BODIES}
    large |= checkpoint_routes.LARGE_BODIES
    return Gate(
        agent_routes.with_quick_exchange(app, context),
        context.keyring.who,
        hosts=context.hosts,
        large_bodies=large,
        leads=context.leads,
        open_paths=open_paths,
        answered=context.service.metrics.answered,
    )


def _answer_errors(app: FastAPI) -> None:
    def answering(status: int) -> Any:
        async def respond(request: Request, error: Exception) -> JSONResponse:
            return problem(status, " ".join(str(error).split()))

        return respond

    for kind, status in STATUSES:
        app.add_exception_handler(kind, answering(status))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return problem(400, "the body is not JSON")
        where = [str(part) for part in first["loc"][1:]] or ["body"]
        context = first.get("ctx", {})
        why = context.get("error", first["msg"])  # the message of the field's own reader, where that refused it
        if (words := messages.PATTERN_WORDS.get(context.get("pattern", ""))) is not None:
            why = f"{ascii(first['input'])[:80]} is not accepted; {words}"
        return problem(422, f"{ascii('.'.join(where))[1:-1][:100]}: {why}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        words = {
            404: "no such path; /openapi.json lists the paths",
            405: "this path does not allow that method; see /openapi.json",
        }
        return problem(error.status_code, words.get(error.status_code, "the body cannot be read"), error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed: %s %s", request.method, request.url.path, exc_info=error)
        return problem(500, "internal error; the log of the service has the details")


def problem(status: int, sentence: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status, headers)


def _document_security(app: FastAPI) -> None:
    """Document the token in the OpenAPI document, for every path except the health check."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
            schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["token"] = {"type": "http", "scheme": "bearer"}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path == HEALTH else [{"token": []}]
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
