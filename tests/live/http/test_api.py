"""The HTTP API of a real service: answers, rights, hostile requests, and requests that schemathesis generates."""

import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from carpool.live.http.client import Refusal

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def ask(service, method, path, body=None, token=None, **headers):
    """Send a request without the client's checks; return the status and the answer."""
    parts = urlsplit(service.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    given = {"Authorization": f"Bearer {token or service.token}", **headers}
    data = json.dumps(body) if isinstance(body, dict | list) else body
    connection.request(method, path, data, {name: value for name, value in given.items() if value is not None})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if response.headers["content-type"] == "application/json" else text


def refused(call, *arguments, **more):
    with pytest.raises(Refusal) as refusal:
        call(*arguments, **more)
    return refusal.value.status


# ---- rights ----------------------------------------------------------------------------------------------------------


def test_nothing_but_the_health_check_answers_without_a_token(service):
    assert ask(service, "GET", "/health", Authorization=None) == (200, {"status": "ok"})
    document = service.client().get("/openapi.json")
    paths = [path.replace("{job}", "1").replace("{name}", "x") for path in document["paths"] if path != "/health"]
    assert len(paths) > 15
    for path in [*paths, "/openapi.json", "/docs", "/ui", "/ui/", "/ui/nothing.js", "/index.html"]:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert ask(service, method, path, Authorization=None)[0] == 401, path


def test_the_token_is_documented(service):
    document = service.client().get("/openapi.json")
    assert document["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    assert document["paths"]["/v1/jobs"]["get"]["security"] == [{"token": []}]
    assert document["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize("path", ["/v1/users", "/v1/nodes"])
def test_a_name_that_is_refused_is_explained_in_words(service, path):
    status, answer = ask(service, "POST", path, {"name": "No Body"}, **{"Content-Type": "application/json"})
    assert status == 422
    assert answer["error"].startswith("name: 'No Body' is not accepted; use up to ")
    assert "lower-case letters" in answer["error"]
    assert "^" not in answer["error"]


def test_users_see_the_queue_and_change_only_their_own_jobs(service, alice, bob):
    job = service.submit("sh", "-c", "echo secret; sleep 60", token=alice, env={"KEY": "s3cret"}, name="hers")
    service.until(job, "running")
    hers, his = service.client(alice), service.client(bob)
    assert [row["user"] for row in his.jobs() if row["job"] == job] == ["alice"]
    for action in ("cancel", "hold", "release", "pause", "resume", "requeue"):
        assert refused(his.post, f"/v1/jobs/{job}/{action}") == 403
    assert refused(his.put, f"/v1/jobs/{job}/priority", {"priority": 5}) == 403
    assert refused(his.raw, f"/v1/jobs/{job}/logs") == 403
    shown = (
        json.dumps(his.get(f"/v1/jobs/{job}")) + json.dumps(his.get(f"/v1/jobs/{job}/explain")) + json.dumps(his.jobs())
    )
    assert "s3cret" not in shown
    assert "echo secret" not in shown
    assert hers.get(f"/v1/jobs/{job}")["spec"]["env"] == {"KEY": "s3cret"}
    service.until_logged(job, b"secret")
    hers.put(f"/v1/jobs/{job}/priority", {"priority": 5})
    hers.post(f"/v1/jobs/{job}/cancel")
    service.until(job, "cancelled")
    assert "s3cret" not in json.dumps(his.get("/v1/history")) + json.dumps(his.get("/v1/workload"))


def test_only_the_administrator_manages_users(service, alice):
    hers = service.client(alice)
    assert refused(hers.get, "/v1/users") == 403
    assert refused(hers.post, "/v1/users", {"name": "mallory"}) == 403
    assert refused(hers.delete, "/v1/users/alice") == 403
    assert refused(hers.put, "/v1/users/alice/limits", {"max_jobs": 100}) == 403


def test_a_revoked_token_is_refused_at_once_and_a_new_one_can_be_made(service):
    admin = service.client()
    token = admin.post("/v1/users", {"name": "carol"})["token"]
    assert service.client(token).get("/v1/me") == {"name": "carol", "admin": False}
    assert refused(admin.post, "/v1/users", {"name": "carol"}) == 409
    admin.delete("/v1/users/carol")
    assert refused(service.client(token).get, "/v1/me") == 401
    again = admin.post("/v1/users", {"name": "carol"})["token"]
    assert again != token
    assert service.client(again).get("/v1/me")["name"] == "carol"
    assert refused(service.client(token).get, "/v1/me") == 401
    assert refused(admin.post, "/v1/users", {"name": "admin"}) == 409
    assert refused(admin.delete, "/v1/users/nobody-here") == 404


def test_limits_of_a_user_hold(service):
    admin = service.client()
    token = admin.post("/v1/users", {"name": "dave", "max_jobs": 1, "max_gpus": 2, "max_priority": 3})["token"]
    assert refused(service.submit, token=token, gpus=3) == 422
    assert refused(service.submit, token=token, priority=4) == 403
    first, second = service.submit(token=token, priority=3), service.submit(token=token)
    service.until(first, "running")
    assert "may run 1 at a time" in admin.get(f"/v1/jobs/{second}/explain")["reason"]
    assert "may run 1 at a time" in next(row["reason"] for row in admin.jobs() if row["job"] == second)
    admin.put("/v1/users/dave/limits", {"max_jobs": 2})
    service.until(second, "running")
    assert [row["max_jobs"] for row in admin.get("/v1/users")["users"] if row["name"] == "dave"] == [2]
    for job in (first, second):
        admin.post(f"/v1/jobs/{job}/cancel")


def test_limits_and_the_group_outlive_a_token(service):
    admin, settled = service.client(), {"max_jobs": 1, "max_gpus": 1, "max_priority": 3, "group": "red"}
    admin.post("/v1/users", {"name": "gina", "max_gpus": 2, "group": "red"})
    admin.put("/v1/users/gina/limits", {"max_jobs": 1, "max_gpus": 1, "max_priority": 3})
    admin.delete("/v1/users/gina")
    again = admin.post("/v1/users", {"name": "gina"})
    assert {key: again[key] for key in settled} == settled
    assert refused(service.submit, token=again["token"], gpus=2) == 422
    admin.delete("/v1/users/gina")
    changed = admin.post("/v1/users", {"name": "gina", "max_gpus": 2, "max_jobs": None, "group": None})
    assert {key: changed[key] for key in settled} == {**settled, "max_gpus": 2, "max_jobs": None, "group": None}


def test_no_token_or_hash_is_ever_shown_or_kept(service, alice):
    shown = json.dumps(service.client().get("/v1/users"))
    assert alice not in shown
    assert "hash" not in shown
    kept = b"".join(
        path.read_bytes() for path in service.home.rglob("*") if path.is_file() and path.name != "admin.token"
    )
    assert alice.encode() not in kept
    assert service.token.encode() not in kept + service.log.read_bytes()


# ---- lists and logs --------------------------------------------------------------------------------------------------


def test_lists_come_in_pages(service):
    jobs = service.client().post("/v1/jobs", {"command": ["true"], "directory": "/", "array": "0-6"})["jobs"]
    for job in jobs:
        service.until(job, "finished")
    client, seen, before = service.client(), [], None
    while True:
        page = client.get("/v1/jobs", all=True, limit=3, before=before)
        assert len(page["jobs"]) <= 3
        seen = [row["job"] for row in page["jobs"]] + seen
        before = page["next"]
        if before is None:
            break
    assert seen[-7:] == jobs
    assert seen == sorted(set(seen), key=int) == [row["job"] for row in client.jobs(all=True)]


def test_the_history_comes_in_pages_the_latest_end_first(service):
    client = service.client()
    late = service.submit("sleep", "1")
    jobs = [service.submit("true") for _ in range(3)]
    for job in (*jobs, late):
        service.until(job, "finished")
    whole = client.get("/v1/history", limit=1000)["jobs"]
    assert whole[0]["job"] == late
    assert [row["finished"] for row in whole] == sorted((row["finished"] for row in whole), reverse=True)
    seen, before = [], None
    while len(seen) < 4:
        page = client.get("/v1/history", limit=2, before=before)
        seen, before = seen + page["jobs"], page["next"]
    assert [row["job"] for row in seen] == [row["job"] for row in whole[:4]]
    with pytest.raises(Refusal, match="before: job 999999 has not ended"):
        client.get("/v1/history", before="999999")


def test_a_log_is_read_in_pieces(service):
    job = service.submit("sh", "-c", "echo one; echo two; echo three; echo bad >&2")
    service.until(job, "finished")
    client = service.client()
    data, headers = client.raw(f"/v1/jobs/{job}/logs", limit=5)
    assert (data, headers["carpool-next"], headers["carpool-ended"]) == (b"one\nt", "5", "0")
    data, headers = client.raw(f"/v1/jobs/{job}/logs", offset=5)
    assert (data, headers["carpool-ended"]) == (b"wo\nthree\n", "1")
    assert client.raw(f"/v1/jobs/{job}/logs", tail=1)[0] == b"three\n"
    assert client.raw(f"/v1/jobs/{job}/logs", stream="stderr")[0] == b"bad\n"
    assert refused(client.raw, f"/v1/jobs/{job}/logs", rank=1) == 422
    assert refused(client.raw, f"/v1/jobs/{job}/logs", attempt=9) == 422
    assert refused(client.raw, "/v1/jobs/999999/logs") == 404


def test_a_request_waits_for_the_end_of_a_job(service):
    job = service.submit("sh", "-c", "sleep 0.3; exit 4")
    assert service.client().get(f"/v1/jobs/{job}/wait", timeout_s=0)["status"] != "failed"
    row = service.client().get(f"/v1/jobs/{job}/wait", timeout_s=20)
    assert (row["status"], row["exit_code"]) == ("failed", 4)


def test_an_ended_job_cannot_be_changed(service):
    job = service.submit("true")
    service.until(job, "finished")
    for action in ("cancel", "hold", "release", "pause", "resume", "requeue"):
        assert refused(service.client().post, f"/v1/jobs/{job}/{action}") == 409
        assert refused(service.client().post, f"/v1/jobs/999999/{action}") == 404


# ---- hostile requests ------------------------------------------------------------------------------------------------

GOOD = {"command": ["true"], "directory": "/"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"command": []}, "command"),
        ({"command": [""]}, "command"),
        ({"command": ["a\0b"]}, "command"),
        ({"command": "true"}, "command"),
        ({"directory": "relative"}, "directory"),
        ({"name": "\x1b[2J"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 300}, "name"),
        ({"name": "\u202e"}, "name"),
        ({"gpus": 0}, "gpus"),
        ({"gpus": 5}, "gpus"),
        ({"gpus": "2"}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"gpus": 10**30}, "gpus"),
        ({"iterations": 1.5}, "iterations"),
        ({"duration_s": -1}, "duration_s"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"RANK": "1"}}, "env"),
        ({"env": {"CARPOOL_GPUS": "1"}}, "env"),
        ({"env": ["A"]}, "env"),
        ({"after": ["../../etc"]}, "after"),
        ({"after": ["999999"]}, "after"),
        ({"array": "9-1"}, "array"),
        ({"array": "0-99999999"}, "array"),
        ({"snapshot": "../../etc/passwd"}, "snapshot"),
        ({"snapshot": "0" * 32}, "snapshot"),
        ({"user": "root"}, "user"),
        ({"max_slowdown": 0.5}, "max_slowdown"),
    ],
)
def test_wrong_fields_are_named(service, change, word):
    before = len(service.client().jobs(all=True))
    status, answer = ask(service, "POST", "/v1/jobs", {**GOOD, **change}, **{"Content-Type": "application/json"})
    assert status == 422
    assert word in answer["error"]
    assert answer["error"].isprintable()
    assert len(service.client().jobs(all=True)) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"command": ["\\ud800"], "directory": "/"}',
        b"[" * 100_000,
        b"9" * 10_000,
    ],
)
def test_a_body_that_is_not_a_job_is_refused(service, body):
    status, answer = ask(service, "POST", "/v1/jobs", body, **{"Content-Type": "application/json"})
    assert status in (400, 422)
    assert answer["error"]


