"""Options and helpers that `carpool simulate`, `compare`, `bound` and `study` share.

The options describe the simulated world; `make_setup` turns them into a `Setup`, `make_cases` turns workload options
into the cases of a sweep, and `bounds_of` computes their lower bounds.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool.core.model import Closure, UserGroup
from carpool.core.state import RESIDENT_PER_GPU
from carpool.core.tenants import DEFAULT_STRENGTH, settings_problem
from carpool.errors import InputError, nearest
from carpool.field_types import Duration, FieldError
from carpool.gpu_names import named_gpus
from carpool.job_schema import GROUP_FIELDS
from carpool.profile.fields import ProfileError
from carpool.profile.interference import read_interference
from carpool.sim import generate
from carpool.sim.engine import Costs
from carpool.sim.run import Setup, cluster_nodes, node_sizes
from carpool.sim.sources import MOST_JOBS, expand_selection, load_workload
from carpool.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from carpool.sim.bound import Bound
    from carpool.sim.sweep import SweepCase

Command = Callable[..., Any]
LEAST_GUESS = 1e-4
"""Smallest ratio of guess to truth; the largest is its inverse."""
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


class OptionDuration(click.ParamType[float]):
    """Seconds, written as a user writes a duration."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value) if isinstance(value, float) else float(HALF_LIFE.from_option(value))
        except FieldError as error:
            self.fail(str(error), param, ctx)


HALF_LIFE = Duration(1.0, 1e10)
"""Range of half-lives."""


def parse_groups(texts: Sequence[str]) -> tuple[UserGroup, ...]:
    """Return the groups that options describe, such as `vision:weight=2,guarantee=8,cap=32`."""
    found = {}
    for text in texts:
        name, _, rest = text.partition(":")
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            kind = GROUP_FIELDS.get(key.strip())
            if kind is None:
                raise InputError(f"--group {text}: {key!r} is unknown: {nearest(key, GROUP_FIELDS)}")
            try:
                values[key.strip()] = kind.from_cell(value.strip())
            except FieldError as error:
                raise InputError(f"--group {text}: {key}: {error}") from None
        if not name or name in found:
            raise InputError(f"--group {text}: give each group one name, such as vision:weight=2")
        found[name] = UserGroup(name, **values)
        if problem := settings_problem(found[name]):
            raise InputError(f"--group {text}: {problem}")
    return tuple(found.values())


