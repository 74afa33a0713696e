"""Attacks on browsers' sessions, on the stream of events and on what-if."""

import http.client
import json
import time

from tests.attack.case import case
from tests.attack.world import PATIENCE_S, Answer, World, hold


def _send(world: World, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[Answer, str]:
    """Send a request without a token; return the answer and the cookie that it sets."""
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return Answer(response.status, response.read()), str(response.headers["Set-Cookie"]).partition(";")[0]
    finally:
        connection.close()


def _sign_in(world: World, user: str) -> tuple[str, str]:
    """Return the cookie and the key of a new session."""
    answer, cookie = _send(world, "POST", "/session", json.dumps({"token": world.tokens[user]}).encode(), {})
    return cookie, answer.data["key"]


@case("a stolen cookie, a stolen key, mixed halves, foreign origins, two cookies", "none of them is a user", short=True)
def halves_of_sessions(world: World) -> None:
    (cookie, key), (other, _) = _sign_in(world, "ann"), _sign_in(world, "ann")
    both, _ = _send(world, "GET", "/v1/me", None, {"Cookie": cookie, "Carpool-Key": key})
    hold(both.status == 200, "both halves are a session")
    wrong = [
        {"Cookie": cookie}, {"Carpool-Key": key}, {"Cookie": cookie, "Carpool-Key": key[:-4]},
        {"Cookie": other, "Carpool-Key": key}, {"Cookie": f"{cookie}; {other}", "Carpool-Key": key},
        {"Cookie": "carpool_session=" + "A" * 8000, "Carpool-Key": key}, {"Cookie": cookie, "Carpool-Key": "é"},
        {"Cookie": cookie, "Carpool-Key": key, "Origin": "http://evil.example"},
        {"Cookie": cookie, "Carpool-Key": key, "Origin": "null"},
        {"Cookie": cookie, "Carpool-Key": key, "Sec-Fetch-Site": "same-site"},
    ]  # fmt: skip
    for headers in wrong:
        answer, _ = _send(world, "POST", "/v1/jobs/cancel", b'{"jobs":["1"]}', headers)
        hold(answer.status in (401, 403), f"{sorted(headers)} is refused, not {answer.status}")


@case("bodies that are no token for /session", "each is refused in one line", short=True)
def signing_in(world: World) -> None:
    bodies = [b"", b"{}", b"null", b"[]", b'{"token":1}', b'{"token":"\\u0000"}', b"x" * 100_000, b'{"token":"a']
    for body in bodies:
        answer, _ = _send(world, "POST", "/session", body, {})
        hold(answer.refused, f"{body[:40]!r} is refused in one line, not {answer.status}")


@case("a hundred streams of events of one user that are never read", "other users are answered at once")
def idle_streams(world: World) -> None:
    streams = []
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=PATIENCE_S)
        connection.request("GET", "/v1/events?after=0", headers={"Authorization": f"Bearer {world.tokens['bob']}"})
        streams.append(connection)
    began = time.monotonic()
    hold(world.ask("GET", "/v1/jobs", user="ann").status == 200, "another user is answered")
    hold(time.monotonic() - began < 5.0, "within seconds")
    for connection in streams:
        connection.close()


@case("policies by the names of files for what-if", "no code of a user runs in the service", short=True)
def what_if_with_files(world: World) -> None:
    for policy in ("/tmp/x.py:X", "x.py:X", "../x.py:X", "fifo:a=1", "", "x" * 500):
        answer = world.ask("POST", "/v1/what-if", json.dumps({"policy": policy}).encode(), user="ann")
        hold(answer.refused, f"{policy[:20]!r} is refused in one line, not {answer.status}")
