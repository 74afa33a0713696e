"""Terminals and commands beside workers on the nodes of agents: real processes, real ptys, keys, cuts and kills."""

import base64
import os
import signal
import time

import pytest
import requests

from carpool.live.http.client import Refusal
from carpool.live.http.event_stream import messages
from tests.cluster.world import ClusterWorld, until
from tests.support.terminals import Screen

SHELL = ("bash", "--norc", "--noprofile", "-i")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ClusterWorld(tmp_path_factory.mktemp("terminals"), ("a", "b"), lease_s=60.0) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left_behind(world):
    """Give the GPUs back after every test."""
    yield
    for relay in world.relays.values():
        relay.mend()
    for row in world.client().jobs():
        world.client().post(f"/v1/jobs/{row['job']}/cancel")
    until(lambda: not world.client().jobs())
    world.until_open("a", "b")
    for name in ("serve", "a", "b"):
        assert "Traceback" not in (world.folder / f"{name}.log").read_text()


def node_of(world, job):
    return world.job(job)["on"][0].partition(":")[0]


def test_a_user_works_in_a_shell_on_a_node(world):
    """Keys, sizes, Ctrl-C and the exit code, as on the service's own machine."""
    screen = Screen(world.home, "run", "--gpus", "2", "--", *SHELL)
    screen.until("job ")
    job = screen.until(": Ctrl-] d leaves it running")
    screen.type("echo $((40 + 2)) $TERM $WORLD_SIZE; stty size\r")
    screen.until("42 vt100 1")
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
    assert not world.job(job)["spec"]["can_pause"]
    screen.type("for i in $(seq 20000); do echo line $i; done; echo all''printed\r")
    lines = screen.until("allprinted").split("\r\n")
    assert lines[-19_001:-1] == [f"line {i}" for i in range(1001, 20_001)]
    screen.type("exit 3\r")
    assert screen.end() == 3
    assert f"job {job} failed: worker 0 ended with exit code 3" in screen.shown.decode()
    assert world.log(job).count("interrupted 130") == 1


def test_a_python_prompt_runs_on_a_node(world):
    screen = Screen(world.home, "run", "--", "python3", "-i")
    screen.until(">>> ")
    screen.type("import os; print(6 * 7, os.environ['CARPOOL_GPUS'])\r")
    screen.until("42 ")
    screen.type("raise SystemExit(4)\r")
    assert screen.end() == 4


def test_a_terminal_outlives_its_agent_and_its_service(world):
    """Each is killed under it: the user is told, the terminal comes back, and no key is lost or doubled."""
    screen = Screen(world.home, "run", "--", *SHELL)
    screen.until("job ")
    job = screen.until(": Ctrl-] d leaves it running")
    screen.type("echo be''fore\r")
    screen.until("before")
    node = node_of(world, job)
    world.signal_agent(node, signal.SIGKILL)
    world.agents.pop(node).wait(10)
    screen.type("echo typed while no ag''ent was there\r")
    world.start_agent(node)
    screen.until("its terminal comes back]")
    screen.until("typed while no agent was there")
    world.kill_service()
    screen.type("echo typed while no ser''vice was there\r")
    screen.until("its terminal comes back]")
    world.serve()
    screen.until("typed while no service was there")
    screen.type("exit\r")
    assert screen.end() == 0
    printed = world.log(job)
    assert [printed.count(f"typed while no {what} was there") for what in ("agent", "service")] == [1, 1]
    assert world.job(job)["attempt"] == 1


def test_a_node_that_is_cut_off_ends_the_command_and_not_the_job(world):
    job = world.submit("sleep", "300")
    world.until_status(job, "running")
    node = node_of(world, job)
    said = world.client().run_beside(job, 0, {"command": ["sh", "-c", "echo $$; exec sleep 1000"]})
    assert next(said).kind == "Hello"
    pid = int(base64.b64decode(next(said).data["data"]))
    world.relays[node].cut()
    last = [one for one in said if one.kind != "Output"][-1]
    assert (last.kind, last.data["reason"]) == ("Lost", f"node {node}: its agent does not answer; try again")
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40.0)
    world.relays[node].mend()
    world.until_open("a", "b")
    assert world.job(job)["status"] == "running"
    assert run_beside(world, job, "echo", "again") == ("again\n", 0)


