"""Two services on PostgreSQL and agents that know both: the one that takes over finds all jobs, which run on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.live.home import Home
from carpool.live.http.client import Client
from tests.cluster.judge import violations
from tests.cluster.relay import Relay
from tests.cluster.world import COMMAND, WORKER, environment, until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Twins:
    """Two services and their agents."""

    def __init__(self, folder, address, lease_s=15.0, command=COMMAND):
        self.folder, self.home, self.address = folder, folder / "home", address
        self.ports = [free_port(), free_port()]
        self.services, self.agents = [], []
        self.lease_s, self.command = lease_s, command
        self.relays = {}
        """The roads of each agent to both services."""
        self.ledger = folder / "ledger"
        self.ledger.touch()

    def serve(self, number):
        words = ["serve", "--home", self.home, "--database", self.address, "--port", self.ports[number]]
        words += ["--executor", f"agents:lease={self.lease_s}s,margin=1s", "--jobs-per-gpu", 1]
        with (self.folder / f"serve-{number}.log").open("ab") as log:
            command = [*self.command, *map(str, words)]
            self.services.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment()))

    def join(self, name):
        token = self.folder / f"{name}.token"
        token.touch(0o600)
        token.write_text(self.client().post("/v1/nodes", {"name": name})["token"])
        words = ["agent", "--name", name, "--token-file", token, "--gpus", 1, "--home", self.folder / f"agent-{name}"]
        self.relays[name] = [Relay(port) for port in self.ports]
        for relay in self.relays[name]:
            words += ["--join", relay.url]
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [*self.command, *map(str, words)]
            self.agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment()))
        until(lambda: self.states().get(name) == "open", 60, self.said)

    def client(self) -> Client:
        return Client.find(self.home)

    def states(self):
        return {row["node"]: row["state"] for row in self.client().get("/v1/nodes")["nodes"]}

    def answers(self):
        try:
            return bool(self.client().get("/v1/me"))
        except (ValueError, OSError):
            return False

    def said(self):
        return "\n".join(f"{path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def lines(self):
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]

    def close(self):
        for process in (*self.agents, *self.services):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)
        for line in self.lines():
            try:
                if WORKER.name.encode() in Path(f"/proc/{line['pid']}/cmdline").read_bytes():
                    os.kill(line["wrapper"], signal.SIGKILL)
            except OSError:
                continue
        for relay in (relay for roads in self.relays.values() for relay in roads):
            relay.close()


@pytest.fixture
def twins(tmp_path, postgres):
    found = Twins(tmp_path, postgres.new_database())
    try:
        yield found
    finally:
        found.close()


def test_jobs_outlive_a_leader_that_is_stopped_and_wakes_up(twins):
    twins.serve(0)
    until(twins.answers, 60, twins.said)
    twins.serve(1)
    twins.join("a")
    command = [sys.executable, "-I", "-S", str(WORKER), str(twins.ledger), "long", "20"]
    request = {"command": command, "directory": "/tmp", "name": "long", "watch": False, "retries": 5}
    job = twins.client().post("/v1/jobs", request)["job"]
    until(lambda: twins.lines())
    until(lambda: "stands by" in (twins.folder / "serve-1.log").read_text(), 30, twins.said)
    twins.services[0].send_signal(signal.SIGSTOP)
    address = Home(twins.home)
    until(lambda: (found := address.read_address()) and found["pid"] == twins.services[1].pid, 30, twins.said)
    until(lambda: twins.answers() and twins.states().get("a") == "open", 30, twins.said)
    twins.services[0].send_signal(signal.SIGCONT)
    assert twins.services[0].wait(20) == 3, "it was deposed"
    later = twins.client().post("/v1/jobs", {"command": ["true"], "directory": "/tmp"})["job"]
    until(lambda: twins.client().get(f"/v1/jobs/{job}")["status"] == "finished", 60, twins.said)
    assert twins.client().get(f"/v1/jobs/{job}")["attempt"] == 1
    assert not violations(twins.lines())
    until(lambda: twins.client().get(f"/v1/jobs/{later}")["status"] == "finished", 30, twins.said)
    memory = json.loads((twins.folder / "agent-a" / "agent.json").read_text())
    assert memory["term"] == 2
    time.sleep(0.1)