def parse_guesses(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return users with the ratio of guess to truth, from texts such as `alice=0.1`."""
    found = {}
    for text in texts:
        user, _, value = text.partition("=")
        try:
            factor = float(value)
        except ValueError:
            factor = 0.0
        if not user or not LEAST_GUESS <= factor <= 1 / LEAST_GUESS:
            raise InputError(f"--guess {text}: give a user and a factor between 0.0001 and 10000, such as alice=0.1")
        if user in found:
            raise InputError(f"--guess {text}: {user} is given twice")
        found[user] = factor
    return tuple(found.items())


def parse_closures(drains: Sequence[str], reservations: Sequence[str], cluster: str) -> tuple[Closure, ...]:
    """Return the closures that options describe, such as `node3@6h` and `node0,node1@2h-6h=vision`."""
    nodes = {node.id: dict(enumerate(node.gpus)) for node in cluster_nodes(Setup(cluster=cluster, memory_limit=False))}
    found: list[Closure] = []
    for option, texts in (("--drain", drains), ("--reserve", reservations)):
        for text in texts:
            try:
                found.append(_closure(f"{option} {len(found)}", text, nodes, reserves=option == "--reserve"))
            except InputError as error:
                raise InputError(f"{option} {text}: {error}") from None
    return tuple(found)


def _closure(name: str, text: str, nodes: Mapping[str, Mapping[int, int]], *, reserves: bool) -> Closure:
    match = re.fullmatch(r"([^@]+)@([^-=]+)(?:-([^-=]+))?(?:=([a-z0-9_][a-z0-9_.-]{0,31}))?", text)
    if match is None or bool(match[4]) is not reserves or (reserves and match[3] is None):
        example = "node0,node1@2h-6h=vision" if reserves else "node3@6h or node0:1@6h-8h"
        raise InputError(f"write GPUs and times, such as {example}")
    start, end = parse_duration(match[2]), parse_duration(match[3]) if match[3] else None
    if end is not None and end <= start:
        raise InputError("it must end after it begins")
    return Closure(name, named_gpus(match[1], nodes), start, end, match[4])


WORLD_OPTIONS = (
    click.option("--cluster", default="16x4", show_default=True, help="Nodes x GPUs per node; 4x8+2x4 has two sizes."),
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
    click.option("--no-reports", is_flag=True, help="Jobs never report their speed: what was guessed is believed."),
    click.option(
        "--guess",
        "guesses",
        multiple=True,
        help="Ratio of a user's guessed durations to the true ones, such as alice=0.1. Repeatable.",
    ),
    click.option(
        "--trust-guesses",
        is_flag=True,
        help="Believe guessed durations: do not correct them by earlier guesses, or when a job outlives them.",
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
        "--fair-share",
        type=number(0.0, 1.0),
        default=0.0,
        help=f"How strongly groups and users that used less than their share go first: 0 not at all, 1 above all; "
        f"{DEFAULT_STRENGTH:g} is a good choice.",
    ),
    click.option(
        "--half-life",
        type=OptionDuration(),
        default="1d",
        show_default=True,
        help="Time after which GPU time that was used counts half, such as 12h.",
    ),
    click.option(
        "--group",
        "groups",
        multiple=True,
        help="Group with its weight, guaranteed GPUs and cap, such as vision:weight=2,guarantee=8,cap=32. Repeatable.",
    ),
    click.option(
        "--drain",
        "drains",
        multiple=True,
        metavar="GPUS@FROM[-TO]",
        help="Drain a node or GPU, such as node3@6h or node0:1@6h-8h: no job runs there then. Repeatable.",
    ),
    click.option(
        "--reserve",
        "reservations",
        multiple=True,
        metavar="GPUS@FROM-TO=GROUP",
        help="Reserve nodes or GPUs for a group, such as node0,node1@2h-6h=vision. Repeatable.",
    ),
    click.option(
        "--fairness",
        is_flag=True,
        help="Measure how evenly groups (or users) are treated: one more simulation for each of them.",
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
    node_sizes(world["cluster"], "--cluster")
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
        report_s=inf if world["no_reports"] else world["report_s"],
        guesses=parse_guesses(world["guesses"]),
        trust_guesses=world["trust_guesses"],
        seed=seed,
        jobs_per_gpu=world["jobs_per_gpu"],
        resident_per_gpu=world["resident_per_gpu"],
        can_swap=world["swap"],
        gpu_memory=parse_bytes(world["gpu_memory"]) if world["gpu_memory"] is not None else None,
        memory_limit=not world["no_memory_limit"],
        ignore_placement=world["ignore_placement"],
        costs=Costs(world["launch_s"], world["stop_s"], world["pause_s"]),
        large_above=world["large_above"],
        fair_share=world["fair_share"],
        half_life_s=world["half_life"],
        groups=parse_groups(world["groups"]),
        closures=parse_closures(world["drains"], world["reservations"], world["cluster"]),
        fairness=world["fairness"],
    )


def make_cases(
    source: str, select: str | None, jobs: int | None, loads: list[float], seeds: list[int], profile: str
) -> "list[SweepCase]":
    """Return a case for each workload, load and seed."""
    from carpool.sim.sweep import SweepCase  # brings multiprocessing, which `simulate` does not need

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


def bounds_of(
    cases: "Sequence[SweepCase]", setup: Setup, progress: Callable[[], None]
) -> dict[tuple[str, str], "Bound"]:
    """Compute the lower bounds of all cases, by label and seed."""
    from carpool.sim.bound import lower_bound

    found = {}
    for case in cases:
        found[case.label, case.seed] = lower_bound(case.workload, setup)
        progress()
    return found
