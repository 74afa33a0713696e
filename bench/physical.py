"""Does the simulator tell the truth? The same jobs through the live service on a real GPU, and through the simulator.

    python bench/physical.py --out out/physical                 (a machine with a GPU; again: goes on where it stopped)
    python bench/physical.py --gpus 1 --profile mine.json …     (logical slots, where there is none)
    python bench/physical.py --report docs/experiments/h200.md …        (what was run, as a page)

Thirty jobs of the paper's six tasks, each for one GPU, run under every policy and both sharing mechanisms: real
processes, started, stopped, resumed and ended by the service. Every case leaves a JSON file with each job's story and
the journal. The simulated side knows the profile (times alone, slow-downs) and three constants of the machine: how long
a process takes until its first iteration, from its last one to its end, and to save and leave when it is preempted, as
medians over all cases.
"""

import argparse
import asyncio
import gzip
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from carpool import policies
from carpool.channel import read_report
from carpool.core import events as ev
from carpool.core.codec import encode
from carpool.core.model import Job, Node
from carpool.core.perf import FittedModel, Placement
from carpool.gpu import mps, nvml
from carpool.live.home import Home
from carpool.live.journal.store import Store
from carpool.live.service.service import Service
from carpool.live.spec import Spec
from carpool.profile.measure import examples
from carpool.profile.measure.conclude import Noise
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile, load
from carpool.sim.engine import Costs, Engine
from carpool.sim.metrics import summarise

MPS, TIME_SLICING, LOGICAL = "mps", "time-slicing", "logical"
GUESSED_LAUNCH_S = 8.0
KEPT_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
EXCLUSIVE = ("fifo", "sjf", "tiresias")
SAMPLE_S = 0.1
PATIENCE = 3.0
"""A case that takes so many times as long as simulated, and a minute more, is given up."""


@dataclass(frozen=True)
class Case:
    policy: str
    mechanism: str
    jobs_per_gpu: int = 2
    repeat: int = 0

    @property
    def kind(self) -> tuple[str, str, int]:
        return self.policy, self.mechanism, self.jobs_per_gpu

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.mechanism}-{self.jobs_per_gpu}-run{self.repeat + 1}"


@dataclass(frozen=True)
class Work:
    """One job: the same in every case and in both worlds."""

    name: str
    task: str
    batch: int
    iterations: int
    submitted: float


class MeasuredModel(FittedModel):
    """The profile's fit, but at a measured batch the measured time."""

    def __init__(self, profile: Profile, mechanism: str) -> None:
        super().__init__(profile.core_tasks(), profile.interference(mechanism), 1)
        self._noise, self._mechanism = Noise(profile.raw), mechanism

    def iteration_time(self, job: Job, accum: int, placement: Placement) -> float:
        known = self._noise.alone(self._mechanism, Setting(job.model, job.batch, accum))
        return known if known is not None else super().iteration_time(job, accum, placement)


def settings(profile: Profile) -> list[Setting]:
    """Every task at every batch at which pairs of it were measured."""
    found = {Setting(pair.a, pair.batch_a) for pair in profile.pairs}
    return sorted(found | {Setting(pair.b, pair.batch_b) for pair in profile.pairs})


def workload(profile: Profile, mechanism: str, options: argparse.Namespace) -> list[Work]:
    """Tasks and batches by turns in random order; lengths lognormal; arrivals Poisson, `load` times too fast."""
    drawn = random.Random(options.seed)
    kinds = settings(profile)
    chosen = [kinds[i % len(kinds)] for i in drawn.sample(range(options.jobs), options.jobs)]
    model, now, jobs = MeasuredModel(profile, mechanism), 0.0, []
    for number, setting in enumerate(chosen, 1):
        length = options.mean * min(3.0, max(0.3, math.exp(drawn.gauss(-0.25, 0.7))))
        probe = Job("probe", 0.0, setting.task, 1, setting.batch, 1)
        iterations = max(5, round(length / model.iteration_time(probe, 1, Placement(1, 1))))
        jobs.append(Work(f"{setting.task}-{number}", setting.task, setting.batch, iterations, round(now, 2)))
        now += drawn.expovariate(options.load / (options.mean + GUESSED_LAUNCH_S))
    return jobs


# ---- the real world ------------------------------------------------------------------------------------------------


