"""Agents by hand, as processes of their own on loopback: jobs, logs, restarts, leases, gangs over nodes, tokens."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from carpool.live.home import Home
from carpool.live.http.client import Client, Refusal
from tests.cluster import world as worlds
from tests.cluster.judge import double_runs, violations
from tests.cluster.world import ClusterWorld, until
from tests.support.served import Served

SLOW = "i=0; while [ $i -lt 600 ]; do i=$((i + 1)); echo $i; sleep 0.05; done"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ClusterWorld(tmp_path_factory.mktemp("agents"), ("a", "b"), lease_s=30.0) as found:
        yield found


def test_a_job_runs_on_a_node_and_leaves_its_log_and_exit_code(world):
    job = world.submit("sh", "-c", "echo here $CARPOOL_GPUS; echo trouble >&2; exit 3")
    row = world.until_status(job, "failed")
    assert row["exit_code"] == 3
    assert row["attempts"][-1]["ranks"][0]["exit_code"] == 3
    assert world.log(job) in ("here a:0\n", "here a:1\n", "here b:0\n", "here b:1\n")
    assert world.client().raw(f"/v1/jobs/{job}/logs", stream="stderr")[0] == b"trouble\n"


def test_a_running_job_is_watched_paused_resumed_and_cancelled(world):
    job = world.submit("sh", "-c", SLOW)
    world.until_status(job, "running")
    until(lambda: "3\n" in world.log(job))
    world.client().post(f"/v1/jobs/{job}/pause")
    world.until_status(job, "paused")
    time.sleep(1.2)  # what it wrote before is copied
    before = world.log(job)
    time.sleep(1.0)
    assert world.log(job) == before
    world.client().post(f"/v1/jobs/{job}/resume")
    until(lambda: len(world.log(job)) > len(before))
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")
    assert not world.job_processes()


def test_a_service_that_is_killed_finds_its_jobs_again(world):
    job = world.submit("sh", "-c", "echo begun; sleep 4; echo done")
    ended = world.submit("sh", "-c", "sleep 0.5; exit 7")
    world.until_status(job, "running")
    world.until_status(ended, "running", "failed")
    world.kill_service()
    time.sleep(1.0)
    world.serve()
    assert world.until_status(ended, "failed")["exit_code"] == 7
    row = world.until_status(job, "finished")
    assert row["attempt"] == 1
    assert world.log(job) == "begun\ndone\n"
    world.until_open("a", "b")


def test_an_agent_that_is_killed_finds_its_jobs_again(world):
    jobs = [world.submit("sh", "-c", "echo begun; sleep 4; echo done") for _ in range(4)]
    for job in jobs:
        world.until_status(job, "running")
    os.kill(world.agent_pids("a")[1], signal.SIGKILL)  # its supervisor starts it again
    world.kill_agent("b")
    time.sleep(1.0)
    world.start_agent("b")
    for job in jobs:
        assert world.until_status(job, "finished")["attempt"] == 1
        assert world.log(job) == "begun\ndone\n"
    world.until_open("a", "b")


def test_a_gang_over_two_nodes_meets_at_one_port(world):
    script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT $CARPOOL_GPUS"
    job = world.submit("sh", "-c", script, gpus=4)
    world.until_status(job, "finished")
    rows = [world.log(job, rank).split() for rank in range(4)]
    assert [row[:3] for row in rows] == [["0", "4", "0"], ["1", "4", "1"], ["2", "4", "0"], ["3", "4", "1"]]
    assert len({tuple(row[3:5]) for row in rows}) == 1
    assert {row[5] for row in rows} == {"a:0", "a:1", "b:0", "b:1"}


def test_the_death_of_one_part_ends_the_gang(world):
    job = world.submit("sh", "-c", 'test "$RANK" = 3 && sleep 1 && exit 9; sleep 600', gpus=4)
    row = world.until_status(job, "failed")
    assert row["exit_code"] == 9
    assert "worker 3" in row["reason"]
    until(lambda: not world.job_processes())


def test_a_gang_over_two_nodes_is_paused_and_stopped_whole(world):
    job = world.submit_ledger("gang", 60, gpus=3)
    world.until_status(job, "running")
    until(lambda: len({line["rank"] for line in world.lines() if line["job"] == "gang"}) == 3)
    world.client().post(f"/v1/jobs/{job}/pause")
    world.until_status(job, "paused")
    before = len(world.lines())
    time.sleep(0.5)
    assert len(world.lines()) == before
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")
    assert not world.job_processes()


def test_a_drained_node_gets_nothing_new(world):
    running = world.submit("sleep", "2")
    name = world.until_status(running, "running")["on"][0].partition(":")[0]
    assert world.client().put(f"/v1/nodes/{name}", {"state": "drained"})["state"] == "drained"
    jobs = [world.submit("sh", "-c", "echo $CARPOOL_GPUS; sleep 0.3") for _ in range(4)]
    for job in (running, *jobs):
        world.until_status(job, "finished")
    assert not any(world.log(job).startswith(f"{name}:") for job in jobs)
    world.client().put(f"/v1/nodes/{name}", {"state": "open"})
    job = world.submit("sh", "-c", "echo $CARPOOL_GPUS", gpus=4)
    world.until_status(job, "finished")


def test_an_agents_token_is_good_for_its_node_only(world):
    token = (world.folder / "a.token").read_text()
    agent = Client(f"http://127.0.0.1:{world.port}", token)
    for path in ("/v1/jobs", "/v1/nodes", "/v1/users", "/v1/me"):
        with pytest.raises(Refusal) as refused:
            agent.get(path)
        assert refused.value.status == 403
    state = {"node": "b", "identity": "x", "boot": "x", "instance": "x", "number": 1, "address": "x", "memory": 1}
    state |= {"mechanism": "logical", "release": "0", "devices": [{"index": 0}]}
    with pytest.raises(Refusal, match="node a only"):
        agent.post("/v1/agents/sync", state)
    with pytest.raises(Refusal, match=r"another agent speaks for node a|an agent on another machine"):
        agent.post("/v1/agents/sync", {**state, "node": "a"})
    with pytest.raises(Refusal) as refused:
        world.client().post("/v1/agents/sync", state)
    assert refused.value.status == 403


def test_commands_show_the_nodes(world):
    home = ["--home", str(world.home)]
    shown = subprocess.run([*worlds.COMMAND, "nodes", *home], capture_output=True, text=True, env=worlds.environment())
    assert [line.split()[:4] for line in shown.stdout.splitlines()[2:]] == [[n, "open", "hand", "2"] for n in "ab"]
    checked = subprocess.run(
        [*worlds.COMMAND, "doctor", *home, "--json"], capture_output=True, text=True, env=worlds.environment()
    )
    found = {row["what"]: row["level"] for row in json.loads(checked.stdout) if row["what"].startswith("node ")}
    assert found == {"node a": "ok", "node b": "ok"}


def test_no_secret_is_where_jobs_can_read_it(world):
    token = (world.folder / "a.token").read_bytes()
    job = world.submit("sh", "-c", "env; sleep 30")
    world.until_status(job, "running")
    until(lambda: "CARPOOL_JOB" in world.log(job))
    assert token.decode() not in world.log(job)
    for pid in (*world.agent_pids("a"), *world.job_processes()):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                assert token not in file.read()
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")
    assert token.decode() not in world.said()


PYTHON_DDP = """
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.full((8, 4), float(dist.get_rank() + 1))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
total = torch.tensor([1.0])
dist.all_reduce(total)
print("sum", total.item(), "weight", round(model.module.weight.sum().item(), 6), flush=True)
dist.destroy_process_group()
"""


def test_pytorch_trains_over_two_nodes(world):
    pytest.importorskip("torch")
    job = world.submit(sys.executable, "-c", PYTHON_DDP, gpus=3)
    world.until_status(job, "finished", "failed", seconds=120)
    outputs = {world.log(job, rank) for rank in range(3)}
    assert len(outputs) == 1, outputs
    assert outputs.pop().startswith("sum 3.0"), world.client().raw(f"/v1/jobs/{job}/logs", stream="stderr")


def test_agents_and_clients_speak_tls_with_the_certificate_that_they_were_given(tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = ["-keyout", key, "-out", certificate, "-subj", "/CN=carpool", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *words]
    subprocess.run(made, check=True, capture_output=True)
    served = Served(tmp_path / "home", "--executor", "agents", "--tls-certificate", certificate, "--tls-key", key)
    process = None
    try:
        served.client = lambda token=None: Client(served.url, token or served.token, Home(served.home))
        served.start()
        assert served.url.startswith("https:")
        (tmp_path / "token").touch(0o600)
        (tmp_path / "token").write_text(served.client().post("/v1/nodes", {"name": "a"})["token"])
        agent = [*worlds.COMMAND, "agent", "--join", served.url, "--token-file", tmp_path / "token", "--name", "a"]
        agent += ["--gpus", "1", "--home", tmp_path / "agent"]
        refused = subprocess.run(agent, capture_output=True, text=True, timeout=60, env=worlds.environment())
        assert refused.returncode == 2
        assert "certificate is not trusted" in refused.stderr
        shutil.rmtree(tmp_path / "agent")
        process = subprocess.Popen([*agent, "--ca", certificate], env=worlds.environment())
        until(lambda: [row["state"] for row in served.client().get("/v1/nodes")["nodes"]] == ["open"], 60)
        with pytest.raises(ValueError):
            Client(served.url.replace("https", "http"), served.token).get("/v1/me")
    finally:
        if process is not None:
            process.terminate()
            process.wait(20)
        served.stop()


# ---- leases ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_world(tmp_path_factory):
    with ClusterWorld(tmp_path_factory.mktemp("leases"), ("a", "b"), gpus=1, lease_s=3.0, margin_s=1.0) as found:
        yield found


@pytest.fixture
def short(short_world):
    """A cluster with short leases, all of whose nodes are open and whose ledger is empty."""
    for name in short_world.names:
        if name not in short_world.agents:
            short_world.start_agent(name)
    short_world.until_open(*short_world.names)
    short_world.ledger.write_text("")
    return short_world


def test_workers_of_a_node_that_hears_nothing_end_before_they_run_elsewhere(short):
    job = short.submit_ledger("long", 8)
    node = short.until_status(job, "running")["on"][0].partition(":")[0]
    until(lambda: short.lines())
    cut_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    short.relays[node].cut()
    row = until(lambda: (row := short.job(job))["attempt"] == 2 and row["status"] == "running" and row, 30)
    assert row["on"][0].partition(":")[0] != node
    first = [line["at"] for line in short.lines() if line["attempt"] == 1]
    second = until(lambda: [line["at"] for line in short.lines() if line["attempt"] == 2])
    assert cut_at + 1.0 < max(first) < cut_at + short.lease_s + 0.3, "it ran for a lease and no longer"
    assert second[0] < cut_at + short.lease_s + short.margin_s + 3.0
    assert not double_runs(short.lines())
    assert short.nodes()[node]["state"] == "lost"
    short.relays[node].mend()
    short.until_open(node)
    short.until_status(job, "finished")
    assert not violations(short.lines())


def test_a_cut_shorter_than_the_lease_changes_nothing(short):
    job = short.submit_ledger("long", 6)
    node = short.until_status(job, "running")["on"][0].partition(":")[0]
    for way in ({"to_agent": True}, {"to_service": True}):
        short.relays[node].cut(**way)
        time.sleep(1.5)
        short.relays[node].mend()
        time.sleep(2.0)
    assert short.until_status(job, "finished")["attempt"] == 1
    assert not violations(short.lines())


def test_a_stopped_agent_and_a_dead_one_lose_their_workers(short):
    jobs = {name: short.submit_ledger(name, 8) for name in ("one", "two")}
    nodes = {}
    for name, job in jobs.items():
        nodes[name] = short.until_status(job, "running")["on"][0].partition(":")[0]
    until(lambda: {line["job"] for line in short.lines()} == {"one", "two"})
    short.signal_agent(nodes["one"], signal.SIGSTOP)
    short.kill_agent(nodes["two"])
    gone = time.clock_gettime(time.CLOCK_BOOTTIME)
    until(lambda: {row["state"] for row in short.nodes().values()} == {"lost"}, 20)
    assert max(line["at"] for line in short.lines()) < gone + short.lease_s + 0.3
    assert not short.job_processes()
    short.signal_agent(nodes["one"], signal.SIGCONT)
    short.start_agent(nodes["two"])
    for job in jobs.values():
        short.until_status(job, "running", "finished")
        assert short.job(job)["attempt"] >= 2
    for job in jobs.values():
        short.until_status(job, "finished")
    assert not violations(short.lines())


def test_an_agent_does_not_obey_an_earlier_term(short):
    """A service that woke up after another took over is refused, whatever it says."""
    job = short.submit_ledger("long", 5)
    node = short.until_status(job, "running")["on"][0].partition(":")[0]
    memory = short.folder / f"agent-{node}" / "agent.json"
    short.kill_agent(node)
    text = memory.read_text()
    memory.write_text(json.dumps({**json.loads(text), "term": 99}))
    short.start_agent(node)
    until(lambda: short.nodes()[node]["state"] == "lost", 30)
    short.until_status(job, "finished")
    assert short.job(job)["attempt"] == 2
    assert not violations(short.lines())
    short.kill_agent(node)
    memory.write_text(text)


def test_a_revoked_token_ends_the_node(short):
    job = short.submit_ledger("long", 10)
    node = short.until_status(job, "running")["on"][0].partition(":")[0]
    assert short.client().delete(f"/v1/nodes/{node}/token")["revoked"] is True
    until(lambda: short.nodes()[node]["state"] == "lost", 20)
    short.until_status(job, "finished")
    assert short.job(job)["attempt"] == 2
    assert not violations(short.lines())
