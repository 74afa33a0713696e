"""The real world of the physical experiment: jobs through the live service, its executor and real processes."""

import argparse
import asyncio
import gzip
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from physical_work import Case, MeasuredModel, Work, policy

from carpool.channel import read_report
from carpool.core import events as ev
from carpool.core.codec import encode
from carpool.gpu import nvml
from carpool.live.home import Home
from carpool.live.journal.store import Store
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import Service, open_service
from carpool.live.spec import Spec
from carpool.profile.measure import examples
from carpool.profile.measure.plan import MPS

KEPT_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
SAMPLE_S = 0.1
PROGRESS_S = 0.5
"""How often a job's progress is kept."""


class Observer:
    """Watches the workers' reports and the GPU's own counter while a case runs."""

    def __init__(self, home: Home, uuid: str | None) -> None:
        self.home, self.uuid = home, uuid
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.progress: list[dict[str, Any]] = []
        """Where each job was at what time, as its own reports say."""
        self.utilisation: list[float] = []
        self._noted: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(SAMPLE_S)

    def _look(self) -> None:
        for path in self.home.jobs.glob("*/attempt-*/rank-0/report"):
            job, attempt = path.parts[-4], path.parts[-3]
            report = read_report(path.parent)
            if report is not None and report.iteration > 0:
                if attempt == "attempt-1":
                    self.first.setdefault(job, time.time())
                if report.time - self._noted.get(job, 0.0) >= PROGRESS_S:
                    self._noted[job] = report.time
                    self.progress.append({"job": job, "at": report.time, "iteration": report.iteration})
                self.last[job] = max(report.time, self.last.get(job, 0.0))
        if self.uuid is not None and (share := nvml.utilisation(self.uuid)) is not None:
            self.utilisation.append(share)


@dataclass
class Outcome:
    """What was seen of one case."""

    rows: list[dict[str, Any]]
    """Each job's story."""
    events: list[ev.Event]
    progress: list[dict[str, Any]]
    utilisation: list[float]


async def warm_up(jobs: Sequence[Work], options: argparse.Namespace) -> None:
    """Start every task once, all at the same time: the first processes on a machine read everything from its disk."""
    tasks = {job.task: replace(job, iterations=5) for job in jobs}
    processes = []
    try:
        for job in tasks.values():
            command = _command(job, options)
            processes.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL))
        for process in processes:
            await process.wait()
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()


async def run_live(
    case: Case, jobs: Sequence[Work], model: MeasuredModel, limit_s: float, options: argparse.Namespace
) -> Outcome:
    """One case, from the first submission to the last end; given up after `limit_s`. It has the first GPU."""
    uuid = None if options.gpus else nvml.devices()[0].uuid
    with tempfile.TemporaryDirectory(prefix="cp-") as place:
        home = Home(Path(place) / "h")
        config = ServiceConfig(
            home,
            policy(case.policy),
            gpus=options.gpus,
            only=() if uuid is None else (uuid,),
            jobs_per_gpu=case.jobs_per_gpu,
            mps=case.mechanism == MPS,
            perf=model,
        )
        service = await open_service(config)
        running = asyncio.create_task(service.run())
        observer = Observer(home, uuid)
        watching = asyncio.create_task(observer.run())
        try:
            told = await asyncio.wait_for(_submit_all(service, jobs, options), limit_s)
        finally:
            watching.cancel()
            await _end(service)
            await asyncio.gather(running, watching, return_exceptions=True)
        stories = {row["name"]: row for row in told}
        events = _journal(home.journal)
    rows = [_row(case, job, stories[job.name], observer) for job in jobs]
    return Outcome(rows, events, observer.progress, observer.utilisation)


async def _submit_all(service: Service, jobs: Sequence[Work], options: argparse.Namespace) -> list[dict[str, Any]]:
    began, ids = time.monotonic(), []
    for job in jobs:
        await asyncio.sleep(max(0.0, began + job.submitted - time.monotonic()))
        ids += await service.requests.submit([_spec(job, options)], "bench")
    for name in ids:
        await service.queries.wait(name)
    return [service.queries.show(name) for name in ids]


async def _end(service: Service) -> None:
    """Nothing of ours runs on when a case is given up."""
    for row in service.queries.jobs():
        await service.requests.cancel(row["job"])
        await service.queries.wait(row["job"])
    await service.close()


def _spec(job: Work, options: argparse.Namespace) -> Spec:
    return Spec(
        command=_command(job, options),
        directory=str(examples.folder(options.examples)),
        batch=job.batch,
        iterations=job.iterations,
        model=job.task,
        name=job.name,
        env={key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ},
    )


def _command(job: Work, options: argparse.Namespace) -> tuple[str, ...]:
    script = examples.folder(options.examples) / examples.SCRIPTS[job.task]
    return (sys.executable, str(script), "--iterations", str(job.iterations), "--batch-size", str(job.batch))


def _row(case: Case, job: Work, told: Mapping[str, Any], observer: Observer) -> dict[str, Any]:
    number = str(told["job"])
    if told["status"] != "finished":
        raise SystemExit(f"{case.name}: {job.name} {told['status']}: {told.get('reason')}")
    receipt = told["receipt"]
    return {
        "name": job.name,
        **{key: told[key] for key in ("submitted", "started", "finished")},
        "waited_s": receipt["waited_s"],
        "ran_s": receipt["ran_s"],
        "preemptions": receipt["preemptions"],
        "shared": bool(receipt["shares"] or receipt["hosted"]),
        # None: preempted before it had done anything
        "launch_s": observer.first[number] - told["started"] if number in observer.first else None,
        "exit_s": told["finished"] - observer.last[number],
    }


def told(case: Case, outcome: Outcome) -> dict[str, Any]:
    """A case's file: what was measured, and each job's story."""
    rows = outcome.rows
    first, last = min(row["submitted"] for row in rows), max(row["finished"] for row in rows)
    measured = {
        "makespan_s": last - first,
        "mean_jct_s": fmean(row["finished"] - row["submitted"] for row in rows),
        "mean_queue_s": fmean(row["waited_s"] for row in rows),
        "gpu_utilisation": fmean(outcome.utilisation) if outcome.utilisation else None,
        "occupied": _occupied(rows) / (last - first),
        "preemptions": sum(row["preemptions"] for row in rows),
    }
    return {"case": asdict(case), "measured": measured, "jobs": rows, "stops_s": _stops(outcome.events)}


def _journal(path: Path) -> list[ev.Event]:
    store = Store(path)
    store.open()
    try:
        return [event for _, event in store.events_after(0)]
    finally:
        store.close()


def keep(folder: Path, case: Case, outcome: Outcome) -> None:
    """The journal and the jobs' progress."""
    _keep_lines(folder / f"{case.name}.journal.gz", map(encode, outcome.events))
    _keep_lines(folder / f"{case.name}.progress.gz", outcome.progress)


def _keep_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """The same rows give the same bytes."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def _stops(events: Iterable[ev.Event]) -> list[float]:
    """How long each preempted job took to save and leave."""
    asked: dict[str, float] = {}
    took = []
    for event in events:
        if isinstance(event, ev.Planned):
            asked |= {one.job: event.at for one in event.decisions if one.allocation is None}
        elif isinstance(event, ev.Stopped) and event.job in asked:
            took.append(event.at - asked.pop(event.job))
    return took


def _occupied(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which some job was on the GPU (a preempted one counts to its end)."""
    total, until = 0.0, -math.inf
    for start, end in sorted((row["started"], row["finished"]) for row in rows):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
