"""Measure the cost of wrong beliefs about slow-downs: SJF-BSBF under different beliefs, as a table.

    CARPOOL_DATA=… python bench/belief.py [--truth gavel] [--seeds 8]
    CARPOOL_DATA=… python bench/belief.py --unknown        nobody is known: `carpool`, with trials and without

The calibrated workloads of CARPOOL_DATA with 240 and 480 jobs run under one true table of slow-downs. Every belief is
compared with perfect knowledge of the table: first without memory limits and placement effects, then with both.
"""

import argparse
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from carpool.sim import Setup, read, simulate

JOBS = (240, 480)
BELIEFS: dict[str, dict[str, object]] = {
    "the truth": {},
    "constant 1.25": {"belief": "1.25"},
    "constant 1.5": {"belief": "1.5"},
    "constant 2.0": {"belief": "2.0"},
    "learned": {"belief": "learned"},
    "learned, reports off by σ = 0.1": {"belief": "learned", "report_error": 0.1},
    "learned, probing at 1.5": {"belief": "learned:probe=1.5"},
    "learned, probing at 1.75": {"belief": "learned:probe=1.75"},
    "the truth, durations off by σ = 1": {"duration_error": 1.0},
    "learned, durations off by σ = 1": {"belief": "learned", "duration_error": 1.0},
}
UNKNOWN: dict[str, dict[str, object]] = {
    "the truth": {},
    "unknown": {"belief": "unknown"},
    "unknown, durations off by σ = 0.35": {"belief": "unknown", "duration_error": 0.35},
    "unknown, no two jobs alike": {"belief": "unknown:unique"},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--truth", default="gavel")
    arguments.add_argument("--seeds", type=int, default=8)
    arguments.add_argument("--policy", action="append", help="repeatable")
    arguments.add_argument("--unknown", action="store_true")
    chosen = arguments.parse_args()
    beliefs = UNKNOWN if chosen.unknown else BELIEFS
    usual = ["carpool", "carpool:trials=false"] if chosen.unknown else ["sjf-bsbf"]
    file = Path(os.environ["CARPOOL_DATA"]) / "calibrated" / "workloads.csv"
    seeds = range(1, chosen.seeds + 1)
    workloads = {n: [read(file, {"n": str(n), "seed": str(seed)}) for seed in seeds] for n in JOBS}
    worlds = {
        "without memory limits and placement": Setup(truth=chosen.truth, memory_limit=False, ignore_placement=True),
        **({} if chosen.unknown else {"with both": Setup(truth=chosen.truth)}),
    }
    for (world, setup), policy in product(worlds.items(), chosen.policy or usual):
        print(f"\n{policy}, ξ {chosen.truth}, {world}; mean of {chosen.seeds} seeds\n")
        print("| believed ξ | 240 jobs, h | change | 480 jobs, h | change | CPU s per run |\n" + "| --- " * 6 + "|")
        known: dict[int, float] = {}
        for name, belief in beliefs.items():
            cells, cpu = [], []
            for n in JOBS:
                runs = [
                    simulate(workload, policy, replace(setup, seed=seed, **belief)).summary  # type: ignore[arg-type]
                    for seed, workload in zip(seeds, workloads[n], strict=True)
                ]
                mean = fmean(run.mean_jct_s for run in runs)
                cpu.append(fmean(run.cpu_s for run in runs))
                cells += [f"{mean / 3600:.3f}", f"{100 * (mean / known.setdefault(n, mean) - 1):+.1f} %"]
            print(f"| {name} | {' | '.join(cells)} | {cpu[-1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
