"""The road from an agent to the service: HTTP requests with a token, bounded in time, to one of several addresses.

Standard library only. Each call takes a connection that is not in use, or makes one. Called from threads.
"""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from carpool.errors import InputError
from carpool.live.executors.wire import HOLD_S
from carpool.live.http.tls import client_context

TIMEOUT_S = 10.0
"""Seconds without an answer after which a request is given up."""
SYNC, LOGS, SNAPSHOT = "/v1/agents/sync", "/v1/agents/logs", "/v1/agents/snapshot"
DOORS, SAID = "/v1/agents/doors", "/v1/agents/doors/said"
CHECKPOINT = "/v1/agents/checkpoint"
MAX_ANSWER = 512 << 20
AGAIN_S = 0.5
"""Seconds before a request is repeated that must be answered."""
Answer = TypeVar("Answer")


class NoAnswer(InputError):
    """No service answered in time."""


class Turned(InputError):
    """A service answered, and refused; `status` is the HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Road:
    """Sends requests to the service that answers."""

    def __init__(self, urls: Sequence[str], token: str, ca: str | None = None) -> None:
        if not urls:
            raise InputError("--join: give the address of a service, such as http://127.0.0.1:8471")
        if not token or not token.isascii() or not token.isprintable():
            raise InputError("the join token is missing or damaged; `carpool nodes add` makes one")
        self._urls = [_checked(url) for url in urls]
        self._token = token
        self._tls = client_context(ca=ca) if any(url.startswith("https:") for url in self._urls) else None
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        self.timeout_s = TIMEOUT_S

    @property
    def url(self) -> str:
        return self._urls[0]

    def sync(self, state: Any) -> Any:
        """Exchange what is here for what shall be here. Blocks."""
        return self._json("POST", SYNC, json.dumps(state).encode())

    def send_log(self, data: bytes, **place: str | int) -> int:
        """Append to the service's copy of a log; return the size of that. Blocks."""
        return self._size(f"{LOGS}?{urlencode(place)}", data)

    def _size(self, target: str, data: bytes) -> int:
        """Send bytes to be appended there; return how many are there."""
        answer = self._json("POST", target, data, "application/octet-stream")
        size = answer.get("size") if isinstance(answer, dict) else None
        if type(size) is not int or size < 0:
            raise NoAnswer("the service did not say how many bytes it has")
        return size

    def doors(self, here: Any) -> Any:
        """Exchange the doors that are open for those that are wanted. Blocks."""
        return self._json("POST", DOORS, json.dumps(here).encode())

    def bring_from_door(self, data: bytes, place: Mapping[str, str | int]) -> int:
        """Bring what a door said; return how many bytes of it the service has. Blocks."""
        return self._size(f"{SAID}?{urlencode(place)}", data)

    def snapshot(self, job: str) -> bytes:
        """Return the code snapshot of a job, packed. Blocks."""
        return self._send("GET", f"{SNAPSHOT}?{urlencode({'job': job})}", None, "")

    def send_checkpoint(self, data: bytes, **place: str | int) -> tuple[int, bool]:
        """Send a piece of a job's packed checkpoints; return how much the service has, and whether that is all."""
        answer = self._json("POST", f"{CHECKPOINT}?{urlencode(place)}", data, "application/octet-stream")
        size, done = (answer.get("size"), answer.get("done")) if isinstance(answer, dict) else (None, None)
        if type(size) is not int or size < 0 or type(done) is not bool:
            raise NoAnswer("the service did not say how much of the checkpoint it has")
        return size, done

    def leave_checkpoint(self, job: str, attempt: int, why: str) -> None:
        """Tell the service that the checkpoints of a job stay here. Blocks."""
        body = json.dumps({"why": why[:500]}).encode()
        self._json("POST", f"{CHECKPOINT}/left?{urlencode({'job': job, 'attempt': attempt})}", body)

    def offered_checkpoint(self, job: str) -> tuple[int, str] | None:
        """Return the size and the hash of a job's packed checkpoints; None: they are being packed. Blocks."""
        answer = self._json("GET", f"{CHECKPOINT}?{urlencode({'job': job})}", None)
        size, sha256 = (answer.get("size"), answer.get("sha256")) if isinstance(answer, dict) else (None, None)
        return (size, sha256) if type(size) is int and type(sha256) is str else None

    def read_checkpoint(self, job: str, offset: int) -> bytes:
        """Return a piece of a job's packed checkpoints. Blocks."""
        return self._send("GET", f"{CHECKPOINT}/piece?{urlencode({'job': job, 'offset': offset})}", None, "")

    def took_checkpoint(self, job: str) -> None:
        """Tell the service that a job's checkpoints are here. Blocks."""
        self._json("DELETE", f"{CHECKPOINT}?{urlencode({'job': job})}", None)

    def _json(self, method: str, target: str, body: bytes | None, kind: str = "application/json") -> Any:
        data = self._send(method, target, body, kind)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise NoAnswer(f"{self.url}: what answers there is no Carpool service") from None

    def _send(self, method: str, target: str, body: bytes | None, kind: str) -> bytes:
        """Send a request to the first service that answers; the one that does is asked first from then on."""
        problem: InputError = NoAnswer("no service answers")
        for url in list(self._urls):
            try:
                found = self._ask(url, method, target, body, kind)
            except NoAnswer as error:
                problem = error
                continue
            except Turned as error:
                if error.status != 503:  # 503: it stands by, or cannot write
                    raise
                problem = error
                continue
            with self._lock:
                self._urls = [url, *(other for other in self._urls if other != url)]
            return found
        raise problem

    def _ask(self, url: str, method: str, target: str, body: bytes | None, kind: str) -> bytes:
        headers = {"Authorization": f"Bearer {self._token}"}
        if kind:
            headers["Content-Type"] = kind
        for fresh in (False, True):  # a kept connection may just have been closed
            connection = self._take(url, fresh=fresh)
            try:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
                data = response.read(MAX_ANSWER)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if isinstance(error, ssl.SSLCertVerificationError):
                    why = f"its certificate is not trusted ({error.verify_message})"
                    raise Turned(403, f"{url}: {why}; give --ca with the right one") from None
                if fresh or isinstance(error, TimeoutError | ssl.SSLError):
                    raise NoAnswer(f"{url}: {_why(error)}") from None
                continue
            if response.will_close:
                connection.close()
            else:
                with self._lock:
                    self._idle.append((url, connection))
            if response.status >= 400:
                raise Turned(response.status, _refusal(response.status, data, url))
            return data
        raise AssertionError("unreachable")

    def _take(self, url: str, *, fresh: bool) -> http.client.HTTPConnection:
        timeout = HOLD_S + self.timeout_s
        with self._lock:
            kept = [one for one in self._idle if one[0] == url]
            if kept and not fresh:
                self._idle.remove(kept[-1])
                connection = kept[-1][1]
                if connection.sock is not None:
                    connection.sock.settimeout(timeout)  # the lease may have become known since it was made
                return connection
        parts = urlsplit(url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)

    def close(self) -> None:
        with self._lock:
            for _, connection in self._idle:
                connection.close()
            self._idle.clear()


def until_answered(ask: Callable[[], Answer], wanted: Callable[[], bool]) -> Answer | None:
    """Ask until the service answers; None: it is not wanted any more. Raise what the service refuses with. Blocks."""
    while True:
        try:
            return ask()
        except (NoAnswer, Turned) as error:
            if isinstance(error, Turned) and error.status != 503:
                raise
            if not wanted():
                return None
            time.sleep(AGAIN_S)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/")
        usable = usable and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"--join {ascii(url)[:100]}: write an address such as http://127.0.0.1:8471")
    return url.rstrip("/")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _refusal(status: int, data: bytes, url: str) -> str:
    if status == 401:
        return f"{url}: the join token is not valid there, or was revoked; `carpool nodes add` makes a new one"
    return _sentence(data) or f"{url} answered with status {status}"


def _sentence(data: bytes) -> str:
    try:
        found: Mapping[str, Any] = json.loads(data)
        return str(found["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
