"""Nodes with homes of their own: a job that stops on one of them goes on elsewhere from its checkpoint."""

import hashlib
import shutil
import sys
import time
from pathlib import Path

import pytest
import requests

from carpool.live.home import Home
from tests.cluster.world import ClusterWorld, until

JOB = Path(__file__).with_name("saving_job.py")
STEPS = 120


class OwnHomes(ClusterWorld):
    """A cluster whose nodes do not see the service's home."""

    def executor_options(self):
        return ["--executor", f"agents:lease={self.lease_s}s,margin={self.margin_s}s,checkpoints=4MiB"]

    def hide_home(self):
        """Let no node see the service's home, also after a restart of the service, which cannot write the file then."""
        (self.home / "shared-home").unlink()
        (self.home / "shared-home").mkdir()
        until(lambda: not any(row["shared_home"] for row in self.nodes().values()))

    def train(self, *options, steps=STEPS):
        words = [sys.executable, str(JOB), str(steps), *options]
        return self.submit(*words, grace_s=20.0, name="saving", iterations=steps)

    def move(self, job):
        """Let a job save and go on elsewhere; return the node that it left."""
        until(lambda: "from" in self.log(job))
        name = self.until_status(job, "running")["on"][0].partition(":")[0]
        self.client().put(f"/v1/nodes/{name}", {"state": "drained"})
        until(lambda: self.log(job).count("step") > 1)
        attempt = self.job(job)["attempt"]
        self.client().post(f"/v1/jobs/{job}/requeue")
        until(lambda: self.job(job)["attempt"] > attempt and self.job(job)["status"] == "running", 60.0, self.said)
        self.client().put(f"/v1/nodes/{name}", {"state": "open"})
        return name

    def folder_on(self, name, job):
        return Home(self.folder / f"agent-{name}").checkpoints(job)


def result(steps=STEPS):
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return f"result {state}"


def begun_at(world, job):
    """The step from which the present attempt went on."""
    return int(until(lambda: world.log(job)).split()[1])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with OwnHomes(tmp_path_factory.mktemp("own"), ("a", "b"), gpus=1) as found:
        found.hide_home()
        yield found


def test_a_job_goes_on_elsewhere_from_its_checkpoint_with_the_same_result(world):
    job = world.train("--bulk", "3000000")
    first = world.move(job)
    assert begun_at(world, job) > 5
    second = world.until_status(job, "running")["on"][0].partition(":")[0]
    assert second != first
    assert not world.folder_on(first, job).exists(), "the service has it"
    assert (world.folder_on(second, job) / "last" / "state").exists()
    before = begun_at(world, job)
    assert world.move(job) == second
    assert begun_at(world, job) > before, "and back again"
    assert world.until_status(job, "finished")["attempt"] == 3
    assert world.log(job).splitlines()[-1] == result()
    kept = Home(world.home).checkpoints(job)
    assert (kept / "last" / "state").exists()
    assert not list(Home(world.home).job(job).glob(".*")), "no archive is left"


def test_a_checkpoint_that_is_too_large_stays_and_that_is_said(world):
    job = world.train("--bulk", "6000000")
    first = world.move(job)
    assert begun_at(world, job) == 0
    left = world.job(job)["checkpoint_left"]
    assert f"on node {first} only (it holds more than 4 MiB" in left
    assert "elsewhere it starts from its beginning" in left
    assert any(left[1:] in line for line in world.client().get(f"/v1/jobs/{job}/explain")["sentences"])
    assert (world.folder_on(first, job) / "last" / "state").exists()
    world.until_status(job, "finished")
    assert world.log(job).splitlines()[-1] == result()


def test_an_agent_cannot_touch_checkpoints_of_another_node(world):
    job = world.submit("sleep", "60")
    name = world.until_status(job, "running")["on"][0].partition(":")[0]
    other = "b" if name == "a" else "a"
    url = f"http://127.0.0.1:{world.port}/v1/agents/checkpoint"
    place = {"job": job, "attempt": 1, "offset": 0, "size": 1, "sha256": "0" * 64}
    for node, expected in ((other, 404), (name, 200)):
        headers = {"Authorization": f"Bearer {(world.folder / f'{node}.token').read_text()}"}
        sent = requests.post(url, params=place, data=b"x", headers=headers, timeout=10)
        assert sent.status_code == expected
        left = requests.post(f"{url}/left", params=place, json={"why": "x"}, headers=headers, timeout=10)
        assert left.status_code == expected
    for method, path in (("GET", ""), ("GET", "/piece"), ("DELETE", "")):
        headers = {"Authorization": f"Bearer {(world.folder / f'{other}.token').read_text()}"}
        asked = requests.request(method, url + path, params=place, headers=headers, timeout=10)
        assert asked.status_code == 404
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")


def test_a_service_and_an_agent_that_are_killed_meanwhile_change_nothing(world):
    job = world.train("--bulk", "3000000")
    until(lambda: "from" in world.log(job))
    name = world.until_status(job, "running")["on"][0].partition(":")[0]
    world.client().put(f"/v1/nodes/{name}", {"state": "drained"})
    until(lambda: world.log(job).count("step") > 1)
    world.client().post(f"/v1/jobs/{job}/requeue")
    until(lambda: (world.folder_on(name, job) / "last").is_symlink() or world.job(job)["attempt"] > 1)
    world.kill_service()
    world.kill_agent(name)
    world.start_agent(name)
    world.serve()
    row = world.until_status(job, "finished", seconds=90.0)
    assert row["attempt"] == 2
    assert begun_at(world, job) > 5
    assert world.log(job).splitlines()[-1] == result()
    world.client().put(f"/v1/nodes/{name}", {"state": "open"})
    world.until_open("a", "b")


def test_the_checkpoint_of_a_lost_node_is_said_to_be_lost(world):
    job = world.train(steps=400)
    world.move(job)
    name = world.until_status(job, "running")["on"][0].partition(":")[0]
    until(lambda: world.log(job).count("step") > 1)
    time.sleep(1.5)  # an exchange has told of it
    world.client().put(f"/v1/nodes/{name}", {"state": "lost"})
    left = until(lambda: world.job(job)["checkpoint_left"])
    assert f"on node {name} only (node {name} was given up by the operator)" in left
    assert "goes on from that of attempt 1" in left
    world.client().post(f"/v1/jobs/{job}/cancel")
    world.until_status(job, "cancelled")
    shutil.rmtree(world.folder_on(name, job), ignore_errors=True)
