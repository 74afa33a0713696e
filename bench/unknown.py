"""Run jobs that nobody has measured on a real GPU, through `carpool serve` and `carpool submit` as users run them.

    python bench/unknown.py --out out/unknown                     (with a GPU; the same call resumes after a stop)
    python bench/unknown.py --out out/unknown --gpus 1 --tiny     (logical slot, on a CPU, to try the script)
    python bench/unknown.py --out docs/experiments/unknown/machine-2 --table        (print the results that exist)

Three workloads of fifteen trainings that are in no profile, with unique names, run times that their users misjudge by
up to a factor of two, and a service that has seen no job before. Half of the jobs are plain scripts, half use
`carpool.train`. The default of `carpool serve` is compared with exclusive SJF, SJF-BSBF and first-fit sharing. Every
case leaves a JSON file with a row per job, its journal, and the jobs' progress. The lengths of the jobs come from
`speeds-mps.json` of the folder (`bench/unknown_speeds.py`).

Exclusive SJF needs five minutes for a workload. To spare the GPU, `--give-up 2` ends a case of another policy as soon
as its mean JCT is certain to be twice that of the default, and keeps that mean as what it is at least.
"""

import argparse
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from unknown_work import KINDS, WORKLOADS, UnknownJob, draw

from carpool.channel import read_report
from carpool.client.connection import Connection, connect
from carpool.core.codec import encode
from carpool.errors import InputError
from carpool.live.home import Home
from carpool.live.journal.store import Store

CARPOOL = [sys.executable, "-m", "carpool.cli"]
START_S = 60.0
LIMIT_S = 420.0
"""Seconds after which a case is ended in any case."""
SAMPLE_S = 0.25
LOOK_S = 0.5
"""Seconds between two looks at whether a case is to be given up."""
MPS, TIME_SLICING = "mps", "time-slicing"


@dataclass(frozen=True)
class Case:
    """One workload under one policy; `repeat` counts its runs."""

    workload: str
    policy: str
    jobs_per_gpu: int | None
    """None: the default of `carpool serve`."""
    mechanism: str
    repeat: int = 0

    @property
    def rule(self) -> str:
        return self.policy if self.jobs_per_gpu is None else f"{self.policy}-{self.jobs_per_gpu}"

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.rule}-{self.mechanism}-run{self.repeat + 1}"

    def options(self) -> list[str]:
        """Return the options of `carpool serve`; the default needs none."""
        chosen = (
            [] if self.jobs_per_gpu is None else ["--policy", self.policy, "--jobs-per-gpu", str(self.jobs_per_gpu)]
        )
        return chosen if self.mechanism == MPS else [*chosen, "--no-mps"]


RULES = (
    ("carpool", None),
    ("sjf-ffs", 4),
    ("sjf-ffs", 3),
    ("sjf-ffs", 2),
    ("sjf", 1),
    ("sjf-bsbf", 2),
    ("carpool", 4),
)


def cases(options: argparse.Namespace) -> list[Case]:
    every = [
        Case(workload, policy, limit, options.mechanism, repeat)
        for workload in options.workload
        for repeat in range(options.repeats)
        for policy, limit in RULES
    ]
    wanted = set(options.only or [case.rule for case in every])
    unknown = wanted - {name for case in every for name in (case.rule, case.name)}
    if unknown:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such case; give names of cases, or of policies "
                         "such as sjf-ffs-3")  # fmt: skip
    return [case for case in every if case.rule in wanted or case.name in wanted]


# ---- one case --------------------------------------------------------------------------------------------------------


class ProgressLog:
    """Notes the iterations of all jobs over time, from the reports in the service's home."""

    def __init__(self, home: Home) -> None:
        self.rows: list[dict[str, Any]] = []
        self._home, self._stop = home, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "ProgressLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        noted: dict[str, int] = {}
        while not self._stop.wait(SAMPLE_S):
            for folder in self._home.jobs.glob("*/attempt-*/rank-0"):
                report, job = read_report(folder), folder.parts[-3]
                if report is not None and report.iteration != noted.get(job):
                    noted[job] = report.iteration
                    self.rows.append({"job": job, "at": report.time, "iteration": report.iteration})


