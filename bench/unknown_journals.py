"""What the cases of `bench/unknown.py` left behind: their records, journals and progress, and what follows from them.

`bench/unknown_sim.py` tells it to the simulator: when jobs were submitted, how long each process started up, how fast
it was alone, how long it took to end, and what kinds of jobs demand of the GPU.
"""

import gzip
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from unknown import MPS, Case
from unknown_engine import Process
from unknown_speeds import WARM
from unknown_work import UnknownJob

from carpool.core import events as ev
from carpool.core.codec import decode
from carpool.core.model import GpuDemand

SWITCHES = ("Paused", "Resumed")
CHANGES = ("Computing", *SWITCHES)
TURN_S = 0.02
"""Seconds between two events of the journal from which on they belong to two turns of the service."""
ALONE_S = 1.0
"""Seconds that a job must have computed alone for its speed alone to be known."""


def complete_cases(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the file and the record of each case that was not given up."""
    for path in sorted(folder.glob("*-run*.json")):
        record = json.loads(path.read_text())
        if not record["measured"].get("given_up"):
            yield path, record


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the events of a case."""
    return _lines(path.with_name(path.name.replace(".json", ".journal.gz")))


def read_progress(path: Path) -> list[dict[str, Any]]:
    """Return how far each job of a case was, and when."""
    return _lines(path.with_name(path.name.replace(".json", ".progress.gz")))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def as_submitted(jobs: Sequence[UnknownJob], record: Mapping[str, Any]) -> list[UnknownJob]:
    """Return the jobs of a case at the times at which the service received them."""
    received = [replace(job, submitted_s=row["submitted"]) for job, row in zip(jobs, record["jobs"], strict=True)]
    return sorted(received, key=lambda job: job.submitted_s)


def read_speeds(folder: Path, mechanism: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the speeds that the jobs were drawn for, and those on the machine of the cases.

    Alone, a job is as fast under time-slicing as under MPS; pairs are used only under the mechanism they belong to.
    """
    drawn_for = json.loads((folder / "speeds-mps.json").read_text())
    path = folder / "pairs-mps.json"
    here = json.loads(path.read_text()) if path.exists() else {**drawn_for, "pairs": []}
    return drawn_for, here if mechanism == MPS else {**here, "pairs": []}


def read_processes(path: Path, record: Mapping[str, Any], alone_s: Mapping[str, float]) -> dict[str, Process]:
    """Return what is known of the process of each job of a case, by its name."""
    began: dict[str, float] = {}
    computed: dict[str, float] = {}
    ended: dict[str, float] = {}
    for row in read_journal(path):
        if row["event"] == "Started":
            began.setdefault(row["job"], row["at"])
        elif row["event"] == "Computing":
            computed.setdefault(row["job"], row["at"])
        elif row["event"] == "Finished":
            ended[row["job"]] = row["at"]
    last = _last_steps(path)
    pace = _paces_alone(path, record, alone_s)
    return {
        row["name"]: Process(computed[job] - began[job], ended[job] - last[job], pace.get(job, 1.0))
        for row in record["jobs"]
        for job in [row["job"]]
    }


def _last_steps(path: Path) -> dict[str, float]:
    """Return when each job of a case reported for the last time."""
    return {row["job"]: row["at"] for row in read_progress(path)}


def _paces_alone(path: Path, record: Mapping[str, Any], alone_s: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step of jobs that were alone for a while, over those of their kind, by the job's id."""
    kinds = {row["job"]: row["kind"] for row in record["jobs"]}
    reports: dict[str, list[tuple[float, int]]] = {}
    for row in read_progress(path):
        if row["iteration"] >= WARM:
            reports.setdefault(row["job"], []).append((row["at"], row["iteration"]))
    spent: dict[str, tuple[float, int]] = {}
    for begin, end, active in stretches(path, kinds):
        within = [one for one in reports.get(active[0], ()) if begin <= one[0] <= end]
        if len(active) == 1 and len(within) > 1:
            seconds, steps = spent.get(active[0], (0.0, 0))
            spent[active[0]] = seconds + within[-1][0] - within[0][0], steps + within[-1][1] - within[0][1]
    return {
        job: seconds / steps / alone_s[kinds[job]]
        for job, (seconds, steps) in spent.items()
        if seconds >= ALONE_S and steps
    }


def stretches(path: Path, jobs: Collection[str]) -> Iterator[tuple[float, float, list[str]]]:
    """Yield each stretch of time in which the same jobs computed: its begin, its end and these jobs."""
    changes = [(at, job, "Ended") for job, at in _last_steps(path).items()]
    changes += [(row["at"], row["job"], row["event"]) for row in read_journal(path) if row["event"] in CHANGES]
    computing, paused, before = set[str](), set[str](), 0.0
    for at, job, what in sorted(changes):
        active = sorted((computing - paused) & set(jobs))
        if active:
            yield before, at, active
        before = at
        (paused if what in SWITCHES else computing).symmetric_difference_update([job])


def turns(path: Path) -> Iterator[tuple[list[ev.Event], ev.Planned | None]]:
    """Yield the events of each turn of the service, and the plan that followed. The journal does not say where turns
    begin: events some milliseconds apart are taken for one, and a plan ends it."""
    events: list[ev.Event] = []
    for event in map(decode, read_journal(path)):
        if events and event.at - events[-1].at > TURN_S:
            yield events, None
            events = []
        if isinstance(event, ev.Planned):
            yield events, event
            events = []
        else:
            events.append(event)
    if events:
        yield events, None


# ---- demands ---------------------------------------------------------------------------------------------------------


def read_demands(folder: Path) -> dict[str, GpuDemand]:
    """Return the demand of each kind at its speed alone: the median over its jobs, else the highest reading.

    A job whose process waits for its host is slower alone and uses less of the GPU, in proportion. When the cases were
    measured, readings could contain the start or the end of a training, and were too low then.
    """
    highest: dict[str, GpuDemand] = {}
    settled: dict[str, list[GpuDemand]] = {}
    for path, record in complete_cases(folder):
        kinds = {row["job"]: row["kind"] for row in record["jobs"]}
        for job, demand in _readings(path):
            highest[kinds[job]] = max(demand, highest.get(kinds[job], demand), key=lambda one: one.sm)
        for kind, demand in _settled(folder, path, record):
            settled.setdefault(kind, []).append(demand)
    return {kind: _median(settled[kind]) if kind in settled else demand for kind, demand in highest.items()}


def _readings(path: Path, before: Mapping[str, float] | None = None) -> Iterator[tuple[str, GpuDemand]]:
    """Yield all readings of demands in a case; with `before`, only those from before these times, by job."""
    for row in read_journal(path):
        if row["event"] == "DemandMeasured" and (before is None or row["at"] < before[row["job"]]):
            yield row["job"], GpuDemand(**row["demand"])


def _settled(folder: Path, path: Path, record: Mapping[str, Any]) -> Iterator[tuple[str, GpuDemand]]:
    """Yield the last reading before its last step of each job whose speed alone is known, as it is at that of its kind.

    A reading is a mean since the job came to be alone, so that the last one contains least of the start.
    """
    alone_s = read_speeds(folder, Case(**record["case"]).mechanism)[1]["alone"]
    kinds = {row["job"]: row["kind"] for row in record["jobs"]}
    pace = _paces_alone(path, record, alone_s)
    for job, demand in dict(_readings(path, _last_steps(path))).items():
        if job in pace:
            yield (
                kinds[job],
                replace(demand, sm=min(1.0, demand.sm * pace[job]), busy=min(1.0, demand.busy * pace[job])),
            )


def _median(demands: Sequence[GpuDemand]) -> GpuDemand:
    """Return the median demand. Memory and the rest play no part in slow-downs."""
    return replace(demands[0], sm=median(one.sm for one in demands), busy=median(one.busy for one in demands))
