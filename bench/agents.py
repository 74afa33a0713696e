"""Many simulated agents on one real service, over real HTTP: CPU of the service, and how long its answers take.

`python bench/agents.py --agents 1000 --jobs 10000 --seconds 60`. All agents live in this process; each has one GPU and,
like a real agent, an exchange that the service holds and another one whenever it has news. A job is an entry in a
dictionary that ends after its time: `--spread 0.3` lets that vary by σ = 0.3 of its logarithm, and without it all jobs
that start together end together. Ten times a second one of the agents asks as if it had forgotten its orders, which the
service answers at once: that time is the one shown. Nobody waits for another's answer, so that a stall of the service
counts for all that asked during it. `cores` is the CPU of the service alone. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from carpool.live.agent.pacing import exchange_for_ever
from carpool.live.home import Home
from carpool.live.http.client import Client

JOB_S = 20.0
"""Seconds that a simulated job takes."""
ARRAY = 1000
PROBE_S = 0.1


class SimulatedAgent:
    """An agent without processes."""

    def __init__(self, name: str, token: str, port: int, spread: float) -> None:
        self.name, self.token, self.port, self.spread = name, token, port, spread
        self.parts: dict[str, dict] = {}
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.seen, self.number, self.obeyed, self.ran, self.exchanges = "", 0, 0, 0, 0
        self._news = asyncio.Event()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self) -> None:
        await exchange_for_ever(self._exchange, self._news)

    async def probe(self) -> float:
        """Ask for orders that the service must tell at once; return the seconds that it took."""
        began = time.monotonic()
        await self._exchange(seen="")
        return time.monotonic() - began

    async def _exchange(self, seen: str | None = None) -> None:
        self.number += 1
        self.exchanges += 1
        try:
            connection = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self.port)
            answer = await self._send(*connection, self.seen if seen is None else seen)
        except (OSError, asyncio.IncompleteReadError):  # many that come at once must come again
            await asyncio.sleep(0.5)
            return
        self._idle.append(connection)
        if answer["number"] > self.obeyed:
            self.obeyed = answer["number"]
            self._obey(answer)

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: str) -> dict:
        state = {"node": self.name, "identity": self.name, "boot": "b", "instance": self.name, "number": self.number}
        state |= {"address": "127.0.0.1", "memory": 2**40, "mechanism": "logical", "release": "bench"}
        state |= {"devices": [{"index": 0}], "seen": seen, "parts": self._parts()}
        body = json.dumps(state).encode()
        head = f"POST /v1/agents/sync HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.token}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length"))
        data = json.loads(await reader.readexactly(length))
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{lines[0]}: {data}")
        return data

    def _parts(self) -> dict[str, dict]:
        """Return the parts as they are now, with the time since they started and ended."""
        now, told = time.monotonic(), {}
        for key, part in self.parts.items():
            told[key] = {**part, "started_ago_s": now - self.started[key]}
            if key in self.ended:
                told[key]["ended_ago_s"] = now - self.ended[key]
        return told

    def _obey(self, answer: dict) -> None:
        for key in [key for key in self.parts if key not in answer["orders"]]:
            del self.parts[key], self.started[key]
            self.ended.pop(key, None)
        for key, order in answer["orders"].items():
            if key not in self.parts and order["launch"]:
                self.parts[key] = {"phase": "up"}
                self.started[key] = time.monotonic()
                seconds = JOB_S * random.lognormvariate(0.0, self.spread)
                asyncio.get_running_loop().call_later(seconds, self._end, key)
                self._news.set()
        self.seen = answer["mark"]

    def _end(self, key: str) -> None:
        if key not in self.parts:
            return
        job, _, attempt = key.partition("-")
        ended = {"job": job, "attempt": int(attempt), "outcome": "finished", "exit_code": 0}
        self.parts[key] = {"phase": "gone", "ended": ended}
        self.ended[key] = time.monotonic()
        self.ran += 1
        self._news.set()


def open_nodes(client: Client) -> int:
    return sum(row["state"] == "open" for row in client.get("/v1/nodes")["nodes"])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def measure(client: Client, port: int, pid: int, options: argparse.Namespace) -> dict:
    agents = []
    for number in range(options.agents):
        answer = await asyncio.to_thread(client.post, "/v1/nodes", {"name": f"n{number}"})
        agents.append(SimulatedAgent(f"n{number}", answer["token"], port, options.spread))
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    while await asyncio.to_thread(open_nodes, client) < len(agents):
        await asyncio.sleep(1.0)
    joined = cpu_s(pid)
    request = {"command": ["true"], "directory": "/", "duration_s": JOB_S, "watch": False}
    for _ in range(options.jobs // ARRAY):
        await asyncio.to_thread(client.post, "/v1/jobs", {**request, "array": f"1-{ARRAY}"})
    submitted = cpu_s(pid)
    await asyncio.sleep(5.0)
    began, used = time.monotonic(), cpu_s(pid)
    ran, exchanges = sum(agent.ran for agent in agents), sum(agent.exchanges for agent in agents)
    probes = []
    while time.monotonic() < began + options.seconds:
        probes.append(asyncio.create_task(random.choice(agents).probe()))
        await asyncio.sleep(PROBE_S)
    span = time.monotonic() - began
    cores = (cpu_s(pid) - used) / span
    took = await asyncio.gather(*probes)
    result = {
        "agents": options.agents,
        "jobs": options.jobs,
        "seconds": round(span, 1),
        "cores": round(cores, 3),
        "exchanges_per_s": round((sum(agent.exchanges for agent in agents) - exchanges) / span),
        "exchange_p50_s": round(quantile(took, 0.5), 4),
        "exchange_p99_s": round(quantile(took, 0.99), 4),
        "exchange_max_s": round(max(took), 4),
        "jobs_ended_per_s": round((sum(agent.ran for agent in agents) - ran) / span, 1),
        "cpu_join_s": round(joined, 1),
        "cpu_submit_s": round(submitted - joined, 1),
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--policy", default="carpool")
    parser.add_argument("--spread", type=float, default=0.0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        words = ["serve", "--home", str(home.path), "--port", "0", "--executor", "agents", "--policy", options.policy]
        with (Path(folder) / "log").open("wb") as log:
            service = subprocess.Popen([sys.executable, "-m", "carpool.cli", *words], stdout=log, stderr=log)
        try:
            while home.read_address() is None:
                time.sleep(0.1)
            client = Client.find(home.path)
            port = urlsplit(client.url).port
            print(json.dumps(asyncio.run(measure(client, port or 0, service.pid, options))))
        finally:
            service.kill()
            service.wait()


if __name__ == "__main__":
    main()
