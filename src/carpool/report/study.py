"""The robustness study as tables and a picture: every policy compared with `sjf-bsbf`, paired by seed.

A ratio is the geometric mean over seeds of a policy's mean completion time divided by that of the reference on the same
jobs. Its interval is two standard errors of the logarithms to either side. `carpool study` calls this module.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from carpool.files import write_csv
from carpool.report import plots
from carpool.report.console import new_console, print_table
from carpool.report.tables import new_table
from carpool.sim.study import OURS, REFERENCE, REPAIR, StudyRun
from carpool.sim.sweep import mean

MOST_SHOWN = 5
"""Number of policies that the tables show."""
TOLERANCE = 1.02
"""Ratio above which the lower end of the interval must lie for a policy to count as worse than the reference."""
SHOWN = {REPAIR: "repair", "carpool:suspend=true": "carpool, suspends"}
"""Short names of policies whose specification is too long for a column."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One policy in one scenario, over all seeds. Times are in hours; `--json` and the CSV file use these names."""

    group: str
    scenario: str
    load: float
    policy: str
    seeds: int
    mean_jct_h: float
    mean_jct_error_h: float | None
    p95_jct_h: float
    p99_jct_h: float
    large_jct_h: float
    makespan_h: float
    host_slowdown_max: float
    preemptions_per_job: float
    worst_rho: float | None
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    mean_jct_over_bound: float | None

    @property
    def worse(self) -> bool:
        """Whether the policy is worse than the reference, by more than the tolerance and more than chance."""
        return self.ratio_low is not None and self.ratio_low > TOLERANCE

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "worse": self.worse}


def digest(runs: Sequence[StudyRun]) -> list[StudyRow]:
    """Return a row for each scenario and policy, in the order of the runs."""
    scenarios: dict[tuple[str, str, float], dict[str, dict[int, StudyRun]]] = {}
    for run in runs:
        scenarios.setdefault((run.group, run.scenario, run.load), {}).setdefault(run.policy, {})[run.seed] = run
    rows = []
    for (group, scenario, load), by_policy in scenarios.items():
        reference = by_policy[REFERENCE]
        for policy, some in by_policy.items():
            rows.append(_row((group, scenario, load, policy), list(some.values()), reference))
    return rows


def _row(where: tuple[str, str, float, str], runs: Sequence[StudyRun], reference: dict[int, StudyRun]) -> StudyRow:
    jct = mean([run.mean_jct_s / 3600 for run in runs])
    ratio = mean([log(run.mean_jct_s / reference[run.seed].mean_jct_s) for run in runs])
    bounds = [run.bound_s for run in runs if run.bound_s]
    group, scenario, load, policy = where
    return StudyRow(
        group=group,
        scenario=scenario,
        load=load,
        policy=policy,
        seeds=len(runs),
        mean_jct_h=jct.value,
        mean_jct_error_h=jct.error,
        p95_jct_h=fmean(run.p95_jct_s for run in runs) / 3600,
        p99_jct_h=fmean(run.p99_jct_s for run in runs) / 3600,
        large_jct_h=fmean(run.large_jct_s for run in runs) / 3600,
        makespan_h=fmean(run.makespan_s for run in runs) / 3600,
        host_slowdown_max=max(run.host_slowdown_max for run in runs),
        preemptions_per_job=fmean(run.preemptions_per_job for run in runs),
        worst_rho=None if any(run.worst_rho is None for run in runs) else fmean(run.worst_rho or 0.0 for run in runs),
        ratio=exp(ratio.value),
        ratio_low=None if ratio.error is None else exp(ratio.value - 2 * ratio.error),
        ratio_high=None if ratio.error is None else exp(ratio.value + 2 * ratio.error),
        mean_jct_over_bound=jct.value * 3600 / fmean(bounds) if bounds else None,
    )


def by_scenario(rows: Sequence[StudyRow]) -> dict[str, dict[tuple[str, float], list[StudyRow]]]:
    """Return the rows by group, then by scenario and load."""
    groups: dict[str, dict[tuple[str, float], list[StudyRow]]] = {}
    for row in rows:
        groups.setdefault(row.group, {}).setdefault((row.scenario, row.load), []).append(row)
    return groups


def _name(policy: str) -> str:
    return SHOWN.get(policy, policy)


def _ratio(row: StudyRow) -> str:
    if row.policy == REFERENCE:
        error = "" if row.mean_jct_error_h is None else f" ± {row.mean_jct_error_h:.2f}"
        return f"{row.mean_jct_h:.2f}{error} h"
    interval = "" if row.ratio_low is None else f" [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
    return f"{row.ratio:.3f}{interval}"


def verdict(rows: Sequence[StudyRow]) -> str:
    """Return which of Carpool's own policies are worse than the reference in this scenario, or "none"."""
    worse = [_name(row.policy) for row in rows if row.policy in OURS and row.worse]
    return ", ".join(worse) or "none"


