"""Nodes from Ray: a head and three nodes on loopback, pilots, gangs over nodes, and what Ray's side can do."""

import os
import signal

import pytest

from tests.cluster.ground_cases import *  # noqa: F403
from tests.cluster.ground_cases import running_on
from tests.cluster.ground_world import RayWorld
from tests.cluster.judge import violations
from tests.cluster.world import until
from tests.support.ray_cluster import RayCluster


@pytest.fixture(scope="module")
def ray():
    with RayCluster(3) as found:
        yield found


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory, ray):
    world = RayWorld(tmp_path_factory.mktemp("ray"), ray, count="2", gpus=1, lease_s=4.0, margin_s=1.0)
    world.jobs_per_gpu = 2
    world.options = ["--policy", "sjf-ffs"]
    with world:
        yield world


def test_ray_starts_a_killed_actor_again_and_its_jobs_are_not_doubled(world):
    job, node = running_on(world, "long", 8, retries=3)
    actor = world.actor_of(node)
    os.kill(actor, signal.SIGKILL)
    until(lambda: world.actor_of(node) not in (None, actor), 60, world.said)
    world.until_status(job, "finished", seconds=90)
    assert world.job(job)["attempt"] <= 2
    assert not violations(world.lines())
    world.until_nodes(2)


def test_jobs_of_a_node_whose_raylet_dies_run_elsewhere(world, ray):
    job, node = running_on(world, "long", 12, retries=3)
    ray.kill(node)
    until(lambda: world.nodes()[node]["state"] == "lost" and len(world.open_nodes()) == 2, 90, world.said)
    world.until_status(job, "finished", seconds=90)
    assert not violations(world.lines())
    ray.start_node(node)
