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
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unknown import MPS, RULES, TIME_SLICING, Case
from unknown_work import KINDS, WORKLOADS, UnknownJob, draw

from carpool.belief.demand import slowdown
from carpool.core import events as ev
from carpool.core.guesses import expected_left
from carpool.core.healing import record_of
from carpool.core.model import GpuDemand, Job, Node
from carpool.core.pace import update_pace
from carpool.core.perf import AllReduce, FittedModel, Mate, Task
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.policies import make
from carpool.profile.schema import load
from carpool.sim.engine import Costs, Due, Engine
from carpool.sim.unknown import UnknownBelief

REPORT_S = 0.75
"""Seconds after which a job's speed is known: the median, over all journals, for scripts that tell how far they are."""
DRAWS, MOVED_S = 20, 0.25
"""Each case is simulated so often, with start-ups moved at random by up to so many seconds: a decision that hangs on
which of two processes is up first changes all that follows."""
PAUSE_S = 0.007
"""Seconds that a pause or resume takes: the median over all journals."""
SWITCHES = ("Paused", "Resumed")
EXPECTED_STARTUP_S = 5.0
"""What the service expects of a script before any has started."""
USER = "user"
"""All jobs are of one user, whose guesses are corrected by what became of the earlier ones."""
PLAIN = {"gpt", "diffusion", "diffusion-small", "gan", "tabular"}
"""Kinds whose scripts do not tell how many steps they make."""
TASK = Task(0.0, 1.0, AllReduce(0.0, 0.0), AllReduce(0.0, 0.0), 1.0)
"""Its constants do not matter, because every job has a duration."""


class MeasuredPairs:
    """The slow-downs of pairs as measured, else from demands."""

    def __init__(self, speeds: Mapping[str, Any], demands: Mapping[str, GpuDemand], mechanism: str) -> None:
        alone = speeds["alone"]
        self.known = {(a, b): a_s / alone[a] for a, b, a_s, _ in speeds["pairs"]}
        self.known |= {(b, a): b_s / alone[b] for a, b, _, b_s in speeds["pairs"]}
        self.demands, self.mechanism = demands, mechanism

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        known = self.known.get((model, mate))
        return max(1.0, known or slowdown(self.demands[model], self.demands[mate], self.mechanism))

    def demand(self, model: str, samples: int) -> float:
        return self.demands[model].sm


class TrueModel(FittedModel):
    """How fast the trainings really are. One whose steps are done slows no mate down while its process ends."""

    def __init__(self, pairs: MeasuredPairs, startup_s: Mapping[str, float]) -> None:
        tasks = dict.fromkeys(KINDS, TASK)
        super().__init__(tasks, pairs, 1, ignore_memory=True, startup=lambda job: startup_s[job.id])
        self.ended: set[str] = set()

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        computing = [mate for mate in mates if mate[0].id not in self.ended]
        return super().slowdown(job, accumulation, computing) if computing else 1.0


@dataclass(frozen=True)
class StartUps(Costs):
    """The costs of a case in which it is known how long each process took to start up."""

    startup_s: Mapping[str, float] = field(default_factory=dict)

    def launch(self, job: Job) -> float:
        return self.startup_s[job.id]


