"""`carpool bound`: how well could any schedule do?"""

import json
from dataclasses import asdict
from typing import Any

import click

from carpool.commands.options import bounds_of, jobs_option, make_cases, make_setup, progress_bar, world_options
from carpool.sim import generate
from carpool.sim.sources import parse_loads, parse_seeds


@click.command()
@click.argument("workload", default=generate.NAME)
@click.option("--select", help="Rows of a file; ranges name several workloads: n=240,seed=1-8.")
@jobs_option
@click.option(
    "--loads", "--load", "loads", default="1", show_default=True, help="Arrive so many times as fast, such as 0.5,1,2."
)
@click.option("--seeds", "--seed", "seeds", default="1", show_default=True, help="Of the generator, such as 1-8.")
@world_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bound(
    workload: str, select: str | None, jobs: int | None, loads: str, seeds: str, as_json: bool, **world: Any
) -> None:
    """Compute lower bounds on the mean completion time of WORKLOAD.

    No schedule does better, preemptive or not, whatever it knows; with sharing as the options allow it, and with
    one job per GPU. WORKLOAD is a CSV file or the generator's name. `carpool compare --bound` sets policies against it.
    """
    numbers = parse_seeds(seeds)
    setup = make_setup(numbers[0], world)
    cases = make_cases(workload, select, jobs, parse_loads(loads), numbers, setup.profile)
    with progress_bar("bounding", len(cases), quiet=as_json) as advance:
        bounds = bounds_of(cases, setup, advance)
    if as_json:
        rows = [{"case": case, "seed": seed, **asdict(found)} for (case, seed), found in bounds.items()]
        click.echo(json.dumps({"bounds": rows}))
        return
    from carpool.report.tables import bound_table

    bound_table(bounds, setup)
