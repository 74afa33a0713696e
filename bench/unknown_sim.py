"""Simulate the cases of `bench/unknown.py`, and compare them with what was measured.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2

The simulator is told how fast each kind is alone and in pairs (`pairs-mps.json`), and how long each process of the case
took to start up and to end. The policy knows as little as the service did: guessed durations, and what jobs
report. A plain script that tells no total reports only how much slower it is than alone, once it was seen alone. Where
pairs were not measured, their slow-downs follow from the demands that the journals contain.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --pairs

prints how well these demands predict the slow-downs of the measured pairs. Nothing was fitted to these trainings.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --work

compares the work that the trainings did with what they would have done at simulated speeds, under the decisions of the
service. Chance in decisions plays no part there.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --workloads 12

simulates workloads of other seeds under every policy, with start-ups drawn from those that were measured.
"""

import argparse
import gzip
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unknown import MPS, RULES, TIME_SLICING, Case
from unknown_engine import MeasuredPairs, StartUps, TrueModel, WatchedEngine, submitted
from unknown_work import WORKLOADS, UnknownJob, draw

from carpool.belief.demand import slowdown
from carpool.core.model import GpuDemand, Node
from carpool.live.service.estimator import JobEstimator
from carpool.live.service.progress import EVERY_S
from carpool.policies import make

DRAWS, MOVED_S = 20, 0.25
"""Each case is simulated so often, with start-ups moved at random by up to so many seconds: a decision that hangs on
which of two processes is up first changes all that follows."""
PAUSE_S = 0.007
"""Seconds that a pause or resume takes: the median over all journals."""
SWITCHES = ("Paused", "Resumed")
H200 = "NVIDIA H200"


def simulate(
    case: Case,
    jobs: Sequence[UnknownJob],
    alone_s: Mapping[str, float],
    pairs: MeasuredPairs,
    startup_s: Mapping[str, float],
    exit_s: Mapping[str, float],
    looks_s: float = 0.0,
) -> tuple[float, float]:
    """Return the mean JCT and the makespan of a case in the simulator."""
    trainings = [submitted(job, alone_s) for job in jobs]
    truth = TrueModel(pairs, trainings, startup_s)
    guesses = {job.name: job.guess_s for job in jobs}
    policy = make(case.policy)
    engine = WatchedEngine(
        trainings,
        [Node("here", (0,), 1 << 50)],
        policy,
        belief=JobEstimator(1, case.mechanism, [H200]).initial_belief(),
        truth=truth,
        jobs_per_gpu=case.jobs_per_gpu or policy.jobs_per_gpu,
        costs=StartUps(pause_s=PAUSE_S, startup_s=startup_s),
        guess=lambda job: replace(job, duration_s=guesses[job.id]),
    )
    engine.truth, engine.demands, engine.exit_s, engine.looks_s = truth, pairs.demands, exit_s, looks_s
    state = engine.run()
    ends = {job.name: state.ended[job.name].ended for job in jobs}
    return fmean(ends[job.name] - job.submitted_s for job in jobs), max(ends.values())


def as_submitted(jobs: Sequence[UnknownJob], record: Mapping[str, Any]) -> list[UnknownJob]:
    """Return the jobs of a case at the times at which the service received them."""
    received = [replace(job, submitted_s=row["submitted"]) for job, row in zip(jobs, record["jobs"], strict=True)]
    return sorted(received, key=lambda job: job.submitted_s)


