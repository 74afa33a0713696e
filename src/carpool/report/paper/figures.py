"""The pictures of results: Figures 4 and 5 (completion and queuing), 6a (load), 6b (slow-down), and the overhead."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from carpool.report.paper import plan
from carpool.report.paper.cells import signed
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.drawing import (
    GRID,
    PAPER_MARK,
    grouped_bars,
    log_axis,
    picture,
    policy_colours,
    second_of_family,
)
from carpool.report.paper.plan import RunSetting
from carpool.report.paper.results import HOUR, Results, jct_h
from carpool.report.paper.tables import gpus_of


def completion_and_queue(
    folder: Path, name: str, results: Results, setting: RunSetting, policies: Sequence[str]
) -> None:
    """Draw Figure 4 or 5: the share of jobs done within a time, and the mean queuing time of each model."""
    shown = [policy for policy in policies if results.of(setting, policy)]
    with picture(folder, name, 10.0, 4.2, columns=2) as (figure, ((left, right),)):
        _cdf(left, results, setting, shown)
        models = sorted({m for o in results.of(setting, shown[-1]).values() for m in o.summary.models})
        heights = {policy: [_queue(results, setting, policy, model) for model in models] for policy in shown}
        grouped_bars(right, results.config, shown, models, heights)
        right.set_ylabel("mean queuing time (hours)")
        right.tick_params(axis="x", rotation=20)
        right.set_title("(b) queuing time by model")
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=4, loc="outside upper center")


def _cdf(axes: Any, results: Results, setting: RunSetting, policies: Sequence[str]) -> None:
    palette, dashed = policy_colours(results.config), second_of_family(results.config)
    for policy in policies:
        times = sorted(jct for outcome in results.of(setting, policy).values() for jct in outcome.jcts_s)
        hours = [max(time, 1.0) / HOUR for time in times]
        shares = [100.0 * (rank + 1) / len(times) for rank in range(len(times))]
        style = "--" if policy in dashed else "-"
        axes.step(hours, shares, where="post", color=palette[policy], linestyle=style, linewidth=1.6)
    log_axis(axes, "x", 10)
    axes.set_xlabel("job completion time (hours)")
    axes.set_ylabel("jobs done (%)")
    axes.set_ylim(0, 100)
    axes.grid(**GRID)
    axes.set_title("(a) completion times, all seeds together")


def _queue(results: Results, setting: RunSetting, policy: str, model: str) -> float:
    """Return the mean queuing time over all jobs of a model in all seeds, in hours."""
    waited = jobs = 0.0
    for outcome in results.of(setting, policy).values():
        part = outcome.summary.models.get(model)
        if part:
            waited += part.mean_queue_s * part.jobs
            jobs += part.jobs
    return waited / jobs / HOUR if jobs else 0.0


def load(folder: Path, results: Results) -> None:
    """Draw Figure 6a: one panel per workload, one line per policy, the paper's own numbers as hollow diamonds."""
    config = results.config
    palette, dashed = policy_colours(config), second_of_family(config)
    with picture(folder, "figure6a", 10.0, 4.4, columns=len(config.workloads)) as (figure, (panels,)):
        for axes, workload in zip(panels, config.workloads, strict=True):
            for row in config.policies:
                means = [
                    results.mean(plan.main(config, workload.name, jobs), row.name, jct_h()) for jobs in config.figure6a
                ]
                known = [(jobs, mean) for jobs, mean in zip(config.figure6a, means, strict=True) if mean]
                if known:
                    axes.errorbar(
                        [jobs for jobs, _ in known],
                        [mean.value for _, mean in known],
                        yerr=[mean.error or 0.0 for _, mean in known],
                        color=palette[row.name],
                        linestyle="--" if row.name in dashed else "-",
                        marker="o",
                        markersize=3.5,
                        capsize=2,
                        linewidth=1.6,
                        label=row.label,
                    )
            _printed(axes, results, palette)
            axes.set_xticks(config.figure6a)
            axes.set_xlabel(f"jobs in {config.hours:g} hours")
            axes.set_ylabel("mean completion time (hours)")
            log_axis(axes, "y", 10)
            axes.grid(**GRID)
            axes.set_title(f"{workload.title} workload")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=4, handlelength=3.2, loc="outside upper center")