class WatchedEngine(Engine):
    """An engine in which plain scripts report as the service sees them, and demands are measured."""

    truth: TrueModel
    demands: Mapping[str, GpuDemand]
    exit_s: Mapping[str, float]
    """Seconds between the last step of each job and the end of its process, in which it keeps its place."""

    def run(self) -> State:
        self._exits: dict[str, float] = {}
        self._guessed_s: dict[str, float] = {}
        return super().run()

    def _push(self, at: float, what: Due, pace_version: int) -> None:
        """Let processes start at once, and compute once they are up, which the service sees as two events."""
        if isinstance(what, ev.Started):
            super()._push(self.world.now, replace(what, at=self.world.now, computes=False), 0)
            what = ev.Computing(at, what.job, what.attempt)
        super()._push(at, what, pace_version)

    def _pop(self, now: float, batch: list[ev.Event]) -> bool:
        wake = super()._pop(now, batch)
        for event in [one for one in batch if isinstance(one, ev.Finished)]:
            ends_at = self._exits.get(event.job)
            if ends_at is None:
                ends_at = self._exits[event.job] = now + self.exit_s[event.job]
                self._push(ends_at, ev.Finished(ends_at, event.job, event.attempt), 0)
                self.truth.ended.add(event.job)
                update_pace(self.world, self.world.cluster.mates(self.world.jobs[event.job]))
            if now < ends_at:
                batch.remove(event)
        return wake

    def _report(self, now: float, pace_changes: list[JobRecord]) -> None:
        for record in pace_changes:
            believed = self.belief.jobs.get(record.job.id)
            if not record.iteration_s or believed is None or believed.attempt != record.attempt:
                continue
            event = self._observed(now, record, believed)
            if event is None:
                continue
            self.belief.apply(event)
            if believed.alone_seen and self.belief.perf.demand_of(record.job, 1) is None:
                demand = self.demands[record.job.model]
                self.belief.apply(ev.DemandMeasured(now, record.job.id, record.attempt, demand))
        self.belief.pace_changes.clear()

    def _observed(self, now: float, record: JobRecord, believed: JobRecord) -> ev.Observed | None:
        job = record.job
        done = record.done if record.since == now else job.iterations - record.iterations_left(now)
        if job.model not in PLAIN:
            return ev.Observed(now, job.id, record.attempt, done, record.iteration_s)
        mates = self.belief.cluster.mates(believed)
        if not believed.alone_seen and any(mate.active and not mate.starts_up for mate in mates):
            return None
        guessed_s = self._guessed_s.setdefault(job.id, believed.alone_iteration_s)
        worked_s = done * record.alone_iteration_s
        spread = record_of(self.belief, believed).spread
        left_s = expected_left(worked_s, job.iterations * guessed_s, spread)
        seconds = record.iteration_s / record.alone_iteration_s * guessed_s
        return ev.Observed(
            now, job.id, record.attempt, max(0.0, job.iterations - left_s / guessed_s), seconds, relative=True
        )


def simulate(
    case: Case,
    jobs: Sequence[UnknownJob],
    alone_s: Mapping[str, float],
    pairs: MeasuredPairs,
    startup_s: Mapping[str, float],
    exit_s: Mapping[str, float],
) -> tuple[float, float]:
    """Return the mean JCT and the makespan of a case in the simulator."""
    trainings = [
        Job(job.name, job.submitted_s, job.kind, 1, 1, job.steps, USER, duration_s=job.steps * alone_s[job.kind])
        for job in jobs
    ]
    truth = TrueModel(pairs, startup_s)
    guesses = {job.name: job.guess_s for job in jobs}
    belief = UnknownBelief(truth, 1, load("h200"), case.mechanism)
    belief.startups.overall_s = EXPECTED_STARTUP_S
    policy = make(case.policy)
    engine = WatchedEngine(
        trainings,
        [Node("here", (0,), 1 << 50)],
        policy,
        belief=belief,
        truth=truth,
        jobs_per_gpu=case.jobs_per_gpu or policy.jobs_per_gpu,
        costs=StartUps(pause_s=PAUSE_S, startup_s=startup_s),
        report_s=REPORT_S,
        guess=lambda job: replace(job, duration_s=guesses[job.id]),
    )
    engine.truth, engine.demands, engine.exit_s = truth, pairs.demands, exit_s
    state = engine.run()
    ends = {job.name: state.ended[job.name].ended for job in jobs}
    return fmean(ends[job.name] - job.submitted_s for job in jobs), max(ends.values())


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
        jobs = draw(case.workload, drawn_from["alone"], 1)
        startup_s, exit_s = read_overheads(path, record)
        chance = random.Random(case.name)
        runs = []
        for _ in range(DRAWS):
            moved_s = {name: seconds + chance.uniform(-MOVED_S, MOVED_S) for name, seconds in startup_s.items()}
            runs.append(simulate(case, jobs, here["alone"], pairs, moved_s, exit_s))
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
        truth = TrueModel(MeasuredPairs(here, demands, case.mechanism), {})
        kinds = {job["job"]: job["kind"] for job in record["jobs"]}
        jobs = {job: Job(job, 0.0, kind, 1, 1, 1, duration_s=1.0) for job, kind in kinds.items()}
        predicted: dict[int, float] = {}
        for seconds, active in stretches(path, kinds):
            for job in active:
                mates = [(jobs[mate], 1) for mate in active if mate != job]
                gained = seconds / truth.slowdown(jobs[job], 1, mates)
                predicted[len(active)] = predicted.get(len(active), 0.0) + gained
        done = sum(job.steps * here["alone"][job.kind] for job in draw(case.workload, drawn_from["alone"], 1))
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
        abs(slowdown(demands[own], demands[mate], mechanism) / measured.pair(own, 1, mate, 1) - 1.0)
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