def run_case(
    case: Case, jobs: Sequence[UnknownJob], options: argparse.Namespace, enough_s: float = math.inf
) -> dict[str, Any]:
    """Run a case in a new home until its last job has ended, or its mean JCT is certain to be above `enough_s`."""
    with tempfile.TemporaryDirectory(prefix="cu-") as place:
        home = Home(Path(place) / "h")
        log_file = Path(options.out) / f"{case.name}.log"
        with log_file.open("wb") as log:
            chosen = [*case.options(), *(["--gpus", str(options.gpus)] if options.gpus else [])]
            command = [*CARPOOL, "serve", "--home", str(home.path), "--port", "0", *chosen]
            service = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            connection = _connected(home, service)
            with ProgressLog(home) as progress:
                began = time.time()
                ids = _submit_all(home, jobs, options)
                rows = _wait(connection, ids, began, enough_s)
            accuracy = connection.request("GET", "/v1/accuracy")
        finally:
            _end(home, service)
        events = _journal(home)
    _keep(Path(options.out) / f"{case.name}.journal.gz", events)
    _keep(Path(options.out) / f"{case.name}.progress.gz", progress.rows)
    return _record(case, jobs, rows, accuracy)


def _connected(home: Home, service: subprocess.Popen[bytes]) -> Connection:
    until = time.monotonic() + START_S
    while time.monotonic() < until and service.poll() is None:
        try:
            return connect(home=home.path)
        except InputError:
            time.sleep(0.1)
    raise SystemExit("the service did not start; see the case's log")


def _submit_all(home: Home, jobs: Sequence[UnknownJob], options: argparse.Namespace) -> list[str]:
    """Submit every job in time by a command of its own; return their ids in the order of the jobs."""
    began, commands = time.monotonic(), []
    for job in jobs:
        time.sleep(max(0.0, began + job.submitted_s - time.monotonic()))
        words = [*CARPOOL, "submit", "--json", "--home", str(home.path), "--name", job.name]
        words += [
            "--time",
            f"{job.guess_s:.1f}s",
            "--",
            sys.executable,
            *KINDS[job.kind].command(job.steps, options.tiny),
        ]
        commands.append(subprocess.Popen(words, stdout=subprocess.PIPE))
    return [json.loads(command.communicate()[0])["jobs"][0] for command in commands]


def _wait(connection: Connection, ids: Sequence[str], began: float, enough_s: float) -> list[dict[str, Any]]:
    """Return the jobs' rows once all have ended, or once their mean JCT is certain to be above `enough_s`."""
    jobs = [connection.job(one) for one in ids]
    while time.time() < began + LIMIT_S:
        running = [job for job in jobs if job.refresh()["finished"] is None]
        if not running or least_jct_s(job.row for job in jobs) > enough_s:
            break
        time.sleep(LOOK_S)
    return [job.row for job in jobs]