class Observer:
    """Watches the workers' reports and the GPU's own counter while a case runs."""

    def __init__(self, home: Home, uuid: str | None) -> None:
        self.home, self.uuid = home, uuid
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.utilisation: list[float] = []

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
                self.last[job] = max(report.time, self.last.get(job, 0.0))
        if self.uuid is not None and (share := nvml.utilisation(self.uuid)) is not None:
            self.utilisation.append(share)


async def run_live(case: Case, jobs: Sequence[Work], profile: Profile, options: argparse.Namespace) -> dict[str, Any]:
    """One case, from the first submission to the last end."""
    model = MeasuredModel(profile, _table(case, profile))
    uuid = None if options.gpus else nvml.devices()[0].uuid
    with tempfile.TemporaryDirectory(prefix="cp-") as place:
        home = Home(Path(place) / "h")
        service = Service(
            home,
            _policy(case.policy, options),
            gpus=options.gpus,
            jobs_per_gpu=case.jobs_per_gpu,
            mps=case.mechanism == MPS,
            perf=model,
        )
        await service.start()
        running = asyncio.create_task(service.run())
        observer = Observer(home, uuid)
        watching = asyncio.create_task(observer.run())
        try:
            limit = PATIENCE * simulate(case, jobs, profile, options, Costs(GUESSED_LAUNCH_S))["makespan_s"] + 60
            ids = await asyncio.wait_for(_submit_all(service, jobs, options), limit)
        finally:
            watching.cancel()
            await _end(service)
            await asyncio.gather(running, watching, return_exceptions=True)
        stories = {row["name"]: row for row in ids}
        events = journal(home.journal)
    keep_journal(Path(options.out) / f"{case.name}.journal.gz", events)
    return _story(case, jobs, stories, observer) | {"stops_s": _stops(events)}


async def _submit_all(service: Service, jobs: Sequence[Work], options: argparse.Namespace) -> list[dict[str, Any]]:
    began, ids = time.monotonic(), []
    for job in jobs:
        await asyncio.sleep(max(0.0, began + job.submitted - time.monotonic()))
        ids += await service.submit([_spec(job, options)], "bench")
    for name in ids:
        await service.wait(name)
    return [service.show(name) for name in ids]


async def _end(service: Service) -> None:
    """Nothing of ours runs on when a case is given up."""
    for row in service.jobs():
        await service.cancel(row["job"])
        await service.wait(row["job"])
    await service.stop()


def _spec(job: Work, options: argparse.Namespace) -> Spec:
    scripts = examples.folder(options.examples)
    command = (sys.executable, str(scripts / examples.SCRIPTS[job.task]), "--iterations", str(job.iterations))
    return Spec(
        command=(*command, "--batch-size", str(job.batch)),
        directory=str(scripts),
        batch=job.batch,
        iterations=job.iterations,
        model=job.task,
        name=job.name,
        env={key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ},
    )


