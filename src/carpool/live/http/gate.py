"""Checks of every request before it reaches a route: its host, its path, its token, and the size and depth of its body.

The gate is written against ASGI itself, so that nothing is answered without these checks, not even an unknown path or
the OpenAPI document. `api.py` wraps the application in it.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from itertools import accumulate
from typing import Any

from carpool.live.http import sessions
from carpool.live.http.auth import Principal
from carpool.live.http.connections import CONNECTION

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

REFUSED = "none"
"""Route of a request that reached none."""
AGENTS = "/v1/agents/"
"""Beginning of the paths that agents may use, and only they."""
HEALTH = "/health"
"""Path that needs no token; the files of the dashboard need none either."""
NOT_LEADING = (
    "this service is not certain to lead: its database is away, or another service took over; running jobs continue; "
    "try again"
)
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_BODY = 1 << 20
MAX_OPEN_BODY = 512
"""Bytes that a client without a token may send: a token to sign in with."""
MAX_DEPTH = 32
TOO_DEEP = f"the body is nested more than {MAX_DEPTH} levels deep"
BODY_TIMEOUT_S = 30.0
"""Seconds in which a body must have arrived; for a code snapshot, between two parts of it."""
LARGE_BODY_TIMEOUT_S = 900.0
"""Seconds in which a whole code snapshot must have arrived."""
MAX_DRAINED = 64 << 20
DRAIN_S = 2.0
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""A text of JSON. One without its end reaches to the end of the body, so that no byte is looked at twice."""
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEP = tuple({ord("["): 1, ord("{"): 1}.get(byte, -1) for byte in range(256))
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
"""What a Host header may be: a name or an address and a port, and nothing before or after them."""
_TRICKS = re.compile(rb"%(?:00|2e|2f|5c|25)|\\|//|(?:^|/)\.{1,2}(?:/|$)|[\x00-\x20\x7f-\xff]", re.IGNORECASE)


class Refused(Exception):
    """A refused request: a status and one sentence."""

    def __init__(self, status: int, sentence: str, unread: bool = False) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.unread = unread
        """Whether more of the body is still arriving."""


