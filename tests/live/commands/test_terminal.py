"""Terminals of jobs and commands beside workers, from outside: a real service, real ptys, keys, and kills."""

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import time

import pytest
import requests

from carpool.live.commands.console import KeyFilter
from carpool.live.door import MAX_PENDING, MAX_REQUEST
from carpool.live.http.client import Refusal
from carpool.live.http.event_stream import messages
from carpool.live.spec import parse
from tests.support.command_line import COMMAND, environment
from tests.support.effort import thorough_only
from tests.support.terminals import Screen

SHELL = ("bash", "--norc", "--noprofile", "-i")


def terminal_job(service, *command, token=None, **fields):
    """Submit a job with a terminal and wait until it runs."""
    job = service.submit(*(command or ("cat",)), terminal=True, token=token, **fields)
    service.until(job, "running", "finished")
    return job


@pytest.fixture(autouse=True)
def nothing_left_behind(service):
    """Give the GPUs back after every test."""
    yield
    client = service.client()
    for row in client.jobs():
        with contextlib.suppress(Refusal):  # it has just ended
            client.post(f"/v1/jobs/{row['job']}/cancel")
    for row in client.jobs():
        service.until(row["job"], "cancelled", "finished", "failed")
    assert "Traceback" not in service.log.read_text()


def transcript(service, job):
    return service.client().raw(f"/v1/jobs/{job}/logs")[0].decode()


def keys(data=b"", number=1, **more):
    return {"typist": "0123456789abcdef", "number": number, "data": base64.b64encode(data).decode(), **more}


def test_a_user_works_in_a_shell_on_a_gpu(service):
    """Keys, sizes, Ctrl-C, a service that is killed under it, and the exit code; the log has it all."""
    screen = Screen(service.home, "run", "--gpus", "2", "--", *SHELL)
    try:
        screen.until("job ")
        job = screen.until(": Ctrl-] d leaves it running")
        screen.type("echo $((40 + 2)) $TERM $WORLD_SIZE $CARPOOL_GPUS; stty size\r")
        screen.until("42 vt100 1 node0:")
        screen.until("40 100")
        screen.resize(33, 77)
        screen.type("until [ \"$(stty size)\" = '33 77' ]; do sleep 0.05; done; echo re''sized\r")
        screen.until("resized")
        screen.type("echo sle''eps; sleep 60\r")
        screen.until("sleeps")
        time.sleep(0.3)  # the shell prints before it starts the program
        screen.type("\x03")
        screen.type("echo in''terrupted $?\r")
        screen.until("interrupted 130")
        row = service.client().get(f"/v1/jobs/{job}")
        assert (row["status"], row["spec"]["can_pause"], row["spec"]["can_checkpoint"]) == ("running", False, False)

        service.process.kill()
        service.process.wait()
        screen.type("echo typed while no ser''vice was there\r")
        screen.until("its terminal comes back")
        service.start()
        screen.until("typed while no service was there")
        screen.type("exit 5\r")
        assert screen.end() == 5
        assert f"job {job} failed: worker 0 ended with exit code 5" in screen.shown.decode()
        printed = transcript(service, job)
        assert [printed.count(text) for text in ("interrupted 130", "typed while no service was there")] == [1, 1]
    finally:
        if service.process.poll() is not None:
            service.start()


def test_a_user_leaves_a_terminal_and_comes_back(service):
    job = terminal_job(service, *SHELL, grace_s=60)
    screen = Screen(service.home, "attach", job)
    screen.until("leaves it running")
    screen.type("before=7; echo set $before\r")
    screen.until("set 7")
    screen.type("\x1dd")
    screen.until(f"left job {job} running")
    assert screen.end() == 0
    assert service.client().get(f"/v1/jobs/{job}")["status"] == "running"
    again = Screen(service.home, "attach", job)
    again.until("set 7")  # what was printed before is shown
    again.type("echo still $((before * 6))\r")
    again.until("still 42")
    service.client().post(f"/v1/jobs/{job}/cancel")  # an interactive shell ignores SIGTERM, and not a hang-up
    assert again.end() == 130
    assert service.until(job, "cancelled")