def read_overheads(path: Path, record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds that each job of a case started up, and those that it took to end, by its name."""
    began, computed, last = {}, {}, {}
    for row in read_journal(path):
        if row["event"] == "Started":
            began.setdefault(row["job"], row["at"])
        elif row["event"] == "Computing":
            computed.setdefault(row["job"], row["at"])
        elif row["event"] == "Finished":
            last[row["job"]] = row["at"]
    stepped = {row["job"]: row["at"] for row in read_progress(path)}
    names = {job["job"]: job["name"] for job in record["jobs"]}
    return (
        {name: computed[job] - began[job] for job, name in names.items()},
        {name: last[job] - stepped[job] for job, name in names.items()},
    )


def read_speeds(folder: Path, mechanism: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the speeds that the jobs were drawn for, and those on the machine of the cases.

    Alone, a job is as fast under time-slicing as under MPS; pairs are used only under the mechanism they belong to.
    """
    drawn_for = json.loads((folder / "speeds-mps.json").read_text())
    path = folder / "pairs-mps.json"
    here = json.loads(path.read_text()) if path.exists() else {**drawn_for, "pairs": []}
    return drawn_for, here if mechanism == MPS else {**here, "pairs": []}


def read_demands(folder: Path) -> dict[str, GpuDemand]:
    """Return the highest demand of each kind over all journals: readings that contain the start or the end of a
    training, as they could when the cases were measured, are too low."""
    highest: dict[str, GpuDemand] = {}
    for path, record in complete_cases(folder):
        kinds = {job["job"]: job["kind"] for job in record["jobs"]}
        for row in read_journal(path):
            if row["event"] == "DemandMeasured":
                demand, kind = GpuDemand(**row["demand"]), kinds[row["job"]]
                highest[kind] = max(demand, highest.get(kind, demand), key=lambda one: one.sm)
    return highest


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


def rows(folder: Path) -> Iterator[str]:
    """Yield the rows of the table in docs/experiments/unknown.md: a case, measured and simulated."""
    demands = read_demands(folder)
    for path, record in complete_cases(folder):
        case = Case(**record["case"])
        drawn_from, here = read_speeds(folder, case.mechanism)
        pairs = MeasuredPairs(here, demands, case.mechanism)
        jobs = as_submitted(draw(case.workload, drawn_from["alone"], 1), record)
        startup_s, exit_s = read_overheads(path, record)
        chance = random.Random(case.name)
        runs = []
        for _ in range(DRAWS):
            moved_s = {name: seconds + chance.uniform(-MOVED_S, MOVED_S) for name, seconds in startup_s.items()}
            runs.append(simulate(case, jobs, here["alone"], pairs, moved_s, exit_s, chance.random() * EVERY_S))
        yield f"| {case.name} | {_compared(record['measured'], runs)} |"


def _compared(measured: Mapping[str, float], runs: Sequence[tuple[float, float]]) -> str:
    """Return the cells of a row: what was measured, and the mean of the simulated runs with their range."""
    cells = []
    for seen, found in zip((measured["mean_jct_s"], measured["makespan_s"]), zip(*runs, strict=True), strict=True):
        mean = fmean(found)
        cells.append(f"{seen:.1f} | {mean:.1f} ({mean / seen - 1:+.1%}) | {min(found):.1f}–{max(found):.1f}")
    return " | ".join(cells)


def work_rows(folder: Path) -> Iterator[str]:
    """Yield a row per case: by how much the trainings would have done more if each stretch of time in which the same
    jobs computed had been as fast as the simulator takes it to be. The decisions are those of the service."""
    demands = read_demands(folder)
    for path, record in complete_cases(folder):
        case = Case(**record["case"])
        drawn_from, here = read_speeds(folder, case.mechanism)
        drawn = draw(case.workload, drawn_from["alone"], 1)
        trainings = [submitted(job, here["alone"]) for job in drawn]
        truth = TrueModel(MeasuredPairs(here, demands, case.mechanism), trainings, {})
        jobs = {row["job"]: job for row, job in zip(record["jobs"], trainings, strict=True)}
        predicted: dict[int, float] = {}
        for seconds, active in stretches(path, jobs):
            for job in active:
                mates = [(jobs[mate], 1) for mate in active if mate != job]
                gained = seconds / truth.slowdown(jobs[job], 1, mates)
                predicted[len(active)] = predicted.get(len(active), 0.0) + gained
        done = sum(job.steps * here["alone"][job.kind] for job in drawn)
        yield f"| {case.name} | {sum(predicted.values()) / done - 1.0:+.1%} | {max(predicted)} |"


def stretches(path: Path, jobs: Collection[str]) -> Iterator[tuple[float, list[str]]]:
    """Yield each stretch of time in which the same jobs computed: its seconds and these jobs."""
    progress: dict[str, list[float]] = {}
    for row in read_progress(path):
        progress.setdefault(row["job"], []).append(row["at"])
    changes = [(at[0], job, "began") for job, at in progress.items()]
    changes += [(at[-1], job, "ended") for job, at in progress.items()]
    changes += [(row["at"], row["job"], row["event"]) for row in read_journal(path) if row["event"] in SWITCHES]
    computing, paused, before = set[str](), set[str](), 0.0
    for at, job, what in sorted(changes):
        active = sorted((computing - paused) & set(jobs))
        if active:
            yield at - before, active
        before = at
        (paused if what in SWITCHES else computing).symmetric_difference_update([job])


def pair_errors(folder: Path, mechanism: str) -> list[float]:
    """Return the relative errors of the slow-downs that follow from demands, for both jobs of every measured pair."""
    demands = read_demands(folder)
    measured = MeasuredPairs(read_speeds(folder, mechanism)[1], demands, mechanism)
    return [
        abs(slowdown(demands[own], demands[mate], mechanism) / measured.between(own, mate) - 1.0)
        for own, mate in measured.known
        if own in demands and mate in demands
    ]


def other_workloads(folder: Path, mechanism: str, number: int) -> Iterator[str]:
    """Yield a row per policy: mean JCT over that of the default, on workloads that were not measured."""
    demands = read_demands(folder)
    drawn_for, here = read_speeds(folder, mechanism)
    pairs = MeasuredPairs(here, demands, mechanism)
    startups: dict[str, list[float]] = {}
    exits: dict[str, list[float]] = {}
    for path, record in complete_cases(folder):
        startup_s, exit_s = read_overheads(path, record)
        for job in record["jobs"]:
            startups.setdefault(job["kind"], []).append(startup_s[job["name"]])
            exits.setdefault(job["kind"], []).append(exit_s[job["name"]])
    default: dict[tuple[str, int], float] = {}
    for policy, limit in RULES:
        cells = []
        for workload in WORKLOADS:
            ratios = []
            for seed in range(2, number + 2):
                chance = random.Random(f"{workload} {seed}")
                jobs = draw(workload, drawn_for["alone"], seed)
                case = Case(workload, policy, limit, mechanism)
                startup_s = {job.name: chance.choice(startups[job.kind]) for job in jobs}
                exit_s = {job.name: chance.choice(exits[job.kind]) for job in jobs}
                jct_s = simulate(case, jobs, here["alone"], pairs, startup_s, exit_s)[0]
                ratios.append(jct_s / default.setdefault((workload, seed), jct_s))
            cells.append(f"{fmean(ratios):.2f}")
        yield f"| {case.rule} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of results")
    parser.add_argument("--pairs", action="store_true", help="compare slow-downs of pairs instead")
    parser.add_argument(
        "--work", action="store_true", help="compare the work done under the measured decisions instead"
    )
    parser.add_argument("--workloads", type=int, metavar="N", help="simulate N other workloads of each sort instead")
    parser.add_argument("--mechanism", choices=(MPS, TIME_SLICING), default=MPS, help="of these other workloads")
    options = parser.parse_args()
    if options.pairs:
        errors = pair_errors(options.folder, "mps")
        print(f"{len(errors)} slow-downs under MPS, predicted from demands: median error {median(errors):.1%}")
        return
    if options.work:
        for row in work_rows(options.folder):
            print(row)
        return
    other = options.workloads and other_workloads(options.folder, options.mechanism, options.workloads)
    for row in other or rows(options.folder):
        print(row, flush=True)


if __name__ == "__main__":
    main()
