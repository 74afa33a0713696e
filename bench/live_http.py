"""Load test of the service over HTTP: 10,000 queued jobs behind one that holds all GPUs.

    python bench/live_http.py [--jobs 10000] [--clients 16]

Starts a real `carpool serve` with 4 logical GPUs in a temporary home and submits from several connections at a time.
Prints as JSON: submits per second (each durable when it is answered), the time of a listing, an explanation, a dry run
and the command `carpool jobs`, and the memory of the service.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from carpool.live.commands.demo import _environment
from carpool.live.home import Home
from carpool.live.http.client import Client

BLOCKER = {
    "command": ["sleep", "3600"],
    "directory": "/",
    "gpus": 4,
    "exclusive": True,
    "grace_s": 0.0,
    "duration_s": 3600.0,
}


def request(number: int) -> dict[str, Any]:
    return {
        "command": ["python", "train.py", "--lr", "0.1", "--seed", str(number)],
        "directory": "/home/eve/project",
        "gpus": 1 + number % 4,
        "batch": 64,
        "duration_s": 60.0 + number,
        "name": f"run-{number % 50}",
        "env": {"DATA": "/data/imagenet", "SEED": str(number)},
    }


def submits(home: Path, jobs: int, clients: int) -> float:
    """Return the jobs submitted per second, each in a request of its own."""
    numbers, lock = iter(range(jobs)), threading.Lock()

    def work() -> None:
        client = Client.find(home)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            client.post("/v1/jobs", request(number))

    threads = [threading.Thread(target=work) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return jobs / (time.perf_counter() - began)


def milliseconds(function: Callable[[], Any], times: int = 5) -> float:
    """Return the milliseconds of the median call."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return 1000 * sorted(found)[len(found) // 2]


@contextmanager
def served(home: Path) -> Iterator[Client]:
    """Run a service. At the end its first job, the only one that runs, is killed."""
    command = [sys.executable, "-m", "carpool.cli", "serve", "--home", str(home), "--port", "0", "--gpus", "4"]
    process = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
    workers: list[int] = []
    try:
        while Home(home).read_address() is None and process.poll() is None:
            time.sleep(0.1)
        client = Client.find(home)
        client.post("/v1/jobs", BLOCKER)
        while len(workers) < BLOCKER["gpus"]:
            time.sleep(0.1)
            ranks = [rank for attempt in client.get("/v1/jobs/1")["attempts"] for rank in attempt["ranks"]]
            workers = [rank["pid"] for rank in ranks if rank["pid"]]
        yield client
    finally:
        process.terminate()
        process.wait()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, served(Path(folder)) as client:
        home = Path(folder)
        address = Home(home).read_address() or {}
        process = psutil.Process(address["pid"])
        measured = {
            "submits_per_s_one_client": submits(home, min(500, given.jobs), 1),
            f"submits_per_s_{given.clients}_clients": submits(home, max(0, given.jobs - 500), given.clients),
        }
        rows = client.jobs()
        last = rows[-1]["job"]
        command = [sys.executable, "-m", "carpool.cli", "jobs", "--home", folder]

        def run_command() -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())

        measured |= {
            "queued": len(rows),
            "jobs_10000_ms": milliseconds(lambda: client.get("/v1/jobs", limit=10_000)),
            "jobs_100_ms": milliseconds(lambda: client.get("/v1/jobs", limit=100)),
            "show_ms": milliseconds(lambda: client.get(f"/v1/jobs/{last}")),
            "explain_ms": milliseconds(lambda: client.get(f"/v1/jobs/{last}/explain")),
            "dry_run_ms": milliseconds(lambda: client.post("/v1/jobs/dry-run", request(1))),
            "command_jobs_ms": milliseconds(run_command),
            "resident_mb": process.memory_info().rss / 1e6,
            "load_of_the_machine": os.getloadavg()[0],
        }
        print(json.dumps({key: round(value, 2) for key, value in measured.items()}, indent=2), flush=True)


if __name__ == "__main__":
    main()