def study_tables(rows: Sequence[StudyRow]) -> None:
    """Print one table per group: one line per scenario, one column per policy."""
    console = new_console()
    for group, of_scenario in by_scenario(rows).items():
        policies = [row.policy for row in next(iter(of_scenario.values()))]
        lead = [p for p in (REFERENCE, REPAIR, *OURS) if p in policies]
        ordered = lead + [p for p in policies if p not in lead]
        shown, others = ordered[:MOST_SHOWN], ordered[MOST_SHOWN:]
        table = new_table(group, "load", *(_name(policy) for policy in shown), "worse")
        for (scenario, load), some in of_scenario.items():
            of_policy = {row.policy: row for row in some}
            table.add_row(scenario, f"{load:g}", *(_ratio(of_policy[policy]) for policy in shown), verdict(some))
        print_table(console, table)
        if others:
            names = ", ".join(_name(policy) for policy in others)
            console.print(f"not shown: {names}; --json and --out have all policies")
        console.print()
    worse = [f"{row.scenario} at load {row.load:g} ({_name(row.policy)})" for row in rows if _ours_worse(row)]
    console.print(f"worse than {REFERENCE} by more than {TOLERANCE - 1:.0%}: {'; '.join(worse) or 'nowhere'}")


def _ours_worse(row: StudyRow) -> bool:
    return row.policy in OURS and row.worse


# ---- files ----------------------------------------------------------------------------------------------------------


def write_study(folder: Path, rows: Sequence[StudyRow]) -> None:
    """Write the rows, two summaries of them and, if matplotlib is installed, a picture into `folder`.

    `robustness.csv` holds every row, `robustness_groups.csv` one line per group of scenarios, and
    `robustness_jobs_per_gpu.csv` what more jobs per GPU change. The documentation reads its tables from these files.
    """
    names = [field.name for field in fields(StudyRow)]
    write_csv(folder / "robustness.csv", [*names, "worse"], ([*asdict(row).values(), row.worse] for row in rows))
    write_csv(folder / "robustness_groups.csv", GROUP_COLUMNS, group_rows(rows))
    write_csv(folder / "robustness_jobs_per_gpu.csv", JOBS_PER_GPU_COLUMNS, jobs_per_gpu_rows(rows))
    if plots.available():
        picture(folder / "robustness.png", rows)


GROUP_COLUMNS = (
    "group",
    "policy",
    "scenarios",
    "ratio",
    "largest ratio",
    "scenario of the largest",
    "scenarios where worse",
)
JOBS_PER_GPU_COLUMNS = ("interference", "load", "policy", "jobs per GPU", "mean JCT over that with two")


def group_rows(rows: Sequence[StudyRow]) -> list[list[str]]:
    """Summarise each of our policies by group of scenarios, and over all scenarios.

    The ratio of a group is the geometric mean of the ratios of its scenarios.
    """
    lines = []
    for group in (*by_scenario(rows), "all"):
        for policy in (REPAIR, *OURS):
            own = [row for row in rows if row.policy == policy and group in (row.group, "all")]
            if not own:
                continue
            ratio = exp(fmean(log(row.ratio) for row in own))
            largest = max(own, key=lambda row: row.ratio)
            scenario = f"{largest.scenario}, load {largest.load:g}"
            worse = sum(row.worse for row in own)
            lines.append(
                [group, _name(policy), str(len(own)), f"{ratio:.3f}", f"{largest.ratio:.3f}", scenario, str(worse)]
            )
    return lines


def jobs_per_gpu_rows(rows: Sequence[StudyRow]) -> list[list[str]]:
    """Compare each policy's mean completion time at C jobs per GPU with its own at C = 2."""
    base = {("gavel" if row.scenario == "base" else row.scenario, row.load, row.policy): row for row in rows}
    lines = []
    for row in rows:
        table, comma, limit = row.scenario.partition(", C = ")
        if not comma and row.scenario.startswith("C = "):
            table, limit = "gavel", row.scenario.removeprefix("C = ")
        two = base.get((table, row.load, row.policy))
        if limit and two is not None and row.policy in (REFERENCE, *OURS):
            ratio = f"{row.mean_jct_h / two.mean_jct_h:.3f}"
            lines.append([table, f"{row.load:g}", _name(row.policy), limit, ratio])
    return lines


def picture(path: Path, rows: Sequence[StudyRow]) -> None:
    """Draw every scenario as a dot with its interval, one panel per load, one colour per policy."""
    loads = [load for load in (1.0, 2.0) if any(row.load == load for row in rows)] or [rows[0].load]
    policies = [p for p in (REPAIR, *OURS) if any(row.policy == p for row in rows)]
    names = list(dict.fromkeys((row.group, row.scenario) for row in rows if row.load in loads))
    palette = dict(zip((REPAIR, *OURS), (plots.GREY, plots.BLUE, plots.ORANGE), strict=True))
    figure, panels = plots.panels(len(loads), 4.6 * len(loads) + 2.4, 0.235 * len(names) + 1.4)
    for axes, load in zip(panels, loads, strict=True):
        for shift, policy in enumerate(policies):
            own = {(row.group, row.scenario): row for row in rows if row.load == load and row.policy == policy}
            places = [at for at, name in enumerate(names) if name in own]
            some = [own[names[at]] for at in places]
            spread = [[row.ratio - (row.ratio_low or row.ratio) for row in some]]
            spread.append([(row.ratio_high or row.ratio) - row.ratio for row in some])
            axes.errorbar(
                [row.ratio for row in some],
                [at + 0.24 * (shift - (len(policies) - 1) / 2) for at in places],
                xerr=spread,
                fmt="o",
                markersize=3,
                linewidth=1,
                color=palette[policy],
                label=_name(policy),
            )
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.axvline(TOLERANCE, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"load {load:g}", fontsize=10)
        axes.set_xlabel(f"mean completion time ÷ {REFERENCE}")
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(names)), [scenario for _, scenario in names], fontsize=8)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(policies), loc="outside upper center")
    figure.savefig(path)
