"""Many simulated agents on one real service, over real HTTP: CPU of the service, and how late its answers are.

`python bench/agents.py --agents 1000 --jobs 10000 --seconds 60`. All agents live in this process; each has one GPU and
keeps one connection. A job is an entry in a dictionary that ends after its time. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from carpool.live.executors.wire import HOLD_S
from carpool.live.home import Home
from carpool.live.http.client import Client

JOB_S = 20.0
"""Seconds that a simulated job takes."""
ARRAY = 1000


class SimulatedAgent:
    """An agent without processes."""

    def __init__(self, name: str, token: str, port: int, late: list[float]) -> None:
        self.name, self.token, self.port, self.late = name, token, port, late
        self.parts: dict[str, dict] = {}
        self.ends: dict[str, float] = {}
        self.seen, self.number, self.ran = "", 0, 0

    async def run(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await self._talk(reader, writer)
            except (OSError, asyncio.IncompleteReadError):  # many that come at once must come again
                await asyncio.sleep(0.5)
            finally:
                writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            began = time.monotonic()
            answer = await self._exchange(reader, writer)
            spent = time.monotonic() - began
            self.late.append(spent - HOLD_S if spent > HOLD_S else spent)
            self._obey(answer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict:
        self.number += 1
        now = time.monotonic()
        for key, end in list(self.ends.items()):
            if now >= end and self.parts[key]["phase"] == "up":
                job, _, attempt = key.partition("-")
                ended = {"job": job, "attempt": int(attempt), "outcome": "finished", "exit_code": 0}
                self.parts[key] = {"phase": "gone", "started_ago_s": JOB_S, "ended": ended, "ended_ago_s": 0.0}
                self.ran += 1
        state = {"node": self.name, "identity": self.name, "boot": "b", "instance": self.name, "number": self.number}
        state |= {"address": "127.0.0.1", "memory": 2**40, "mechanism": "logical", "release": "bench"}
        state |= {"devices": [{"index": 0}], "seen": self.seen, "parts": self.parts}
        body = json.dumps(state).encode()
        head = f"POST /v1/agents/sync HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.token}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length"))
        data = json.loads(await reader.readexactly(length))
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{lines[0]}: {data}")
        return data

    def _obey(self, answer: dict) -> None:
        for key in [key for key in self.parts if key not in answer["orders"]]:
            self.parts.pop(key)
            self.ends.pop(key, None)
        for key, order in answer["orders"].items():
            if key not in self.parts and order["launch"]:
                self.parts[key] = {"phase": "up", "started_ago_s": 0.0}
                self.ends[key] = time.monotonic() + JOB_S
        self.seen = answer["mark"]


def open_nodes(client: Client) -> int:
    return sum(row["state"] == "open" for row in client.get("/v1/nodes")["nodes"])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def measure(client: Client, port: int, pid: int, options: argparse.Namespace) -> dict:
    late: list[float] = []
    agents = []
    for number in range(options.agents):
        answer = await asyncio.to_thread(client.post, "/v1/nodes", {"name": f"n{number}"})
        agents.append(SimulatedAgent(f"n{number}", answer["token"], port, late))
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    while await asyncio.to_thread(open_nodes, client) < len(agents):
        await asyncio.sleep(1.0)
    joined = cpu_s(pid)
    request = {"command": ["true"], "directory": "/", "duration_s": JOB_S, "watch": False}
    for _ in range(options.jobs // ARRAY):
        await asyncio.to_thread(client.post, "/v1/jobs", {**request, "array": f"1-{ARRAY}"})
    submitted = cpu_s(pid)
    await asyncio.sleep(5.0)
    late.clear()
    began, used, ran = time.monotonic(), cpu_s(pid), sum(agent.ran for agent in agents)
    await asyncio.sleep(options.seconds)
    span = time.monotonic() - began
    result = {
        "agents": options.agents,
        "jobs": options.jobs,
        "seconds": round(span, 1),
        "cores": round((cpu_s(pid) - used) / span, 3),
        "exchanges_per_s": round(len(late) / span),
        "late_p50_s": round(quantile(late, 0.5), 4),
        "late_p99_s": round(quantile(late, 0.99), 4),
        "late_max_s": round(max(late, default=0.0), 4),
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
