"""Tables in the terminal, and the JSON of a comparison. Rich is imported when a table is printed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.core.guesses import in_words
from carpool.report.console import new_console, print_table
from carpool.sim.engine import Costs
from carpool.sim.fairness import Fairness
from carpool.sim.metrics import CorrectedUser, SubsetSummary, Summary
from carpool.sim.run import Setup
from carpool.sim.sweep import CaseResult, Mean, mean

if TYPE_CHECKING:
    from rich.console import Console

    from carpool.sim.bound import Bound

Value = Callable[[Summary], float]
Bounds = Mapping[tuple[str, str], "Bound"]
"""Lower bounds by case and seed."""
SHOWN_USERS = 5
"""Largest number of users with corrected guesses that are listed below a table."""


class TimeUnit(NamedTuple):
    """A unit in which times are shown."""

    name: str
    seconds: float

    def show(self, seconds: float) -> str:
        value = seconds / self.seconds
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"


HOURS, SECONDS = TimeUnit("hours", 3600.0), TimeUnit("seconds", 1.0)


def unit_for(mean_s: float) -> TimeUnit:
    """Return the unit in which a table with this mean is easy to read."""
    return SECONDS if mean_s < 360.0 else HOURS


def new_table(*columns: str) -> Any:
    """Return an empty table; the first column is aligned to the left, the others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(console: Any, title: str, table: Any, less: Sequence[str] = ()) -> None:
    console.print(title, style="bold", overflow="fold")  # not as the table's title, which wraps to the table's width
    print_table(console, table, less)
    console.print()


def describe(setup: Setup) -> str:
    """Describe the simulated world in one line."""
    belief = "" if setup.belief is None else f" (believed {setup.belief})"
    share = f"up to {setup.jobs_per_gpu} jobs per GPU" if setup.jobs_per_gpu > 1 else "no sharing"
    parts = [f"{setup.cluster} GPUs", f"profile {setup.profile}", f"slow-down of sharing {setup.truth}{belief}", share]
    parts += [f"error of durations σ {setup.duration_error:g}"] if setup.duration_error else []
    parts += [f"error of slow-downs σ {setup.interference_error:g}"] if setup.interference_error else []
    parts += [f"error of reports σ {setup.report_error:g}"] if setup.report_error else []
    if setup.report_s is not None:
        parts.append("no reports" if setup.report_s == inf else f"reports after {setup.report_s:g} s")
    parts += [f"guesses of {user} × {factor:g}" for user, factor in setup.guesses]
    parts += ["guesses trusted"] if setup.trust_guesses else []
    parts += [f"fair share {setup.fair_share:g}"] if setup.fair_share else []
    parts += ["placement ignored"] if setup.ignore_placement else []
    parts += [] if setup.memory_limit else ["no memory limit"]
    parts += [f"launch {setup.costs.launch_s:g} s"] if setup.costs.launch_s else []
    parts += [f"stop {setup.costs.stop_s:g} s"] if setup.costs.stop_s else []
    parts += [f"pause {setup.costs.pause_s:g} s"] if setup.costs.pause_s != Costs().pause_s else []
    return ", ".join(parts)


def run_tables(summary: Summary, setup: Setup) -> None:
    """Print the metrics of one simulation."""
    unit = unit_for(summary.mean_jct_s)
    table = new_table(unit.name, "jobs", "mean JCT", "p50", "p95", "p99", "queue", "makespan")
    parts: list[tuple[str, Summary | SubsetSummary]] = [
        ("all", summary),
        (f"large (> {setup.large_above} GPUs)", summary.large),
        ("small", summary.small),
        *summary.models.items(),
    ]
    for name, part in parts:
        times = (part.mean_jct_s, part.p50_jct_s, part.p95_jct_s, part.p99_jct_s, part.mean_queue_s, part.makespan_s)
        table.add_row(name, str(part.jobs), *(unit.show(time) if part.jobs else "-" for time in times))
    console = new_console()
    _print(console, f"{summary.policy} on {summary.workload}", table)
    if summary.fairness is not None:
        fairness_table(console, summary.fairness)
    slowdowns = f"{summary.host_slowdown_mean:.2f}× as long as alone (worst {summary.host_slowdown_max:.2f}×)"
    joined, preempted = _times(summary.shares), _times(summary.preemptions)
    console.print(
        f"GPU utilisation {summary.gpu_utilisation:.0%}, jobs joined others {joined} and were preempted {preempted}"
        + (
            f"\n{summary.hosts} job{'s' * (summary.hosts > 1)} that others joined took {slowdowns}"
            if summary.hosts
            else ""
        )
        + _pauses(summary, unit)
        + "".join(f"\n{_corrected(one)}" for one in summary.corrected[:SHOWN_USERS])
        + (f"\n{_times(summary.at_limit)} a job ended at its time limit" if summary.at_limit else "")
        + f"\n{summary.decisions} decisions, CPU time of one: mean {summary.decision_mean_cpu_s * 1e3:.3f} ms, "
        f"p99 {summary.decision_p99_cpu_s * 1e3:.3f} ms; the whole run took {summary.cpu_s:.2f} s of CPU time\n"
        f"{describe(setup)}"
    )


