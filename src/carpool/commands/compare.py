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
    progress_bar,
    workload_option,
    world_options,
)
from carpool.errors import InputError
from carpool.files import results_in
from carpool.sim import generate
from carpool.sim.sources import parse_loads, parse_seeds
from carpool.sim.sweep import run_all

PAPER = ("fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf")


@click.command()
@click.option("--policy", "chosen", multiple=True, help="One or several.  [default: the paper's five]")
@workload_option
@click.option("--select", help="Rows of a file; ranges name several workloads: n=240,seed=1-8.")
@jobs_option
@click.option("--loads", default="1", show_default=True, help="Arrive so many times as fast, such as 0.5,1,2.")
@click.option("--seeds", help="Of the generator, such as 1-8.  [default: 1-4]")
@world_options
@click.option("--bound", "with_bound", is_flag=True, help="Show every policy as a multiple of the lower bound.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for tables as CSV and pictures.")
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
    """Compare policies on many workloads, using all cores."""
    names = list(dict.fromkeys(chosen or PAPER))
    for name in names:
        policies.make(name)
    errors = ("duration_error", "interference_error", "report_error")
    if seeds and source not in generate.GENERATORS and not any(world[error] for error in errors):
        raise InputError(f"--seeds belongs to the generator; choose workloads of {source} with --select, as seed=1-8")
    numbers = parse_seeds(seeds or ("1-4" if source in generate.GENERATORS else "1"))
    setup = make_setup(numbers[0], world)
    with results_in(out) if out else nullcontext() as folder:
        cases = make_cases(source, select, jobs, parse_loads(loads), numbers, setup.profile)
        with progress_bar("simulating", len(cases) * (len(names) + with_bound), quiet=as_json) as advance:
            bounds = bounds_of(cases, setup, advance) if with_bound else {}
            outcomes = run_all(names, cases, setup, workers=workers, progress=advance)
        if folder:
            from carpool.report.folders import write_comparison

            write_comparison(folder, outcomes, bounds)
    from carpool.report.tables import comparison_json, comparison_tables

    if as_json:
        click.echo(json.dumps(comparison_json(outcomes, bounds)))
        return
    comparison_tables(outcomes, setup, bounds)
    if out:
        click.echo(f"written to {out}/")
