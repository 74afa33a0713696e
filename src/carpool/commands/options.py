"""Options and helpers that `carpool simulate`, `compare`, `bound` and `study` share.

The options describe the simulated world; `make_setup` turns them into a `Setup`, `make_cases` turns workload options
into the cases of a sweep, and `bounds_of` computes their lower bounds.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool.core.state import RESIDENT_PER_GPU
from carpool.errors import InputError
from carpool.profile.fields import ProfileError
from carpool.profile.interference import read_interference
from carpool.sim import generate
from carpool.sim.engine import Costs
from carpool.sim.run import Setup, parse_cluster
from carpool.sim.sources import MOST_JOBS, expand_selection, load_workload
from carpool.sim.sweep import SweepCase
from carpool.units import parse_bytes

if TYPE_CHECKING:
    from carpool.sim.bound import Bound

Command = Callable[..., Any]
workload_option = click.option(
    "--workload",
    "source",
    default=generate.NAME,
    show_default=True,
    help="CSV file with Carpool's, Pollux's or Philly's columns, or a generator: "
    + ", ".join(generate.GENERATORS)
    + ".",
)
jobs_option = click.option(
    "--jobs", type=click.IntRange(1, MOST_JOBS), help="Number of jobs to generate.  [default: 240]"
)


def number(least: float = 0.0, most: float = 1e9) -> Callable[[str], float]:
    """Return the type of an option that takes a number from `least` to `most`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a number") from None
        if not least <= value <= most:
            raise click.BadParameter(f"{text!r} must be a number from {least:g} to {most:g}")
        return value

    convert.__name__ = "number"  # the help shows it
    return convert


WORLD_OPTIONS = (
    click.option("--cluster", default="16x4", show_default=True, help="Nodes x GPUs per node."),
    click.option(
        "--profile",
        default="t4",
        show_default=True,
        help="Profile with iteration times and memory: a shipped name or a file.",
    ),
    click.option(
        "--interference",
        default="1.5",
        show_default=True,
        help="Slow-down of sharing: a number, a CSV matrix (row slowed down by column), or a shipped table.",
    ),
    click.option("--truth", help="True slow-down, if it differs from --interference."),
    click.option(
        "--belief",
        help="Slow-down that the policy believes in, if it differs from --interference; `learned` starts from the "
        "profile and learns from what jobs report; `unknown` starts from a guess of each job's duration alone, and "
        "with `unknown:unique` no two jobs are alike.",
    ),
    click.option(
        "--duration-error",
        type=number(0.0, 10.0),
        default=0.0,
        help="Sigma of the lognormal error of believed iteration times.",
    ),
    click.option(
        "--interference-error",
        type=number(0.0, 10.0),
        default=0.0,
        help="Sigma of the lognormal error of believed slow-downs.",
    ),
    click.option(
        "--report-error",
        type=number(0.0, 10.0),
        default=0.0,
        help="Sigma of the lognormal error of the iteration times that jobs report.",
    ),
    click.option(
        "--report-s",
        type=number(),
        help="Seconds at a new pace after which a job reports it.  [default: 2 with --belief unknown, else 0]",
    ),
    click.option(
        "--jobs-per-gpu",
        type=click.IntRange(1, 100),
        default=2,
        show_default=True,
        help="Maximum number of jobs that compute on a GPU at the same time.",
    ),
    click.option(
        "--resident-per-gpu",
        type=click.IntRange(1, 1000),
        default=RESIDENT_PER_GPU,
        show_default=True,
        help="Maximum number of jobs that hold memory on a GPU, active and paused ones.",
    ),
    click.option("--ignore-placement", is_flag=True, help="Make every placement as fast as the most consolidated one."),
    click.option("--no-memory-limit", is_flag=True, help="Ignore GPU memory: all jobs fit beside each other."),
    click.option("--gpu-memory", help="Memory of a GPU, such as 24GiB.  [default: that of the profile's GPU]"),
    click.option("--launch-s", type=number(), default=0.0, help="Seconds from the decision to the first iteration."),
    click.option("--stop-s", type=number(), default=0.0, help="Seconds to checkpoint and stop a preempted job."),
    click.option("--swap", is_flag=True, help="Nodes can move the memory of a paused one-GPU job to main memory."),
    click.option(
        "--pause-s",
        type=number(),
        default=0.05,
        show_default=True,
        help="Seconds that each pause and each resume of a job takes.",
    ),
    click.option(
        "--large-above",
        type=click.IntRange(0),
        default=4,
        show_default=True,
        help="Number of GPUs above which a job counts as large.",
    ),
)
"""Options that describe the simulated world, in the order of the help."""


