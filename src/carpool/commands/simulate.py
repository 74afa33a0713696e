"""`carpool simulate`: one workload under one policy."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import Any

import click

from carpool import policies
from carpool.commands.options import jobs_option, make_setup, number, workload_option, world_options
from carpool.core import events as ev
from carpool.errors import InputError
from carpool.files import results_in
from carpool.report.progress import waiting
from carpool.report.usage_tables import parse_keys
from carpool.sim.run import no_garbage_collection
from carpool.sim.run import simulate as run_simulation
from carpool.sim.sources import LOADS, expand_selection, load_workload

usage_option = click.option(
    "--usage",
    metavar="KEYS",
    callback=lambda ctx, param, text: parse_keys(text, "--usage") if text else (),
    help="Show what jobs used of the GPUs by user, group, project or day, or by several, such as user,day.",
)


@click.command()
@click.option("--policy", default="sjf-bsbf", show_default=True, help="Policy; `carpool policies` lists them.")
@workload_option
@click.option("--select", help="Rows of a file with many workloads, such as n=240,seed=3.")
@jobs_option
@click.option("--load", type=number(*LOADS), default=1.0, show_default=True, help="Arrival-rate multiplier.")
@click.option("--seed", type=int, default=1, show_default=True, help="Random seed.")
@world_options
@usage_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for a CSV table of jobs, event log and pictures.")
def simulate(
    policy: str,
    source: str,
    select: str | None,
    jobs: int | None,
    load: float,
    seed: int,
    usage: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    **world: Any,
) -> None:
    """Simulate one workload under one policy and show its metrics."""
    setup = make_setup(seed, world)
    policies.make(policy)
    selection = expand_selection(select)
    if len(selection) > 1:
        raise InputError(f"--select {select}: names several workloads; choose one, or use `carpool compare`")
    with no_garbage_collection(ever=False), results_in(out) if out else nullcontext() as folder:
        workload = load_workload(source, selection[0], jobs, load, seed, setup.profile)
        events: list[ev.Event] = []
        with waiting(f"simulating {len(workload.jobs)} jobs", quiet=as_json):
            result = run_simulation(
                workload, policy, setup, log=events.append if folder else None, accounts=bool(usage)
            )
        if folder:
            from carpool.report.folders import write_run

            with waiting("writing tables and pictures", quiet=as_json):
                write_run(folder, result, events)
    if as_json:
        # CPU time of the whole command, including imports and reading the workload
        used = {"usage": result.usage(usage).plain()} if usage else {}
        click.echo(json.dumps({**asdict(result.summary), "cpu_s": process_time(), **used}))
        return
    from carpool.report.tables import run_tables

    run_tables(result.summary, setup)
    if usage:
        from carpool.report.usage_tables import print_usage

        print_usage(result.usage(usage).plain())
    if out:
        click.echo(f"written to {out}/")
