"""Fit slow-downs to demands: `python bench/demand_fit.py [FOLDER]` reads what `bench/demands.py` measured.

For each mechanism it prints the median error of ξ, predicted from demands alone, for models that were left out of the
fit, and the coefficients from all pairs, which belong into `carpool/belief/demand.py`. The error of the coefficients
there is printed beside it. FOLDER is docs/experiments/demands where none is given.
"""

import json
import sys
from collections.abc import Callable, Sequence
from math import log, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from scipy.optimize import least_squares

from carpool.belief import demand as shipped
from carpool.core.model import GpuDemand

FOLDER = Path(__file__).parents[1] / "docs" / "experiments" / "demands"
MECHANISMS = ("mps", "time-slicing")
Predict = Callable[[Sequence[float], GpuDemand, GpuDemand], float]


class PairRow(NamedTuple):
    """A model beside another, and its slow-down."""

    own: str
    mate: str
    xi: float


class Result(NamedTuple):
    """What a fit gave for one mechanism."""

    left_out: float
    """Median error of ξ for pairs with a model that was left out of the fit."""
    shipped: float
    """Median error of the coefficients in `carpool.belief.demand`."""
    shipped_sd: float
    """Standard deviation of log ξ around them."""
    coefficients: tuple[float, ...]


def time_slicing(p: Sequence[float], own: GpuDemand, mate: GpuDemand) -> float:
    return max(1.0, own.busy * (1.0 + p[0] * min(1.0, mate.busy / max(0.01, p[1]))))


def side_by_side(p: Sequence[float], own: GpuDemand, mate: GpuDemand) -> float:
    return 1.0 + abs(p[0]) * own.busy ** p[1] * mate.sm ** p[2]


FORMS: dict[str, tuple[Predict, tuple[float, ...]]] = {
    "mps": (side_by_side, (1.0, 0.5, 2.0)),
    "time-slicing": (time_slicing, (1.2, 0.4)),
}
"""The form of ξ under each mechanism, and where its fit begins."""


def read(folder: Path, mechanism: str) -> tuple[dict[str, GpuDemand], list[PairRow]]:
    """Return the demands of the models alone and the slow-downs of all pairs."""
    files = {one: json.loads((folder / f"demands-{one}.json").read_text())["runs"] for one in MECHANISMS}
    alone: dict[str, list[dict]] = {}
    for run in files[mechanism]:
        if len(run["models"]) == 1:
            alone.setdefault(run["models"][0], []).append(run)
    demands = {}
    for name, runs in alone.items():
        # the plain utilisation is one reading of the last moment, so that of the runs under both mechanisms counts
        both = [run for rows in files.values() for run in rows if run["models"] == [name]]
        demands[name] = GpuDemand(
            sm=fmean(run["counters"]["sm"] for run in runs),
            busy=fmean(run["counters"].get("busy", run["counters"]["utilisation"]) for run in both),
            dram=fmean(run["counters"]["dram"] for run in runs),
            tensor=fmean(run["counters"]["tensor"] for run in runs),
            iteration_s=fmean(run["jobs"][0]["iteration_s"] for run in runs),
        )
    pairs = []
    for run in files[mechanism]:
        if len(run["models"]) == 2:
            (a, b), (of_a, of_b) = run["models"], (job["iteration_s"] for job in run["jobs"])
            sides = [(a, b, fmean((of_a, of_b)))] if a == b else [(a, b, of_a), (b, a, of_b)]
            pairs += [PairRow(own, mate, max(1.0, took / demands[own].iteration_s)) for own, mate, took in sides]
    return demands, pairs


def fit(mechanism: str, demands: dict[str, GpuDemand], pairs: Sequence[PairRow]) -> tuple[float, ...]:
    """Return the coefficients that fit these pairs best; a few pairs that do not fit count little."""
    form, begin = FORMS[mechanism]

    def residuals(p: Sequence[float]) -> list[float]:
        return [log(form(p, demands[pair.own], demands[pair.mate]) / pair.xi) for pair in pairs]

    return tuple(float(value) for value in least_squares(residuals, begin, loss="soft_l1", f_scale=0.1).x)


def judge(folder: Path, mechanism: str) -> Result:
    """Fit and judge one mechanism."""
    demands, pairs = read(folder, mechanism)
    form, _ = FORMS[mechanism]
    errors = []
    for model in demands:
        p = fit(mechanism, demands, [pair for pair in pairs if model not in pair[:2]])
        held_out = [pair for pair in pairs if model in pair[:2]]
        errors += [abs(form(p, demands[pair.own], demands[pair.mate]) / pair.xi - 1.0) for pair in held_out]
    logs = [log(shipped.slowdown(demands[one.own], demands[one.mate], mechanism) / one.xi) for one in pairs]
    sd = sqrt(fmean(value**2 for value in logs))
    return Result(median(errors), median(map(abs, logs)), sd, fit(mechanism, demands, pairs))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    print("| mechanism | median error, model left out | median error, shipped | sd of log ξ | coefficients |")
    print("| --- | --- | --- | --- | --- |")
    for mechanism in MECHANISMS:
        found = judge(folder, mechanism)
        values = ", ".join(f"{value:.3g}" for value in found.coefficients)
        print(f"| {mechanism} | {found.left_out:.1%} | {found.shipped:.1%} | {found.shipped_sd:.2f} | {values} |")


if __name__ == "__main__":
    main()
