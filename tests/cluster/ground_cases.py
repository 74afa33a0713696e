"""What holds on every ground. `test_slurm.py` and `test_ray.py` import these tests and bring their own
`shared_world`: a service with two nodes of one GPU, two jobs to a GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.live.grounds.tickets import PilotKey
from tests.cluster.judge import double_runs, violations
from tests.cluster.test_agents import PYTHON_DDP
from tests.cluster.world import COMMAND, environment, until


@pytest.fixture
def world(shared_world):
    """A service with two nodes that are open, and an empty ledger."""
    shared_world.until_nodes(2)
    shared_world.ledger.write_text("")
    return shared_world


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=environment(), timeout=60)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def running_on(world, name: str, seconds: float, **fields) -> tuple[str, str]:
    """Submit a job that writes into the ledger; return it and its node when it runs."""
    job = world.submit_ledger(name, seconds, **fields)
    node = world.until_status(job, "running")["on"][0].partition(":")[0]
    until(lambda: any(line["job"] == name for line in world.lines()))
    return job, node


def test_two_pytorch_gangs_over_two_nodes_share_their_gpus(world):
    job = world.submit(sys.executable, "-c", PYTHON_DDP.replace("range(5)", "range(400)"), gpus=2)
    other = world.submit(sys.executable, "-c", PYTHON_DDP, gpus=2)
    until(lambda: {world.job(one)["status"] for one in (job, other)} == {"running"}, 60, world.said)
    assert set(world.job(job)["on"]) == set(world.job(other)["on"])
    assert len({place.partition(":")[0] for place in world.job(job)["on"]}) == 2
    for one in (job, other):
        world.until_status(one, "finished", "failed", seconds=180)
        outputs = {world.log(one, rank) for rank in range(2)}
        assert len(outputs) == 1, outputs
        assert outputs.pop().startswith("sum 2.0"), world.client().raw(f"/v1/jobs/{one}/logs", stream="stderr")


def test_the_token_of_a_pilot_is_in_no_argument_variable_or_log(world):
    job = world.submit("sh", "-c", "env; sleep 30")
    world.until_status(job, "running")
    until(lambda: "CARPOOL_JOB" in world.log(job))
    key = PilotKey(world.home / "pilots.key")
    secrets = [key.token(world.pilot_of(node)).rpartition(".")[2] for node in world.open_nodes()]
    tickets = list((world.home / "pilots").glob("*.json"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in tickets)
    seen = world.log(job) + world.said() + world.ground_knows()
    for pid in (*(pid for node in world.open_nodes() for pid in world.agent_pids(node)), *world.job_processes()):
        for name in ("cmdline", "environ"):
            seen += Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    assert "carpool.live.agent" in seen
    assert len(secrets) == 2
    assert not [secret for secret in secrets if secret in seen]
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")


def test_workers_go_on_by_the_grounds_word_while_the_service_is_away(world):
    job, _ = running_on(world, "long", 13)
    world.kill_service()
    time.sleep(2 * world.lease_s + world.margin_s)
    world.serve()
    assert world.until_status(job, "finished")["attempt"] == 1
    assert not violations(world.lines())


def test_a_silent_node_is_given_up_by_the_ground_before_its_jobs_run_elsewhere(world):
    job, node = running_on(world, "long", 60, retries=3)
    others = frozenset(world.pilot_of(other) for other in world.open_nodes() if other != node)
    world.relay.only = others  # its agent asks the ground, and goes on until that denies it
    cut = now()
    until(lambda: any(line["attempt"] == 2 for line in world.lines()), 90, world.said)
    first = [line["at"] for line in world.lines() if line["attempt"] == 1]
    second = [line["at"] for line in world.lines() if line["attempt"] == 2]
    assert max(first) > cut + world.lease_s - 1.0, "the ground vouched for it"
    assert min(second) < cut + 2 * world.lease_s + world.margin_s + world.notices_s
    assert not double_runs(world.lines())
    world.relay.only = None
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")
    world.until_nodes(2)


def test_jobs_of_a_silent_pilot_go_on_under_the_next_pilot_of_their_node_or_run_elsewhere(world):
    job, node = running_on(world, "long", 20, retries=3)
    pilot = world.pilot_of(node)
    world.relay.cut(pilot)
    until(lambda: pilot not in {row["pilot"] for row in world.nodes().values() if row["state"] == "open"}, 60)
    world.until_status(job, "finished", seconds=90)
    assert world.job(job)["attempt"] <= 2
    assert not violations(world.lines())
    world.relay.restore(pilot)
    world.until_nodes(2)


def test_a_stopped_agent_loses_its_workers(world):
    job, node = running_on(world, "long", 7, retries=3)
    for pid in world.agent_pids(node):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: world.job(job)["attempt"] == 2 and world.job(job)["status"] == "running", 90, world.said)
    world.until_status(job, "finished")
    assert not violations(world.lines())
    world.until_nodes(2)


def test_a_killed_supervisor_costs_a_restart_at_most(world):
    job, node = running_on(world, "long", 6, retries=3)
    os.kill(world.supervisors()[node], signal.SIGKILL)
    world.until_status(job, "finished", seconds=90)
    assert world.job(job)["attempt"] <= 2, f"{world.job(job)}\n{world.lines()}\n{world.said()}"
    assert not violations(world.lines())
    world.until_nodes(2)


def test_commands_show_the_ground_and_both_of_its_ends(world):
    home = ["--home", str(world.home)]
    shown = run("nodes", *home).stdout
    rows = [line.split()[:3] for line in shown.splitlines()[2:-1] if "open" in line]
    assert rows == [[node, "open", world.ground] for node in world.open_nodes()]
    assert f"from {world.ground}: 2 to 2 nodes; pilots: 2 running" in shown
    until(lambda: all(world.nodes()[node]["witness"] for node in world.open_nodes()))
    found = {row["what"]: row for row in json.loads(run("doctor", *home, "--json").stdout)}
    assert found[f"ground {world.ground}"]["level"] == "ok"
    for node in world.open_nodes():
        assert found[f"node {node}"]["level"] == "ok"
        assert f"{world.ground} answers it" in found[f"node {node}"]["found"]