def test_a_terminal_that_is_left_alone_ends(service):
    began = time.monotonic()
    job = terminal_job(service, "sh", "-c", "for i in 1 2 3 4; do echo line $i; sleep 0.5; done; cat", idle_s=1)
    row = service.until(job, "finished")
    assert time.monotonic() - began > 2.5, "output counts as use"
    assert row["exit_code"] == 0
    assert "nothing was typed or printed for 1 s" in transcript(service, job)


def test_a_command_runs_beside_a_job_as_the_job_does(service, tmp_path):
    """With its folder, environment and GPUs; input, both outputs and the exit code pass through."""
    job = service.submit("sleep", "60", directory=str(tmp_path), env={"COLOUR": "green"})
    service.until(job, "running")
    said = service.run(
        "exec", job, "--", "sh", "-c", "echo $COLOUR $CARPOOL_JOB $CARPOOL_GPUS; pwd; echo to err >&2; cat; exit 7"
    )
    assert (said.code, said.err) == (7, "to err\n")
    assert re.fullmatch(rf"green {job} node0:\d\n{re.escape(str(tmp_path))}\n", said.out)
    printed, code = run_beside(service, job, "no-such-program")
    assert (code, "cannot run no-such-program" in printed) == (127, True)
    watched = run_beside(service, job, "sh", "-c", "echo path=$PYTHONPATH gpus=${CUDA_VISIBLE_DEVICES-all}")
    assert watched == ("path= gpus=\n", 0), "its iterations would count as the job's, and no other GPU is seen"


def run_beside(service, job, *command, **more):
    """Return what a command beside a job printed, and its exit code."""
    said = list(service.client().run_beside(job, 0, {"command": list(command), **more}))
    printed = b"".join(base64.b64decode(one.data["data"]) for one in said if one.kind == "Output")
    return printed.decode(), said[-1].data["exit_code"]


def test_a_command_ends_when_its_caller_is_gone_and_when_its_job_ends(service):
    job = service.submit("sleep", "60")
    service.until(job, "running")
    client = service.client()
    said = client.run_beside(job, 0, {"command": ["sh", "-c", "echo $$; exec sleep 1000"]})
    next(said)
    pid = int(base64.b64decode(next(said).data["data"]))
    client.abort()
    until_gone(pid)
    other = service.client().run_beside(job, 0, {"command": ["sh", "-c", "echo $$; exec sleep 1000"], "rows": 5,
                                                 "columns": 5})  # fmt: skip
    next(other)
    pid = int(base64.b64decode(next(other).data["data"]))
    service.client().post(f"/v1/jobs/{job}/cancel")
    assert [one.data for one in other if one.kind == "End"] == [{"exit_code": 137}]
    until_gone(pid)


def test_a_revoked_token_ends_its_quiet_terminals_and_commands_at_once(service):
    admin = service.client()
    token = admin.post("/v1/users", {"name": "eve"})["token"]
    job = terminal_job(service, "sh", "-c", "echo ready; exec sleep 60", token=token)
    service.until_logged(job, b"ready")
    terminal = service.client(token).terminal(job, None, 0, None)
    command = service.client(token).run_beside(job, 0, {"command": ["sh", "-c", "echo $$; exec sleep 1000"]})
    assert [next(terminal).kind, next(terminal).kind, next(command).kind] == ["Hello", "Output", "Hello"]
    pid = int(base64.b64decode(next(command).data["data"]))
    time.sleep(0.5)
    began = time.monotonic()
    admin.delete("/v1/users/eve")
    assert [one.kind for said in (terminal, command) for one in said if one.kind] == []
    until_gone(pid)
    assert time.monotonic() - began < 5.0


def until_gone(pid):
    until = time.monotonic() + 20.0
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until, f"process {pid} still runs"
        time.sleep(0.05)


