"""Nodes from Slurm: four slurmd on loopback, pilots, gangs over nodes, and everything that Slurm's side can do."""

import sys
import time
from pathlib import Path

import pytest

from tests.cluster import world as worlds
from tests.cluster.ground_cases import *  # noqa: F403
from tests.cluster.ground_cases import now, running_on
from tests.cluster.ground_world import SlurmWorld
from tests.cluster.judge import double_runs, violations
from tests.cluster.world import until
from tests.support.slurm import SlurmCluster


@pytest.fixture(scope="module")
def slurm():
    with SlurmCluster(4) as found:
        yield found


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory, slurm):
    world = SlurmWorld(tmp_path_factory.mktemp("slurm"), slurm, count="2", gpus=1, lease_s=4.0, margin_s=1.0)
    world.jobs_per_gpu = 2
    world.options = ["--policy", "sjf-ffs"]
    with world:
        yield world


def test_workers_end_with_the_lease_where_neither_the_service_nor_slurm_answers(world):
    job, _ = running_on(world, "long", 12)
    world.slurm.kill("slurmctld")
    world.kill_service()
    gone = now()
    time.sleep(world.lease_s + 1.5)
    assert max(line["at"] for line in world.lines()) < gone + world.lease_s + 0.5
    assert not world.job_processes()
    world.slurm.start_slurmctld()
    world.serve()
    assert world.until_status(job, "finished")["attempt"] == 2
    assert not violations(world.lines())


def test_slurmctld_and_slurmd_may_die_without_a_word_to_jobs(world):
    job, node = running_on(world, "long", 9)
    world.slurm.kill("slurmctld")
    world.slurm.kill(node)
    time.sleep(3.0)
    world.slurm.start_slurmctld()
    world.slurm.start_slurmd(node)
    assert world.until_status(job, "finished")["attempt"] == 1
    assert not violations(world.lines())


def test_a_foreign_scancel_costs_a_restart(world):
    job, node = running_on(world, "long", 6)
    number = world.slurm.command("squeue", "--noheader", "--format=%i", f"--nodelist={node}").strip()
    world.slurm.command("scancel", number)
    world.until_status(job, "finished", seconds=90)
    assert world.job(job)["attempt"] == 2
    assert not violations(world.lines())
    world.until_nodes(2)


def test_the_cluster_grows_with_the_queue_and_gives_idle_nodes_back(tmp_path, slurm, shared_world):
    shared_world.kill_service()
    shared_world.end_pilots()
    world = SlurmWorld(tmp_path, slurm, count="0-3", gpus=1)
    world.options = ["--idle", "3s", "--grow-after", "1s"]
    with world:
        jobs = [world.submit("sleep", "8") for _ in range(2)] + [world.submit("sleep", "4", gpus=2)]
        until(lambda: len(world.slurm_jobs()) == 3, 40, world.said)
        for job in jobs:
            world.until_status(job, "finished", seconds=60)
        until(lambda: not world.slurm_jobs(), 40, world.said)
        until(lambda: {row["state"] for row in world.nodes().values()} == {"lost"}, 20, world.said)
        job = world.submit("true")
        world.until_status(job, "finished")


def test_jobs_save_and_move_before_the_allocation_ends(tmp_path, slurm, shared_world):
    world = SlurmWorld(tmp_path, slurm, count="1-2", gpus=1)
    world.options = ["--time-limit", "1m", "--save-before", "48s"]
    script = "trap 'echo saved; exit 0' TERM; echo begun; sleep 100 & wait"
    with world:
        job = world.submit("sh", "-c", script, retries=0)
        world.until_status(job, "running")
        first = next(name for name, row in world.nodes().items() if row["state"] == "open")
        row = world.nodes()[first]
        assert 0.0 < row["ends_at"] - time.time() < 61.0
        until(lambda: world.job(job)["attempt"] == 2, 40, world.said)
        assert world.client().raw(f"/v1/jobs/{job}/logs", rank=0, attempt=1)[0] == b"begun\nsaved\n"
        row = world.until_status(job, "running")
        assert row["on"][0].partition(":")[0] != first or world.nodes()[first]["ends_at"] > time.time() + 30.0


def test_a_job_that_cannot_be_saved_starts_only_where_it_can_end(tmp_path, slurm, shared_world):
    world = SlurmWorld(tmp_path, slurm, count="1-2", gpus=1)
    world.options = ["--time-limit", "2m", "--save-before", "30s"]
    with world:
        world.until_nodes(1)
        job = world.submit("sleep", "1", can_checkpoint=False, duration_s=600.0)
        until(lambda: world.job(job)["held"], 30, world.said)
        assert world.job(job)["attempt"] <= 1
        assert not world.job_processes()
        assert "needs about 10 min" in world.said("serve")
        short = world.submit("sleep", "1", can_checkpoint=False, duration_s=5.0)
        saved = world.submit("sleep", "1", duration_s=600.0)
        for one in (short, saved):
            world.until_status(one, "finished")
        assert world.job(job)["held"]


def test_without_the_wait_for_slurms_word_a_job_runs_twice(tmp_path, slurm, shared_world, monkeypatch):
    """The ledger finds what the rule prevents."""
    mutated = [sys.executable, str(Path(__file__).with_name("mutated.py")), "silence"]
    monkeypatch.setattr(worlds, "COMMAND", mutated)
    with SlurmWorld(tmp_path, slurm, count="2", gpus=1, lease_s=6.0, margin_s=2.0) as world:
        world.until_nodes(2)
        _, node = running_on(world, "long", 30, retries=3)
        world.relay.cut(world.pilot_of(node))
        until(lambda: any(line["attempt"] == 2 for line in world.lines()), 60, world.said)
        time.sleep(0.5)
        assert double_runs(world.lines())