class Gate:
    def __init__(
        self,
        app: App,
        who: Callable[[str], Principal | None],
        *,
        hosts: Iterable[str] = (),
        max_body: int = MAX_BODY,
        large_bodies: MutableMapping[str, int] | None = None,
        leads: Callable[[], bool] = lambda: True,
        open_paths: Iterable[str] = (),
        answered: Callable[[str, int, float], None] = lambda route, status, seconds: None,
    ) -> None:
        self.app = app
        self.who = who
        self.hosts = LOOPBACK | {host.lower() for host in hosts}
        self.max_body = max_body
        self.large_bodies = dict(large_bodies or {})
        """Paths whose bodies may be larger and are not JSON, with their limits."""
        self.open_paths = frozenset({HEALTH, *open_paths})
        """Paths that need no token: they reveal nothing."""
        self.answered = answered
        """Is called with every answer: its route, its status and the seconds that it took."""
        self.leads = leads
        """Whether this service leads: one that may have been replaced does not answer."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        began = time.monotonic()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answered(route_of(scope), message["status"], time.monotonic() - began)
            await send(message)

        await self._answer(scope, receive, counted)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: the API has none
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check_host(scope)
            if not self.leads():
                raise Refused(503, NOT_LEADING)
            self._check_path(scope)
            _check_query(scope.get("query_string", b""))
            if scope["path"] not in self.open_paths:
                principal = scope.setdefault("state", {})["principal"] = self._authenticate(scope)
                if CONNECTION in scope:
                    scope[CONNECTION].authenticated(principal.name, agent=principal.agent)
                if principal.agent is not scope["path"].startswith(AGENTS):
                    raise Refused(403, "agents may use only the paths of agents, and other clients may not")
            limit = self.large_bodies.get(scope["path"])
            if limit is not None:  # its route reads it as it arrives
                await self.app(scope, self._counted(scope, receive, limit, LARGE_BODY_TIMEOUT_S), send)
                return
            body = await self._body(scope, receive)
        except Refused as refused:
            if refused.unread:
                await _drain(receive)
            await answer(send, refused.status, refused.sentence)
            return
        await self.app(scope, _replay(body, receive), send)

    def _check_host(self, scope: MutableMapping[str, Any]) -> None:
        """Refuse foreign host names. A page in a browser can reach us under its own name (DNS rebinding), but it cannot
        choose the header."""
        given = _values(scope, b"host")
        found = _HOST.fullmatch(given[0].decode("latin-1").lower()) if len(given) == 1 else None
        if found is None or (found["address"] or found["name"]) not in self.hosts:
            raise Refused(400, "the Host header does not name this service; use 127.0.0.1, or serve with --host-name")

    def _check_path(self, scope: MutableMapping[str, Any]) -> None:
        if _TRICKS.search(scope.get("raw_path", scope["path"].encode())):
            raise Refused(400, "the path has characters that no path of this service has; see /openapi.json")

    def _authenticate(self, scope: MutableMapping[str, Any]) -> Principal:
        given = _values(scope, b"authorization")
        if not given and (cookie := sessions.find_cookie(_values(scope, b"cookie"))):
            return self._authenticate_browser(scope, cookie)
        scheme, _, token = given[0].decode("latin-1").partition(" ") if len(given) == 1 else ("", "", "")
        principal = self.who(token.strip()) if scheme.lower() == "bearer" and token.isascii() else None
        if principal is None:
            problem = "this token is not known here" if token else "a token is needed"
            raise Refused(401, f"{problem}: send it as Authorization: Bearer, or set CARPOOL_TOKEN")
        return principal

    def _authenticate_browser(self, scope: MutableMapping[str, Any], cookie: str) -> Principal:
        """Return the user of a session. Only a page of this service has the key and can send the header."""
        origin, site, host, key = (
            b"".join(_values(scope, name)).decode("latin-1")
            for name in (b"origin", b"sec-fetch-site", b"host", sessions.KEY_HEADER)
        )
        if not sessions.comes_from_here(origin, site, host):
            raise Refused(403, "a page of another site may not use this session")
        token = sessions.join(cookie, key)
        principal = self.who(token) if token else None
        if principal is None:
            raise Refused(401, "this session is over; sign in again")
        return principal

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        """Return the whole body."""
        most = MAX_OPEN_BODY if scope["path"] in self.open_paths else self.max_body
        counted, parts, more = self._counted(scope, receive, most), [], True
        while more:
            message = await counted()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        check_body(body)
        return body

    def _counted(
        self, scope: MutableMapping[str, Any], receive: Receive, limit: int, whole_s: float = BODY_TIMEOUT_S
    ) -> Receive:
        """Return a `receive` that refuses a body that is too long or too late. It counts bytes, because a chunked body
        announces no length."""
        announced = _values(scope, b"content-length")
        if announced and (not announced[0].isdigit() or int(announced[0][:20]) > limit):
            raise Refused(413, f"the body is larger than {limit} bytes", unread=True)
        size, until = 0, time.monotonic() + whole_s

        async def counted() -> Message:
            nonlocal size
            try:
                left = max(0.0, until - time.monotonic())
                message = await asyncio.wait_for(receive(), min(BODY_TIMEOUT_S, left))
            except TimeoutError:
                raise Refused(408, "the body did not come in time") from None
            if message["type"] != "http.request":
                raise Refused(400, "the body ended early")
            size += len(message.get("body", b""))
            if size > limit:
                raise Refused(413, f"the body is larger than {limit} bytes", message.get("more_body", False))
            return message

        return counted


def route_of(scope: MutableMapping[str, Any]) -> str:
    """Return the path of a request with names for its parts, so that there are few of them."""
    if "endpoint" not in scope:
        return REFUSED
    names = {str(value): name for name, value in scope.get("path_params", {}).items()}
    return "/".join(f"{{{names[part]}}}" if part in names else part for part in scope["path"].split("/"))


def depth(body: bytes) -> int:
    """Return how deep a JSON text is nested without parsing it: a parser would recurse."""
    brackets = _TEXT.sub(b"", body).translate(None, _NO_BRACKET)
    return max(accumulate(map(_STEP.__getitem__, brackets), initial=0))


def check_body(body: bytes) -> None:
    """Refuse a body that readers may understand differently, or that a parser could not read."""
    _check_encoding(body)
    if depth(body) > MAX_DEPTH:
        raise Refused(400, TOO_DEEP)
    _check_unique(body)


def _check_encoding(body: bytes) -> None:
    """Refuse what is not UTF-8. Python's parser also reads UTF-16 and UTF-32, whose brackets `depth` does not see; it
    recognises them by a NUL, or by a mark at the beginning that UTF-8 does not have."""
    try:
        body.decode()
    except UnicodeDecodeError:
        raise Refused(400, "the body is not UTF-8; encode it as UTF-8") from None
    if b"\0" in body:
        raise Refused(400, "the body has a NUL, which JSON in UTF-8 does not have; encode it as UTF-8")


def _check_unique(body: bytes) -> None:
    """Refuse JSON with a name twice in one object: readers differ in which one counts. Other faults are the route's."""
    try:
        parse(body or b"null")
    except RecursionError:
        raise Refused(400, TOO_DEEP) from None
    except ValueError:
        return


def parse(body: bytes) -> Any:
    """Return what a JSON text says. Raise `Refused` for a name that is twice in one object, `ValueError` for no JSON,
    and `RecursionError` for JSON that is nested too deep."""
    return json.loads(body, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise Refused(400, f"the body has {ascii(twice)[:60]} twice in one object; remove one")
    return found


def _check_query(query: bytes) -> None:
    names = [part.partition(b"=")[0] for part in query.split(b"&") if part]
    if len(set(names)) < len(names):
        raise Refused(400, "the query has a name twice; remove one")


async def _drain(receive: Receive) -> None:
    """Read and drop the rest of a body, within limits: a client that cannot finish sending does not see the answer."""
    left = MAX_DRAINED
    try:
        async with asyncio.timeout(DRAIN_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def answer(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _values(scope: MutableMapping[str, Any], name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once and then what follows (the client's disconnect)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
