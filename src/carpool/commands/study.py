"""`carpool study`: how robust are the policies?"""

import json
from contextlib import nullcontext
from pathlib import Path

import click

from carpool import policies
from carpool.commands.options import progress_bar
from carpool.errors import InputError
from carpool.files import results_in
from carpool.sim.sources import parse_seeds
from carpool.sim.study import RunCache, Scenario, cells, plan, run_study, steps

SEEDS, QUICK_SEEDS = "101-116", "101-104"
"""Nothing was tuned on them."""


@click.command()
@click.option("--quick", is_flag=True, help=f"Load 1 only, seeds {QUICK_SEEDS}: a minute or two instead of a quarter.")
@click.option("--seeds", help=f"Of the generator, such as 1-16.  [default: {SEEDS}]")
@click.option("--policy", "chosen", multiple=True, help="One or several, besides sjf-bsbf.  [default: the study's own]")
@click.option("--only", help="Cells whose group or name contains this text.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print every cell and policy as JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the CSV tables and the picture.")
@click.option("--cache", type=click.Path(path_type=Path, dir_okay=False), help="File in which runs are kept and found.")
def study(
    quick: bool,
    seeds: str | None,
    chosen: tuple[str, ...],
    only: str | None,
    workers: int | None,
    as_json: bool,
    out: Path | None,
    cache: Path | None,
) -> None:
    """Play policies in many worlds, and tell where they do worse than sjf-bsbf.

    Durations and slow-downs that are wrong, memory limits, placement, load, jobs per GPU, interference tables: one
    factor at a time around a base world, and some of them crossed. A study that was interrupted goes on where it
    stopped, if it has a --cache.
    """
    for name in chosen:
        policies.make(name)
    numbers = parse_seeds(seeds or (QUICK_SEEDS if quick else SEEDS))
    some = [cell for cell in cells() if (cell.load == 1.0 or not quick) and (not only or _speaks_of(cell, only))]
    if not some:
        known = ", ".join(dict.fromkeys(cell.group for cell in cells()))
        raise InputError(f"--only {only!r}: no cell's group or name contains it; groups are {known}")
    jobs = plan(some, numbers, chosen or None)
    with results_in(out) if out else nullcontext() as folder:
        try:
            with progress_bar("studying", steps(jobs), quiet=as_json) as advance:
                runs = run_study(jobs, RunCache(cache), workers=workers, progress=advance)
        except KeyboardInterrupt:
            if not cache:
                raise
            kept = f"the runs that are done are kept in {cache}, and the same command goes on from there"
            click.echo(f"interrupted; no table was written; {kept}", err=True)
            raise SystemExit(130) from None
        from carpool.report.study import digest, study_tables, write_study

        rows = digest(runs)
        if folder:
            write_study(folder, rows)
    if as_json:
        click.echo(json.dumps({"cells": [row.facts() for row in rows]}))
        return
    study_tables(rows)
    if out:
        click.echo(f"written to {out}/")


def _speaks_of(cell: Scenario, text: str) -> bool:
    return text.lower() in cell.group.lower() or text.lower() in cell.name.lower()
