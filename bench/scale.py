"""Measure how the simulator scales: jobs per CPU second, memory, and the growth from a quarter of the jobs to all.

    python bench/scale.py [--jobs 1000000] [--cluster 512x8] [--policy sjf --policy sjf-bsbf]

Every figure is that of a whole `carpool simulate` process on the generator `philly-like`, seed 1: imports, generating
the workload, simulating and printing. The load grows with the cluster, so that GPUs are as busy as 64 are at `--load`.
"""

import argparse

from speed import command, report

from carpool.sim.run import parse_cluster

GENERATOR_GPUS = 64
"""GPUs that a load of 1 keeps as busy as in the paper."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--cluster", default="512x8")
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--policy", action="append", help="repeatable; default: sjf and sjf-bsbf")
    options = parser.parse_args()
    nodes, size = parse_cluster(options.cluster)
    load = options.load * nodes * size / GENERATOR_GPUS
    print("| what | jobs | CPU s | jobs per CPU s | memory MB |\n| --- | --- | --- | --- | --- |")
    for policy in options.policy or ("sjf", "sjf-bsbf"):
        quarter, whole = (
            command(policy, "philly-like", options.cluster, "--jobs", str(jobs), "--load", f"{load:g}")
            for jobs in (options.jobs // 4, options.jobs)
        )
        what = f"{policy}, {nodes * size:,} GPUs, load {options.load:g}"
        report(f"{what}, mean JCT {quarter['mean_jct_s']:.3f} s", quarter)
        growth = whole["cpu_s"] / quarter["cpu_s"]
        report(f"{what}, mean JCT {whole['mean_jct_s']:.3f} s, {growth:.2f}× the CPU time", whole)


if __name__ == "__main__":
    main()