def test_only_the_owner_and_the_administrator_reach_a_terminal(service, alice, bob):
    job = terminal_job(service, token=alice)
    attempts = (
        lambda client: list(client.terminal(job, None, 0, None)),
        lambda client: client.post(f"/v1/jobs/{job}/terminal", keys(b"x")),
        lambda client: list(client.run_beside(job, 0, {"command": ["true"]})),
        lambda client: client.post(f"/v1/jobs/{job}/exec/1", keys(b"x")),
    )
    for token, status in ((bob, 403), ("x" * 43, 401)):
        for attempt in attempts:
            with pytest.raises(Refusal) as refused:
                attempt(service.client(token))
            assert refused.value.status == status
    assert service.client().post(f"/v1/jobs/{job}/terminal", keys(b"from the administrator\r"))["taken"]
    service.until_logged(job, b"from the administrator")
    assert "\nx" not in transcript(service, job)
    assert run_beside(service, job, "true") == ("", 0)


def test_a_page_of_another_site_reaches_no_terminal(service):
    """A browser sends the cookie along; it cannot send the key, and says where the page comes from."""
    job = terminal_job(service)
    answer = requests.post(f"{service.url}/session", json={"token": service.token}, timeout=10)
    cookie, key = answer.headers["set-cookie"].partition(";")[0], answer.json()["key"]
    for headers in ({"Cookie": cookie}, {"Cookie": cookie, "Carpool-Key": key, "Origin": "http://evil.example"}):
        for path in ("terminal", "exec"):
            refused = requests.post(f"{service.url}/v1/jobs/{job}/{path}", json=keys(b"x"), headers=headers, timeout=10)
            assert refused.status_code in (401, 403)
        refused = requests.get(f"{service.url}/v1/jobs/{job}/terminal", headers=headers, timeout=10)
        assert refused.status_code in (401, 403)
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x" * 24, "Cookie": cookie}
    refused = requests.get(f"{service.url}/v1/jobs/{job}/terminal", headers=upgrade, timeout=10)
    assert refused.status_code in (400, 401, 403)


def test_keys_arrive_once_and_a_program_that_does_not_read_them_fills_no_memory(service):
    job = terminal_job(service, "sh", "-c", "stty raw -echo; echo ready; sleep 2; exec head -c 10")
    service.until_logged(job, b"ready")
    client, path = service.client(), f"/v1/jobs/{job}/terminal"
    for _ in range(3):  # a client that does not know whether its request arrived
        assert client.post(path, keys(b"once,", 1)) == {"taken": True}
    piece, number = b"x" * 40_000, 2
    while client.post(path, keys(piece, number))["taken"]:
        number += 1
    assert (number - 2) * len(piece) <= 2 * MAX_PENDING
    service.until(job, "finished")
    assert transcript(service, job).endswith("once,xxxxx")


WRONG_KEYS = (
    {"typist": "x", "number": 1},
    {**keys(), "data": "not base64!"},
    {**keys(), "data": "x" * 65_540},
    {**keys(), "number": -1},
    {**keys(), "rows": 5},
    {**keys(), "rows": 5, "columns": 10**6},
    {**keys(), "rows": 0, "columns": 0},
)


def test_wrong_keys_are_refused(service):
    job = service.submit("true", terminal=True)
    for wrong in WRONG_KEYS:
        with pytest.raises(Refusal) as refused:
            service.client().post(f"/v1/jobs/{job}/exec/1", wrong)
        assert refused.value.status == 422, wrong
    running = terminal_job(service)
    for size in ({"rows": 5}, {"columns": 5}, {"rows": 0, "columns": 5}):
        with pytest.raises(Refusal) as refused:
            list(service.client().run_beside(running, 0, {"command": ["true"], **size}))
        assert refused.value.status == 422, size


