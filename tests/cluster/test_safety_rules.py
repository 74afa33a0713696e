"""The ledger finds what each safety rule prevents: with the rule switched off, a job runs twice at a time."""

import signal
import sys
import time
from pathlib import Path

import pytest

from carpool.live.home import Home
from tests.cluster import world as worlds
from tests.cluster.judge import double_runs
from tests.cluster.test_agents_failover import Twins
from tests.cluster.world import WORKER, ClusterWorld, until


@pytest.mark.parametrize("rule", ["term", "deposed"])
def test_agents_do_not_obey_a_service_that_does_not_know_it_was_replaced(rule, tmp_path, postgres):
    """Without terms, the old service keeps the job alive that the new one has given up; with them, it cannot."""
    mutated = [sys.executable, str(Path(__file__).with_name("mutated.py")), rule]
    twins = Twins(tmp_path, postgres.new_database(), lease_s=12.0, command=mutated)
    try:
        twins.serve(0)
        until(twins.answers, 60, twins.said)
        twins.serve(1)
        for name in ("a", "b"):
            twins.join(name)
        until(lambda: "stands by" in (twins.folder / "serve-1.log").read_text(), 30, twins.said)
        command = [sys.executable, "-I", "-S", str(WORKER), str(twins.ledger), "long", "60"]
        request = {"command": command, "directory": "/tmp", "name": "long", "watch": False, "retries": 5}
        twins.client().post("/v1/jobs", request)
        node = until(twins.lines)[0]["gpu"].partition(":")[0]
        twins.services[0].send_signal(signal.SIGSTOP)
        until(lambda: (found := Home(twins.home).read_address()) and found["pid"] == twins.services[1].pid, 30)
        until(lambda: twins.answers() and set(twins.states().values()) == {"open"}, 30, twins.said)
        twins.relays[node][1].cut()  # the job's node hears the old service only, and the other one the new one
        twins.relays["b" if node == "a" else "a"][0].cut()
        twins.services[0].send_signal(signal.SIGCONT)
        until(lambda: any(line["attempt"] == 2 for line in twins.lines()), 60, twins.said)
        time.sleep(1.0)
        assert bool(double_runs(twins.lines())) is (rule == "term")
    finally:
        twins.close()


@pytest.mark.parametrize("rule", ["lease", "silence", "none"])
def test_without_a_safety_rule_a_job_runs_twice(rule, tmp_path, monkeypatch):
    mutated = [sys.executable, str(Path(__file__).with_name("mutated.py")), rule]
    monkeypatch.setattr(worlds, "COMMAND", mutated)
    with ClusterWorld(tmp_path, ("a", "b"), gpus=1, lease_s=3.0, margin_s=0.5) as world:
        job = world.submit_ledger("long", 7.0)
        node = world.until_status(job, "running")["on"][0].partition(":")[0]
        until(lambda: world.lines())
        world.relays[node].cut()
        until(lambda: any(line["attempt"] == 2 for line in world.lines()), 20.0)
        time.sleep(0.5)
        assert bool(double_runs(world.lines())) is (rule != "none")