def least_jct_s(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return what the mean JCT is at least: that if every job which has not ended did so now."""
    now = time.time()
    return fmean((row["finished"] or now) - row["submitted"] for row in rows)


def _end(home: Home, service: subprocess.Popen[bytes]) -> None:
    """Cancel what still runs, and end the service."""
    if service.poll() is None:
        left = connect(home=home.path).jobs()
        for row in left:
            connect(home=home.path).job(row["job"]).cancel()
        if left:
            time.sleep(3.0)
        service.send_signal(signal.SIGTERM)
    service.wait(30.0)


def _journal(home: Home) -> list[dict[str, Any]]:
    store = Store(home.journal)
    store.open()
    try:
        return [encode(event) for _, event in store.events_after(0)]
    finally:
        store.close()


def _keep(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write compressed lines; the same rows give the same bytes."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def _record(
    case: Case, jobs: Sequence[UnknownJob], rows: Sequence[Mapping[str, Any]], accuracy: Mapping[str, Any]
) -> dict[str, Any]:
    first = min(row["submitted"] for row in rows)
    running = [row for row in rows if row["finished"] is None]
    table = [
        {
            "job": row["job"],
            "name": job.name,
            "kind": job.kind,
            **{key: round(row[key] - first, 3) for key in ("submitted", "started", "finished")},
            "receipt": row["receipt"],
        }
        for job, row in zip(jobs, rows, strict=True)
        if row["status"] == "finished"
    ]
    measured = {
        "mean_jct_s": least_jct_s(rows),
        "makespan_s": max(row["finished"] or time.time() for row in rows) - first,
        "failed": [f"{row['name']} {row['status']}" for row in rows if row["status"] in ("failed", "cancelled")],
        "given_up": bool(running),
    }
    return {"case": asdict(case), "measured": measured, "trials": accuracy["trials"], "jobs": table}


# ---- all cases -------------------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> None:
    folder, began, longest = Path(options.out), time.monotonic(), 0.0
    speeds = json.loads((folder / f"speeds-{MPS}.json").read_text())["alone"]
    for case in cases(options):
        path = folder / f"{case.name}.json"
        if path.exists():
            continue
        if options.minutes and time.monotonic() - began + (longest or 60.0) > 60 * options.minutes:
            print(f"{case.name}: left for the next call", flush=True)
            continue
        jobs = draw(case.workload, speeds, options.seed)
        if options.tiny:
            jobs = [replace(job, steps=min(job.steps, 200)) for job in jobs]
        start = time.monotonic()
        record = run_case(case, jobs, options, _enough_s(case, folder, options.give_up))
        longest = max(longest, time.monotonic() - start)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(record, indent=1) + "\n")
        unfinished.replace(path)
        print(f"{case.name}: {json.dumps(record['measured'])} trials {json.dumps(record['trials'])}", flush=True)


def _enough_s(case: Case, folder: Path, factor: float) -> float:
    """Return the mean JCT above which a case is given up, from what the default took for the same jobs."""
    runs = [] if case.policy == "carpool" else list(folder.glob(f"{case.workload}-carpool-{case.mechanism}-run*.json"))
    means = [json.loads(path.read_text())["measured"]["mean_jct_s"] for path in runs]
    return factor * max(means) if means else math.inf


def print_table(folder: Path) -> None:
    """Print mean JCTs of each workload, also relative to exclusive SJF and to the best of the others."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*-run*.json")):
        record = json.loads(path.read_text())
        case = Case(**record["case"])
        found.setdefault((case.workload, case.mechanism), {}).setdefault(case.rule, []).append(record["measured"])
    for (workload, mechanism), rules in found.items():
        means = {rule: fmean(run["mean_jct_s"] for run in runs) for rule, runs in rules.items()}
        others = [mean for rule, mean in means.items() if not rule.startswith("carpool")]
        print(f"\n{workload}, {mechanism}")
        for rule, mean in sorted(means.items(), key=lambda item: item[1]):
            makespan = fmean(run["makespan_s"] for run in rules[rule])
            to_sjf = f"{mean / means['sjf-1']:.2f}" if "sjf-1" in means else "-"
            to_best = f"{mean / min(others):.2f}" if others else "-"
            runs = " ".join(
                f"{'at least ' if run.get('given_up') else ''}{run['mean_jct_s']:.1f}" for run in rules[rule]
            )
            print(
                f"  {rule:12} {mean:7.1f} s  makespan {makespan:6.1f} s  {to_sjf} of sjf  {to_best} of best  ({runs})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/unknown", help="folder of results")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", help="run only these cases or policies, such as carpool or sjf-ffs-3")
    parser.add_argument("--mechanism", choices=(MPS, TIME_SLICING), default=MPS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="start no case that would end after this many minutes")
    certain = "end a case that is certain to have this many times the mean JCT of the default"
    parser.add_argument("--give-up", type=float, default=math.inf, metavar="FACTOR", help=certain)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, help="number of logical slots to use instead of the GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny trainings for a CPU")
    parser.add_argument("--table", action="store_true", help="run nothing; print the results that exist")
    options = parser.parse_args()
    if options.table:
        print_table(Path(options.out))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_all(options)


if __name__ == "__main__":
    main()
