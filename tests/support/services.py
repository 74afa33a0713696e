"""A service for tests: opened, run in the background, closed, and opened again. By default its jobs are processes."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

from carpool.live.home import Home
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import Service, open_service
from carpool.live.spec import Spec, parse

LONGEST_S = 240.0
"""Seconds after which a test is given up, so that none hangs."""


def shell(script: str, **fields) -> Spec:
    return parse({"command": ["sh", "-c", script], "directory": "/tmp", "grace_s": 0.5, **fields})


def python(code: str, *words: str, **fields) -> Spec:
    return parse({"command": [sys.executable, "-c", code, *words], "directory": "/tmp", "grace_s": 5.0, **fields})


@asynccontextmanager
async def serving(home: Home, policy: str = "sjf-bsbf", gpus: int | None = 2, **options):
    """Run a service and close it at the end; its gangs keep running. `gpus` counts for the local executor only."""
    async with asyncio.timeout(LONGEST_S):
        service = await open_service(ServiceConfig(home, policy, gpus=gpus, **options))
        running = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            await service.close()
            await running


async def settle(service: Service) -> None:
    """Take turns until nothing more happens."""
    for _ in range(6):
        await service.driver.turn()


async def until(condition, seconds: float = 20.0):
    """Wait for something to become true, and return it."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.02)
        return found


async def one(service: Service, spec: Spec, user: str = "admin") -> str:
    (job,) = await service.requests.submit([spec], user)
    return job


async def started(service: Service, job: str) -> None:
    await until(lambda: status(service, job) == "running")


def status(service: Service, job: str) -> str:
    return service.queries.show(job)["status"]


def output(service: Service, job: str, rank: int = 0, stream: str = "stdout", attempt: int | None = None) -> str:
    """What a worker of the local executor has written."""
    number = attempt or max(1, service.queries.last_attempt(job))
    path = service.home.rank(job, number, rank) / f"{stream}.log"
    return path.read_text() if path.exists() else ""


def pid_of(service: Service, job: str) -> int | None:
    attempts = service.queries.show(job)["attempts"]
    return attempts[-1]["ranks"][0]["pid"] if attempts and attempts[-1]["ranks"] else None


def notes(service: Service) -> list[str]:
    return journalled(service, "Note")


def journalled(service: Service, kind: str) -> list:
    """The journal's rows of one kind."""
    return [json.loads(row["data"]) for row in service.store.rows(10_000) if row["kind"] == kind]
