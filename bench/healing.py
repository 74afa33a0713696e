"""Measure whether a user gains by lying about durations: one of five users divides all its guesses by 10.

    python bench/healing.py [--policies sjf,carpool] [--seeds 8] [--first-seed 1] [--out docs/experiments/healing.csv]

The generator philly-like gives 300 jobs (64 GPUs, loads 1 and 2); they belong to five users in turn. Three runs are
compared: all users are honest; one divides its guesses by 10 and guesses heal; the same and guesses are trusted. In the
first half of the worlds jobs report their speed, in the other half they report nothing. The figure is the mean
completion time of the liar's jobs after its first 20, over that of the same jobs with honest guesses.
"""

import argparse
import csv
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean

from carpool.profile.schema import load
from carpool.sim.generate import philly_like
from carpool.sim.run import Result, Setup, simulate
from carpool.sim.workload import Workload

COLUMNS = ("policy", "load", "reports", "lie", "guesses", "liar", "others", "all")
MARKER = "<!-- what follows is written by bench/healing.py -->"
LIAR, USERS, FIRST = "user0", 5, 20
LIES = (0.1,)
LOADS = (1.0, 2.0)
JOBS = 300


def workloads(load_factor: float, seeds: range) -> list[Workload]:
    """Return workloads whose jobs belong to five users in turn."""
    tasks = load("t4").core_tasks()
    found = []
    for seed in seeds:
        made = philly_like(tasks, jobs=JOBS, load=load_factor, seed=seed)
        jobs = [replace(job, user=f"user{number % USERS}") for number, job in enumerate(made.jobs)]
        found.append(Workload(tuple(jobs), source=made.source))
    return found


def later_jct(result: Result, liar: bool) -> float:
    """Return the mean completion time of the jobs that users submitted after their first 20."""
    by_user: dict[str, list[float]] = {}
    for record in sorted(result.jobs, key=lambda record: record.seq):
        by_user.setdefault(record.job.user, []).append(record.ended - record.job.submitted)
    return fmean(jct for user, jcts in by_user.items() if (user == LIAR) is liar for jct in jcts[FIRST:])


def row(policy: str, load_factor: float, silent: bool, lie: float, given: list[Workload]) -> list[dict[str, str]]:
    honest = Setup(report_s=inf if silent else None, guesses=tuple((f"user{n}", 1.0) for n in range(USERS)))
    lying = replace(honest, guesses=((LIAR, lie), *honest.guesses[1:]))
    worlds = {"heal": lying, "trusted": replace(lying, trust_guesses=True)}
    base = [simulate(workload, policy, honest) for workload in given]
    rows = []
    for guesses, setup in worlds.items():
        found = [simulate(workload, policy, setup) for workload in given]
        figures = {
            "liar": fmean(later_jct(r, True) for r in found) / fmean(later_jct(r, True) for r in base),
            "others": fmean(later_jct(r, False) for r in found) / fmean(later_jct(r, False) for r in base),
            "all": fmean(r.summary.mean_jct_s for r in found) / fmean(r.summary.mean_jct_s for r in base),
        }
        labels = (policy, f"{load_factor:g}", "no" if silent else "yes", f"{lie:g}", guesses)
        rows.append({**dict(zip(COLUMNS[:5], labels, strict=True)), **{k: f"{v:.3f}" for k, v in figures.items()}})
    return rows


def write_page(rows: list[dict[str, str]], page: Path) -> None:
    """Replace what follows the marker of a page by a table of the rows."""
    text = page.read_text().partition(MARKER)[0] + MARKER + "\n\n"
    text += "| policy | load | jobs report | guesses | the liar | the others | all |\n"
    text += "| --- | ---: | --- | --- | ---: | ---: | ---: |\n"
    for one in rows:
        guesses = "heal" if one["guesses"] == "heal" else "are trusted"
        cells = (one["policy"], one["load"], one["reports"], guesses, one["liar"], one["others"], one["all"])
        text += f"| {' | '.join(cells)} |\n"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="sjf,sjf-bsbf,srtf,carpool")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/experiments/healing.csv"))
    parser.add_argument("--page", type=Path, default=Path("docs/experiments/healing.md"))
    parser.add_argument("--tables", action="store_true", help="only write the table of --out into --page")
    options = parser.parse_args()
    if options.tables:
        write_page(list(csv.DictReader(options.out.open())), options.page)
        return
    rows = []
    for load_factor in LOADS:
        given = workloads(load_factor, range(options.first_seed, options.first_seed + options.seeds))
        for policy in options.policies.split(","):
            for silent in (False, True):
                for lie in LIES:
                    for one in row(policy, load_factor, silent, lie, given):
                        print(*one.values(), flush=True)
                        rows.append(one)
    with options.out.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    write_page(rows, options.page)


if __name__ == "__main__":
    main()
