"""Compare Pollux's search with the optimum in every round of two runs, and its time with that of a solver.

    CARPOOL_DATA=… python bench/pollux_search.py        (needs the extra `fit`: NumPy and SciPy)

Distributing GPUs is a knapsack with several choices for each job. Its optimum comes from dynamic programming, and in
every hundredth round also from SciPy's mixed-integer solver. The optimum ignores nodes, so it is a bound that no
placement may reach.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from carpool.core.model import Decision
from carpool.core.view import View
from carpool.policies.pollux.policy import Pollux, PolluxRound
from carpool.policies.pollux.shares import UserAllowance, share_out
from carpool.sim import Setup, read, simulate

Curve = list[tuple[int, float]]


class Watched(Pollux):
    """Pollux that compares every round with the optimum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shared: list[float] = []
        self.planned: list[float] = []
        self.ours_s: list[float] = []
        self.solver_s: list[float] = []

    def decide(self, view: View) -> list[Decision]:
        self._goodputs.under(view.perf, view.belief_version)
        this = PolluxRound(self, view, self._goodputs)
        if not this.contenders:
            return []
        curves = [
            [(0, c.nothing), *((n, c.stay if n == c.held else c.cost(n, n > this.node_gpus)) for n in c.sizes)]
            for c in this.contenders
        ]
        began = perf_counter()
        shares = share_out(this.contenders, this.gpus, this.node_gpus, UserAllowance(view, this.contenders))
        self.ours_s.append(perf_counter() - began)
        best = optimum(curves, this.gpus)
        ours = sum(dict(curve)[shares.get(c.record.seq, 0)] for curve, c in zip(curves, this.contenders, strict=True))
        self.shared.append(ours / best - 1.0)
        if len(self.shared) % 100 == 0:
            began = perf_counter()
            solved = solve(curves, this.gpus)
            self.solver_s.append(perf_counter() - began)
            assert abs(solved / best - 1.0) < 1e-3
        places = this.best_gpus()
        cost = 0.0
        for c in this.contenders:
            gpus = places.get(c.record.seq, ())
            several = bool(gpus) and view.topology.nodes_spanned(gpus) > 1
            stays = set(gpus) == set(c.record.gpus)
            cost += c.stay if stays else c.cost(len(gpus), several) if gpus else c.nothing
        self.planned.append(cost / best - 1.0)
        return this.decisions(places)


def optimum(curves: Sequence[Curve], gpus: int) -> float:
    best = np.zeros(gpus + 1)
    for curve in curves:
        ways = [np.concatenate([np.full(n, np.inf), best[: gpus + 1 - n] + cost]) for n, cost in curve if n <= gpus]
        best = np.min(ways, axis=0)
    return float(best.min())


def solve(curves: Sequence[Curve], gpus: int) -> float:
    costs = [cost for curve in curves for _, cost in curve]
    rows = np.zeros((len(curves) + 1, len(costs)))
    first = 0
    for number, curve in enumerate(curves):
        rows[number, first : first + len(curve)] = 1.0
        first += len(curve)
    rows[-1] = [size for curve in curves for size, _ in curve]
    ones = [1.0] * len(curves)
    limits = LinearConstraint(rows, [*ones, 0.0], [*ones, float(gpus)])
    return float(milp(costs, constraints=limits, integrality=np.ones(len(costs)), bounds=Bounds(0.0, 1.0)).fun)


def main() -> None:
    path = Path(os.environ.get("CARPOOL_DATA", "")) / "pollux" / "workloads.csv"
    if not path.exists():
        sys.exit("set CARPOOL_DATA to the folder with pollux/workloads.csv")
    print("| jobs | rounds | shares over optimum, mean / p99 | plan over bound, median / p90 | ours ms | solver ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for jobs in (160, 320):
        policy = Watched()
        simulate(read(path, {"n": str(jobs), "seed": "2"}), policy, Setup(memory_limit=False))
        shared = f"{100 * np.mean(policy.shared):.2f} / {100 * np.quantile(policy.shared, 0.99):.2f} %"
        planned = f"{100 * np.median(policy.planned):.1f} / {100 * np.quantile(policy.planned, 0.9):.1f} %"
        times = f"{1e3 * np.mean(policy.ours_s):.1f} | {1e3 * np.mean(policy.solver_s):.1f}"
        print(f"| {jobs} | {len(policy.shared)} | {shared} | {planned} | {times} |", flush=True)


if __name__ == "__main__":
    main()
