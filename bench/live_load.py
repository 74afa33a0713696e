"""Load test of the live service: 10,000 queued jobs, submits per second with a durable journal, listings, memory, and
the time of a restart after 100,000 jobs.

    python bench/live_load.py [--jobs 10000] [--history 100000] [--home DIR]

Only the workers are not real: an executor in memory keeps 8 GPUs busy. Prints the measurements as JSON.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from carpool.core import events as ev
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.home import Home
from carpool.live.insight import views
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import Service, open_service
from carpool.live.spec import Spec

GPUS = 8


def spec(number: int) -> Spec:
    env = {"DATA": "/data/imagenet", "SEED": str(number)}
    command = ("python", "train.py", "--lr", "0.1", "--seed", str(number))
    return Spec(
        command, "/home/eve/project", gpus=1 + number % 4, batch=64, duration_s=60.0 + number, name="run", env=env
    )


def resident() -> float:
    return psutil.Process().memory_info().rss / 1e6


async def serve(home: Home, executor: MemoryExecutor) -> tuple[Service, asyncio.Task[None]]:
    service = await open_service(ServiceConfig(home, executor=executor))
    return service, asyncio.create_task(service.run())


async def submits(service: Service, jobs: int, clients: int) -> float:
    """Return the jobs submitted per second, each in a request of its own, by `clients` clients at a time."""
    left = iter(range(jobs))

    async def client() -> None:
        for number in left:
            await service.requests.submit([spec(number)], "admin")

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return jobs / (time.perf_counter() - began)


def best(function: Any, times: int = 5) -> float:
    """Return the milliseconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return 1000 * min(found)


async def queue(home: Home, jobs: int) -> dict[str, float]:
    before = resident()
    executor = MemoryExecutor(GPUS, automatic=True)
    service, running = await serve(home, executor)
    one = await submits(service, 200, 1)
    many = await submits(service, jobs - 200, 16)
    measured = {
        "submits_per_s_one_client": one,
        "submits_per_s_16_clients": many,
        "jobs_ms": best(lambda: service.queries.jobs()),
        "jobs_json_ms": best(lambda: json.dumps(service.queries.jobs())),
        "jobs_all_1000_ms": best(lambda: service.queries.jobs(all=True, limit=1000)),
        "resident_before_mb": before,
        "resident_mb": resident(),
    }
    began = time.perf_counter()
    await service.close()
    await running
    measured["stop_s"] = time.perf_counter() - began
    began = time.perf_counter()
    service, running = await serve(home, executor)
    measured["restart_s"] = time.perf_counter() - began
    assert len(service.queries.jobs()) == jobs
    await service.close()
    await running
    return measured


async def history(home: Home, jobs: int) -> dict[str, float]:
    """Measure a restart after `jobs` jobs have ended."""
    executor = MemoryExecutor(GPUS, automatic=True)
    service, running = await serve(home, executor)
    began = time.perf_counter()
    submitted = 0
    while submitted < jobs:
        await service.requests.submit([spec(number) for number in range(submitted, submitted + 500)], "admin")
        submitted += 500
        while len(service.book.specs) > 200:
            for key in list(executor.gangs):
                del executor.gangs[key]
                service.inbox.add_events(ev.Finished(service.clock.now(), *key))
            executor.launched.clear()
            await asyncio.sleep(0)
            await service.driver.turn()
    took = time.perf_counter() - began
    measured = {"history_jobs": float(jobs), "history_built_s": took, "history_resident_mb": resident()}
    service.driver.stopped = True  # as if it was killed: no last snapshot
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    service.store.close()
    home.release()
    began = time.perf_counter()
    service, running = await serve(home, executor)
    measured["restart_after_history_s"] = time.perf_counter() - began
    measured["history_page_ms"] = best(lambda: list(views.read_stories(service.book.ended_rows(100))))
    measured["journal_mb"] = home.journal.stat().st_size / 1e6
    await service.close()
    await running
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=100_000)
    parser.add_argument("--home", type=Path, help="directory to work in; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.home) as folder:
        measured = asyncio.run(queue(Home(Path(folder) / "queue"), given.jobs))
        if given.history:
            measured |= asyncio.run(history(Home(Path(folder) / "history"), given.history))
        print(json.dumps({key: round(value, 3) for key, value in measured.items()}, indent=2), flush=True)


if __name__ == "__main__":
    main()
