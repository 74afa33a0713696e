"""`carpool bound`: lower bounds on the mean completion time of any schedule."""

import json
from dataclasses import asdict
from typing import Any

import click

from carpool.commands.options import bounds_of, jobs_option, make_cases, make_setup, world_options
from carpool.report.progress import progress_bar
from carpool.sim import generate
from carpool.sim.sources import parse_loads, parse_seeds


@click.command()
@click.argument("workload", default=generate.NAME)
@click.option("--select", help="Rows of a file with many workloads; ranges select several: n=240,seed=1-8.")
@jobs_option
@click.option(
    "--loads", "--load", "loads", default="1", show_default=True, help="Arrival-rate multipliers, such as 0.5,1,2."
)
@click.option(
    "--seeds", "--seed", "seeds", default="1", show_default=True, help="Seeds of the workload generator, such as 1-8."
)
@world_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def bound(
    workload: str, select: str | None, jobs: int | None, loads: str, seeds: str, as_json: bool, **world: Any
) -> None:
    """Compute lower bounds on the mean completion time.

    No schedule of WORKLOAD has a smaller mean completion time, preemptive or not, even with perfect knowledge. One
    bound is for sharing as the options allow it, one for a single job per GPU. WORKLOAD is a CSV file or the name of a
    generator. `carpool compare --bound` shows policies as multiples of the bound.
    """
    numbers = parse_seeds(seeds)
    setup = make_setup(numbers[0], world)
    cases = make_cases(workload, select, jobs, parse_loads(loads), numbers, setup.profile)
    with progress_bar("computing bounds", len(cases), quiet=as_json) as advance:
        bounds = bounds_of(cases, setup, advance)
    if as_json:
        rows = [{"case": case, "seed": seed, **asdict(found)} for (case, seed), found in bounds.items()]
        click.echo(json.dumps({"bounds": rows}))
        return
    from carpool.report.tables import bound_table

    bound_table(bounds, setup)
