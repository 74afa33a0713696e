"""The paper's 30 jobs on 4 × 4 emulated GPUs, through the live service, its agents and its wrappers, and simulated.

    python bench/emulated.py --out out/emulated               (the same call resumes after a stop)
    python bench/emulated.py --out out/emulated --on slurm    (four nodes of a Slurm cluster that it starts)
    python bench/emulated.py --out out/emulated --csv docs/experiments/emulated.csv \\
        --rows src/carpool/report/paper/emulated.csv

The service runs on the real clock with GPUs that are `--speed` times as fast as the profile's. The jobs of the paper's
physical experiment (`paper.toml`) are submitted through the client at their times, divided by the speed. The simulator
gets the same jobs with the times at which they were really submitted, the same GPUs, and for each attempt the seconds
that it spent beyond its iterations: to be launched, to start up and to end.
"""

import argparse
import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import carpool
from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Job, Node
from carpool.core.record import JobRecord
from carpool.emulate.gpus import EmulatedGpus, parse_gpus
from carpool.live.home import Home
from carpool.live.journal.sqlite import SqliteJournal
from carpool.live.journal.store import Store
from carpool.policies.base import BasePolicy
from carpool.report.paper.cells import deviation, signed
from carpool.report.paper.config import load
from carpool.report.paper.jobs import thirty_jobs
from carpool.sim.engine import Costs, Engine
from carpool.sim.metrics import summarise

RESTART_S = 1.5
"""Seconds that a restart costs, as policies that weigh it believe."""
JOIN_S, PATIENCE_S = 120.0, 1200.0
TOOK = re.compile(r"after ([0-9.]+) s, at ([0-9.]+)")
FIGURES = ("makespan_s", "mean_jct_s")
AGENTS = "agents"
"""Nodes that the service starts on this machine, instead of those of a ground."""


def cases(speed: float) -> dict[str, str]:
    """Return the policies by label. Their times are those of the paper, divided by the speed."""
    return {
        "FIFO": "fifo",
        "SJF": "sjf",
        "Tiresias": f"tiresias:threshold_gpu_s={3600 / speed:g},restart_s={RESTART_S}",
        "Pollux": f"pollux:round_s={max(1.0, 60 / speed):g},restart_s={RESTART_S},start_s=0",
        "SJF-FFS": "sjf-ffs",
        "SJF-BSBF": "sjf-bsbf",
        "carpool": f"carpool:restart_s={RESTART_S}",
    }


# ---- live ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ground_options(ground: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Start what the ground needs; yield the options of `carpool serve` for it and its environment."""
    if ground == AGENTS:
        yield [], {}
        return
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.support.slurm import SlurmCluster

    with SlurmCluster(parse_gpus(gpus_text(1.0)).nodes) as cluster:
        yield ["--on", "slurm"], cluster.environment


def run_live(policy: str, gpus: str, jobs: Sequence[Job], ground: str) -> dict[str, Any]:
    """Run all jobs under a policy; return a row for each job and each attempt, with times in real seconds."""
    with ground_options(ground) as (options, environment):
        return _run_on(policy, gpus, jobs, options, os.environ | environment)


