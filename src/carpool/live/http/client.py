"""The Python client of the HTTP API: it finds the service, sends requests and turns refusals into `InputError`.

It uses the HTTP client of the standard library: a command starts in half the time, and a proxy named in the
environment never sees a token. The commands use it, and scripts can. Where several services share a journal, the leader
has written its address into the home, or `CARPOOL_URL` names all of them and only the leader answers.
"""

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from carpool.errors import InputError
from carpool.live.home import Home
from carpool.live.http import starting
from carpool.live.http.auth import read_token
from carpool.live.http.event_stream import StreamMessage, messages

ENV_URL = "CARPOOL_URL"
ENV_TOKEN = "CARPOOL_TOKEN"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts to which the token of the home directory is sent without being asked for."""
TIMEOUT_S = 90.0
"""Seconds to wait for an answer; longer than the service lets a request wait."""
AWAY_S = 600.0
"""Seconds to wait for a service that went away: jobs outlive it, and so does waiting for them."""
AGAIN_S = 0.5
Params = Mapping[str, str | int | float | bool | None]
Answer = TypeVar("Answer")


class Refusal(InputError):
    """The service refused a request; `status` is the HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Unreachable(InputError):
    """No service answers."""


class Client:
    def __init__(self, url: str, token: str, place: Home | None = None) -> None:
        """`url`: address of the service, or several addresses with commas between them, one of which leads.

        `place` is the home where the address was found: a service that starts again may write another one there.
        """
        self._place = place
        self._others = [one.strip() for one in url.split(",") if one.strip()]
        self._answered = False
        self._aborted = False
        self._headers = {"Authorization": f"Bearer {token}"}
        if not token.isascii() or not token.isprintable() or not token:
            raise InputError(f"{ENV_TOKEN}: does not hold a token; ask the administrator for one")
        for one in reversed(self._others or [url]):
            self._go_to(one)

    def _go_to(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise InputError(f"{ENV_URL} {url!r}: write an address such as http://127.0.0.1:8471")
        self.url = url.rstrip("/")
        if parts.scheme == "http":
            self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)
            return
        from carpool.live.http.tls import client_context

        trusted = client_context(self._place)
        self._connection = http.client.HTTPSConnection(parts.hostname, port, timeout=TIMEOUT_S, context=trusted)

    @classmethod
    def find(
        cls, home: str | Path | None = None, *, wait: bool = True, say: Callable[[str], None] = lambda text: None
    ) -> "Client":
        """Return a client by `CARPOOL_URL` and `CARPOOL_TOKEN`; the home directory has what is not set.

        With `wait`, a service of the home that is starting is waited for; `say` is told so if it takes long.
        """
        place = Home(home)
        url, token = None if home else os.environ.get(ENV_URL), os.environ.get(ENV_TOKEN)
        far = any(urlsplit(one.strip()).hostname not in LOOPBACK for one in (url or "").split(","))
        if url and not token and far:
            raise InputError(f"{ENV_TOKEN}: is not set; {url} needs the token that its administrator gave you")
        from_home = not url
        if not url:
            if wait:
                starting.wait(place, say)
            address = place.read_address()
            if address is None:
                raise Unreachable(
                    f"no service runs for home {place.path}; start one with `carpool serve`, "
                    f"or set {ENV_URL} and {ENV_TOKEN}"
                )
            url = str(address["url"])
        return cls(url, token or read_token(place.admin_token), place if from_home else None)

    # ---- requests --------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: str | int | float | bool | None) -> Any:
        return self._json("GET", path, params)

    def post(self, path: str, data: Any = None) -> Any:
        return self._json("POST", path, {}, data)

    def put(self, path: str, data: Any) -> Any:
        return self._json("PUT", path, {}, data)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path, {})

    def upload(self, path: str, file: IO[bytes], size: int) -> Any:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        return _read_json(*self._send("POST", path, {}, file, headers))

    def raw(self, path: str, **params: str | int | float | bool | None) -> tuple[bytes, Mapping[str, str]]:
        response, body = self._send("GET", path, params, None, {})
        if response.status != 200:
            _read_json(response, body)
        return body, {name.lower(): value for name, value in response.getheaders()}

    def _json(self, method: str, path: str, params: Params, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        return _read_json(*self._send(method, path, params, body, {"Content-Type": "application/json"} if body else {}))

    def _send(
        self, method: str, path: str, params: Params, body: bytes | IO[bytes] | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        def whole(response: http.client.HTTPResponse) -> tuple[http.client.HTTPResponse, bytes]:
            return response, response.read()

        return self._exchange(method, _target(path, params), body, headers, whole)

    def _exchange(
        self,
        method: str,
        target: str,
        body: bytes | IO[bytes] | None,
        headers: Mapping[str, str],
        take: Callable[[http.client.HTTPResponse], Answer],
    ) -> Answer:
        """Send a request and return what `take` reads of the answer."""
        self._find_listener()
        for attempt in (1, 2):
            try:
                self._connection.request(method, target, body, {**self._headers, **headers})
                taken = take(self._connection.getresponse())
                self._answered = True
                return taken
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self._connection.close()
                if (
                    attempt == 2 or method != "GET"
                ):  # a kept connection may just have been closed; repeating a GET is safe
                    raise self._unreachable(error) from None
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                raise self._unreachable(error) from None
        raise AssertionError("unreachable")

    def _find_listener(self) -> None:
        """Connect to the first of several services that listens: one that stands by does not. Nothing is sent."""
        if self._connection.sock is not None or len(self._others) < 2:
            return
        for one in list(self._others):
            self._go_to(one)
            try:
                self._connection.connect()
                return
            except OSError:
                self._connection.close()
                self._others.append(self._others.pop(0))  # the next command asks the others first

    def _unreachable(self, error: Exception) -> Unreachable:
        if isinstance(error, ConnectionRefusedError):
            return Unreachable(f"no service answers at {self.url}; start one with `carpool serve`")
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unreachable(f"{self.url}: {why}; is `carpool serve` running there?")

    def close(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        """End an answer that another thread reads, and send nothing any more."""
        self._aborted = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "_connection"):  # a wrong address made none
            self.close()

    # ---- what several commands need --------------------------------------------------------------------------------

    def jobs(self, all: bool = False) -> list[dict[str, Any]]:
        """Return the rows of all pages, in order of submission."""
        pages: list[list[dict[str, Any]]] = []
        before = None
        while True:
            page = self.get("/v1/jobs", all=all, limit=10_000, before=before)
            pages.append(page["jobs"])
            before = page["next"]
            if before is None:
                return [row for rows in reversed(pages) for row in rows]

    def patiently(self, ask: Callable[[], Answer], away: Callable[[], None] = lambda: None) -> Answer:
        """Return the answer to a request, also if the service is restarted meanwhile. A service that has never answered
        is not waited for. `away` is called when the service is found to be gone."""
        until = None
        while True:
            try:
                return ask()
            except (Unreachable, Refusal) as error:
                if isinstance(error, Refusal) and error.status != 503:  # 503: it does not lead now
                    raise
                if until is None:
                    until = time.monotonic() + AWAY_S
                    if self._answered:
                        away()
                if not self._answered or self._aborted or time.monotonic() > until:
                    raise
            time.sleep(AGAIN_S)
            address = self._place.read_address() if self._place is not None else None
            if address is not None:
                self._go_to(str(address["url"]))

    def wait(self, job: str, away: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the end of a job and return its row."""
        while True:
            row: dict[str, Any] = self.patiently(lambda: self.get(f"{job_path(job)}/wait", timeout_s=30), away)
            if row["status"] in ("finished", "failed", "cancelled"):
                return row

    def events(self, after: int | None = None, job: str | None = None) -> Iterator[StreamMessage]:
        """Yield what happens, from now on or after an event, also if the service is started again meanwhile.

        The client serves nothing else while the iterator is open; closing it closes the connection.
        """
        try:
            while not self._aborted:
                target = partial(self.stream, "GET", _target("/v1/events", {"after": after, "job": job}))
                for message in self.patiently(target):
                    after = message.number
                    yield message
        except Unreachable:
            if not self._aborted:
                raise
        finally:
            self.close()

    def terminal(self, job: str, attempt: int | None, offset: int, tail: int | None) -> Iterator[StreamMessage]:
        """Return what the terminal of a job prints, up to the end of the connection."""
        given = {"attempt": attempt, "offset": offset, "tail": tail}
        return self.stream("GET", _target(f"{job_path(job)}/terminal", given))

    def run_beside(self, job: str, rank: int, request: Mapping[str, Any]) -> Iterator[StreamMessage]:
        """Run a command beside a worker and return its output, up to the end of the connection, which ends it."""
        return self.stream("POST", _target(f"{job_path(job)}/exec", {"rank": rank}), request)

    def stream(self, method: str, target: str, data: Any = None) -> Iterator[StreamMessage]:
        """Return the messages of a new stream, up to the end of its connection."""

        def opened(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
            if response.status != 200:
                _read_json(response, response.read())
            return response

        body = None if data is None else json.dumps(data).encode()
        response = self._exchange(method, target, body, {"Content-Type": "application/json"} if body else {}, opened)

        def until_the_end() -> Iterator[StreamMessage]:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                yield from messages(response)
            self._connection.close()

        return until_the_end()

    def log(
        self, job: str, *, offset: int = 0, attempt: int | None = None, **which: str | int | None
    ) -> Iterator[tuple[bytes, int, bool]]:
        """Yield pieces of a log from an offset on: bytes, the offset that follows, and whether the log has ended.
        Without an `attempt` it begins with the latest attempt and continues with those that follow."""
        path, now = f"{job_path(job)}/logs", attempt
        while True:
            query = {**which, "offset": offset, "attempt": now}
            data, headers = self.patiently(lambda query=query: self.raw(path, **query))  # type: ignore[misc]
            which.pop("tail", None)  # it says only where to begin
            offset, now = int(headers.get("carpool-next", offset)), int(headers.get("carpool-attempt", now or 1))
            ended = headers.get("carpool-ended") == "1"
            if ended and attempt is None and now < int(headers.get("carpool-last-attempt", now)):
                offset, now, ended = 0, now + 1, False
            yield data, offset, ended


def _target(path: str, params: Params) -> str:
    given = {key: _word(value) for key, value in params.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def segment(text: str) -> str:
    """Return a user's name as one part of a path, whatever it contains."""
    return quote(text, safe="") or "-"


def job_id(job: str) -> str:
    if not (job.isascii() and job.isdigit() and len(job) <= 18):
        raise InputError(f"{ascii(job)[:40]} is not the id of a job; `carpool jobs --all` lists them")
    return job


def job_path(job: str) -> str:
    """Return the path of a job. Text that cannot be an id never becomes a path."""
    return f"/v1/jobs/{job_id(job)}"


def _word(value: str | int | float | bool | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_json(response: http.client.HTTPResponse, body: bytes) -> Any:
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if response.status >= 400 or data is None:
        sentence = data.get("error") if isinstance(data, dict) else None
        raise Refusal(response.status, str(sentence or f"the service answered with status {response.status}"))
    return data