def _corrected(one: CorrectedUser) -> str:
    """Return what is believed in place of a user's guesses."""
    low, high = one.correction / one.spread, one.correction * one.spread
    took = in_words(one.user, one.kind, one.jobs, one.ratio)
    return f"{took}; the next guess is believed {one.correction:.2g} times ({low:.2g} to {high:.2g})"


def fairness_table(console: "Console", fairness: Fairness) -> None:
    """Print what each tenant got, worst first."""
    unit = unit_for(fmean(result.mean_jct_s for result in fairness.tenants))
    table = new_table(unit.name, "jobs", "mean JCT", "own share", "ρ", "GPU h")
    for result in fairness.tenants:
        times = (unit.show(result.mean_jct_s), unit.show(result.own_jct_s))
        hours = f"{result.gpu_s / 3600:,.0f}"
        table.add_row(result.tenant or "(none)", str(result.jobs), *times, f"{result.rho:.2f}", hours)
    _print(console, "tenants; ρ is the mean JCT over the one with the share of the cluster to itself", table)
    console.print(f"worst ρ {fairness.worst_rho:.2f}, Jain's index of GPU time {fairness.jain:.2f}")


def _pauses(summary: Summary, unit: TimeUnit) -> str:
    """Describe pauses and residents in a line of their own; nothing if no job was paused."""
    if not summary.pauses:
        return ""
    per_job, total = unit.show(summary.mean_paused_s), unit.show(summary.paused_s)
    return (
        f"\njobs were paused {_times(summary.pauses)}, {per_job} {unit.name} per job and {total} in all; "
        f"a GPU that was in use held {summary.residents_mean:.2f} jobs in the mean and {summary.residents_max} at most"
    )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def by_case(outcomes: Sequence[CaseResult]) -> dict[str, dict[str, list[CaseResult]]]:
    """Return the results by case and policy, one for each seed."""
    cases: dict[str, dict[str, list[CaseResult]]] = {}
    for outcome in outcomes:
        cases.setdefault(outcome.case, {}).setdefault(outcome.policy, []).append(outcome)
    return cases


def comparison_tables(outcomes: Sequence[CaseResult], setup: Setup, bounds: Bounds | None = None) -> None:
    """Print policies side by side, one table per case; with lower bounds, also as multiples of them."""
    console = new_console()
    pauses = any(outcome.summary.pauses for outcome in outcomes)
    columns = [column for column in COLUMNS if pauses or not column.of_pauses]
    if all(outcome.summary.fairness is not None for outcome in outcomes):
        columns += FAIRNESS_COLUMNS
    for case, of_policy in by_case(outcomes).items():
        seeds = len(next(iter(of_policy.values())))
        title = f"{case} ({seeds} seed{'s' if seeds > 1 else ''})"
        summaries = {policy: [outcome.summary for outcome in some] for policy, some in of_policy.items()}
        jcts = {policy: mean([summary.mean_jct_s for summary in some]) for policy, some in summaries.items()}
        best = min(jct.value for jct in jcts.values())
        unit = unit_for(best)
        bound = _mean_bound(case, bounds)
        multiple = ["÷ bound"] if bound else []
        table = new_table(unit.name, "mean JCT", "÷ best", *multiple, *(column.title for column in columns))
        for policy, some in summaries.items():
            averages = [(column.show or unit.show)(mean([column.value(s) for s in some]).value) for column in columns]
            ratio = [f"{jcts[policy].value / bound:.2f}"] if bound else []
            table.add_row(_short(policy), *_jct_cells(jcts[policy], best, unit), *ratio, *averages)
        if bound:
            table.add_row("lower bound", unit.show(bound), f"{bound / best:.2f}", "1.00", *("" for _ in columns))
        _print(console, title, table, LESS)
    several = any(len(some) > 1 for of_policy in by_case(outcomes).values() for some in of_policy.values())
    console.print(describe(setup) + ("; ± is the standard error over seeds" if several else ""))


def _mean_bound(case: str, bounds: Bounds | None) -> float | None:
    """Return the mean lower bound over all seeds of a case."""
    own = [bound.sharing_s for (label, _), bound in (bounds or {}).items() if label == case]
    return mean(own).value if own else None


def _short(policy: str) -> str:
    """Return a policy's name; for a policy from a file, without the path."""
    name, _, rest = policy.partition(":")
    return rest if name.endswith(".py") else policy


class Column(NamedTuple):
    """A column of a comparison: a mean over seeds."""

    title: str
    value: Value
    show: Callable[[float], str] | None = None
    """Format of the value; None for a time."""
    of_pauses: bool = False
    """The column is left out where no job was paused."""


