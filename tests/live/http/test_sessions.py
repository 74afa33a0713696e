"""Sessions of browsers: halves of a token, of which none tells anything without the other."""

import http.client
import json
from urllib.parse import urlsplit

import pytest

from carpool.live.http import sessions

TOKEN = "abcdefghijklmnopqrstuvwxyz-ABCDEFGHIJKLMNOP"


def test_two_halves_give_the_token_and_one_gives_nothing():
    (cookie, key), (other_cookie, other_key) = sessions.split(TOKEN), sessions.split(TOKEN)
    assert sessions.join(cookie, key) == sessions.join(other_cookie, other_key) == TOKEN
    assert len({cookie, key, other_cookie, other_key}) == 4
    assert TOKEN not in cookie + key
    assert sessions.join(cookie, other_key) != TOKEN


@pytest.mark.parametrize("half", ["", "x", "!!!!", "AAAA", "ü" * 58, "A" * 10_000])
def test_a_half_that_is_none_gives_no_token(half):
    cookie, key = sessions.split(TOKEN)
    assert sessions.join(half, key) != TOKEN
    assert sessions.join(cookie, half) != TOKEN


def test_the_cookie_is_for_this_site_and_no_script():
    assert sessions.set_cookie("x", False).endswith("HttpOnly; SameSite=Strict")
    assert sessions.set_cookie("x", True).endswith("Secure")
    assert "Max-Age=0" in sessions.set_cookie("", False)
    assert sessions.find_cookie([b"a=b; carpool_session=half; c"]) == "half"
    assert sessions.find_cookie([b"carpool_session=one; carpool_session=two"]) == ""


def ask(service, method, path, body=None, **headers):
    parts = urlsplit(service.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    given = {"Content-Type": "application/json", **headers}
    connection.request(method, path, None if body is None else json.dumps(body), given)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, response.headers, text


@pytest.fixture(scope="module")
def session(service):
    status, headers, text = ask(service, "POST", "/session", {"token": service.token})
    assert status == 200
    return {"Cookie": headers["Set-Cookie"].partition(";")[0], "Carpool-Key": json.loads(text)["key"]}


def test_a_session_is_the_user_and_needs_both_halves_and_the_right_origin(service, session):
    host = urlsplit(service.url).netloc
    status, _, text = ask(service, "GET", "/v1/me", **session)
    assert (status, json.loads(text)["name"]) == (200, "admin")
    assert ask(service, "GET", "/v1/me", **session, Origin=f"http://{host}")[0] == 200
    assert ask(service, "GET", "/v1/me", Cookie=session["Cookie"])[0] == 401
    assert ask(service, "GET", "/v1/me", **{"Carpool-Key": session["Carpool-Key"]})[0] == 401
    for foreign in ({"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"}):
        assert ask(service, "GET", "/v1/me", **session, **foreign)[0] == 403
    for site in ("cross-site", "same-site"):
        assert ask(service, "POST", "/v1/jobs", {}, **session, **{"Sec-Fetch-Site": site})[0] == 403


def test_files_of_the_dashboard_need_no_token_and_forbid_what_they_do_not_need(service):
    status, headers, text = ask(service, "GET", "/")
    assert status == 200
    assert b"<script>" not in text
    assert b"style=" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    for path in ("/ui/app.js", "/ui/style.css", "/ui/icon.svg"):
        status, headers, _ = ask(service, "GET", path)
        assert status == 200
        assert ask(service, "GET", path, **{"If-None-Match": headers["ETag"]})[0] == 304
    assert ask(service, "POST", "/ui/app.js")[0] == 405
    assert ask(service, "GET", "/", Host="evil.example")[0] == 400


def test_signing_in_with_a_wrong_token_is_refused(service):
    assert ask(service, "POST", "/session", {"token": "x" * 43})[0] == 401
    assert ask(service, "POST", "/session", {"token": ""})[0] == 422
    assert ask(service, "POST", "/session", {"token": "x" * 5000})[0] == 413
    assert ask(service, "GET", "/session")[0] == 405
    status, headers, _ = ask(service, "DELETE", "/session")
    assert status == 200
    assert "Max-Age=0" in headers["Set-Cookie"]


def test_a_session_ends_with_its_token(service):
    token = service.client().post("/v1/users", {"name": "zoe"})["token"]
    _, headers, text = ask(service, "POST", "/session", {"token": token})
    given = {"Cookie": headers["Set-Cookie"].partition(";")[0], "Carpool-Key": json.loads(text)["key"]}
    assert ask(service, "GET", "/v1/me", **given)[0] == 200
    service.client().delete("/v1/users/zoe")
    assert ask(service, "GET", "/v1/me", **given)[0] == 401
