"""Tables for people, in the terminal. Rich is imported when a table is printed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from carpool.sim.metrics import Group, Summary
from carpool.sim.run import Setup
from carpool.sim.sweep import Mean, Outcome, mean

Value = Callable[[Summary], float]


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}" if seconds < 360_000 else f"{seconds / 3600:.0f}"


def _print(*tables: Any) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def describe(setup: Setup) -> str:
    belief = "" if setup.belief is None else f", believed {setup.belief}"
    share = f"up to {setup.jobs_per_gpu} jobs per GPU" if setup.jobs_per_gpu > 1 else "no sharing"
    extras = [", placement ignored"] if setup.ignore_placement else []
    extras += [] if setup.memory_limit else [", no memory limit"]
    return f"{setup.cluster} GPUs, profile {setup.profile}, ξ {setup.truth}{belief}, {share}{''.join(extras)}"


def run_tables(summary: Summary, setup: Setup) -> None:
    """One simulation."""
    table = _table(
        f"{summary.policy} on {summary.workload}", "jobs", "", "JCT h", "p50", "p95", "p99", "queue h", "makespan h"
    )
    parts: list[tuple[str, Summary | Group]] = [
        ("all", summary),
        (f"large (> {setup.large_above} GPUs)", summary.large),
        ("small", summary.small),
        *summary.models.items(),
    ]
    for name, part in parts:
        times = (part.mean_jct_s, part.p50_jct_s, part.p95_jct_s, part.p99_jct_s, part.mean_queue_s, part.makespan_s)
        table.add_row(name, str(part.jobs), *(hours(time) for time in times))
    table.caption_justify = "left"
    table.caption = (
        f"GPU utilisation {summary.gpu_utilisation:.0%}, {summary.shares} shares, {summary.preemptions} preemptions, "
        f"hosts ran {summary.host_slowdown_mean:.2f} times slower (worst {summary.host_slowdown_max:.2f})\n"
        f"{summary.decisions} decisions, mean {summary.decision_mean_s * 1e3:.3f} ms, "
        f"p99 {summary.decision_p99_s * 1e3:.3f} ms; {summary.cpu_s:.2f} CPU s\n{describe(setup)}"
    )
    _print(table)


def by_case(outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[Outcome]]]:
    """Outcomes by case and policy; the seeds are what remains."""
    cases: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        cases.setdefault(outcome.case, {}).setdefault(outcome.policy, []).append(outcome)
    return cases


def comparison_tables(outcomes: Sequence[Outcome], setup: Setup) -> None:
    """Policies side by side, one table per case."""
    tables = []
    for case, of_policy in by_case(outcomes).items():
        seeds = len(next(iter(of_policy.values())))
        title = f"{case} ({seeds} seed{'s' if seeds > 1 else ''})"
        table = _table(
            title, "policy", "mean JCT h", "vs best", "p95", "large", "small", "queue h", "makespan", "GPU use", "shares",
            "preempt.", "host slow-down",
        )  # fmt: skip
        summaries = {policy: [outcome.summary for outcome in some] for policy, some in of_policy.items()}
        best = min(mean([s.mean_jct_s for s in some]).value for some in summaries.values())
        for policy, some in summaries.items():
            table.add_row(policy, *_cells(some, best))
        tables.append(table)
    tables[-1].caption_justify = "left"
    tables[-1].caption = f"{describe(setup)}; ± is the standard error over seeds"
    _print(*tables)


def _cells(summaries: Sequence[Summary], best: float) -> list[str]:
    def average(value: Value) -> float:
        return mean([value(summary) for summary in summaries]).value

    jct = mean([summary.mean_jct_s for summary in summaries])
    spread = "" if jct.error is None else f" ± {jct.error / 3600:.2f}"
    mark = ("[bold]", "[/bold]") if jct.value == best else ("", "")
    return [
        f"{mark[0]}{hours(jct.value)}{spread}{mark[1]}",
        f"{jct.value / best:.2f}" if best else "-",
        hours(average(lambda s: s.p95_jct_s)),
        hours(average(lambda s: s.large.mean_jct_s)),
        hours(average(lambda s: s.small.mean_jct_s)),
        hours(average(lambda s: s.mean_queue_s)),
        hours(average(lambda s: s.makespan_s)),
        f"{average(lambda s: s.gpu_utilisation):.0%}",
        f"{average(lambda s: s.shares):.0f}",
        f"{average(lambda s: s.preemptions):.0f}",
        f"{average(lambda s: s.host_slowdown_mean):.2f}",
    ]


def comparison_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Every run, and the means over seeds."""
    means = []
    for case, of_policy in by_case(outcomes).items():
        for policy, some in of_policy.items():
            jct: Mean = mean([outcome.summary.mean_jct_s for outcome in some])
            queue: Mean = mean([outcome.summary.mean_queue_s for outcome in some])
            means.append(
                {
                    "policy": policy,
                    "case": case,
                    "seeds": len(some),
                    "mean_jct_s": jct.value,
                    "mean_jct_error_s": jct.error,
                    "mean_queue_s": queue.value,
                    "mean_queue_error_s": queue.error,
                }
            )
    runs = [{**asdict(o.summary), "case": o.case, "seed": o.seed} for o in outcomes]
    return {"means": means, "runs": runs}


def workload_tables(facts: dict[str, Any]) -> None:
    table = _table(facts["workload"], "model", "jobs", "share", "mean run h")
    for model, part in facts["models"].items():
        table.add_row(model, str(part["jobs"]), f"{part['jobs'] / facts['jobs']:.1%}", hours(part["mean_run_s"]))
    table.add_section()
    table.add_row("all", str(facts["jobs"]), "100.0%", hours(facts["mean_run_s"]))
    gangs = _table("gangs", "GPUs", "jobs", "share")
    for gpus, jobs in facts["gangs"].items():
        gangs.add_row(str(gpus), str(jobs), f"{jobs / facts['jobs']:.1%}")
    load = "" if facts["load"] is None else f", {facts['load']:.2f} times what {facts['load_of_gpus']} GPUs can do"
    gangs.caption_justify = "left"
    gangs.caption = (
        f"submitted over {hours(facts['span_s'])} h; run time median {hours(facts['p50_run_s'])} h, "
        f"p99 {hours(facts['p99_run_s'])} h; {facts['gpu_s'] / 3600:.0f} GPU-hours{load}"
    )
    _print(table, gangs)
