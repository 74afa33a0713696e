"""A cluster of real processes on loopback: `carpool serve --executor agents`, agents with logical GPUs, and relays.

Jobs write into one ledger when they start, while they run and when they end, so that what ran where can be judged
without believing the service.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from carpool.live.home import Home
from carpool.live.http.client import Client
from tests.cluster.relay import Relay

COMMAND = [sys.executable, "-m", "carpool.cli"]
WORKER = Path(__file__).with_name("ledger_job.py")
START_S = 60.0


def until(condition, seconds: float = 30.0, what=lambda: ""):
    """Wait for something to become true, and return it. `what`: returns what to say if it does not."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what() or "it did not happen in time"
        time.sleep(0.05)
    return found


class ClusterWorld:
    """A service and its agents."""

    def __init__(self, folder: Path, nodes=("a", "b"), gpus: int = 2, lease_s: float = 30.0, margin_s: float = 2.0):
        self.folder, self.home, self.gpus = folder, folder / "service", gpus
        self.lease_s, self.margin_s = lease_s, margin_s
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.service: subprocess.Popen | None = None
        self.agents: dict[str, subprocess.Popen] = {}
        self.relays: dict[str, Relay] = {}
        self.port = 0
        self.names = nodes
        self.jobs_per_gpu = 1

    @property
    def all_gpus(self) -> int:
        return self.gpus * len(self.names)

    def executor_options(self) -> list[str]:
        return ["--executor", f"agents:lease={self.lease_s}s,margin={self.margin_s}s"]

    def more_options(self) -> list[str]:
        """More options of `carpool serve`."""
        return []

    def environment(self) -> dict[str, str]:
        """The environment of the service."""
        return environment()

    def __enter__(self):
        self.serve()
        for name in self.names:
            self.join(name)
        self.until_open(*self.names)
        return self

    def __exit__(self, *_):
        for name in list(self.agents):
            self.kill_agent(name)
        if self.service is not None and self.service.poll() is None:
            self.service.send_signal(signal.SIGCONT)
            self.service.kill()
            self.service.wait(10)
        for pid in self.job_processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for relay in self.relays.values():
            relay.close()

    def join(self, name: str) -> None:
        """Start the agent of a new node."""
        self.relays[name] = self.new_roads()
        token = self.folder / f"{name}.token"
        token.touch(0o600)
        token.write_text(self.client().post("/v1/nodes", {"name": name})["token"])
        self.start_agent(name)

    def new_roads(self) -> Relay:
        """Return the roads from a new node."""
        return Relay(self.port)

    # ---- processes -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        Home(self.home).remove_address()
        options = ["--home", str(self.home), "--port", str(self.port), *self.executor_options()]
        options += ["--jobs-per-gpu", str(self.jobs_per_gpu), *self.more_options()]
        with (self.folder / "serve.log").open("ab") as log:
            command = [*COMMAND, "serve", *options]
            self.service = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment())
        address = until(lambda: Home(self.home).read_address(), START_S, lambda: self.said("serve"))
        self.port = int(address["url"].rpartition(":")[2])
        until(self._answers, START_S, lambda: self.said("serve"))

    def _answers(self) -> bool:
        with contextlib.suppress(ValueError, OSError):
            return bool(self.client().get("/v1/me"))
        return False

    def kill_service(self) -> None:
        self.service.kill()
        self.service.wait(10)

    def start_agent(self, name: str, *options: str) -> None:
        words = ["agent", *self.relays[name].options, "--token-file", str(self.folder / f"{name}.token")]
        words += ["--name", name, "--gpus", str(self.gpus), "--home", str(self.folder / f"agent-{name}"), *options]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log, env=environment())

    def agent_pids(self, name: str) -> list[int]:
        """The supervisor, and the agent below it."""
        parent = self.agents[name].pid
        return [parent, *children(parent, b"carpool.live.agent.main")]

    def signal_agent(self, name: str, number: int) -> None:
        for pid in self.agent_pids(name):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill_agent(self, name: str) -> None:
        process = self.agents.pop(name)
        if process.poll() is None:
            for pid in [process.pid, *children(process.pid, b"carpool.live.agent.main")]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            process.kill()
        process.wait(10)

    def job_processes(self) -> list[int]:
        """Processes that belong to jobs of this world: wrappers and workers."""
        mark = str(self.folder).encode()
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
                variables = Path(f"/proc/{name}/environ").read_bytes() if name.isdigit() else b""
                if (b"rank.py" in words and mark in words) or (b"CARPOOL_WORKER_DIR=" + mark) in variables:
                    found.append(int(name))
        return found

    # ---- what users see --------------------------------------------------------------------------------------------

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", (self.home / "admin.token").read_text().strip())

    def nodes(self) -> dict[str, dict]:
        return {row["node"]: row for row in self.client().get("/v1/nodes")["nodes"]}

    def until_open(self, *names: str, seconds: float = START_S) -> None:
        until(lambda: all(self.nodes().get(name, {}).get("state") == "open" for name in names), seconds, self.said)

    def submit(self, *command: str, **fields) -> str:
        request = {"command": list(command), "directory": "/tmp", "grace_s": 1.0, "watch": False, **fields}
        return self.client().post("/v1/jobs", request)["job"]

    def submit_ledger(self, name: str, seconds: float, **fields) -> str:
        command = [sys.executable, "-I", "-S", str(WORKER), str(self.ledger), name, str(seconds)]
        return self.submit(*command, name=name, **fields)

    def job(self, job: str) -> dict:
        return self.client().get(f"/v1/jobs/{job}")

    def until_status(self, job: str, *states: str, seconds: float = 60.0) -> dict:
        until(lambda: self.job(job)["status"] in states, seconds, lambda: f"job {job}: {self.job(job)}\n{self.said()}")
        return self.job(job)

    def log(self, job: str, rank: int = 0) -> str:
        return self.client().raw(f"/v1/jobs/{job}/logs", rank=rank)[0].decode()

    def lines(self, last: int = 0) -> list[dict]:
        """The ledger, or its last lines."""
        return [json.loads(line) for line in self.ledger.read_text().splitlines()[-last:]]

    def said(self, *names: str) -> str:
        files = [self.folder / f"{name}.log" for name in names or ("serve", *self.names)]
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in files if path.exists())


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def children(parent: int, word: bytes = b"") -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if not name.isdigit():
                continue
            status = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == parent and word in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found
