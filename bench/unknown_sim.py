"""Simulate the cases of `bench/unknown.py`, and compare them with what was measured.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2

The simulator is told how fast each kind is alone and in pairs (`pairs-mps.json`), when each job of the case was
submitted, and how long its process took to start up, to make a step alone and to end. The policy knows as little as the
service did: guessed durations, and what jobs report. A plain script that tells no total reports only how much slower it
is than alone, once it was seen alone. Where pairs were not measured, their slow-downs follow from the demands that the
journals contain.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --pairs

prints how well these demands predict the slow-downs of the measured pairs. Nothing was fitted to these trainings.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --work

compares the work that the trainings did with what they would have done at simulated speeds, under the decisions of the
service. Chance in decisions plays no part there.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --plans

compares the plans of the service with those that a scheduler makes of the events in its journal.

    python bench/unknown_sim.py docs/experiments/unknown/machine-2 --workloads 12

simulates workloads of other seeds under every policy, with start-ups drawn from those that were measured.
"""

import argparse
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from unknown import MPS, RULES, TIME_SLICING, Case
from unknown_engine import MeasuredPairs, Process, StartUps, TrueModel, WatchedEngine, submitted
from unknown_journals import as_submitted, complete_cases, read_demands, read_processes, read_speeds, stretches, turns
from unknown_work import WORKLOADS, UnknownJob, draw

from carpool.belief.demand import slowdown
from carpool.core import events as ev
from carpool.core.batches import apply_together
from carpool.core.model import Decision, Node
from carpool.core.scheduler import Scheduler
from carpool.live.service.estimator import JobEstimator
from carpool.live.service.progress import EVERY_S
from carpool.policies import make

DRAWS, MOVED_S = 40, 0.25
"""Each case is simulated so often, with start-ups moved at random by up to so many seconds: a decision that hangs on
which of two processes is up first changes all that follows."""
PAUSE_S = 0.007
"""Seconds that a pause or resume takes: the median over all journals."""
H200 = "NVIDIA H200"


def simulate(
    case: Case,
    jobs: Sequence[UnknownJob],
    alone_s: Mapping[str, float],
    pairs: MeasuredPairs,
    processes: Mapping[str, Process],
    looks_s: float = 0.0,
) -> tuple[float, float]:
    """Return the mean JCT and the makespan of a case in the simulator."""
    trainings = [submitted(job, alone_s, processes[job.name].pace) for job in jobs]
    truth = TrueModel(pairs, trainings, processes)
    guesses = {job.name: job.guess_s for job in jobs}
    policy = make(case.policy)
    engine = WatchedEngine(
        trainings,
        [Node("here", (0,), 1 << 50)],
        policy,
        belief=JobEstimator(1, case.mechanism, [H200]).initial_belief(),
        truth=truth,
        jobs_per_gpu=case.jobs_per_gpu or policy.jobs_per_gpu,
        costs=StartUps(pause_s=PAUSE_S, processes=processes),
        guess=lambda job: replace(job, duration_s=guesses[job.id]),
    )
    engine.truth, engine.demands, engine.processes, engine.looks_s = truth, pairs.demands, processes, looks_s
    state = engine.run()
    ends = {job.name: state.ended[job.name].ended for job in jobs}
    return fmean(ends[job.name] - job.submitted_s for job in jobs), max(ends.values())


def rows(folder: Path) -> Iterator[str]:
    """Yield the rows of the table in docs/experiments/unknown.md: a case, measured and simulated."""
    demands = read_demands(folder)
    for path, record in complete_cases(folder):
        case = Case(**record["case"])
        drawn_from, here = read_speeds(folder, case.mechanism)
        pairs = MeasuredPairs(here, demands, case.mechanism)
        jobs = as_submitted(draw(case.workload, drawn_from["alone"], 1), record)
        processes = read_processes(path, record, here["alone"])
        chance = random.Random(case.name)
        runs = []
        for _ in range(DRAWS):
            moved = {name: _moved(process, chance) for name, process in processes.items()}
            runs.append(simulate(case, jobs, here["alone"], pairs, moved, chance.random() * EVERY_S))
        yield f"| {case.name} | {_compared(record['measured'], runs)} |"


