"""`carpool compare`: several policies on many workloads."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from carpool import policies
from carpool.commands.options import (
    bounds_of,
    jobs_option,
    make_cases,
    make_setup,
    workload_option,
    world_options,
)
from carpool.errors import InputError
from carpool.files import results_in
from carpool.report.progress import progress_bar, waiting
from carpool.sim import generate
from carpool.sim.sources import parse_loads, parse_seeds
from carpool.sim.sweep import run_all

PAPER = ("fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf")
"""Policies that are compared by default: those of the paper except Pollux."""


@click.command()
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    help=f"Policy to compare. Repeatable.  [default: {', '.join(PAPER)}]",
)
@workload_option
@click.option("--select", help="Rows of a file with many workloads; ranges select several: n=240,seed=1-8.")
@jobs_option
@click.option("--loads", default="1", show_default=True, help="Arrival-rate multipliers, such as 0.5,1,2.")
@click.option("--seeds", help="Seeds of the workload generator, such as 1-8.  [default: 1-4]")
@world_options
@click.option("--bound", "with_bound", is_flag=True, help="Show every policy as a multiple of the lower bound.")
@click.option("--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for CSV tables and pictures.")
def compare(
    chosen: Sequence[str],
    source: str,
    select: str | None,
    jobs: int | None,
    loads: str,
    seeds: str | None,
    with_bound: bool,
    workers: int | None,
    as_json: bool,
    out: Path | None,
    **world: Any,
) -> None:
    """Compare policies on the same workloads, using all cores."""
    names = list(dict.fromkeys(chosen or PAPER))
    for name in names:
        policies.make(name)
    errors = ("duration_error", "interference_error", "report_error")
    if seeds and source not in generate.GENERATORS and not any(world[error] for error in errors):
        raise InputError(f"--seeds belongs to the generator; select workloads of {source} with --select seed=1-8")
    numbers = parse_seeds(seeds or ("1-4" if source in generate.GENERATORS else "1"))
    setup = make_setup(numbers[0], world)
    with results_in(out) if out else nullcontext() as folder:
        cases = make_cases(source, select, jobs, parse_loads(loads), numbers, setup.profile)
        with progress_bar("simulating", len(cases) * (len(names) + with_bound), quiet=as_json) as advance:
            bounds = bounds_of(cases, setup, advance) if with_bound else {}
            outcomes = run_all(names, cases, setup, workers=workers, progress=advance)
        if folder:
            from carpool.report.folders import write_comparison

            with waiting("writing tables and pictures", quiet=as_json):
                write_comparison(folder, outcomes, bounds)
    from carpool.report.tables import comparison_json, comparison_tables

    if as_json:
        click.echo(json.dumps(comparison_json(outcomes, bounds)))
        return
    comparison_tables(outcomes, setup, bounds)
    if out:
        click.echo(f"written to {out}/")