def run_beside(world, job, *command, rank=0, **more):
    """Return what a command beside a job printed, and its exit code."""
    said = list(world.client().run_beside(job, rank, {"command": list(command), **more}))
    printed = b"".join(base64.b64decode(one.data["data"]) for one in said if one.kind == "Output")
    return printed.decode(), said[-1].data["exit_code"]


def test_a_command_runs_beside_any_worker_of_a_gang_over_nodes(world):
    """Input, both outputs, the exit code, and a large output without loss."""
    job = world.submit("sleep", "300", gpus=4)
    world.until_status(job, "running")
    places = [run_beside(world, job, "sh", "-c", "echo $RANK $CARPOOL_GPUS; exit 7", rank=rank) for rank in range(4)]
    gpus = world.job(job)["on"]
    assert sorted(gpus) == ["a:0", "a:1", "b:0", "b:1"]
    assert places == [(f"{rank} {gpu}\n", 7) for rank, gpu in enumerate(gpus)]
    assert run_beside(world, job, "no-such-program")[1] == 127
    printed, code = run_beside(world, job, "seq", "200000", rank=2)
    assert (printed.split("\n"), code) == ([*map(str, range(1, 200_001)), ""], 0)
    with pytest.raises(Refusal, match="worker 4 does not run") as refused:
        run_beside(world, job, "true", rank=4)
    assert refused.value.status == 409


def test_a_caller_that_does_not_read_stops_only_its_own_command(world):
    job = world.submit("sleep", "300")
    world.until_status(job, "running")
    headers = {"Authorization": f"Bearer {(world.home / 'admin.token').read_text().strip()}"}
    address = f"http://127.0.0.1:{world.port}/v1/jobs/{job}/exec"
    command = {"command": ["sh", "-c", "echo $$; exec yes"]}
    answer = requests.post(address, json=command, headers=headers, stream=True, timeout=30)
    said = messages(line + b"\n" for line in answer.iter_lines(chunk_size=1))
    next(said)
    pid = int(base64.b64decode(next(said).data["data"]).split()[0])
    before = ""
    for _ in range(100):
        now = written(pid)
        if now == before:
            break
        before = now
        time.sleep(0.5)
    else:
        raise AssertionError("it does not stand still, although nobody reads")
    assert run_beside(world, job, "echo", "alive") == ("alive\n", 0)
    answer.close()
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def written(pid):
    with open(f"/proc/{pid}/io") as file:
        return next(line for line in file if line.startswith("wchar"))


def test_a_terminal_that_is_left_alone_ends_on_a_node_too(world):
    job = world.submit("sh", "-c", "echo begun; cat", terminal=True, idle_s=1)
    assert world.until_status(job, "finished")["exit_code"] == 0
    assert "nothing was typed or printed for 1 s" in world.log(job)


def test_a_terminal_needs_one_node(world):
    job = world.submit(*SHELL, terminal=True, gpus=4)
    assert "a terminal is on one node, and its GPUs would be on " in world.until_status(job, "failed")["reason"]


def test_an_agent_reaches_the_doors_of_its_own_node_only(world):
    """Its token is good for its own doors; users have none of these paths, and agents have none of the users'."""
    job = world.submit("sleep", "300")
    world.until_status(job, "running")
    node = node_of(world, job)
    other = "ab"["ba".index(node)]
    said = world.client().run_beside(job, 0, {"command": ["cat"]})
    next(said)
    tokens = {name: (world.folder / f"{name}.token").read_text() for name in "ab"}
    url = f"http://127.0.0.1:{world.port}/v1"
    here = {"instance": "0123456789abcdef"}
    place = {"door": 1, "offset": 0, **here}
    for token, status in ((tokens[other], 409), (tokens[node], 409), ((world.home / "admin.token").read_text(), 403)):
        headers = {"Authorization": f"Bearer {token.strip()}"}
        asked = requests.post(f"{url}/agents/doors", json=here, headers=headers, timeout=10)
        brought = requests.post(f"{url}/agents/doors/said", params=place, data=b"x", headers=headers, timeout=10)
        assert (asked.status_code, brought.status_code) == (status, status), (asked.text, brought.text)
    headers = {"Authorization": f"Bearer {tokens[node]}"}
    refused = requests.post(f"{url}/jobs/{job}/exec", json={"command": ["true"]}, headers=headers, timeout=10)
    assert refused.status_code == 403