def _story(
    case: Case, jobs: Sequence[Work], stories: Mapping[str, dict[str, Any]], observer: Observer
) -> dict[str, Any]:
    rows = []
    for job in jobs:
        told = stories[job.name]
        number = str(told["job"])
        if told["state"] != "finished":
            raise SystemExit(f"{case.name}: {job.name} {told['state']}: {told.get('reason')}")
        receipt = told["receipt"]
        rows.append(
            {
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
        )
    first, last = min(row["submitted"] for row in rows), max(row["finished"] for row in rows)
    measured = {
        "makespan_s": last - first,
        "mean_jct_s": fmean(row["finished"] - row["submitted"] for row in rows),
        "mean_queue_s": fmean(row["waited_s"] for row in rows),
        "gpu_utilisation": fmean(observer.utilisation) if observer.utilisation else None,
        "occupied": _occupied(rows) / (last - first),
        "preemptions": sum(row["preemptions"] for row in rows),
    }
    return {"case": asdict(case), "measured": measured, "jobs": rows}


def journal(path: Path) -> list[ev.Event]:
    store = Store(path)
    store.open()
    try:
        return [event for _, event in store.events_after(0)]
    finally:
        store.close()


def keep_journal(path: Path, events: Iterable[ev.Event]) -> None:
    """One event a line. The same events give the same bytes."""
    lines = "".join(json.dumps(encode(event)) + "\n" for event in events)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def _stops(events: Iterable[ev.Event]) -> list[float]:
    """How long each preempted job took to save and leave, from the journal."""
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


# ---- the simulated world -------------------------------------------------------------------------------------------


def simulate(
    case: Case, jobs: Sequence[Work], profile: Profile, options: argparse.Namespace, costs: Costs
) -> dict[str, float]:
    model = MeasuredModel(profile, _table(case, profile))
    memory = profile.gpu.memory_bytes if profile.gpu and profile.gpu.memory_bytes else 2**50
    node = Node("node", tuple(range(options.gpus or 1)), memory)
    coming = [Job(job.name, job.submitted, job.task, 1, job.batch, job.iterations) for job in jobs]
    policy = policies.make(_policy(case.policy, options))
    state = Engine(coming, [node], policy, belief=model, jobs_per_gpu=case.jobs_per_gpu, costs=costs).run()
    found = summarise(state, policy=case.policy, workload="physical")
    keys = ("makespan_s", "mean_jct_s", "mean_queue_s", "gpu_utilisation", "preemptions")
    return {("occupied" if key == "gpu_utilisation" else key): getattr(found, key) for key in keys}


def _table(case: Case, profile: Profile) -> str:
    """On logical slots, whatever the profile holds stands for the way they share."""
    known = profile.pair_mechanisms()
    return case.mechanism if case.mechanism in known else known[0]


def _policy(name: str, options: argparse.Namespace) -> str:
    """Tiresias' threshold is scaled with the jobs; the cost of a restart is the launch, which both worlds have."""
    threshold = options.threshold or 1.5 * (options.mean + GUESSED_LAUNCH_S)
    return f"tiresias:threshold_gpu_s={threshold:g},restart_s=0" if name == "tiresias" else name


# ---- all cases -----------------------------------------------------------------------------------------------------


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What matters most first; the whole set once before anything is repeated."""
    plain = LOGICAL if options.gpus else TIME_SLICING
    shared = [plain] if options.gpus or mps.available() is not None else [MPS, plain]
    kinds = [Case("sjf", plain)]
    kinds += [Case("sjf-bsbf", mechanism) for mechanism in shared]
    kinds += [Case("fifo", plain), Case("tiresias", plain)]
    kinds += [Case("sjf-ffs", mechanism) for mechanism in shared]
    kinds += [Case(policy, shared[0], crowd) for crowd in options.crowds for policy in ("sjf-bsbf", "carpool")]
    wanted = [case for case in kinds if not options.only or case.policy in options.only]
    for repeat in range(options.repeats):
        for case in wanted:
            yield replace(case, repeat=repeat)


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    folder, began = Path(options.out), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    profile = load(options.profile)
    jobs = workload(profile, _table(Case("sjf", TIME_SLICING), profile), options)
    _same_workload(folder / "workload.json", [asdict(job) for job in jobs])
    done = []
    for case in cases(options):
        path = folder / f"{case.name}.json"
        if not path.exists():
            needs = simulate(case, jobs, profile, options, Costs(GUESSED_LAUNCH_S))["makespan_s"]
            if options.minutes is not None and time.monotonic() - began + needs > 60 * options.minutes:
                print(f"{case.name}: left for the next call (about {needs:.0f} s)", flush=True)
                continue
            result = asyncio.run(run_live(case, jobs, profile, options))
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{case.name}: {json.dumps(result['measured'])}", flush=True)
        done.append(json.loads(path.read_text()))
    rows = compare(done, jobs, profile, options)
    (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _same_workload(path: Path, jobs: list[dict[str, Any]]) -> None:
    if not path.exists():
        path.write_text(json.dumps(jobs, indent=1) + "\n")
    elif json.loads(path.read_text()) != jobs:
        raise SystemExit(f"{path}: results of another workload are there; give another --out, or the same options")


def compare(
    done: Sequence[dict[str, Any]], jobs: Sequence[Work], profile: Profile, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measured (mean over the runs) against simulated, per case."""
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for result in done:
        runs.setdefault(Case(**result["case"]).kind, []).append(result)
    rows = []
    for kind, same in runs.items():
        of_kind = [row for result in done if result["case"]["mechanism"] == kind[1] for row in result["jobs"]]
        stops = [took for result in done for took in result["stops_s"]]
        launch_s = median(row["launch_s"] + row["exit_s"] for row in of_kind if row["launch_s"] is not None)
        costs = Costs(launch_s, median(stops) if stops else 0.0)
        simulated = simulate(Case(*kind), jobs, profile, options, costs)
        measured = {key: [result["measured"][key] for result in same] for key in same[0]["measured"]}
        rows.append(
            {"policy": kind[0], "mechanism": kind[1], "jobs_per_gpu": kind[2], "launch_s": costs.launch_s}
            | {"measured": measured, "simulated": simulated}
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'case':28}{'runs':>5}" + "".join(f"{head:>26}" for head in ("makespan s", "mean JCT s", "queue s")))
    for row in rows:
        label = f"{row['policy']} {row['mechanism']} C={row['jobs_per_gpu']}"
        cells = []
        for key in ("makespan_s", "mean_jct_s", "mean_queue_s"):
            real, model = fmean(row["measured"][key]), row["simulated"][key]
            cells.append(f"{real:8.1f} / {model:7.1f} {100 * (model / real - 1) if real else 0:+5.1f}%")
        print(f"{label:28}{len(row['measured']['makespan_s']):>5}" + "".join(f"{cell:>26}" for cell in cells))
    print("\n".join(gains(rows)))
    print("(measured / simulated)")


def gains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sharing against exclusive SJF, on the same GPU and jobs."""
    base = next((row for row in rows if row["policy"] == "sjf"), None)
    found = []
    for row in rows if base is not None else ():
        if row["policy"] not in EXCLUSIVE:
            ratio = fmean(base["measured"]["mean_jct_s"]) / fmean(row["measured"]["mean_jct_s"])
            what = f"{row['policy']}, {row['mechanism']}, up to {row['jobs_per_gpu']} jobs per GPU"
            found.append(f"- {what}: the mean JCT of exclusive SJF is {ratio:.2f} times as long")
    return found


# ---- the page --------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace) -> str:
    """What the folder holds, as markdown. Needs no GPU."""
    folder, profile = Path(options.out), load(options.profile)
    jobs = [Work(**row) for row in json.loads((folder / "workload.json").read_text())]
    done = [json.loads(path.read_text()) for path in sorted(folder.glob("*-run*.json"))]
    rows = compare(done, jobs, profile, options)
    lines = ["| policy | mechanism | jobs per GPU | runs | makespan s | mean JCT s | mean queue s | GPU busy |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = [_cell(row, key) for key in ("makespan_s", "mean_jct_s", "mean_queue_s")]
        busy = [share for share in row["measured"]["gpu_utilisation"] if share is not None]
        runs = str(len(row["measured"]["makespan_s"]))
        crowd = "1" if row["policy"] in EXCLUSIVE else str(row["jobs_per_gpu"])
        lines.append(
            "| " + " | ".join([row["policy"], row["mechanism"], crowd, runs, *cells, f"{fmean(busy):.0%}"]) + " |"
        )
    return "\n".join([*lines, "", *gains(rows)]) + "\n"


def _cell(row: Mapping[str, Any], key: str) -> str:
    real, model = fmean(row["measured"][key]), row["simulated"][key]
    return f"{real:.1f} / {model:.1f} ({100 * (model / real - 1):+.1f} %)"


def replace_table(path: Path, table: str) -> None:
    """Between the two marks of the page; the words around them are written by people."""
    begin, end = "<!-- measured: begin -->\n", "<!-- measured: end -->"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path}: mark the place of the table with {begin.strip()} and {end}")
    path.write_text(before + begin + table + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/physical", help="results, journals and the summary")
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--gpus", type=int, help="so many logical slots instead of the GPU")
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--mean", type=float, default=4.0, help="mean length of a job alone, seconds")
    parser.add_argument("--load", type=float, default=2.5, help="arrivals, times what one GPU could serve")
    parser.add_argument("--threshold", type=float, help="Tiresias' threshold in GPU-seconds; else 1.5 mean jobs")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--crowds", type=int, nargs="*", default=[3, 4], help="more jobs per GPU to try under MPS")
    parser.add_argument("--only", nargs="*", help="these policies only")
    parser.add_argument("--minutes", type=float, help="start no case that would end later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", help="folder of the example scripts")
    parser.add_argument("--report", type=Path, help="run nothing; put the results into this page")
    options = parser.parse_args()
    if options.report:
        replace_table(options.report, report(options))
        return
    if not options.gpus and not nvml.devices():
        raise SystemExit("no GPU was found; --gpus 1 runs it on a logical slot, with a profile of this machine")
    show(run_all(options))


if __name__ == "__main__":
    main()
