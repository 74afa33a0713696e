"""A service of real processes for tests: started, run in the background, stopped, and started again."""

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from carpool.live.home import Home
from carpool.live.service.service import Service
from carpool.live.spec import Spec, parse


def shell(script: str, **wishes) -> Spec:
    return parse({"command": ["sh", "-c", script], "directory": "/tmp", "grace_s": 0.5, **wishes})


def python(code: str, *words: str, **wishes) -> Spec:
    return parse({"command": [sys.executable, "-c", code, *words], "directory": "/tmp", "grace_s": 5.0, **wishes})


@asynccontextmanager
async def serving(home: Home, policy: str = "sjf-bsbf", gpus: int = 2, **options):
    """Leaves as a service does: what runs goes on."""
    service = Service(home, policy, gpus=gpus, **options)
    await service.start()
    running = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        await service.stop()
        await running


async def until(condition, seconds: float = 20.0):
    """Wait for something to become true, and give it back."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.02)
        return found


async def one(service: Service, spec: Spec, user: str = "eve") -> str:
    (job,) = await service.requests.submit([spec], user)
    return job


async def started(service: Service, job: str) -> None:
    await until(lambda: state(service, job) == "running")


def state(service: Service, job: str) -> str:
    return service.queries.show(job)["status"]


def output(service: Service, job: str, rank: int = 0, stream: str = "stdout", attempt: int | None = None) -> str:
    path: Path = service.queries.log_file(job, rank, stream, attempt)
    return path.read_text() if path.exists() else ""


def notes(service: Service) -> list[str]:
    import json

    return [json.loads(row["data"]) for row in service._store.story(10_000) if row["kind"] == "Note"]


def told(service: Service, kind: str) -> list[dict]:
    """The journal's events of a kind."""
    import json

    return [json.loads(row["data"]) for row in service._store.story(10_000) if row["kind"] == kind]
