"""Measure the simulator: CPU seconds of whole commands, jobs per CPU second, memory, and CPU time of decisions.

    python bench/speed.py [--quick]        (make bench)

Everything runs on fixed seeds. With CARPOOL_DATA the Philly trace is the real one (82,247 jobs). Without it, a
generated workload of the same size and load replaces it, and the table says so.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from carpool import policies
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.profile.schema import load
from carpool.sim.engine import Engine
from carpool.sim.generate import philly_like
from carpool.sim.metrics import percentile
from carpool.sim.run import Setup, cluster_nodes

PHILLY_JOBS = 82_247


def command(policy: str, workload: Path | str, cluster: str = "64x8", *more: str) -> dict[str, float]:
    """Run `carpool simulate` as a user would, and return what the whole process used."""
    arguments = ["simulate", "--policy", policy, "--workload", str(workload), "--cluster", cluster, "--json", *more]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-m", "carpool.cli", *arguments], stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed")
        output.seek(0)
        summary = json.load(output)
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "cpu_s": cpu,
        "jobs": summary["jobs"],
        "rss_mb": usage.ru_maxrss / 1024,
        "p99_s": summary["decision_p99_cpu_s"],
        "mean_jct_s": summary["mean_jct_s"],
    }


def philly(folder: Path) -> tuple[Path, str]:
    data = os.environ.get("CARPOOL_DATA")
    if data and (trace := Path(data) / "philly" / "philly.csv").exists():
        return trace, "Philly trace"
    trace = folder / "stand-in.csv"
    jobs = philly_like(load("t4").core_tasks(), jobs=PHILLY_JOBS, load=4.0).jobs
    start = datetime(2017, 9, 4)
    with open(trace, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["timestamp", "duration", "num_gpus"])
        out.writerows((start + timedelta(seconds=job.submitted), job.duration_s, job.gpus) for job in jobs)
    return trace, "generated stand-in for the Philly trace"


def four_times(trace: Path, folder: Path) -> Path:
    """Return the same jobs four times, one span after the other: four times the jobs at the same load."""
    with open(trace, newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["timestamp"]) for row in rows]
    span = max(times) - min(times) + timedelta(seconds=60)
    longer = folder / "four-times.csv"
    with open(longer, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["timestamp", "duration", "num_gpus"])
        for lap in range(4):
            laps = zip(times, rows, strict=True)
            out.writerows((time + lap * span, row["duration"], row["num_gpus"]) for time, row in laps)
    return longer


class EnoughSteps(Exception):
    """As many steps as wanted have been measured."""


class Watched:
    """A policy that records how many jobs wait whenever it is asked, and stops a run after enough such steps."""

    def __init__(self, policy, waiting: range = range(0), steps: int | None = None) -> None:
        self.policy = policy
        self.wanted, self.steps_left = waiting, steps
        self.restart_s = policy.restart_s
        self.key = policy.key
        self.wake = policy.wake
        self.pauses = getattr(policy, "pauses", False)
        self.waiting: list[int] = []

    def decide(self, view):
        if self.steps_left is not None and len(view.queue) in self.wanted:
            if not self.steps_left:
                raise EnoughSteps
            self.steps_left -= 1
        self.waiting.append(len(view.queue))
        return self.policy.decide(view)


def decisions(
    name: str,
    cluster: str,
    jobs: int,
    load_factor: float,
    waiting: range,
    xi: float = 1.5,
    jobs_per_gpu: int = 2,
    steps: int | None = None,
) -> list[float]:
    """Return the CPU times of steps, from events to plan, that began with a number of waiting jobs in `waiting`.

    With `steps`, only of the first so many of them.
    """
    setup = Setup(cluster=cluster)
    nodes = cluster_nodes(setup)
    tasks = load("t4").core_tasks()
    workload = philly_like(tasks, jobs=jobs, load=load_factor)
    policy = Watched(policies.make(name), waiting, steps)
    model = FittedModel(tasks, ConstantInterference(xi), len(nodes[0].gpus))
    engine = Engine(workload.jobs, nodes, policy, belief=model, jobs_per_gpu=jobs_per_gpu)
    engine.timed_every = 1
    with suppress(EnoughSteps):
        engine.run()
    return sorted(s for s, n in zip(engine.decision_cpu_s, policy.waiting, strict=False) if n in waiting)


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    print("| what | jobs | CPU s | jobs per CPU s | memory MB |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, label = philly(folder)
        longer = None if quick else four_times(trace, folder)
        for policy in ("sjf", "sjf-bsbf", "fifo", "sjf-ffs", "carpool"):
            once = command(policy, trace)
            report(f"{policy}, {label}, 512 GPUs", once)
            if longer and policy in ("sjf", "sjf-bsbf"):
                four = command(policy, longer)
                report(f"{policy}, four times the jobs ({four['cpu_s'] / once['cpu_s']:.2f}× the CPU time)", four)
    print("\n| decision, CPU time | steps | mean ms | p99 ms | max ms |\n| --- | --- | --- | --- | --- |")
    for policy in ("sjf", "sjf-bsbf", "sjf-ffs", "carpool", "carpool:suspend=true"):
        times = decisions(policy, "16x4", 480, 2.0, range(10**9))
        show(f"{policy}, 64 GPUs, 480 jobs", times)
    times = decisions("carpool", "24x8", 800, 80.0, range(10**9), 1.2, jobs_per_gpu=4)
    show("carpool, 192 GPUs, 800 jobs, ξ 1.2, up to four jobs per GPU", times)
    if not quick:
        bsbf = [("sjf-bsbf", xi) for xi in (1.2, 1.5, 2.0)]
        for policy, xi in (("sjf", 1.5), *bsbf, ("sjf-ffs", 1.5), ("carpool", 1.5), ("carpool", 2.0)):
            times = decisions(policy, "1250x8", 32_000, 4000.0, range(10_000, 14_000), xi)
            show(f"{policy}, 10,000 GPUs, 10,000–14,000 pending, ξ {xi}", times)
        for xi in (1.5, 1.2):
            times = decisions("carpool", "1250x8", 32_000, 4000.0, range(10_000, 14_000), xi, 4, steps=1000)
            show(f"carpool, the same with up to four jobs per GPU, ξ {xi}, the first 1,000 steps", times)


def report(what: str, figures: dict[str, float]) -> None:
    speed = figures["jobs"] / figures["cpu_s"]
    print(
        f"| {what} | {figures['jobs']:,} | {figures['cpu_s']:.2f} | {speed:,.0f} | {figures['rss_mb']:.0f} |",
        flush=True,
    )


def show(what: str, times: list[float]) -> None:
    mean = sum(times) / max(1, len(times))
    cells = [f"{value * 1e3:.3f}" for value in (mean, percentile(times, 0.99), times[-1] if times else 0.0)]
    print(f"| {what} | {len(times)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
