"""Nodes with homes of their own, and jobs of other uids: their checkpoints follow them and stay their own.

Service and agents run as root, as on machines of several users. The users have uids without a login, so that nothing of
the machine is changed.
"""

import contextlib
import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest

from carpool.live.home import Home
from carpool.live.http.client import Client
from tests.cluster.test_own_checkpoints import STEPS, OwnHomes, begun_at, result
from tests.cluster.world import until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can start jobs under other users' ids")
UIDS = {"ann": 7_000_301, "bob": 7_000_302}
JOB = Path(__file__).with_name("saving_job.sh").read_text()


class OwnUsers(OwnHomes):
    """A cluster of root's with two users."""

    def __enter__(self):
        super().__enter__()
        self.tokens = {
            name: self.client().post("/v1/users", {"name": name, "uid": uid})["token"] for name, uid in UIDS.items()
        }
        return self

    def start_agent(self, name, *options):
        super().start_agent(name, "--leave", *options)

    def train_as(self, user, bulk=0):
        words = ["sh", "-c", JOB, "job", str(STEPS), str(bulk)]
        request = {"command": words, "directory": "/tmp", "grace_s": 20.0, "watch": False, "iterations": STEPS}
        return Client(f"http://127.0.0.1:{self.port}", self.tokens[user]).post("/v1/jobs", request)["job"]

    def until_steps(self, job):
        """Wait until a job has taken some steps; return its node."""
        until(lambda: self.log(job).count("step") > 1, 60.0, lambda: f"{self.job(job)}\n{self.said()}")
        return self.until_status(job, "running")["on"][0].partition(":")[0]

    def until_elsewhere(self, job, attempt):
        """Wait until a job has taken some steps in its attempt; return its node."""
        until(lambda: self.job(job)["attempt"] == attempt, 60.0, lambda: f"{self.job(job)}\n{self.said()}")
        return self.until_steps(job)

    def cut_power(self, name):
        """Kill everything on a node, and tell the service that it is gone."""
        self.kill_agent(name)
        mark = str(self.folder / f"agent-{name}").encode()
        for pid in self.job_processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
                if mark in words:
                    os.kill(pid, signal.SIGKILL)
        self.client().put(f"/v1/nodes/{name}", {"state": "lost"})

    def ran_as(self, job):
        """Return the uid of the present attempt, as soon as the service has what it wrote."""

        def written():
            return self.client().raw(f"/v1/jobs/{job}/logs", rank=0, stream="stderr")[0].split()

        return int(until(written, 10.0, self.said)[0])


def check_owner(folder, user):
    """Check that everything in a checkpoint folder belongs to a user, and that nobody else can enter it."""
    paths = [folder, *folder.rglob("*")]
    assert {"last", "state", "weights"} <= {path.name for path in paths}
    assert {(row.st_uid, row.st_gid) for row in map(Path.lstat, paths)} == {(UIDS[user], UIDS[user])}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "last" / "state").stat().st_mode) == 0o640


@pytest.fixture(scope="module")
def world():
    """A cluster in a folder that jobs of others reach; each new run of pytest closes the folders of all runs."""
    with tempfile.TemporaryDirectory(prefix="carpool-users-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with OwnUsers(Path(folder), ("a", "b"), gpus=1) as found:
            found.hide_home()
            yield found


def test_a_job_of_another_uid_goes_on_elsewhere_when_its_node_leaves_or_dies(world):
    job = world.train_as("ann", bulk=3_000_000)
    first = world.until_steps(job)
    assert world.ran_as(job) == UIDS["ann"]
    leaving = world.agents.pop(first)
    leaving.terminate()
    second = world.until_elsewhere(job, 2)
    assert second != first
    assert leaving.wait(60) == 0
    assert world.ran_as(job) == UIDS["ann"]
    begun = begun_at(world, job)
    assert begun > 5
    check_owner(world.folder_on(second, job), "ann")
    check_owner(Home(world.home).checkpoints(job), "ann")
    assert not world.folder_on(first, job).exists(), "the service has it"
    world.start_agent(first)
    world.until_open(first)
    world.cut_power(second)
    assert world.until_elsewhere(job, 3) == first
    assert begun_at(world, job) == begun, "what the dead node had not sent is lost"
    check_owner(world.folder_on(first, job), "ann")
    world.until_status(job, "finished")
    assert world.log(job).splitlines()[-1] == result()
    world.start_agent(second)
    world.until_open("a", "b")


def test_jobs_of_several_users_keep_to_their_own_checkpoints(world):
    jobs = {user: world.train_as(user) for user in UIDS}
    for job in jobs.values():
        world.until_steps(job)
    for job in jobs.values():
        world.client().post(f"/v1/jobs/{job}/requeue")
    for user, job in jobs.items():
        node = world.until_elsewhere(job, 2)
        assert begun_at(world, job) > 5
        assert world.ran_as(job) == UIDS[user]
        check_owner(world.folder_on(node, job), user)
    for job in jobs.values():
        world.until_status(job, "finished")
        assert world.log(job).splitlines()[-1] == result()