def _moved(process: Process, chance: random.Random) -> Process:
    return process._replace(startup_s=process.startup_s + chance.uniform(-MOVED_S, MOVED_S))


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
        processes = read_processes(path, record, here["alone"])
        trainings = [submitted(job, here["alone"], processes[job.name].pace) for job in drawn]
        truth = TrueModel(MeasuredPairs(here, demands, case.mechanism), trainings, processes)
        jobs = {row["job"]: job for row, job in zip(record["jobs"], trainings, strict=True)}
        predicted: dict[int, float] = {}
        for begin, end, active in stretches(path, jobs):
            for job in active:
                mates = [(jobs[mate], 1) for mate in active if mate != job]
                gained = (end - begin) / truth.slowdown(jobs[job], 1, mates)
                predicted[len(active)] = predicted.get(len(active), 0.0) + gained
        done = sum(job.duration_s or 0.0 for job in trainings)
        yield f"| {case.name} | {sum(predicted.values()) / done - 1.0:+.1%} | {max(predicted)} |"


def plan_rows(folder: Path) -> Iterator[str]:
    """Yield a row per case: how many plans the service made, and how many of them a scheduler makes that is given the
    events of the journal. What the simulator lacks then are events, not rules."""
    for path, record in complete_cases(folder):
        case = Case(**record["case"])
        policy = make(case.policy)
        belief = JobEstimator(1, case.mechanism, [H200]).initial_belief()
        scheduler = Scheduler(policy, belief, case.jobs_per_gpu or policy.jobs_per_gpu)
        made = same = 0
        for events, plan in turns(path):
            wanted = [] if plan is None else _in_short(plan.decisions)
            found = _decide(scheduler, events, plan)
            made += bool(wanted or found)
            same += bool(wanted or found) and wanted == found
        yield f"| {case.name} | {made} | {same} |"


def _decide(scheduler: Scheduler, events: Sequence[ev.Event], plan: ev.Planned | None) -> list[tuple[str, bool]]:
    """Apply the events of a turn and the plan that the service made, and return what the policy would have done."""
    state, now = scheduler.state, plan.at if plan is not None else events[-1].at
    scheduler.begin_moment(now)
    apply_together(state, events)
    found = []
    if plan is not None or state.needs_decision:
        state.advance(now)
        found = _in_short(scheduler.policy.decide(state))
    if plan is not None:
        state.apply(plan)
    state.needs_decision = False
    return found


def _in_short(decisions: Iterable[Decision]) -> list[tuple[str, bool]]:
    """Return which jobs are to compute, or to start up or be paused, in the order of their ids."""
    return sorted((one.job, one.allocation is not None and one.allocation.active) for one in decisions)


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
    seen: dict[str, list[Process]] = {}
    for path, record in complete_cases(folder):
        processes = read_processes(path, record, here["alone"])
        for job in record["jobs"]:
            seen.setdefault(job["kind"], []).append(processes[job["name"]])
    default: dict[tuple[str, int], float] = {}
    for policy, limit in RULES:
        cells = []
        for workload in WORKLOADS:
            ratios = []
            for seed in range(2, number + 2):
                chance = random.Random(f"{workload} {seed}")
                jobs = draw(workload, drawn_for["alone"], seed)
                case = Case(workload, policy, limit, mechanism)
                drawn = {job.name: chance.choice(seen[job.kind]) for job in jobs}
                jct_s = simulate(case, jobs, here["alone"], pairs, drawn)[0]
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
    parser.add_argument("--plans", action="store_true", help="compare plans made from the journals' events instead")
    parser.add_argument("--workloads", type=int, metavar="N", help="simulate N other workloads of each sort instead")
    parser.add_argument("--mechanism", choices=(MPS, TIME_SLICING), default=MPS, help="of these other workloads")
    options = parser.parse_args()
    if options.pairs:
        errors = pair_errors(options.folder, "mps")
        print(f"{len(errors)} slow-downs under MPS, predicted from demands: median error {median(errors):.1%}")
        return
    if options.plans:
        for row in plan_rows(options.folder):
            print(row)
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
