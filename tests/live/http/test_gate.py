"""The gate passes good requests on and refuses wrong hosts, paths, tokens and bodies."""

import asyncio
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.live.http import gate
from carpool.live.http.auth import Keyring, Principal, digest, new_token
from carpool.live.http.gate import Gate, depth

TOKEN = new_token()
KEYRING = Keyring(digest(TOKEN))


async def ask(path="/v1/jobs", *, headers=None, body=(b"",), large=None, host="127.0.0.1:8471", token=TOKEN, query=b""):
    """Send a request through a gate; return the status, the error and what reached the application."""
    reached, sent = [], []

    async def application(scope, receive, send):
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message["body"], message.get("more_body", False)
        reached.append((scope.get("state", {}).get("principal"), data))
        await gate.answer(send, 200, "fine")

    given = [(b"host", host.encode())] if host is not None else []
    given += [(b"authorization", f"Bearer {token}".encode())] if token else []
    given += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers or ()]
    pieces = list(body)

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": given, "query_string": query}
    await Gate(application, KEYRING.who, max_body=1000, large_bodies=large)(scope, receive, send)
    answer = json.loads(sent[1]["body"])
    return sent[0]["status"], answer["error"], reached


async def test_a_good_request_comes_through_with_its_sender():
    status, _, reached = await ask(body=(b'{"a":', b"1}"))
    assert (status, reached) == (200, [(Principal("admin", True), b'{"a":1}')])


async def test_only_the_health_check_needs_no_token():
    assert (await ask("/health", token=None))[0] == 200
    for path in ("/v1/jobs", "/openapi.json", "/", "/health/", "/nothing"):
        status, sentence, reached = await ask(path, token=None)
        assert (status, reached) == (401, [])
        assert "token is needed" in sentence


WRONG = {
    "wrong": "wrong",
    "short": TOKEN[:-1],
    "long": TOKEN + "x",
    "swapped case": TOKEN.swapcase(),
    "not ascii": "é" * 43,
    "blank": " ",
}


@pytest.mark.parametrize("token", WRONG.values(), ids=WRONG)  # fixed ids: a token differs from run to run
async def test_wrong_tokens_are_refused(token):
    status, sentence, reached = await ask(token=None, headers=[("authorization", f"Bearer {token}")])
    assert (status, reached) == (401, [])
    assert token.strip() not in sentence or not token.strip()


async def test_a_token_sent_twice_or_under_another_scheme_is_refused():
    assert (await ask(headers=[("authorization", f"Bearer {TOKEN}")]))[0] == 401
    assert (await ask(token=None, headers=[("authorization", f"Basic {TOKEN}")]))[0] == 401
    assert (await ask(token=None, query=f"token={TOKEN}".encode()))[0] == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8471"])
async def test_loopback_hosts_are_accepted(host):
    assert (await ask(host=host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        None,
        "[",
        "10.0.0.1",
        "127.0.0.1@x.y",
        "evil@127.0.0.1",
        "127.0.0.1?x",
    ],
)
async def test_foreign_hosts_are_refused(host):
    status, sentence, reached = await ask(host=host)
    assert (status, reached) == (400, [])
    assert "Host" in sentence


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../x",
        "/v1/%2e%2e/x",
        "/v1/a%2Fb",
        "//v1",
        "/v1/a%00",
        "/v1/a%5cb",
        "/v1/a\\b",
        "/v1/.",
        "/v1/%252e",
        "/v1/a b",
    ],
)
async def test_paths_with_tricks_are_refused(path):
    status, _, reached = await ask(path)
    assert (status, reached) == (400, [])


async def test_bodies_are_counted_with_and_without_an_announced_length():
    assert (await ask(body=(b"1" * 1000,)))[0] == 200
    assert (await ask(body=(b"1" * 500, b"1" * 501)))[0] == 413  # chunked: no length was announced
    status, _, reached = await ask(headers=[("content-length", "1001")], body=(b"",))
    assert (status, reached) == (413, [])
    assert (await ask(headers=[("content-length", "-1")]))[0] == 413
    assert (await ask(headers=[("content-length", "9" * 5000)]))[0] == 413


async def test_a_larger_body_is_allowed_where_it_belongs_and_counted_too():
    assert (await ask("/up", large={"/up": 3000}, body=(b"1" * 1500, b"1" * 1500)))[0] == 200
    assert (await ask("/up", large={"/up": 3000}, body=(b"1" * 1500, b"1" * 1501)))[0] == 413


async def test_a_late_body_is_refused(monkeypatch):
    monkeypatch.setattr(gate, "BODY_TIMEOUT_S", 0.01)

    async def never():
        await asyncio.sleep(10)

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "path": "/", "raw_path": b"/", "headers": headers}
    await Gate(None, KEYRING.who)(scope, never, send)
    assert sent[0]["status"] == 408


async def test_deeply_nested_bodies_are_refused():
    assert (await ask(body=(b"[" * 33 + b"]" * 33,)))[0] == 400
    assert (await ask(body=(b"[" * 32 + b"]" * 32,)))[0] == 200
    assert (await ask(body=(b'["' + b"[" * 100 + b'"]',)))[0] == 200  # brackets inside a string do not count


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("levels", [1, 40])
async def test_only_utf_8_is_read(encoding, levels):
    text = '{"a":"\u2200","b":' + "[" * levels + "]" * levels + ',"c":1}'
    assert (await ask(body=(text.encode(encoding),)))[0] == 400
    assert (await ask(body=(b'"\xff"',)))[0] == 400
    assert (await ask(body=('{"a":"\u2200\\u0000"}'.encode("utf-8-sig"),)))[0] == 200


HARD = {
    "open": b"[" * 2**20,
    "flat": b"[]" * 2**19,
    "texts": b'""' * 2**19,
    "a text without its end": b'"' + b'\\"' * 2**19,
    "escapes": b'"\\' * 2**19,
}


@pytest.mark.parametrize("body", HARD.values(), ids=HARD)
def test_the_depth_of_a_large_body_is_found_in_a_moment(body):
    began = time.process_time()
    assert depth(body) in (0, 1, 2**20)
    assert time.process_time() - began < 1.0


nested = st.recursive(
    st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def true_depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(true_depth, inner), default=0)


@settings(max_examples=50)
@given(nested, st.booleans())
def test_the_depth_is_that_of_the_parsed_value(value, ascii_only):
    assert depth(json.dumps(value, ensure_ascii=ascii_only).encode()) == true_depth(value)


async def test_websockets_are_closed():
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    await Gate(None, KEYRING.who)({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