def _printed(axes: Any, results: Results, palette: dict[str, str]) -> None:
    config = results.config
    shown = False
    for table, jobs in config.tables.items():
        for policy, triple in config.paper.jct[table].items():
            label = None if shown else "the paper's tables"
            axes.plot([jobs], [triple[0]], color=palette.get(policy, "black"), label=label, **PAPER_MARK)
            shown = True


def interference(folder: Path, results: Results) -> None:
    """Draw Figure 6b: completion times under a constant slow-down of all jobs that share."""
    config = results.config
    with picture(folder, "figure6b", 10.0, 4.0, columns=len(config.figure6b.jobs)) as (figure, (panels,)):
        for axes, jobs in zip(panels, config.figure6b.jobs, strict=True):
            names = list(config.figure6b.policies)
            settings = [plan.injected(config, jobs, text) for text in plan.constants(config)]
            means = {name: [results.mean(setting, name, jct_h()) for setting in settings] for name in names}
            heights = {name: [mean.value if mean else 0.0 for mean in found] for name, found in means.items()}
            grouped_bars(axes, config, names, plan.constants(config), heights)
            width = 0.84 / len(names)
            for number, name in enumerate(names):
                places = [place - 0.42 + width * (number + 0.5) for place in range(len(settings))]
                errors = [(mean.error or 0.0) if mean else 0.0 for mean in means[name]]
                axes.errorbar(places, heights[name], yerr=errors, fmt="none", ecolor="black", capsize=2, linewidth=0.8)
            gains = [results.lower(setting, names[-1], names[0], jct_h()) for setting in settings]
            texts = [signed(-gain.value) if gain else "" for gain in gains]
            ticks = [f"{xi}\n{text}" for xi, text in zip(plan.constants(config), texts, strict=True)]
            axes.set_xticks(range(len(settings)), ticks)
            axes.set_xlabel(f"slow-down ξ of all sharing jobs; {_label(config, -1)} relative to {_label(config, 0)}")
            axes.set_ylabel("mean completion time (hours)")
            axes.set_title(f"{jobs} jobs")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=2, loc="outside upper center")


def _label(config: PaperConfig, number: int) -> str:
    return config.policy(config.figure6b.policies[number]).label


def overhead(folder: Path, results: Results) -> None:
    config = results.config
    settings = [plan.overhead(config, nodes) for nodes in config.overhead.nodes]
    gpus = [gpus_of(setting) for setting in settings]
    colour = policy_colours(config)[config.overhead.policy]
    limit = 1e3 * config.paper.claims["overhead_s"]
    with picture(folder, "overhead", 6.8, 4.0) as (figure, ((axes,),)):
        for label, marker, style, name in (
            ("mean", "o", "-", "decision_mean_cpu_s"),
            ("p99", "s", "--", "decision_p99_cpu_s"),
        ):
            values = [
                1e3 * fmean(getattr(o.summary, name) for o in results.of(setting, config.overhead.policy).values())
                for setting in settings
            ]
            axes.plot(gpus, values, color=colour, marker=marker, linestyle=style, label=label)
            if label == "mean":
                linear = [values[0] * size / gpus[0] for size in gpus]
                axes.plot(gpus, linear, color="#777777", linestyle=":", linewidth=1.2, label="linear growth")
        axes.plot([16], [limit], color="black", label="the paper's limit (16 GPUs)", **PAPER_MARK)
        log_axis(axes, "x", 2)
        log_axis(axes, "y", 10)
        axes.set_xticks(gpus, [str(size) for size in gpus])
        axes.set_xlabel("GPUs (jobs in proportion)")
        axes.set_ylabel("CPU time of a decision (ms)")
        axes.grid(**GRID)
        figure.legend(frameon=False, ncols=4, loc="outside upper center")
