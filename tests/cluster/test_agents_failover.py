"""Two services on PostgreSQL and agents that know both: the one that takes over finds all jobs, which run on."""

import json
import signal

import pytest

from tests.cluster.judge import violations
from tests.cluster.pair_world import PairWorld
from tests.cluster.world import until


@pytest.fixture
def world(tmp_path, postgres):
    with PairWorld(tmp_path, postgres.new_database(), ("a",), gpus=1, lease_s=15.0, margin_s=1.0) as found:
        yield found


def test_jobs_outlive_a_leader_that_is_stopped_and_wakes_up(world):
    job = world.submit_ledger("long", 20, retries=5)
    until(world.lines)
    old = world.leader()
    new = world.until_it_stands_by(1 - old)
    world.sides[old].send_signal(signal.SIGSTOP)
    until(lambda: world.leader() == new, 30, world.said)
    until(world._answers, 30, world.said)
    world.until_open("a", seconds=30)
    world.sides[old].send_signal(signal.SIGCONT)
    assert world.sides[old].wait(20) == 3, "it was deposed"
    later = world.submit("true")
    assert world.until_status(job, "finished")["attempt"] == 1
    assert not violations(world.lines())
    world.until_status(later, "finished", seconds=30)
    memory = json.loads((world.folder / "agent-a" / "agent.json").read_text())
    assert memory["term"] == 2
