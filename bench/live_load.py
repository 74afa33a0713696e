"""How the live service bears load: 10,000 queued jobs, submits per second with a durable journal, listings, memory, and
how long a restart takes after 100,000 jobs.

    python bench/live_load.py [--jobs 10000] [--history 100000] [--home DIR]

Everything real but the workers: an executor that starts nothing keeps 8 GPUs busy. Reports what it measured as JSON.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from carpool.core import events as ev
from carpool.live.executors.base import How, Key, Launch, Listener
from carpool.live.home import Home
from carpool.live.service.service import Service
from carpool.live.spec import Spec

GPUS = 8


class Nobody:
    """Takes gangs and never lets them end, unless told."""

    def __init__(self) -> None:
        self.gangs: dict[Key, tuple[int, ...]] = {}
        self.listener: Listener

    def start(self, listener: Listener) -> None:
        self.listener = listener

    async def recover(self, known: Iterable[Key]) -> None:
        self.gangs.update((key, ()) for key in known)

    def launch(self, launch: Launch) -> None:
        self.gangs[launch.key] = tuple(slot.id for slot in launch.slots)
        self.listener.gang_up(*launch.key)

    def stop(self, key: Key, how: How) -> bool:
        return key in self.gangs

    def retune(self, key: Key, accumulation: int) -> None:
        return

    def present(self) -> dict[Key, tuple[int, ...]]:
        return dict(self.gangs)

    def report(self, key: Key) -> None:
        return None

    def ranks(self, key: Key) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        return


def spec(number: int) -> Spec:
    env = {"DATA": "/data/imagenet", "SEED": str(number)}
    command = ("python", "train.py", "--lr", "0.1", "--seed", str(number))
    return Spec(
        command, "/home/eve/project", gpus=1 + number % 4, batch=64, duration_s=60.0 + number, name="run", env=env
    )


def resident() -> float:
    return psutil.Process().memory_info().rss / 1e6


async def serve(home: Home) -> tuple[Service, Nobody, asyncio.Task[None]]:
    executor = Nobody()
    service = Service(home, gpus=GPUS, executor=executor)
    await service.start()
    return service, executor, asyncio.create_task(service.run())


async def submits(service: Service, jobs: int, clients: int) -> float:
    """Jobs per second, each in a request of its own, from so many clients at a time."""
    left = iter(range(jobs))

    async def client() -> None:
        for number in left:
            await service.requests.submit([spec(number)], f"user{number % 5}")

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return jobs / (time.perf_counter() - began)


def best(function: Any, times: int = 5) -> float:
    """Milliseconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return 1000 * min(found)


async def queue(home: Home, jobs: int) -> dict[str, float]:
    before = resident()
    service, _, running = await serve(home)
    one = await submits(service, 200, 1)
    many = await submits(service, jobs - 200, 16)
    told = {
        "submits_per_s_one_client": one,
        "submits_per_s_16_clients": many,
        "jobs_ms": best(lambda: service.queries.jobs()),
        "jobs_json_ms": best(lambda: json.dumps(service.queries.jobs())),
        "jobs_all_1000_ms": best(lambda: service.queries.jobs(all=True, limit=1000)),
        "resident_before_mb": before,
        "resident_mb": resident(),
    }
    began = time.perf_counter()
    await service.stop()
    await running
    told["stop_s"] = time.perf_counter() - began
    began = time.perf_counter()
    service, _, running = await serve(home)
    told["restart_s"] = time.perf_counter() - began
    assert len(service.queries.jobs()) == jobs
    await service.stop()
    await running
    return told


async def history(home: Home, jobs: int) -> dict[str, float]:
    """A restart after so many jobs have come and gone."""
    service, executor, running = await serve(home)
    began = time.perf_counter()
    submitted = 0
    while submitted < jobs:
        await service.requests.submit([spec(number) for number in range(submitted, submitted + 500)], "eve")
        submitted += 500
        while len(service.specs) > 200:
            for key in list(executor.gangs):
                del executor.gangs[key]
                service._driver.tell(ev.Finished(service._clock.now(), *key))
            await asyncio.sleep(0)
            await service._driver.turn()
    took = time.perf_counter() - began
    told = {"history_jobs": float(jobs), "history_built_s": took, "history_resident_mb": resident()}
    service._driver.stopped = True  # as if killed: no last snapshot
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    service._store.close()
    home.release()
    began = time.perf_counter()
    service, _, running = await serve(home)
    told["restart_after_history_s"] = time.perf_counter() - began
    told["history_page_ms"] = best(lambda: service.queries.history(limit=100))
    told["journal_mb"] = home.journal.stat().st_size / 1e6
    await service.stop()
    await running
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=100_000)
    parser.add_argument("--home", type=Path, help="where to work; default: a temporary directory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.home) as folder:
        told = asyncio.run(queue(Home(Path(folder) / "queue"), given.jobs))
        if given.history:
            told |= asyncio.run(history(Home(Path(folder) / "history"), given.history))
        print(json.dumps({key: round(value, 3) for key, value in told.items()}, indent=2), flush=True)


if __name__ == "__main__":
    main()