def test_huge_bodies_are_cut_short(service):
    assert ask(service, "POST", "/v1/jobs", b"x" * (2 << 20))[0] == 413
    parts = urlsplit(service.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as raw:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.token}\r\n"
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(200):  # 20 MB without an announced length
                raw.sendall(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
        except OSError:
            pass  # the service closed the connection
        else:
            assert b" 413 " in raw.recv(1000)
    assert ask(service, "GET", "/health")[0] == 200


def test_a_body_that_never_arrives_does_not_block_other_requests(service):
    parts = urlsplit(service.url)
    with socket.create_connection((parts.hostname, parts.port)) as raw:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.token}\r\n"
        raw.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        began = time.monotonic()
        assert ask(service, "GET", "/v1/jobs")[0] == 200
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "path", ["/v1/jobs/../users", "/v1/jobs/%2e%2e", "/v1/jobs/1%2f..%2f2", "//etc/passwd", "/v1/jobs/1/"]
)
def test_paths_with_tricks_are_refused(service, path):
    assert ask(service, "GET", path)[0] in (400, 404)


@pytest.mark.parametrize("job", ["abc", "-1", "1e3", "٣", "0x1", "9" * 19, "1;2"])
def test_text_that_is_not_an_id_is_refused(service, job):
    assert ask(service, "GET", f"/v1/jobs/{job.encode('utf-8').hex() if not job.isascii() else job}")[0] in (404, 422)


