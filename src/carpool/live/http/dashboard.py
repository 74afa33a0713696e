"""The dashboard: its files, and signing in and out. Everything that it shows comes from the API.

The files are part of the package and the same for everyone, so they need no token. Their headers allow nothing but
scripts and styles of this service: a text that is taken for markup by mistake can neither run nor send anything.
"""

import hashlib
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import Response

from carpool.live.http import messages, sessions
from carpool.live.http.api import ApiContext, Json, api_context, problem

PAGE = "/"
FOLDER = "/ui/"
SESSION = "/session"
"""Path to sign in and out; a browser has no token before."""
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
router = APIRouter(tags=["sessions"])


def read_files() -> dict[str, Response]:
    """Return the answers for the files of the dashboard, by their paths."""
    found = {}
    for file in files("carpool.live.http").joinpath("ui").iterdir():
        kind = KINDS.get(file.name[file.name.rfind(".") :])
        if kind is None:
            continue
        content = file.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        path = PAGE if file.name == "index.html" else FOLDER + file.name
        found[path] = Response(content, media_type=kind, headers={**HEADERS, "ETag": tag})
    return found


def add_to(app: FastAPI) -> frozenset[str]:
    """Add the routes to an application, and return the paths that need no token."""
    answers = read_files()

    def route_of(answer: Response) -> Any:
        async def send(request: Request) -> Response:
            if request.headers.get("if-none-match") == answer.headers["etag"]:
                return Response(status_code=304, headers={**HEADERS, "ETag": answer.headers["etag"]})
            return answer

        return send

    for path, answer in answers.items():
        app.add_api_route(path, route_of(answer), methods=["GET"], include_in_schema=False)
    app.include_router(router, include_in_schema=False)
    return frozenset({*answers, SESSION})


@router.post(SESSION)
async def sign_in(
    given: messages.SignInRequest, request: Request, context: Annotated[ApiContext, Depends(api_context)]
) -> Response:
    """Give the browser a session for a token."""
    who = context.keyring.who(given.token)
    if who is None or who.agent:
        return problem(401, "this token is not known here; `carpool user add` makes one for you")
    cookie, key = sessions.split(given.token)
    secure = request.url.scheme == "https"
    return Json(
        {"name": who.name, "admin": who.admin, "key": key}, headers={"Set-Cookie": sessions.set_cookie(cookie, secure)}
    )


@router.delete(SESSION)
async def sign_out(request: Request) -> Response:
    """Take the session of the browser away."""
    return Json({}, headers={"Set-Cookie": sessions.set_cookie("", request.url.scheme == "https")})
