"""Repeat Pollux's own evaluation: mean JCT on its workloads, the published figures, and the CPU time of a run.

    CARPOOL_DATA=… python bench/pollux.py [--seeds 8]

16 nodes of 4 GPUs, seeds 1 to 8 of each load, without a memory limit (Pollux has none) and with it. Tiresias has the
settings of Pollux's evaluation, and runs once more with the run times of Pollux's simulator. That simulator counts the
progress of a whole epoch by the gradient statistics at its end, so jobs with large batches run 2 % shorter to 10 %
longer than their files say. The published figures are the means in the Pollux artifact (Qiao et al., OSDI 2021).
"""

import argparse
import csv
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from carpool.sim import Setup, read, simulate
from carpool.sim.workload import Workload

TIRESIAS = "tiresias:threshold_gpu_s=57600,round_s=60,start_s=30"
PUBLISHED_S = {
    "pollux": {160: 2751, 240: 3685, 320: 5289},
    TIRESIAS: {160: 4038, 240: 6182, 320: 10040},
}
NO_LIMIT, LIMIT = Setup(memory_limit=False), Setup()
Change = Callable[[Workload], Workload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, choices=range(1, 9), metavar="1..8")
    seeds = range(1, parser.parse_args().seeds + 1)
    folder = Path(os.environ.get("CARPOOL_DATA", "")) / "pollux"
    if not (folder / "workloads.csv").exists():
        sys.exit("set CARPOOL_DATA to the folder with pollux/workloads.csv")
    longer = as_pollux_counts(folder / "efficiency.csv")
    print("| policy | what | jobs | mean JCT s | ± over seeds | published s | deviation | CPU s per run |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    compare("pollux", "no memory limit", NO_LIMIT, folder, seeds)
    compare("pollux", "memory limit", LIMIT, folder, seeds)
    compare(TIRESIAS, "no memory limit", NO_LIMIT, folder, seeds)
    compare(TIRESIAS, "memory limit", LIMIT, folder, seeds)
    compare(TIRESIAS, "no memory limit, run times as Pollux counts", NO_LIMIT, folder, seeds, longer)


def compare(
    policy: str, what: str, setup: Setup, folder: Path, seeds: range, change: Change = lambda workload: workload
) -> None:
    for jobs, wanted in PUBLISHED_S[policy].items():
        workloads = [read(folder / "workloads.csv", {"n": str(jobs), "seed": str(seed)}) for seed in seeds]
        runs = [simulate(change(workload), policy, setup).summary for workload in workloads]
        mean = fmean(run.mean_jct_s for run in runs)
        spread = stdev(run.mean_jct_s for run in runs) / len(runs) ** 0.5 if len(runs) > 1 else 0.0
        cpu = fmean(run.cpu_s for run in runs)
        figures = f"{mean:.0f} | {spread:.0f} | {wanted} | {100 * (mean / wanted - 1):+.1f} % | {cpu:.1f}"
        print(f"| `{policy}` | {what} | {jobs} | {figures} |", flush=True)


def as_pollux_counts(path: Path) -> Change:
    """Scale run times by the iterations that the gradient statistics imply divided by those in the table."""
    epochs: dict[str, dict[int, list[dict[str, str]]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            epochs.setdefault(row["app"], {}).setdefault(int(row["batch"]), []).append(row)

    def stretch(model: str, batch: int) -> float:
        batches = epochs[model]
        batch = min(batches, key=lambda known: abs(known - batch))  # a gang's batch was rounded up to whole samples
        needed = before = 0.0
        number = min(len(rows) for rows in batches.values())
        for epoch in range(number):
            progress = min(float(rows[epoch]["progress"]) for rows in batches.values())
            square, variance = (float(batches[batch][epoch][name]) for name in ("grad_sqr", "grad_var"))
            gain = (variance + square) / (variance * min(batches) / batch + square)
            needed += (progress - before) / gain
            before = progress
        return needed / int(batches[batch][number - 1]["iteration"])

    def change(workload: Workload) -> Workload:
        jobs = [(job, stretch(job.model, job.batch * job.gpus)) for job in workload.jobs]
        return replace(workload, jobs=tuple(replace(job, duration_s=(job.duration_s or 0.0) * by) for job, by in jobs))

    return change


if __name__ == "__main__":
    main()
