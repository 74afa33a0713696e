"""`carpool replay`: simulate the jobs that ran here under other policies, on a cluster like this one.

The table shows the results beside what was achieved live.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from carpool import policies
from carpool.core.state import RESIDENT_PER_GPU
from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.live.commands.tables import cluster_of
from carpool.live.insight.what_if import workload_of
from carpool.report.progress import progress_bar
from carpool.report.tables import comparison_json, comparison_tables
from carpool.sim.engine import Costs
from carpool.sim.run import Setup, node_sizes
from carpool.sim.sweep import CaseResult, SweepCase, run_all

POLICIES = ("fifo", "sjf", "sjf-ffs", "sjf-bsbf")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Achieved:
    """What was achieved live with the jobs that are replayed."""

    jobs: int
    mean_jct_s: float
    mean_queue_s: float


@click.command(short_help="Simulate past jobs under other policies.")
@click.option(
    "--policy", "chosen", multiple=True, help="Policy to simulate; repeatable.  [default: fifo, sjf, sjf-ffs, sjf-bsbf]"
)
@click.option(
    "--interference", help="Slow-down of jobs that share: a number or a table.  [default: 1.5]", default="1.5"
)
@click.option("--profile", default="t4", show_default=True, help="Profile with the speed and memory of models.")
@click.option(
    "--jobs-per-gpu", type=click.IntRange(1, 100), default=2, show_default=True, help="Maximum number of jobs on a GPU."
)
@click.option(
    "--resident-per-gpu",
    type=click.IntRange(1, 1000),
    default=RESIDENT_PER_GPU,
    show_default=True,
    help="Maximum number of jobs that hold memory on a GPU, active and paused ones.",
)
@click.option(
    "--pause-s",
    type=click.FloatRange(0.0, 1e6),
    default=Costs().pause_s,
    show_default=True,
    help="Seconds that each pause and each resume of a job takes.",
)
@click.option("--cluster", help="Cluster as nodes x GPUs per node.  [default: as it is here]")
@home_option
@json_option
def replay(
    chosen: Sequence[str],
    interference: str,
    profile: str,
    jobs_per_gpu: int,
    resident_per_gpu: int,
    pause_s: float,
    cluster: str | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """Simulate the history of this service under other policies and compare them.

    Only finished jobs count. A job's duration is the time that it would have needed here alone: the cost of sharing is
    taken out, and the simulator adds its own slow-down where a policy lets jobs share.
    """
    for name in chosen:
        policies.make(name)
    if cluster is not None:
        node_sizes(cluster, "--cluster")
    client = connect(home)
    rows = client.get("/v1/workload")["jobs"]
    shape = cluster or cluster_of(client.get("/v1/gpus"))
    setup = Setup(
        cluster=shape,
        profile=profile,
        truth=interference,
        jobs_per_gpu=jobs_per_gpu,
        resident_per_gpu=resident_per_gpu,
        memory_limit=False,
        costs=Costs(pause_s=pause_s),
    )
    names = chosen or POLICIES
    with progress_bar("simulating", len(names), quiet=as_json) as advance:
        outcomes = run(rows, setup, names, advance)
    achieved = achieved_by(rows)
    if as_json:
        print_json(
            {"achieved": {f.name: getattr(achieved, f.name) for f in fields(achieved)}, **comparison_json(outcomes)}
        )
        return
    comparison_tables(outcomes, setup)
    click.echo(
        f"achieved live: mean JCT {achieved.mean_jct_s:.2f} s, of which {achieved.mean_queue_s:.2f} s before the start"
    )


def run(
    rows: Sequence[Row], setup: Setup, names: Sequence[str], advance: Callable[[], None] = lambda: None
) -> list[CaseResult]:
    """Simulate the finished jobs of a history under each policy."""
    workload = workload_of(rows, setup.profile)
    case = SweepCase(f"{len(workload.jobs)} jobs of the history", "1", workload)
    return run_all(list(names), [case], setup, workers=1, progress=advance)


def achieved_by(rows: Sequence[Row]) -> Achieved:
    done = [row for row in rows if row["alone_s"] > 0.0]
    jct = fmean(row["finished"] - row["submitted"] for row in done)
    return Achieved(len(done), jct, fmean(row["started"] - row["submitted"] for row in done))
