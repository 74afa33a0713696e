"""`carpool serve --emulate`: gangs on emulated GPUs through the real service, its agents and its wrappers."""

import os
import re
import signal
import subprocess
import time

import pytest

import carpool
from carpool.core.model import Job
from carpool.core.perf import Placement
from carpool.emulate.gpus import parse_gpus
from carpool.live.home import Home
from tests.support.command_line import COMMAND, environment

LIMIT_S = 90.0


class EmulatedCluster:
    """A service with emulated GPUs on a home of its own."""

    def __init__(self, folder, gpus: str, *options: str) -> None:
        self.home = Home(folder / "home")
        words = [*COMMAND, "serve", "--home", str(self.home.path), "--port", "0", "--emulate", gpus, *options]
        self.log = folder / "serve.log"
        with self.log.open("a") as output:
            self.process = subprocess.Popen(words, env=environment(), stdout=output, stderr=output)
        until(lambda: self.home.read_address() is not None)
        self.connection = carpool.connect(home=self.home.path)

    def get(self, path: str):
        return self.connection.request("GET", path)

    def submit(self, **fields) -> str:
        fields = {"model": "yolov3", "batch": 8, **fields}
        command = [*COMMAND, "emulate"]
        return self.connection.submit(command, env={"PYTHONPATH": environment()["PYTHONPATH"]}, **fields).id

    def show(self, job: str):
        return self.get(f"/v1/jobs/{job}")

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0, self.log.read_text()


def until(condition, seconds: float = LIMIT_S):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def pilots(home: Home) -> list[int]:
    mark = str(home.pilots)
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline") as file:
                    words = file.read()
            except OSError:
                continue
            if "carpool.live.agent.pilot" in words and mark in words:
                found.append(int(name))
    return found


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(*words: str) -> EmulatedCluster:
        made.append(EmulatedCluster(tmp_path, *words))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        for pid in pilots(one.home):
            os.kill(pid, signal.SIGKILL)


def test_a_gang_over_two_emulated_nodes_runs_is_suspended_and_goes_on(cluster):
    service = cluster("t4:2x2:100", "--policy", "fifo")
    until(lambda: [row["state"] for row in service.get("/v1/nodes")["nodes"]] == ["open", "open"])
    rows = service.get("/v1/nodes")["nodes"]
    assert {(row["ground"], row["gpus"], row["device"]) for row in rows} == {
        ("emulated", 2, "emulated NVIDIA T4 at 100× speed")
    }
    job = service.submit(gpus=4, iterations=1200)
    until(lambda: (row := service.show(job))["measured"] and row["progress"] > 0.2)
    service.connection.request("POST", f"/v1/jobs/{job}/requeue")
    until(lambda: service.show(job)["attempt"] == 2)
    until(lambda: service.show(job)["status"] == "finished")
    said = re.search(r"iteration 1200 of 1200 after ([0-9.]+) s", service.connection.job(job).logs())
    whole = 1200 * parse_gpus("t4:2x2:100").model().iteration_time(Job("1", 0, "yolov3", 4, 8, 1), 1, Placement(4, 2))
    assert 0.1 * whole < float(said[1]) < 0.85 * whole
    assert not list((service.home.emulated / "gangs").iterdir())
    assert len(pilots(service.home)) == 2
    service.end()
    until(lambda: not pilots(service.home), 10)


def test_agents_and_jobs_outlive_the_service_and_the_next_one_finds_them(cluster, tmp_path):
    port = str(20_000 + os.getpid() % 20_000)
    first = cluster("t4:2x1:100", "--port", port)
    until(lambda: [row["state"] for row in first.get("/v1/nodes")["nodes"]] == ["open", "open"])
    job = first.submit(gpus=2, iterations=2500)
    until(lambda: first.show(job)["status"] == "running")
    before = pilots(first.home)
    first.process.kill()
    first.process.wait()
    first.home.address.unlink(missing_ok=True)
    second = cluster("t4:2x1:100", "--port", port)
    until(lambda: second.show(job)["status"] == "finished")
    assert second.show(job)["attempt"] == 1
    assert sorted(pilots(second.home)) == sorted(before)
    second.end()