def test_a_client_that_does_not_read_stops_only_its_own_command(service):
    job = terminal_job(service)
    headers = {"Authorization": f"Bearer {service.token}"}
    command = {"command": ["sh", "-c", "echo $$; exec yes"]}
    address = f"{service.url}/v1/jobs/{job}/exec"
    answer = requests.post(address, json=command, headers=headers, stream=True, timeout=30)
    found = messages(line + b"\n" for line in answer.iter_lines(chunk_size=1))
    next(found)
    pid = int(base64.b64decode(next(found).data["data"]).split()[0])
    until, before = time.monotonic() + 20.0, ""
    while written(pid) != before:
        assert time.monotonic() < until, "it does not stand still, although nobody reads"
        before = written(pid)
        time.sleep(0.3)
    assert service.client().post(f"/v1/jobs/{job}/terminal", keys(b"alive\r")) == {"taken": True}
    answer.close()
    until_gone(pid)


def written(pid):
    with open(f"/proc/{pid}/io") as file:
        return next(line for line in file if line.startswith("wchar"))


def test_nonsense_at_the_door_of_a_worker_disturbs_nobody(service):
    job = terminal_job(service)
    assert run_beside(service, job, "true") == ("", 0)
    door = str(service.home / "jobs" / job / "attempt-1" / "rank-0" / "door")
    assert os.stat(door).st_mode & 0o077 == 0
    for nonsense in (b"x" * (MAX_REQUEST + 100_000), b"[]\n", b"{\n", b'{"do": "type", "rows": 70000}\n', b"null\n"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(door)
            caller.settimeout(10)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                caller.sendall(nonsense)
                assert caller.recv(100) == b"", "it hangs up"
    assert service.client().post(f"/v1/jobs/{job}/terminal", keys(b"alive\r")) == {"taken": True}
    service.until_logged(job, b"alive")


def test_jobs_without_a_terminal_and_jobs_that_wait_say_so(service):
    job = service.submit("sleep", "60")
    service.until(job, "running")
    said = service.call("attach", job)
    assert (said.code, said.err) == (
        2, f"error: job {job} has no terminal; `carpool logs {job}` shows its output, `carpool exec` works\n",
    )  # fmt: skip
    held = service.submit("sleep", "60", after=[job])
    with pytest.raises(Refusal, match="commands run beside workers only while they run"):
        list(service.client().run_beside(held, 0, {"command": ["true"]}))
    with pytest.raises(Refusal, match="idle_s: is for jobs with a terminal"):
        service.submit("true", idle_s=60)


def test_a_terminal_may_be_paused_only_where_its_owner_allows_it():
    job = {"command": ["bash"], "directory": "/", "terminal": True}
    assert (parse(job).can_pause, parse(job).can_checkpoint) == (False, False)
    assert parse({**job, "can_pause": True}).can_pause
    assert parse({"command": ["bash"], "directory": "/"}).can_pause
    assert parse(json.loads(parse({**job, "can_pause": True}).to_json())).can_pause, "a restart does not change it"


def test_ctrl_bracket_twice_is_one_for_the_program():
    keys = KeyFilter()
    assert keys.take(b"a\x1d") == (b"a", False)
    assert keys.take(b"\x1db\x1dxd") == (b"\x1db\x1dxd", False)
    assert keys.take(b"c\x1dd ignored") == (b"c", True)


@thorough_only
def test_a_terminal_is_served_by_a_pipe_too(service):
    """Without a terminal of one's own: input from a pipe, and its end is the end of the program's input."""
    done = subprocess.run(
        [*COMMAND, "run", "--", "cat"], input=b"through a pipe\n", capture_output=True, timeout=60,
        env=environment(CARPOOL_HOME=str(service.home)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"through a pipe" in done.stdout


def test_a_shell_completes_the_jobs_of_the_service(service):
    """With their ids; nothing where no service answers."""
    job = service.submit("sleep", "60", name="completed")
    for words in ("attach", "exec", "logs", "cancel"):
        found = service.run(_CARPOOL_COMPLETE="bash_complete", COMP_WORDS=f"carpool {words} ", COMP_CWORD="2")
        assert f"plain,{job}\n" in found.out, found
    missing = service.run(
        _CARPOOL_COMPLETE="bash_complete", COMP_WORDS="carpool attach --home /nowhere ", COMP_CWORD="4"
    )
    assert (missing.out.strip(), missing.err) == ("", "")
