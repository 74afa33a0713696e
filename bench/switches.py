"""Random pauses of real trainings through the live service: `python bench/switches.py --out FILE.json` (4 minutes).

Needs an NVIDIA GPU. Six trainings are resident on the GPU and paused. At random moments the one that computes is paused
and another resumed, 200 times in all, under time-slicing and under MPS. Recorded: the seconds from the request to the
first iteration of the resumed training that ends after it, and whether all losses and final weights equal those of the
same trainings without a pause, bit by bit. docs/experiments/benchmarks.md has the figures.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import swap
from swap import Training, read_lines, result_of

from carpool.core.model import Status
from carpool.live.home import Home
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import Service, open_service
from carpool.live.spec import Spec

SIZES = [0.1, 0.2, 0.5, 1.0, 2.0, 4.0]
"""GiB of ballast of the six trainings."""
KEPT_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
LOOK_S = 0.002


async def experiment(switches: int, steps: int, seed: int, gpus: int | None) -> dict[str, Any]:
    """Run the trainings alone and switched, under both mechanisms."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        plain = [Training(Path(text), f"plain{number}", gib, steps) for number, gib in enumerate(SIZES)]
        expected = [training.result() for training in plain]
    for mechanism in ("time-slicing", "mps"):
        with tempfile.TemporaryDirectory(prefix="cp-") as text:
            found[mechanism] = await run(Path(text), mechanism, switches, steps, random.Random(seed), expected, gpus)
            print(mechanism, found[mechanism], flush=True)
    return found


async def run(
    folder: Path,
    mechanism: str,
    switches: int,
    steps: int,
    rng: random.Random,
    expected: list[list[str]],
    gpus: int | None,
) -> dict[str, Any]:
    """Switch between six trainings under a service of their own."""
    home = Home(folder / "h")
    config = ServiceConfig(home, "sjf-ffs", gpus=gpus, jobs_per_gpu=len(SIZES), mps=mechanism == "mps")
    service = await open_service(config)
    mechanism_used = service.queries.gpus()["nodes"][0]["mechanism"]
    running = asyncio.create_task(service.run())
    try:
        specs = [_spec(folder / f"paused{number}", gib, steps) for number, gib in enumerate(SIZES)]
        jobs = await service.requests.submit(specs, "admin")
        files = dict(zip(jobs, [folder / f"paused{number}" for number in range(len(SIZES))], strict=True))
        waits = await _switch(service, files, switches, steps, rng)
        for job in jobs:
            await asyncio.wait_for(service.queries.wait(job), 300)
    finally:
        await service.close()
        await asyncio.gather(running, return_exceptions=True)
    waits.sort()
    return {
        "mechanism": mechanism_used,
        "switches": len(waits),
        "median_s": statistics.median(waits),
        "p99_s": waits[int(0.99 * (len(waits) - 1))],
        "longest_s": waits[-1],
        "bit_equal": [result_of(files[job]) == one for job, one in zip(jobs, expected, strict=True)],
    }


async def _switch(
    service: Service, files: dict[str, Path], switches: int, steps: int, rng: random.Random
) -> list[float]:
    """Pause all trainings, then let them compute in turn; return the seconds that each switch took."""
    for job, file in files.items():
        await _iterations(file, 3)
        await service.requests.pause(job)
    waits = []
    active = ""
    for _ in range(switches):
        following = rng.choice([job for job in files if job != active])
        if len(read_lines(files[following])) > 0.9 * steps:
            break  # it is about to end
        began = time.monotonic()
        await service.requests.resume(following)
        if active:
            await service.requests.pause(active)
        waits.append(await _next_iteration(files[following], began) - began)
        active = following
        await asyncio.sleep(rng.uniform(0.0, 0.1))
    for job in files:
        if job in service.state.jobs and service.state.jobs[job].paused_by_owner:
            await service.requests.resume(job)
    assert all(record.status is not Status.FAILED for record in service.state.ended.values())
    return waits


async def _iterations(file: Path, number: int, patience_s: float = 120.0) -> None:
    async with asyncio.timeout(patience_s):
        while len(read_lines(file)) < number:
            await asyncio.sleep(0.05)


async def _next_iteration(file: Path, after: float, patience_s: float = 60.0) -> float:
    """Return when the first iteration ended after this moment."""
    async with asyncio.timeout(patience_s):
        while True:
            lines = read_lines(file)
            if lines and float(lines[-1][1]) > after:
                return min(float(line[1]) for line in lines if float(line[1]) > after)
            await asyncio.sleep(LOOK_S)


def _spec(file: Path, gib: float, steps: int) -> Spec:
    command = (sys.executable, swap.__file__, "--train", str(gib), "--steps", str(steps), "--progress", str(file))
    env = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return Spec(command=command, directory=str(file.parent), name=file.name, env=env, duration_s=600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--switches", type=int, default=200)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, help="logical GPUs, to try the script on a machine without one")
    parser.add_argument("--sizes", help="GiB of the trainings, such as 0.1,0.2")
    options = parser.parse_args()
    if options.sizes:
        SIZES[:] = [float(size) for size in options.sizes.split(",")]
    text = json.dumps(asyncio.run(experiment(options.switches, options.steps, options.seed, options.gpus)), indent=1)
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