def world_options(command: Command) -> Command:
    """Add the options that describe the simulated world."""
    for option in reversed(WORLD_OPTIONS):
        command = option(command)
    return command


def make_setup(seed: int, world: dict[str, Any]) -> Setup:
    """Return the setup that the world options describe."""
    truth = world["truth"] or world["interference"]
    belief = world["belief"] or world["interference"]
    parse_cluster(world["cluster"], "--cluster")
    try:
        read_interference(truth)
    except ProfileError as error:
        option = "--truth" if world["truth"] else "--interference"
        raise InputError(str(error).replace("interference ", f"{option} ", 1)) from None
    return Setup(
        cluster=world["cluster"],
        profile=world["profile"],
        truth=truth,
        belief=None if belief == truth else belief,
        duration_error=world["duration_error"],
        interference_error=world["interference_error"],
        report_error=world["report_error"],
        report_s=world["report_s"],
        seed=seed,
        jobs_per_gpu=world["jobs_per_gpu"],
        resident_per_gpu=world["resident_per_gpu"],
        can_swap=world["swap"],
        gpu_memory=parse_bytes(world["gpu_memory"]) if world["gpu_memory"] is not None else None,
        memory_limit=not world["no_memory_limit"],
        ignore_placement=world["ignore_placement"],
        costs=Costs(world["launch_s"], world["stop_s"], world["pause_s"]),
        large_above=world["large_above"],
    )


def make_cases(
    source: str, select: str | None, jobs: int | None, loads: list[float], seeds: list[int], profile: str
) -> list[SweepCase]:
    """Return a case for each workload, load and seed."""
    selections = expand_selection(select)
    if source in generate.GENERATORS:
        cases = []
        for load in loads:
            for seed in seeds:
                workload = load_workload(source, selections[0], jobs, load, seed, profile)
                cases.append(SweepCase(f"{len(workload.jobs)} jobs, load {load:g}", str(seed), workload, seed))
        return cases
    if len(seeds) > 1:
        raise InputError(f"--seeds belongs to the generator; select workloads of {source} with --select seed=1-8")
    # a file is read once for each selection, not once for each load
    workloads = [(selection, load_workload(source, selection, jobs, 1.0, 1, profile)) for selection in selections]
    cases = []
    for load in loads:
        for selection, workload in workloads:
            label = ", ".join(f"{key} {value}" for key, value in selection.items() if key != "seed")
            label = f"{label or Path(source).name}, load {load:g}"
            cases.append(SweepCase(label, selection.get("seed", "1"), workload.at_load(load), seeds[0]))
    return cases


def bounds_of(cases: Sequence[SweepCase], setup: Setup, progress: Callable[[], None]) -> dict[tuple[str, str], "Bound"]:
    """Compute the lower bounds of all cases, by label and seed."""
    from carpool.sim.bound import lower_bound

    found = {}
    for case in cases:
        found[case.label, case.seed] = lower_bound(case.workload, setup)
        progress()
    return found


def progress_bar(what: str, total: int, quiet: bool) -> Any:
    """Show a progress bar on standard error; the context manager yields the function to call after each step."""
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
