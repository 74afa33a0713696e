"""The ledger finds what each safety rule prevents: with the rule switched off, a job runs twice at a time."""

import sys
import time
from pathlib import Path

import pytest

from tests.cluster import world as worlds
from tests.cluster.judge import double_runs
from tests.cluster.world import ClusterWorld, until


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
