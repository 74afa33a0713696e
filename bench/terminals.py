"""Time from a key to its echo in a terminal, and what a key costs the service: here, and on the node of an agent.

    python bench/terminals.py [--keys 300]

Serves one logical GPU twice, by the local executor and through an agent on loopback, opens a terminal with `cat`, and
types one key at a time. Prints as JSON: the median and the 95th percentile in milliseconds, the CPU time that a key
takes in the service and in the agent, and the load average of the machine.
"""

import argparse
import base64
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from carpool.live.http.client import Client
from tests.support.command_line import COMMAND, environment
from tests.support.served import Served  # the same service as in the tests


def start_agent(served: Served, folder: Path) -> subprocess.Popen[bytes]:
    """Start an agent with one logical GPU, and wait until its node is open."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(served.client().post("/v1/nodes", {"name": "a"})["token"])
    words = ["agent", "--join", served.url, "--token-file", str(token), "--name", "a", "--gpus", "1"]
    log = (folder / "agent.log").open("wb")
    agent = subprocess.Popen(
        [*COMMAND, *words, "--home", str(folder / "agent")], stdout=log, stderr=log, env=environment()
    )
    while not any(row["state"] == "open" for row in served.client().get("/v1/nodes")["nodes"]):
        time.sleep(0.1)
    return agent


def cpu_s(process: int) -> float:
    """CPU seconds of a process and of its children that live."""
    own = psutil.Process(process)
    return sum(float(sum(one.cpu_times()[:2])) for one in [own, *own.children(recursive=True)])


def echoes(client: Client, job: str) -> Iterator[bytes]:
    for message in client.terminal(job, None, 0, None):
        if message.kind == "Output":
            yield base64.b64decode(message.data["data"])


def measure(served: Served, keys: int, agent: subprocess.Popen[bytes] | None) -> dict[str, Any]:
    job = served.submit("sh", "-c", "stty raw -echo; echo ready; exec cat", terminal=True)
    served.until(job, "running")
    served.until_logged(job, b"ready")
    typing, printed = served.client(), echoes(served.client(), job)
    next(printed)
    processes = {"service": served.process.pid} | ({"agent": agent.pid} if agent is not None else {})
    before = {name: cpu_s(pid) for name, pid in processes.items()}
    delays = []
    for number in range(1, keys + 1):
        data = {"typist": "0123456789abcdef", "number": number, "data": base64.b64encode(b"x").decode()}
        began = time.monotonic()
        typing.post(f"/v1/jobs/{job}/terminal", data)
        next(printed)
        delays.append(1000 * (time.monotonic() - began))
        time.sleep(0.01)
    cost = {name: 1000 * (cpu_s(pid) - before[name]) / keys for name, pid in processes.items()}
    served.client().post(f"/v1/jobs/{job}/cancel")
    served.until(job, "cancelled")
    return {
        "median_ms": round(statistics.median(delays), 1),
        "p95_ms": round(statistics.quantiles(delays, n=20)[-1], 1),
        "cpu_ms_per_key": {name: round(value, 1) for name, value in cost.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=300)
    keys = parser.parse_args().keys
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = Served(folder / "here", "--gpus", "1").start()
        found: dict[str, Any] = {"local": measure(here, keys, None)}
        here.end()
        cluster = Served(folder / "cluster", "--executor", "agents").start()
        agent = start_agent(cluster, folder)
        try:
            found["node"] = measure(cluster, keys, agent)
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(30)
            cluster.end()
    print(json.dumps({**found, "load_average": round(os.getloadavg()[0], 1)}, indent=2))


if __name__ == "__main__":
    main()