def _run_on(
    policy: str, gpus: str, jobs: Sequence[Job], options: list[str], environment: dict[str, str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="carpool-emulated-") as place:
        home = Home(Path(place) / "home")
        command = [sys.executable, "-m", "carpool.cli", "serve", "--home", str(home.path), "--port", "0"]
        log = Path(place) / "serve.log"
        with log.open("w") as output:
            words = [*command, "--policy", policy, "--emulate", gpus, *options]
            service = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        try:
            connection = _joined(home, service, parse_gpus(gpus))
            began = time.monotonic()
            for job in jobs:
                time.sleep(max(0.0, began + job.submitted - time.monotonic()))
                connection.submit(
                    [sys.executable, "-m", "carpool.emulate"],
                    name=job.id,
                    model=job.model,
                    batch=job.batch,
                    gpus=job.gpus,
                    iterations=job.iterations,
                    can_shrink=True,
                    clean_env=True,
                    directory=place,
                )
            until = time.monotonic() + PATIENCE_S
            while connection.request("GET", "/v1/jobs")["jobs"]:
                if time.monotonic() > until:
                    raise SystemExit(f"{policy}: not finished after {PATIENCE_S:g} s; give a higher --speed")
                time.sleep(1.0)
        except BaseException:
            print(log.read_text(), file=sys.stderr)
            raise
        finally:
            service.terminate()
            service.wait()
        return _record(home, jobs)


def _joined(home: Home, service: "subprocess.Popen[bytes]", gpus: EmulatedGpus) -> Any:
    """Return a connection to the service as soon as all nodes take jobs."""
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until and service.poll() is None:
        time.sleep(0.5)
        if home.read_address() is None:
            continue
        connection = carpool.connect(home=home.path)
        rows = connection.request("GET", "/v1/nodes")["nodes"]
        if sum(row["state"] == "open" for row in rows) == gpus.nodes:
            return connection
    raise SystemExit("the service or its nodes did not start")


def _record(home: Home, jobs: Sequence[Job]) -> dict[str, Any]:
    store = Store(SqliteJournal(home.journal))
    store.open()
    try:
        events = [event for _, event in store.events_after(0)]
    finally:
        store.close()
    names = {str(number): job.id for number, job in enumerate(jobs, 1)}
    submitted = {event.job.id: event.at for event in events if isinstance(event, ev.Submitted)}
    finished = {event.job: event.at for event in events if isinstance(event, ev.Finished)}
    if len(finished) != len(jobs):
        raise SystemExit(f"only {len(finished)} of {len(jobs)} jobs finished")
    first = min(submitted.values())
    rows = [
        {"job": names[job], "submitted_s": at - first, "finished_s": finished[job] - first}
        for job, at in submitted.items()
    ]
    return {"first_at": first, "jobs": rows, "attempts": _attempts(home, events, names)}


def _attempts(home: Home, events: Sequence[ev.Event], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return for each attempt the seconds that it took beyond its iterations, before them and after them."""
    claimed: dict[str, float] = {}
    asked: dict[str, float] = {}
    found = []
    for event in events:
        if isinstance(event, ev.Planned):
            for one in event.decisions:
                if one.allocation is None:
                    asked[one.job] = event.at
                else:
                    claimed.setdefault(one.job, event.at)
        elif isinstance(event, ev.Finished | ev.Stopped) and event.job in claimed:
            began, stop_asked = claimed.pop(event.job), asked.pop(event.job, None)
            path = home.attempt(event.job, event.attempt) / "rank-0" / "stdout.log"
            took = TOOK.search(path.read_text()) if path.exists() else None
            if took is None:
                continue
            seconds, last = map(float, took.groups())
            row = {"job": names[event.job], "attempt": event.attempt, "before_s": last - seconds - began}
            if isinstance(event, ev.Stopped) and stop_asked is not None:
                row |= {"stop_s": event.at - stop_asked, "went_on_s": last - stop_asked}
            found.append(row | {"after_s": event.at - last})
    return found


# ---- simulated -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunCosts(Costs):
    """What the attempts of a live run cost, and their mean where the simulation has another attempt."""

    overheads_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    believed_s: float = 0.0
    """Seconds that the engine adds to every start but the first."""
    went_on_s: float = 0.0
    """Seconds for which a job goes on that is asked to stop."""
    after_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Seconds that attempts took to end after their last iteration. They are charged at the start, with the others."""
    _starts: dict[str, int] = field(default_factory=dict)

    def launch(self, job: Job) -> float:
        number = self._starts[job.id] = self._starts.get(job.id, 0) + 1
        mean = fmean(self.overheads_s.values())
        known = self.overheads_s.get((job.id, number), mean)
        return max(0.0, known - (self.believed_s if number > 1 else 0.0))


def _overhead_s(attempt: Mapping[str, Any]) -> float:
    """Return the seconds that an attempt took beyond its iterations. Those after a stop count as the stop's."""
    return float(attempt["before_s"] + (0.0 if "stop_s" in attempt else attempt["after_s"]))


class RunEngine(Engine):
    """An engine in which a job that is asked to stop makes some more iterations before it hears of it."""

    costs: RunCosts

    def _stopped(self, now: float, record: JobRecord) -> ev.Stopped | ev.Finished:
        job, each_s = record.job, record.alone_iteration_s
        left_s = (job.iterations - record.done) * each_s
        after_s = self.costs.after_s.get((job.id, record.attempt), 0.0)  # for so long it had only to end, live
        if left_s <= self.costs.went_on_s + after_s:
            return ev.Finished(now + left_s, job.id, record.attempt)
        done = record.done + self.costs.went_on_s / each_s
        return ev.Stopped(now + self.costs.stop_s, job.id, record.attempt, done)


def simulate(policy: str, gpus: EmulatedGpus, jobs: Sequence[Job], live: Mapping[str, Any]) -> dict[str, float]:
    """Simulate the jobs of a live run with its submissions and its overheads."""
    made = policies.make(policy)
    # policies that decide in rounds do so at multiples of the round, so the simulation begins within one as the run did
    round_s = getattr(made, "round_s", 0.0)
    begins = live.get("first_at", 0.0) % round_s if round_s else 0.0
    at = {row["job"]: begins + row["submitted_s"] for row in live["jobs"]}
    overheads = {(row["job"], row["attempt"]): _overhead_s(row) for row in live["attempts"]}
    stops = [row for row in live["attempts"] if "stop_s" in row]
    costs = RunCosts(
        stop_s=fmean(row["stop_s"] for row in stops) if stops else 0.0,
        overheads_s=overheads,
        believed_s=getattr(made, "restart_s", 0.0),
        went_on_s=max(0.0, fmean(row["went_on_s"] for row in stops)) if stops else 0.0,
        after_s={(row["job"], row["attempt"]): row["after_s"] for row in live["attempts"] if "stop_s" not in row},
    )
    size = gpus.gpus
    nodes = [Node(f"node{n}", tuple(range(n * size, (n + 1) * size)), gpus.memory) for n in range(gpus.nodes)]
    state = RunEngine(
        # whether a job may start ahead of its turn is learned from those like it, as in the service
        [replace(job, submitted=at[job.id], can_start_ahead=None) for job in jobs],
        nodes,
        made,
        belief=gpus.model(),
        jobs_per_gpu=getattr(made, "jobs_per_gpu", BasePolicy.jobs_per_gpu),
        costs=costs,
    ).run()
    found = summarise(state, policy=policy, workload="emulated")
    return {key: getattr(found, key) for key in FIGURES}


def measured(live: Mapping[str, Any]) -> dict[str, float]:
    rows = live["jobs"]
    return {
        "makespan_s": max(row["finished_s"] for row in rows) - min(row["submitted_s"] for row in rows),
        "mean_jct_s": fmean(row["finished_s"] - row["submitted_s"] for row in rows),
    }


# ---- all -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunComparison:
    """One policy, live and simulated, in seconds of the emulated GPU, that is, multiplied by the speed."""

    label: str
    policy: str
    ground: str
    live: Mapping[str, float]
    simulated: Mapping[str, float]
    overhead_s: float
    """Real seconds that an attempt took to start and to end, in the mean."""
    suspended: int

    def row(self) -> dict[str, str]:
        """Return the row of the page."""
        row = {"policy": self.label}
        for key, name in (("makespan_s", "makespan s"), ("mean_jct_s", "mean JCT s")):
            row[f"{name}, live"] = f"{self.live[key]:.0f}"
            row[f"{name}, simulated"] = f"{self.simulated[key]:.0f}"
            row[f"{name}, off"] = signed(deviation(self.simulated[key], self.live[key]), 1)
        return row | {"start and end of an attempt, s": f"{self.overhead_s:.2f}", "suspended": str(self.suspended)}

    def figures(self) -> dict[str, str]:
        """Return the row of `carpool paper`."""
        row = {"policy": self.policy.partition(":")[0], "ground": self.ground}
        for key in FIGURES:
            row |= {f"live_{key}": f"{self.live[key]:.1f}", f"simulated_{key}": f"{self.simulated[key]:.1f}"}
        return row | {"suspended": str(self.suspended)}


def comparisons(folder: Path) -> list[RunComparison]:
    """Simulate each policy that was run, and return it beside its live run."""
    found = []
    for label, result in _results(folder).items():
        gpus = parse_gpus(result["gpus"])
        simulated = simulate(result["policy"], gpus, _jobs(gpus, result["seed"]), result)
        live, simulated = (
            {key: value * gpus.speed for key, value in figures.items()} for figures in (measured(result), simulated)
        )
        overhead_s = fmean(map(_overhead_s, result["attempts"]))
        suspended = sum("stop_s" in one for one in result["attempts"])
        about = label, result["policy"], result.get("ground", AGENTS)
        found.append(RunComparison(*about, live, simulated, overhead_s, suspended))
    return found


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {label: found[label] for label in cases(1.0) if label in found}


def _jobs(gpus: EmulatedGpus, seed: int) -> list[Job]:
    """Return the paper's jobs, with their times divided by the speed."""
    jobs = sorted(thirty_jobs(load(), seed).jobs, key=lambda job: job.submitted)
    return [replace(job, submitted=job.submitted / gpus.speed) for job in jobs]


def gpus_text(speed: float) -> str:
    """Return the GPUs of the paper's physical experiment in the words of `--emulate`."""
    rule = load().physical.setup
    return f"{rule.profile}:{rule.cluster}:{speed:g},interference={rule.truth},memory={rule.gpu_memory}B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for a JSON file of each policy")
    parser.add_argument("--speed", type=float, default=100.0, help="how many times as fast as a T4  [default: 100]")
    parser.add_argument("--seed", type=int, default=3, help="seed of the workload  [default: 3]")
    parser.add_argument("--only", nargs="*", help="labels of policies  [default: all]")
    parser.add_argument("--on", choices=(AGENTS, "slurm"), default=AGENTS, help="who has the nodes  [default: agents]")
    parser.add_argument("--rows", type=Path, help="write the figures for `carpool paper` there")
    parser.add_argument("--csv", type=Path, help="write the table of all results there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = gpus_text(options.speed)
    for label, policy in cases(options.speed).items():
        path = options.out / f"{label}.json"
        if path.exists() or (options.only and label not in options.only):
            continue
        began, load_before = time.monotonic(), os.getloadavg()[0]
        result = run_live(policy, gpus, _jobs(parse_gpus(gpus), options.seed), options.on)
        about = {
            "policy": policy,
            "gpus": gpus,
            "ground": options.on,
            "seed": options.seed,
            "load": [load_before, os.getloadavg()[0]],
        }
        path.with_suffix(".part").write_text(json.dumps(about | result, indent=1))
        path.with_suffix(".part").replace(path)
        print(f"{label}: {time.monotonic() - began:.0f} s, {measured(result)}", flush=True)
    found = comparisons(options.out)
    for one in found:
        print("  ".join(f"{key} {value}" for key, value in one.row().items()))
    for path, rows in ((options.csv, [one.row() for one in found]), (options.rows, [one.figures() for one in found])):
        if path and rows:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