def test_foreign_hosts_and_wrong_methods_are_refused(service):
    assert ask(service, "GET", "/v1/jobs", Host="evil.example")[0] == 400
    assert ask(service, "GET", "/health", Host="evil.example")[0] == 400
    assert ask(service, "PATCH", "/v1/jobs")[0] == 405
    assert ask(service, "GET", "/nothing")[0] == 404


# ---- schemathesis ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_request_that_the_document_describes_breaks_it(service, mode):
    """Submit jobs as a user who may run none, so that no generated command is ever executed."""
    admin = service.client()
    name = f"fuzz{mode.name.lower()}"
    token = admin.post("/v1/users", {"name": name, "max_jobs": 0})["token"]
    known = service.submit("true", token=token)
    document = admin.get("/openapi.json")
    schema = schemathesis.openapi.from_dict(document)
    asked = 0

    def examine(case):
        nonlocal asked
        asked += 1
        if "job" in (case.path_parameters or {}) and asked % 2 and mode is GenerationMode.POSITIVE:
            case.path_parameters["job"] = known
        if case.operation.path.endswith("/wait") and mode is GenerationMode.POSITIVE:
            case.query = {**(case.query or {}), "timeout_s": 0}
        if case.operation.path == "/v1/events":
            case.query = {**(case.query or {}), "wait_s": 0}
        own = token if case.operation.label.startswith("POST /v1/jobs") else service.token
        response = case.call(base_url=service.url, headers={"Authorization": f"Bearer {own}"}, session=session)
        case.validate_response(response, checks=CHECKS)

    few = settings(
        max_examples=10, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            if mode is GenerationMode.POSITIVE or operation.path != "/health":  # it has no input that could be wrong
                few(given(operation.as_strategy(generation_mode=mode))(examine))()
    assert asked > 100
    assert "Traceback" not in service.log.read_text()


@pytest.mark.parametrize(
    "body", [b'{"command": ["true"], "directory": "/", "gpus": 1, "gpus": 4}', b'{"x": {"a": 1, "a": 1}}']
)
def test_a_name_that_is_twice_in_json_is_refused(service, body):
    status, answer = ask(service, "POST", "/v1/jobs", body)
    assert (status, "twice" in answer["error"]) == (400, True)


def test_a_name_that_is_twice_in_a_query_is_refused(service):
    assert ask(service, "GET", "/v1/jobs?limit=1&limit=2")[0] == 400


def test_the_copies_of_an_array_have_a_limit(service, tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(bytes(50 << 20))
    said = service.call("submit", "--snapshot", "--array", "0-399", "--", "true", cwd=tmp_path)
    assert (said.code, "every job gets a copy, 19.5 GiB here" in said.err) == (2, True), said.err
