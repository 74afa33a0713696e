"""`carpool study`: compare policies under many conditions."""

import json
from contextlib import nullcontext
from pathlib import Path

import click

from carpool import policies
from carpool.errors import InputError
from carpool.files import results_in
from carpool.report.progress import progress_bar, waiting
from carpool.sim.sources import parse_seeds
from carpool.sim.study import RunCache, Scenario, plan, run_study, scenarios, steps

SEEDS, QUICK_SEEDS = "101-116", "101-104"
"""Seeds of the study. No policy was tuned on them."""


@click.command(short_help="Find conditions under which a policy does worse.")
@click.option("--quick", is_flag=True, help=f"Load 1 and seeds {QUICK_SEEDS} only: 1 to 2 minutes instead of about 15.")
@click.option("--seeds", help=f"Seeds of the workload generator, such as 1-16.  [default: {SEEDS}]")
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    help="Policy to compare with sjf-bsbf. Repeatable.  [default: those of the study]",
)
@click.option("--only", help="Run only scenarios whose group or name contains this text.")
@click.option("--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for CSV tables and a picture.")
@click.option(
    "--cache", type=click.Path(path_type=Path, dir_okay=False), help="File that keeps completed runs for the next call."
)
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
    """Find conditions under which a policy does worse than sjf-bsbf.

    The scenarios vary one factor of a base world at a time: wrong durations, wrong slow-downs, memory limits,
    placement, load, jobs per GPU, and interference tables. Some scenarios cross factors. With --cache, an interrupted
    study resumes where it stopped.
    """
    for name in chosen:
        policies.make(name)
    numbers = parse_seeds(seeds or (QUICK_SEEDS if quick else SEEDS))
    some = [
        scenario
        for scenario in scenarios()
        if (scenario.load == 1.0 or not quick) and (not only or _matches(scenario, only))
    ]
    if not some:
        known = ", ".join(dict.fromkeys(scenario.group for scenario in scenarios()))
        raise InputError(f"--only {only!r}: no scenario's group or name contains it; groups are {known}")
    planned = plan(some, numbers, chosen or None)
    with results_in(out) if out else nullcontext() as folder:
        try:
            with progress_bar("simulating", steps(planned), quiet=as_json) as advance:
                runs = run_study(planned, RunCache(cache), workers=workers, progress=advance)
        except KeyboardInterrupt:
            if not cache:
                raise
            kept = f"completed runs are kept in {cache}; run the same command to continue"
            click.echo(f"interrupted; no table was written; {kept}", err=True)
            raise SystemExit(130) from None
        from carpool.report.study import digest, study_tables, write_study

        rows = digest(runs)
        if folder:
            with waiting("writing tables and pictures", quiet=as_json):
                write_study(folder, rows)
    if as_json:
        click.echo(json.dumps({"scenarios": [row.facts() for row in rows]}))
        return
    study_tables(rows)
    if out:
        click.echo(f"written to {out}/")


def _matches(scenario: Scenario, text: str) -> bool:
    return text.lower() in scenario.group.lower() or text.lower() in scenario.name.lower()