COLUMNS = (
    Column("p95", lambda s: s.p95_jct_s),
    Column("large", lambda s: s.large.mean_jct_s),
    Column("small", lambda s: s.small.mean_jct_s),
    Column("queue", lambda s: s.mean_queue_s),
    Column("makespan", lambda s: s.makespan_s),
    Column("GPU use", lambda s: s.gpu_utilisation, "{:.0%}".format),
    Column("joined", lambda s: s.shares, "{:.0f}".format),
    Column("preempted", lambda s: s.preemptions, "{:.0f}".format),
    Column("paused", lambda s: s.pauses, "{:.0f}".format, of_pauses=True),
    Column("time paused", lambda s: s.mean_paused_s, of_pauses=True),
    Column("residents", lambda s: s.residents_mean, "{:.2f}".format, of_pauses=True),
    Column("host slow-down", lambda s: s.host_slowdown_mean, "{:.2f}".format),
)
LESS = ("residents", "time paused", "host slow-down", "GPU use", "preempted", "makespan", "paused", "joined", "p95")
"""Titles of the columns that a narrow terminal leaves out, the first of them first."""
FAIRNESS_COLUMNS = (
    Column("worst ρ", lambda s: s.fairness.worst_rho if s.fairness else 0.0, "{:.2f}".format),
    Column("Jain", lambda s: s.fairness.jain if s.fairness else 0.0, "{:.2f}".format),
)
"""Columns where fairness was measured."""


def _jct_cells(jct: Mean, best: float, unit: TimeUnit) -> list[Any]:
    from rich.text import Text

    spread = "" if jct.error is None else f" ± {unit.show(jct.error)}"
    shown = f"{unit.show(jct.value)}{spread}"
    ratio = f"{jct.value / best:.2f}" if best else "-"
    return [Text(shown, "bold" if jct.value == best else ""), ratio]


def comparison_json(outcomes: Sequence[CaseResult], bounds: Bounds | None = None) -> dict[str, Any]:
    """Return every run and the means over seeds, with lower bounds if they are given."""
    means = []
    for case, of_policy in by_case(outcomes).items():
        for policy, some in of_policy.items():
            jct: Mean = mean([outcome.summary.mean_jct_s for outcome in some])
            queue: Mean = mean([outcome.summary.mean_queue_s for outcome in some])
            bound = _mean_bound(case, bounds)
            means.append(
                {
                    "policy": policy,
                    "case": case,
                    "seeds": len(some),
                    "mean_jct_s": jct.value,
                    "mean_jct_error_s": jct.error,
                    "mean_queue_s": queue.value,
                    "mean_queue_error_s": queue.error,
                    **_fairness_means([outcome.summary for outcome in some]),
                    **({"bound_s": bound, "mean_jct_over_bound": jct.value / bound} if bound else {}),
                }
            )
    runs = [{**asdict(o.summary), "case": o.case, "seed": o.seed} for o in outcomes]
    return {"means": means, "runs": runs}


def _fairness_means(summaries: Sequence[Summary]) -> dict[str, float]:
    found = [summary.fairness for summary in summaries if summary.fairness is not None]
    if len(found) < len(summaries):
        return {}
    return {
        "worst_rho": mean([fairness.worst_rho for fairness in found]).value,
        "spread_rho": mean([fairness.spread_rho for fairness in found]).value,
        "jain": mean([fairness.jain for fairness in found]).value,
    }


def bound_table(bounds: Bounds, setup: Setup) -> None:
    """Print the lower bounds by case, as means over seeds."""
    cases = list(dict.fromkeys(case for case, _ in bounds))
    unit = unit_for(mean([bound.alone_s for bound in bounds.values()]).value)
    table = new_table(unit.name, "seeds", "jobs", "alone", "bound with sharing", "exclusive bound")
    for case in cases:
        some = [bound for (label, _), bound in bounds.items() if label == case]
        times = [[b.alone_s for b in some], [b.sharing_s for b in some], [b.exclusive_s for b in some]]
        jobs = f"{mean([b.jobs for b in some]).value:.0f}"
        table.add_row(case, str(len(some)), jobs, *(unit.show(mean(values).value) for values in times))
    console = new_console()
    _print(console, "Lower bounds on the mean completion time of any schedule", table)
    console.print(f"{describe(setup)}; alone: mean run time if every job had the cluster to itself")


def workload_tables(facts: dict[str, Any]) -> None:
    """Print what is in a workload: models, gangs and load."""
    table = new_table("model", "jobs", "share", "mean run time, h")
    for model, part in facts["models"].items():
        table.add_row(model, str(part["jobs"]), f"{part['jobs'] / facts['jobs']:.1%}", HOURS.show(part["mean_run_s"]))
    table.add_section()
    table.add_row("all", str(facts["jobs"]), "100.0%", HOURS.show(facts["mean_run_s"]))
    gangs = new_table("GPUs per job", "jobs", "share")
    for gpus, jobs in facts["gangs"].items():
        gangs.add_row(str(gpus), str(jobs), f"{jobs / facts['jobs']:.1%}")
    load = "" if facts["load"] is None else f", {facts['load']:.2f}× the capacity of {facts['load_of_gpus']} GPUs"
    console = new_console()
    _print(console, facts["workload"], table)
    print_table(console, gangs)
    console.print()
    console.print(
        f"submitted over {HOURS.show(facts['span_s'])} h; run time median {HOURS.show(facts['p50_run_s'])} h, "
        f"p99 {HOURS.show(facts['p99_run_s'])} h; {facts['gpu_s'] / 3600:.0f} GPU-hours{load}"
    )
