"""The ledger finds what each safety rule prevents: with the rule switched off, a job runs twice at a time."""

import signal
import time

import pytest

from tests.cluster.chaos_agents import switched_off
from tests.cluster.judge import double_runs
from tests.cluster.pair_world import PairWorld
from tests.cluster.world import ClusterWorld, until


@pytest.mark.parametrize("rule", ["term", "deposed"])
def test_agents_do_not_obey_a_service_that_does_not_know_it_was_replaced(rule, tmp_path, postgres):
    """Without terms, the old service keeps the job alive that the new one has given up; with them, it cannot."""
    options = {"gpus": 1, "lease_s": 12.0, "margin_s": 1.0}
    with switched_off(rule), PairWorld(tmp_path, postgres.new_database(), ("a", "b"), **options) as world:
        old = world.leader()
        new = world.until_it_stands_by(1 - old)
        world.submit_ledger("long", 60, retries=5)
        node = until(world.lines)[0]["gpu"].partition(":")[0]
        world.sides[old].send_signal(signal.SIGSTOP)
        until(lambda: world.leader() == new, 30)
        until(world._answers, 30, world.said)
        world.until_open("a", "b", seconds=30)
        world.relays[node].to[new].cut()  # the job's node hears the old service only, and the other one the new one
        world.relays["b" if node == "a" else "a"].to[old].cut()
        world.sides[old].send_signal(signal.SIGCONT)
        until(lambda: any(line["attempt"] == 2 for line in world.lines()), 60, world.said)
        time.sleep(1.0)
        assert bool(double_runs(world.lines())) is (rule == "term")


@pytest.mark.parametrize("rule", ["lease", "silence", "none"])
def test_without_a_safety_rule_a_job_runs_twice(rule, tmp_path):
    with (
        switched_off(rule),
        ClusterWorld(tmp_path, ("a", "b"), gpus=1, lease_s=3.0, margin_s=0.5) as world,
    ):
        job = world.submit_ledger("long", 7.0)
        node = world.until_status(job, "running")["on"][0].partition(":")[0]
        until(lambda: world.lines())
        world.relays[node].cut()
        until(lambda: any(line["attempt"] == 2 for line in world.lines()), 20.0)
        time.sleep(0.5)
        assert bool(double_runs(world.lines())) is (rule != "none")
