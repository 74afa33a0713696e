"""`carpool simulate` and `carpool compare`."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

import click

from carpool import policies
from carpool.core import events as ev
from carpool.errors import InputError
from carpool.report.output import results_in
from carpool.sim import generate
from carpool.sim.engine import Costs
from carpool.sim.run import Setup, no_garbage_collection
from carpool.sim.run import simulate as run_simulation
from carpool.sim.sources import (
    LOADS,
    MOST_JOBS,
    expand_selection,
    load_workload,
    number,
    parse_loads,
    parse_seeds,
)
from carpool.sim.sweep import Case, run_all
from carpool.units import parse_bytes

if TYPE_CHECKING:
    from carpool.sim.bound import Bound

PAPER = ("fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf")
Command = Callable[..., Any]
workload_option = click.option(
    "--workload",
    "source",
    default=generate.NAME,
    show_default=True,
    help="A CSV file (ours, Pollux's or Philly's columns), or a generator: " + ", ".join(generate.GENERATORS) + ".",
)
jobs_option = click.option("--jobs", type=click.IntRange(1, MOST_JOBS), help="Jobs to generate.  [default: 240]")


def world_options(command: Command) -> Command:
    """The options that describe the simulated world."""
    options = [
        click.option("--cluster", default="16x4", show_default=True, help="Nodes x GPUs per node."),
        click.option("--profile", default="t4", show_default=True, help="Speeds and memory: a shipped name or a file."),
        click.option(
            "--interference",
            default="1.5",
            show_default=True,
            help="Slow-down of sharing: a number, a CSV matrix (row slowed by column), or a shipped table.",
        ),
        click.option("--truth", help="The slow-down as it is, where it differs from --interference."),
        click.option(
            "--belief",
            help="The slow-down as the policy believes it to be, where it differs; or learned: from what jobs report.",
        ),
        click.option(
            "--duration-error",
            type=number(0.0, 10.0),
            default=0.0,
            help="Sigma of a lognormal error in believed iteration times; the seed draws it.",
        ),
        click.option(
            "--interference-error",
            type=number(0.0, 10.0),
            default=0.0,
            help="Sigma of a lognormal error in believed slow-downs; the seed draws it.",
        ),
        click.option(
            "--report-error",
            type=number(0.0, 10.0),
            default=0.0,
            help="Sigma of a lognormal error in the iteration times that jobs report.",
        ),
        click.option(
            "--jobs-per-gpu", type=click.IntRange(1, 100), default=2, show_default=True, help="Most jobs on a GPU."
        ),
        click.option("--ignore-placement", is_flag=True, help="Every placement is as fast as the most consolidated."),
        click.option("--no-memory-limit", is_flag=True, help="Let all jobs fit beside each other."),
        click.option("--gpu-memory", help="Memory of a GPU, such as 24GiB.  [default: the profile's GPU]"),
        click.option(
            "--launch-s", type=number(), default=0.0, help="Seconds from the decision to the first iteration."
        ),
        click.option("--stop-s", type=number(), default=0.0, help="Seconds to checkpoint and stop a preempted job."),
        click.option(
            "--large-above",
            type=click.IntRange(0),
            default=4,
            show_default=True,
            help="A job on more GPUs than this counts as large.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def make_setup(seed: int, world: dict[str, Any]) -> Setup:
    truth = world["truth"] or world["interference"]
    belief = world["belief"] or world["interference"]
    return Setup(
        cluster=world["cluster"],
        profile=world["profile"],
        truth=truth,
        belief=None if belief == truth else belief,
        duration_error=world["duration_error"],
        interference_error=world["interference_error"],
        report_error=world["report_error"],
        seed=seed,
        jobs_per_gpu=world["jobs_per_gpu"],
        gpu_memory=parse_bytes(world["gpu_memory"]) if world["gpu_memory"] is not None else None,
        memory_limit=not world["no_memory_limit"],
        ignore_placement=world["ignore_placement"],
        costs=Costs(world["launch_s"], world["stop_s"]),
        large_above=world["large_above"],
    )


@click.command()
@click.option("--policy", default="sjf-bsbf", show_default=True, help="See `carpool policies`.")
@workload_option
@click.option("--select", help="Rows of a file that holds many workloads, such as n=240,seed=3.")
@jobs_option
@click.option("--load", type=number(*LOADS), default=1.0, show_default=True, help="Arrive so many times as fast.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of all that is random.")
@world_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for per-job CSV, event log and pictures.")
def simulate(
    policy: str,
    source: str,
    select: str | None,
    jobs: int | None,
    load: float,
    seed: int,
    as_json: bool,
    out: Path | None,
    **world: Any,
) -> None:
    """Run one workload under one policy and show what comes of it."""
    setup = make_setup(seed, world)
    policies.make(policy)
    selection = expand_selection(select)
    if len(selection) > 1:
        raise InputError(f"--select {select}: names several workloads; `carpool compare` takes them all")
    with no_garbage_collection(), results_in(out) if out else nullcontext() as folder:
        workload = load_workload(source, selection[0], jobs, load, seed, setup.profile)
        events: list[ev.Event] = []
        with _waiting(f"simulating {len(workload.jobs)} jobs", len(workload.jobs) > 5000 and not as_json):
            result = run_simulation(workload, policy, setup, log=events.append if folder else None)
        if folder:
            from carpool.report.folders import write_run

            write_run(folder, result, events)
    if as_json:
        # the whole command so far, imports and reading included
        click.echo(json.dumps({**asdict(result.summary), "cpu_s": process_time()}))
        return
    from carpool.report.tables import run_tables

    run_tables(result.summary, setup)
    if out:
        click.echo(f"written to {out}/")


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


def make_cases(
    source: str, select: str | None, jobs: int | None, loads: list[float], seeds: list[int], profile: str
) -> list[Case]:
    selections = expand_selection(select)
    if source in generate.GENERATORS:
        cases = []
        for load in loads:
            for seed in seeds:
                workload = load_workload(source, selections[0], jobs, load, seed, profile)
                cases.append(Case(f"{len(workload.jobs)} jobs, load {load:g}", str(seed), workload, seed))
        return cases
    if len(seeds) > 1:
        raise InputError(f"--seeds belongs to the generator; choose workloads of {source} with --select, as seed=1-8")
    # a file is read once for each selection, whatever the loads
    workloads = [(selection, load_workload(source, selection, jobs, 1.0, 1, profile)) for selection in selections]
    cases = []
    for load in loads:
        for selection, workload in workloads:
            label = ", ".join(f"{key} {value}" for key, value in selection.items() if key != "seed")
            label = f"{label or Path(source).name}, load {load:g}"
            cases.append(Case(label, selection.get("seed", "1"), workload.at_load(load), seeds[0]))
    return cases


def bounds_of(cases: Sequence[Case], setup: Setup, progress: Callable[[], None]) -> dict[tuple[str, str], "Bound"]:
    """The lower bounds of all cases, by label and seed."""
    from carpool.sim.bound import lower_bound

    found = {}
    for case in cases:
        found[case.label, case.seed] = lower_bound(case.workload, setup)
        progress()
    return found


def _waiting(what: str, show: bool) -> Any:
    if not show or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"{what} …")


def progress_bar(what: str, total: int, quiet: bool) -> Any:
    """A progress bar on standard error; yields what to call after each run."""
    if quiet or not sys.stderr.isatty():
        return nullcontext(lambda: None)
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    @contextmanager
    def bar() -> Any:
        columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=total)
            yield lambda: progress.advance(task)

    return bar()
