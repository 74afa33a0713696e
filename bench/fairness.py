"""Measure the price of fairness: mean completion time against the worst ρ, with shares and without them.

    python bench/fairness.py [--policies sjf,carpool] [--philly] [--out docs/experiments/fairness.csv]
    python bench/fairness.py --page docs/experiments/fairness.md

Every policy runs on the generator three-tenants (64 GPUs, seeds 1-4, loads 1 and 2) with strengths 0, 0.5 and 1. With
--philly, and with CARPOOL_DATA, it runs on the whole Philly trace instead (512 GPUs, loads 1 and 2, its virtual
clusters as groups) with strengths 0 and 0.5. Rows of other worlds or policies that the file has stay there. What no
schedule can reach is the same for all policies; it is in fairness-bounds.csv beside the rows, and `--policies none`
computes only that.
"""

import argparse
import csv
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from textwrap import fill

from carpool.core.tenants import DEFAULT_STRENGTH
from carpool.policies import BUILT_IN
from carpool.profile.schema import load
from carpool.sim.fairness import least_worst_rho, measure, own_jcts
from carpool.sim.generate import three_tenants
from carpool.sim.run import Setup, simulate
from carpool.sim.workload import Workload, read

COLUMNS = ("world", "load", "policy", "strength", "mean_jct_s", "worst_rho", "spread_rho", "jain", "cpu_s")
MARKER = "<!-- what follows is written by bench/fairness.py -->"
BOUND_COLUMNS = ("world", "load", "least_worst_rho")
ELASTIC = ("pollux",)
"""The policies that change the batch and the GPUs of jobs, for which the bound does not hold."""
TARGET = 0.5
"""The part of the worst ρ of strength 0 that is wanted at the default strength."""
LOADS = (1.0, 2.0)
SEEDS = range(1, 5)


def worlds(philly: bool, load_factor: float) -> tuple[str, Setup, list[Workload]]:
    if not philly:
        tasks = load("t4").core_tasks()
        made = [three_tenants(tasks, load=load_factor, seed=seed) for seed in SEEDS]
        return "three tenants", Setup(), made
    trace = Path(os.environ["CARPOOL_DATA"]) / "philly" / "philly.csv"
    return "Philly", Setup(cluster="64x8"), [read(trace).at_load(load_factor)]


def row(name: str, setup: Setup, given: list[Workload], alone: list[dict[str, float]], policy: str) -> dict[str, str]:
    found, cpu, jcts = [], 0.0, []
    for workload, own in zip(given, alone, strict=True):
        result = simulate(workload, policy, setup)
        fairness = measure(result.jobs, own, {})
        assert fairness is not None
        found.append(fairness)
        jcts.append(result.summary.mean_jct_s)
        cpu += result.summary.cpu_s
    return {
        "world": name,
        "policy": policy,
        "strength": f"{setup.fair_share:g}",
        "mean_jct_s": f"{fmean(jcts):.0f}",
        "worst_rho": f"{fmean(one.worst_rho for one in found):.2f}",
        "spread_rho": f"{fmean(one.spread_rho for one in found):.1f}",
        "jain": f"{fmean(one.jain for one in found):.2f}",
        "cpu_s": f"{cpu:.1f}",
    }


def write_page(rows: list[dict[str, str]], bounds: list[dict[str, str]], page: Path) -> None:
    """Replace what follows the marker of a page by tables of the rows."""
    head = page.read_text().partition(MARKER)[0] + MARKER + "\n"
    least = {(one["world"], one["load"]): float(one["least_worst_rho"]) for one in bounds}
    for world, load_factor in sorted({(one["world"], one["load"]) for one in rows}, reverse=True):
        own = [one for one in rows if (one["world"], one["load"]) == (world, load_factor)]
        head += f"\n## {world}, load {load_factor}\n\n"
        head += bound_text(own, least[world, load_factor])
        head += "| policy | strength | mean JCT | worst ρ | largest ÷ smallest ρ | Jain's index |\n"
        head += "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        plain = {one["policy"]: one for one in own if one["strength"] == "0"}
        for one in own:
            jct, before = float(one["mean_jct_s"]), plain[one["policy"]]
            change = "" if one is before else f" ({100 * (jct / float(before['mean_jct_s']) - 1):+.1f} %)"
            rho = "" if one is before else f" (× {float(one['worst_rho']) / float(before['worst_rho']):.2f})"
            cells = (one["policy"], one["strength"], f"{jct / 3600:.2f} h{change}", f"{one['worst_rho']}{rho}")
            head += f"| {' | '.join((*cells, one['spread_rho'], one['jain']))} |\n"
    page.write_text(head)


def bound_text(rows: list[dict[str, str]], least: float) -> str:
    """Say what no schedule can reach, and for which policies that rules out half of the worst ρ without shares."""
    plain = {one["policy"]: float(one["worst_rho"]) for one in rows if one["strength"] == "0"}
    ruled_out = [f"`{name}`" for name, rho in plain.items() if TARGET * rho < least and name not in ELASTIC]
    text = f"No policy that leaves the jobs their batch and GPUs can have a worst ρ below {least:.2f}"
    if ruled_out:
        text += f": half of strength 0 is out of reach for {', '.join(ruled_out)}"
    return fill(f"{text}.", 120, break_on_hyphens=False) + "\n\n"


def keep(path: Path, columns: tuple[str, ...], keys: int, new: dict[str, str]) -> None:
    """Write a row into a table, in place of the one with the same keys: the first columns."""
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    kept = {tuple(one[name] for name in columns[:keys]): one for one in [*rows, new]}
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, columns, lineterminator="\n")
        out.writeheader()
        out.writerows(kept[one] for one in sorted(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=",".join(BUILT_IN))
    parser.add_argument("--philly", action="store_true")
    parser.add_argument("--page", type=Path, help="only write the tables of --out into this page")
    parser.add_argument("--out", type=Path, default=Path("docs/experiments/fairness.csv"))
    options = parser.parse_args()
    bounds = options.out.with_name(f"{options.out.stem}-bounds.csv")
    if options.page:
        write_page(*(list(csv.DictReader(path.open())) for path in (options.out, bounds)), options.page)
        return
    policies = [] if options.policies == "none" else options.policies.split(",")
    strengths = (0.0, DEFAULT_STRENGTH) if options.philly else (0.0, DEFAULT_STRENGTH, 1.0)
    for load_factor in LOADS:
        name, setup, given = worlds(options.philly, load_factor)
        alone = [own_jcts(workload.jobs, setup) for workload in given]
        least = fmean([least_worst_rho(one.jobs, own, setup) for one, own in zip(given, alone, strict=True)])
        bound = {"world": name, "load": f"{load_factor:g}", "least_worst_rho": f"{least:.3f}"}
        keep(bounds, BOUND_COLUMNS, 2, bound)
        for policy in policies:
            for strength in strengths:
                new = row(name, replace(setup, fair_share=strength), given, alone, policy)
                new["load"] = f"{load_factor:g}"
                print(*(new[column] for column in COLUMNS), flush=True)
                keep(options.out, COLUMNS, 4, new)


if __name__ == "__main__":
    main()
