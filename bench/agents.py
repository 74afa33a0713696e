"""Many simulated agents on one real service, over real HTTP: CPU of the service, how long its answers take, and how
long decisions take beside them.

`python bench/agents.py --agents 1000 --jobs 10000 --seconds 60`. All agents live in this process; each has one GPU and,
like a real agent, an exchange that the service holds and another one whenever it has news. A job is an entry in a
dictionary that ends after its time: `--spread 0.3` lets that vary by σ = 0.3 of its logarithm, and without it all jobs
that start together end together. Ten times a second one of the agents asks as if it had forgotten its orders, which the
service answers at once: that time is the one shown. Nobody waits for another's answer, so that a stall of the service
counts for all that asked during it. `cores` is the CPU of the service alone.

Decisions are measured twice, each time with a service of its own: first with the same jobs on as many nodes in the
memory of the service, which need no exchange, then with the agents. A decision is what `carpool_decision_seconds` of
`/metrics` counts; the service writes the time of each, because the buckets are too coarse for p99. On the clock it also
counts the time in which other processes have the cores; its CPU time does not. Prints one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agents_service import JOB_S, job_seconds

from carpool.live.agent.pacing import exchange_for_ever
from carpool.live.home import Home
from carpool.live.http.client import Client

ARRAY = 1000
PROBE_S = 0.1
SETTLE_S = 5.0
"""Seconds after the submission in which nothing is measured."""
SERVICE = Path(__file__).with_name("agents_service.py")
FINISHED = 'carpool_jobs_ended_total{status="finished"}'
LONG_S = 0.05
"""CPU seconds above which a decision is a long one."""
RATIOS = ("decision_p99_ms", "decision_p99_cpu_ms", "deciding_cores", "long_decision_p50_cpu_ms")


@dataclass(frozen=True)
class Service:
    """A service that runs."""

    client: Client
    port: int
    pid: int
    decisions: Path
    """File with a line for each decision."""


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
                asyncio.get_running_loop().call_later(job_seconds(self.spread), self._end, key)
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


def decision_times(path: Path, began: float, ended: float) -> dict:
    """Return how long decisions took that ended between two moments."""
    rows = [[float(word) for word in line.split()] for line in path.read_text().splitlines()]
    took = [(wall, cpu) for at, wall, cpu in rows if began <= at <= ended]
    walls, cpus = [wall for wall, _ in took], [cpu for _, cpu in took]
    long = [cpu for cpu in cpus if cpu > LONG_S]
    return {
        "decisions_per_s": round(len(took) / (ended - began), 1),
        "decision_p50_ms": round(1000 * quantile(walls, 0.5), 2),
        "decision_p99_ms": round(1000 * quantile(walls, 0.99), 2),
        "decision_max_ms": round(1000 * max(walls, default=0.0), 2),
        "decision_p50_cpu_ms": round(1000 * quantile(cpus, 0.5), 2),
        "decision_p99_cpu_ms": round(1000 * quantile(cpus, 0.99), 2),
        "deciding_cores": round(sum(cpus) / (ended - began), 4),
        "long_decisions_per_min": round(60 * len(long) / (ended - began), 1),
        "long_decision_p50_cpu_ms": round(1000 * quantile(long, 0.5), 2),
    }


def submit(client: Client, jobs: int) -> None:
    request = {"command": ["true"], "directory": "/", "duration_s": JOB_S, "watch": False}
    for _ in range(jobs // ARRAY):
        client.post("/v1/jobs", {**request, "array": f"1-{ARRAY}"})


def ended_jobs(client: Client) -> float:
    """Return how many jobs have finished, by the service's own count."""
    lines = client.raw("/metrics")[0].decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(FINISHED))


def measure_alone(service: Service, options: argparse.Namespace) -> dict:
    """Measure decisions about the same jobs on as many nodes that need no exchange."""
    submit(service.client, options.jobs)
    time.sleep(SETTLE_S)
    began, used, ran = time.monotonic(), cpu_s(service.pid), ended_jobs(service.client)
    time.sleep(options.seconds)
    ended, cpu, ran = time.monotonic(), cpu_s(service.pid) - used, ended_jobs(service.client) - ran
    span = ended - began
    result = {"cores": round(cpu / span, 3), "jobs_ended_per_s": round(ran / span, 1)}
    return result | decision_times(service.decisions, began, ended)


async def measure(service: Service, options: argparse.Namespace) -> dict:
    client, pid, agents = service.client, service.pid, []
    for number in range(options.agents):
        answer = await asyncio.to_thread(client.post, "/v1/nodes", {"name": f"n{number}"})
        agents.append(SimulatedAgent(f"n{number}", answer["token"], service.port, options.spread))
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    while await asyncio.to_thread(open_nodes, client) < len(agents):
        await asyncio.sleep(1.0)
    joined = cpu_s(pid)
    await asyncio.to_thread(submit, client, options.jobs)
    submitted = cpu_s(pid)
    await asyncio.sleep(SETTLE_S)
    began, used = time.monotonic(), cpu_s(pid)
    ran, exchanges = sum(agent.ran for agent in agents), sum(agent.exchanges for agent in agents)
    probes = []
    while time.monotonic() < began + options.seconds:
        probes.append(asyncio.create_task(random.choice(agents).probe()))
        await asyncio.sleep(PROBE_S)
    ended, cpu = time.monotonic(), cpu_s(pid) - used
    span = ended - began
    took = await asyncio.gather(*probes)
    result = {
        "cores": round(cpu / span, 3),
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
    return result | decision_times(service.decisions, began, ended)


@contextlib.contextmanager
def serve(executor: str, options: argparse.Namespace) -> Iterator[Service]:
    """Run a service with an executor."""
    with tempfile.TemporaryDirectory() as folder:
        home, decisions = Home(Path(folder) / "home"), Path(folder) / "decisions"
        words = [str(SERVICE), str(decisions), str(options.agents), str(options.spread)]
        words += ["serve", "--home", str(home.path), "--port", "0", "--executor", executor, "--policy", options.policy]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)
        try:
            while home.read_address() is None:
                if process.poll() is not None:
                    raise RuntimeError((Path(folder) / "log").read_text())
                time.sleep(0.1)
            client = Client.find(home.path)
            yield Service(client, urlsplit(client.url).port or 0, process.pid, decisions)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--policy", default="carpool")
    parser.add_argument("--spread", type=float, default=0.0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    result = {"agents": options.agents, "jobs": options.jobs, "seconds": options.seconds}
    result["load_average"] = round(os.getloadavg()[0], 1)
    with serve("timed", options) as service:
        alone = measure_alone(service, options)
    with serve("agents", options) as service:
        beside = asyncio.run(measure(service, options))
    ratios = {f"{name}_ratio": round(beside[name] / (alone[name] or 1.0), 2) for name in RATIOS}
    print(json.dumps({**result, "without_agents": alone, "with_agents": beside, **ratios}))


if __name__ == "__main__":
    main()
