"""`carpool workload`: generate, show and convert workloads."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from carpool.commands.options import number
from carpool.core.perf import Placement
from carpool.errors import InputError, nearest
from carpool.files import whole_file
from carpool.profile.schema import load as load_profile
from carpool.sim import generate
from carpool.sim.metrics import percentile
from carpool.sim.sources import LOADS, MOST_JOBS, expand_selection, generated, load_workload
from carpool.sim.workload import Workload, write


@click.group()
def workload() -> None:
    """Generate, show and convert workloads."""


@workload.command("generate")
@click.option(
    "--like",
    type=click.Choice(generate.GENERATORS),
    default=generate.NAME,
    show_default=True,
    help="Generator of the workload.",
)
@click.option("--jobs", type=click.IntRange(1, MOST_JOBS), default=240, show_default=True, help="Number of jobs.")
@click.option(
    "--load",
    type=number(*LOADS),
    default=1.0,
    show_default=True,
    help="Arrival-rate multiplier; 1 is 30 jobs per hour.",
)
@click.option(
    "--hours", type=number(0.01, 1e6), help="Hours over which the jobs arrive at load 1.  [default: jobs / 30]"
)
@click.option("--seed", type=int, default=1, show_default=True, help="Random seed.")
@click.option("--profile", default="t4", show_default=True, help="Profile that turns durations into iterations.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: standard output]")
def generate_command(
    like: str, jobs: int, load: float, hours: float | None, seed: int, profile: str, out: Path | None
) -> None:
    """Write a generated workload as CSV."""
    _write(generated(like, profile, jobs=jobs, load=load, seed=seed, hours=hours), out)


@workload.command("convert")
@click.argument("source")
@click.option("--select", help="Select one workload of a file with many, such as n=240,seed=3.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: standard output]")
def convert(source: str, select: str | None, out: Path | None) -> None:
    """Convert a Pollux or Philly trace to Carpool's CSV format."""
    _write(_read(source, select, "t4"), out)


@workload.command("show")
@click.argument("source", default=generate.NAME)
@click.option("--select", help="Select one workload of a file with many, such as n=240,seed=3.")
@click.option(
    "--profile", default="t4", show_default=True, help="Profile that predicts the durations of jobs without one."
)
@click.option(
    "--gpus", type=click.IntRange(1), default=64, show_default=True, help="Number of GPUs to compute the load for."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def show(source: str, select: str | None, profile: str, gpus: int, as_json: bool) -> None:
    """Describe a workload: jobs, gangs, models, durations, load."""
    facts = describe(_read(source, select, profile), profile, gpus)
    if as_json:
        click.echo(json.dumps(facts))
        return
    from carpool.report.tables import workload_tables

    workload_tables(facts)


def _read(source: str, select: str | None, profile: str) -> Workload:
    selections = expand_selection(select)
    if len(selections) > 1:
        raise InputError(f"--select {select}: names several workloads; choose one")
    return load_workload(source, selections[0], None, 1.0, 1, profile)


def _write(jobs: Workload, out: Path | None) -> None:
    if out is None:
        write(jobs, sys.stdout)
        return
    with whole_file(out) as file:
        write(jobs, file)
    click.echo(f"{len(jobs.jobs)} jobs written to {out}", err=True)


def describe(jobs: Workload, profile: str, gpus: int) -> dict[str, Any]:
    """Return the facts about a workload as JSON shows them."""
    tasks = load_profile(profile).core_tasks()
    runs = []
    for job in jobs.jobs:
        if job.duration_s is not None:
            runs.append(job.duration_s)
        elif job.model in tasks:
            placement = Placement(job.gpus, -(-job.gpus // generate.NODE_GPUS))
            runs.append(job.iterations * tasks[job.model].iteration(job.batch, 1, placement))
        else:
            problem = f"model: {job.model!r} is not in profile {profile}: {nearest(job.model, tasks)}"
            raise InputError(f"{jobs.where(job.id)}: {problem} (or add a column duration_s)")
    span = jobs.jobs[-1].submitted - jobs.jobs[0].submitted
    work = sum(run * job.gpus for run, job in zip(runs, jobs.jobs, strict=True))
    ordered = sorted(runs)
    models: dict[str, list[float]] = {}
    for run, job in zip(runs, jobs.jobs, strict=True):
        models.setdefault(job.model, []).append(run)
    return {
        "workload": jobs.source,
        "jobs": len(runs),
        "span_s": span,
        "gpu_s": work,
        "load": work / (span * gpus) if span else None,
        "load_of_gpus": gpus,
        "mean_run_s": sum(runs) / len(runs),
        "p50_run_s": percentile(ordered, 0.5),
        "p99_run_s": percentile(ordered, 0.99),
        "gangs": dict(sorted(Counter(job.gpus for job in jobs.jobs).items())),
        "models": {
            model: {"jobs": len(times), "mean_run_s": sum(times) / len(times)}
            for model, times in sorted(models.items())
        },
    }
