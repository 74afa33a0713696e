"""Search for workloads on which the joint rule is worse than SJF-BSBF, small enough to see why.

    python bench/worst_case.py [--tries 3000] [--seed 1] [--seconds 120]

The script draws random workloads, then changes the worst one step by step as long as that makes it worse. It prints
the workload as rows (submitted, gpus, seconds alone) with ξ and C; tests/policies/test_joint.py has one of them.
"""

import argparse
from random import Random
from time import process_time

from carpool.core.model import Job
from carpool.core.perf import GENERIC
from carpool.sim import Setup, simulate

Case = tuple[float, int, tuple[tuple[float, int, float], ...]]
"""ξ, jobs per GPU, and (submitted, gpus, seconds alone) of every job."""
XIS = (1.0, 1.1, 1.3, 1.49, 1.51, 1.75, 2.0, 2.5, 3.0)


def run(case: Case, policy: str) -> float:
    """Return the mean JCT on one node of four GPUs."""
    xi, jobs_per_gpu, rows = case
    jobs = [Job(f"j{n}", at, GENERIC, gpus, 1, max(1, round(s)), duration_s=s) for n, (at, gpus, s) in enumerate(rows)]
    setup = Setup(cluster="1x4", truth=str(xi), jobs_per_gpu=jobs_per_gpu, memory_limit=False)
    return simulate(jobs, policy, setup).summary.mean_jct_s


def ratio(case: Case, policy: str = "carpool") -> float:
    return run(case, policy) / run(case, "sjf-bsbf")


def draw(random: Random) -> Case:
    rows = sorted(_row(random) for _ in range(random.randint(4, 12)))
    return random.choice(XIS), random.choice((1, 2, 2, 3, 4)), tuple(rows)


def _row(random: Random) -> tuple[float, int, float]:
    return float(random.randint(0, 400)), random.choice((1, 1, 2, 3, 4)), float(round(10 ** random.uniform(1, 3.5)))


def change(case: Case, random: Random) -> Case:
    """Return the case with one job replaced, removed or moved."""
    xi, jobs_per_gpu, rows = case
    kept = list(rows)
    index = random.randrange(len(kept))
    what = random.random()
    if what < 0.3 and len(kept) > 3:
        del kept[index]
    elif what < 0.6:
        kept[index] = _row(random)
    else:
        at, gpus, seconds = kept[index]
        kept[index] = (
            max(0.0, at + random.randint(-60, 60)),
            gpus,
            max(1.0, round(seconds * random.uniform(0.5, 2.0))),
        )
    return xi, jobs_per_gpu, tuple(sorted(kept))


def search(tries: int, seed: int, seconds: float) -> tuple[float, Case]:
    random = Random(seed)
    began = process_time()
    worst, case = 0.0, draw(random)
    for number in range(tries):
        new = change(case, random) if number > tries // 3 and random.random() < 0.9 else draw(random)
        found = ratio(new)
        if found > worst:
            worst, case = found, new
        if process_time() - began > seconds:
            break
    return worst, case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    worst, (xi, jobs_per_gpu, rows) = search(options.tries, options.seed, options.seconds)
    print(f"carpool / sjf-bsbf = {worst:.3f} at ξ = {xi}, {jobs_per_gpu} jobs per GPU")
    print(f"{'submitted':>10} {'gpus':>5} {'alone s':>8}")
    for at, gpus, alone in rows:
        print(f"{at:10.0f} {gpus:5} {alone:8.0f}")


if __name__ == "__main__":
    main()
