"""The real side of the physical experiment: jobs as real processes under the live service."""

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

from physical_work import ExperimentCase, ExperimentJob, MeasuredModel, policy

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
"""Seconds between two recorded reports of a job."""


class Observer:
    """Records the workers' reports and the GPU's utilisation counter while a case runs."""

    def __init__(self, home: Home, uuid: str | None) -> None:
        self.home, self.uuid = home, uuid
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.progress: list[dict[str, Any]] = []
        """Iteration of each job over time, from its own reports."""
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
class Recording:
    """What was recorded of one case."""

    rows: list[dict[str, Any]]
    """One row per job: its times and how it shared."""
    events: list[ev.Event]
    progress: list[dict[str, Any]]
    utilisation: list[float]


async def warm_up(jobs: Sequence[ExperimentJob], options: argparse.Namespace) -> None:
    """Start every task once, all at the same time: the first processes on a machine read everything from disk."""
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
    case: ExperimentCase,
    jobs: Sequence[ExperimentJob],
    model: MeasuredModel,
    limit_s: float,
    options: argparse.Namespace,
) -> Recording:
    """Run one case on the first GPU, from the first submission to the last end; give up after `limit_s`."""
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
            shown = await asyncio.wait_for(_submit_all(service, jobs, options), limit_s)
        finally:
            watching.cancel()
            await _end(service)
            await asyncio.gather(running, watching, return_exceptions=True)
        shown_by_name = {row["name"]: row for row in shown}
        events = _journal(home.journal)
    rows = [_row(case, job, shown_by_name[job.name], observer) for job in jobs]
    return Recording(rows, events, observer.progress, observer.utilisation)


async def _submit_all(
    service: Service, jobs: Sequence[ExperimentJob], options: argparse.Namespace
) -> list[dict[str, Any]]:
    began, ids = time.monotonic(), []
    for job in jobs:
        await asyncio.sleep(max(0.0, began + job.submitted - time.monotonic()))
        ids += await service.requests.submit([_spec(job, options)], "admin")
    for name in ids:
        await service.queries.wait(name)
    return [service.queries.show(name) for name in ids]


async def _end(service: Service) -> None:
    """Cancel all jobs, so that nothing keeps running when a case is given up."""
    for row in service.queries.jobs():
        await service.requests.cancel(row["job"])
        await service.queries.wait(row["job"])
    await service.close()


def _spec(job: ExperimentJob, options: argparse.Namespace) -> Spec:
    return Spec(
        command=_command(job, options),
        directory=str(examples.folder(options.examples)),
        batch=job.batch,
        iterations=job.iterations,
        model=job.task,
        name=job.name,
        env={key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ},
    )


def _command(job: ExperimentJob, options: argparse.Namespace) -> tuple[str, ...]:
    script = examples.folder(options.examples) / examples.SCRIPTS[job.task]
    return (sys.executable, str(script), "--iterations", str(job.iterations), "--batch-size", str(job.batch))


def _row(case: ExperimentCase, job: ExperimentJob, shown: Mapping[str, Any], observer: Observer) -> dict[str, Any]:
    number = str(shown["job"])
    if shown["status"] != "finished":
        raise SystemExit(f"{case.name}: {job.name} {shown['status']}: {shown.get('reason')}")
    receipt = shown["receipt"]
    return {
        "name": job.name,
        **{key: shown[key] for key in ("submitted", "started", "finished")},
        "waited_s": receipt["waited_s"],
        "ran_s": receipt["ran_s"],
        "preemptions": receipt["preemptions"],
        "shared": bool(receipt["shares"] or receipt["hosted"]),
        # None if the job was preempted before its first iteration
        "launch_s": observer.first[number] - shown["started"] if number in observer.first else None,
        "exit_s": shown["finished"] - observer.last[number],
    }


def case_record(case: ExperimentCase, recording: Recording) -> dict[str, Any]:
    """Return the content of a case's file: what was measured, and a row per job."""
    rows = recording.rows
    first, last = min(row["submitted"] for row in rows), max(row["finished"] for row in rows)
    measured = {
        "makespan_s": last - first,
        "mean_jct_s": fmean(row["finished"] - row["submitted"] for row in rows),
        "mean_queue_s": fmean(row["waited_s"] for row in rows),
        "gpu_utilisation": fmean(recording.utilisation) if recording.utilisation else None,
        "occupied": _occupied(rows) / (last - first),
        "preemptions": sum(row["preemptions"] for row in rows),
    }
    return {"case": asdict(case), "measured": measured, "jobs": rows, "stops_s": _stops(recording.events)}


def _journal(path: Path) -> list[ev.Event]:
    store = Store(path)
    store.open()
    try:
        return [event for _, event in store.events_after(0)]
    finally:
        store.close()


def keep(folder: Path, case: ExperimentCase, recording: Recording) -> None:
    """Write the journal and the jobs' progress."""
    _keep_lines(folder / f"{case.name}.journal.gz", map(encode, recording.events))
    _keep_lines(folder / f"{case.name}.progress.gz", recording.progress)


def _keep_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write compressed lines; the same rows give the same bytes."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def _stops(events: Iterable[ev.Event]) -> list[float]:
    """Return the times that preempted jobs took to save and exit."""
    asked: dict[str, float] = {}
    took = []
    for event in events:
        if isinstance(event, ev.Planned):
            asked |= {one.job: event.at for one in event.decisions if one.allocation is None}
        elif isinstance(event, ev.Stopped) and event.job in asked:
            took.append(event.at - asked.pop(event.job))
    return took


def _occupied(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which at least one job was on the GPU; a preempted job counts until its end."""
    total, until = 0.0, -math.inf
    for start, end in sorted((row["started"], row["finished"]) for row in rows):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
