"""`carpool demo`: run a dozen real trainings on this machine, then simulate the same jobs under other policies.

It starts a service in a temporary home, submits the jobs, shows the queue until all have ended and prints the
comparison. Nothing is left behind, also after an interrupt.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click

import carpool
from carpool.errors import InputError
from carpool.live.commands import replay, tables
from carpool.live.home import Home
from carpool.live.http.client import Client
from carpool.report.console import new_console
from carpool.sim.run import Setup

GPUS = 4
START_S = 30.0
ENOUGH_S = 300.0
PAUSE_S = 1.0
"""Seconds between two refreshes, and between two submissions."""
ASSUMED_SLOWDOWN = 1.75
COMPARED = ("fifo", "sjf", "sjf-bsbf")


class DemoJob(NamedTuple):
    """One of the demo's jobs."""

    name: str
    gpus: int
    iterations: int
    width: int
    rest_ms: float

    @property
    def duration_s(self) -> float:
        """The estimate that its owner would give."""
        return self.iterations * (self.rest_ms + 3.0) / 1000.0 + 3.0


DOZEN = (
    DemoJob("resnet-long", 2, 900, 256, 20),
    DemoJob("bert-long", 1, 700, 256, 25),
    DemoJob("probe-a", 1, 60, 64, 20),
    DemoJob("wide", 4, 250, 512, 20),
    DemoJob("probe-b", 1, 80, 64, 20),
    DemoJob("bert-short", 1, 200, 256, 25),
    DemoJob("resnet-short", 2, 250, 256, 20),
    DemoJob("sweep-1", 1, 150, 128, 20),
    DemoJob("sweep-2", 1, 150, 128, 20),
    DemoJob("sweep-3", 1, 150, 128, 20),
    DemoJob("pair", 2, 120, 128, 20),
    DemoJob("last-minute", 1, 50, 64, 20),
)


@click.command(short_help="Run a dozen small trainings and compare policies.")
@click.option("--policy", default="sjf-bsbf", show_default=True, help="Scheduling policy; see `carpool policies`.")
@click.option("--quick", is_flag=True, help="Run a fifth of the iterations.")
def demo(policy: str, quick: bool) -> None:
    """Run a dozen small trainings on this machine and compare the result with other policies in the simulator."""
    if find_spec("torch") is None:
        raise InputError("the demo trains with PyTorch: pip install 'carpool[live,train]'")
    dozen = [one._replace(iterations=max(20, one.iterations // 5)) if quick else one for one in DOZEN]
    with tempfile.TemporaryDirectory(prefix="carpool-demo-") as folder:
        with served(Path(folder), policy) as client:
            watch(client, dozen)
            rows, gpus = client.get("/v1/workload")["jobs"], client.get("/v1/gpus")
            jobs = client.jobs(all=True)
        compare(rows, tables.cluster_of(gpus), policy, jobs)


# ---- the service -----------------------------------------------------------------------------------------------------


@contextmanager
def served(home: Path, policy: str) -> Iterator[Client]:
    """Run a service in this home and yield a client. Afterwards neither the service nor any of its jobs runs."""
    command = [sys.executable, "-m", "carpool.cli", "serve", "--home", str(home), "--port", "0", "--policy", policy]
    log = home / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *_gpus()], stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
        )
        try:
            client = _client(home, process, log)
            try:
                yield client
            finally:
                _cancel_all(client)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _gpus() -> list[str]:
    """Return options that ask for logical GPUs where the machine has none."""
    from carpool.gpu import nvml

    return [] if nvml.devices() else ["--gpus", str(GPUS)]


def _environment() -> dict[str, str]:
    """Return an environment in which the service imports this source, also where it is not installed."""
    return {**os.environ, "PYTHONPATH": str(Path(carpool.__file__).parents[1])}


def _client(home: Path, process: subprocess.Popen[bytes], log: Path) -> Client:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        if Home(home).read_address():
            with suppress(InputError):
                client = Client.find(home)
                client.get("/v1/me")
                return client
        time.sleep(0.1)
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["its log is empty"]
    raise InputError(f"the demo's service did not start: {last[0]}")


def _cancel_all(client: Client) -> None:
    """Cancel all jobs and wait for their end."""
    with suppress(InputError):
        until = time.monotonic() + 30.0
        while (left := client.jobs()) and time.monotonic() < until:
            for row in left:
                with suppress(InputError):
                    client.post(f"/v1/jobs/{row['job']}/cancel")
            time.sleep(0.2)


# ---- the jobs --------------------------------------------------------------------------------------------------------


def submit(client: Client, one: DemoJob) -> str:
    words = [str(one.iterations), str(one.width), str(one.rest_ms)]
    request = {
        "command": [sys.executable, "-m", "carpool.live.commands.demo_job", *words],
        "directory": str(Path.cwd()),
        "name": one.name,
        "gpus": one.gpus,
        "batch": 64,
        "iterations": one.iterations,
        "duration_s": one.duration_s,
        "env": {"PYTHONPATH": _environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"},
        "grace_s": 5.0,
    }
    job: str = client.post("/v1/jobs", request)["job"]
    return job


def watch(client: Client, dozen: Sequence[DemoJob]) -> None:
    """Submit one job after the other and show the queue until all have ended.

    A terminal shows a table that refreshes; elsewhere each change is a line.
    """
    until = time.monotonic() + ENOUGH_S
    following = iter(dozen)
    seen: dict[str, str] = {}
    rows: list[dict[str, Any]] = []

    def look() -> Any:
        for one in following:
            submit(client, one)
            break
        rows[:] = client.jobs(all=True)
        return tables.jobs_table(tables.order(rows), 50)

    def over() -> bool:
        ended = [row for row in rows if row["status"] in ("finished", "failed", "cancelled")]
        return len(ended) == len(dozen) or time.monotonic() > until

    if sys.stdout.isatty():
        tables.watch(look, over)
        return
    while True:
        look()
        for row in rows:
            if seen.get(row["job"]) != row["status"]:
                seen[row["job"]] = row["status"]
                why = tables.why(row)
                gpus = "1 GPU" if row["gpus"] == 1 else f"{row['gpus']} GPUs"
                click.echo(f"{row['name']} ({gpus}): {row['status']}" + (f", {why}" if why else ""))
        if over():
            return
        time.sleep(PAUSE_S)


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(rows: list[dict[str, Any]], cluster: str, policy: str, jobs: list[dict[str, Any]]) -> None:
    finished = [row for row in jobs if row["status"] == "finished"]
    console = new_console()
    console.print(f"\n{len(finished)} of {len(jobs)} jobs finished")
    if not finished:
        raise SystemExit(1)
    achieved = fmean(row["finished"] - row["submitted"] for row in finished)
    xi, known = sharing_cost(rows)
    setup = Setup(cluster=cluster, truth=f"{xi:.3f}", memory_limit=False)
    outcomes = replay.run(rows, setup, COMPARED)
    table = tables.new_table("mean completion time", "seconds", "", right=("seconds",))
    table.add_row(f"achieved, live ({policy})", f"{achieved:.1f}", "measured")
    for outcome in outcomes:
        table.add_row(outcome.policy, f"{outcome.summary.mean_jct_s:.1f}", "simulated")
    console.print(table)
    console.print(
        f"simulated: the same jobs at the same times with their durations alone, on {cluster} GPUs; "
        f"a job that shares takes {xi:.2f}× as long, {known}."
    )
    if cores := _short_of_cores():
        console.print(f"All jobs share the {cores} CPU cores of this machine, which the simulator does not model.")
    if len(finished) < len(jobs):
        raise SystemExit(1)


def _short_of_cores() -> int:
    """Return the number of cores if it is smaller than the number of processes that may run at a time, else 0."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores < 2 * GPUS else 0


def sharing_cost(rows: list[dict[str, Any]]) -> tuple[float, str]:
    """Return the mean slow-down of the jobs that shared, and where it is known from."""
    slowed = [row["ran_s"] / row["alone_s"] for row in rows if row["shared"] and row["measured"] and row["alone_s"]]
    if slowed:
        return max(1.0, fmean(slowed)), "as measured here"
    return ASSUMED_SLOWDOWN, "an assumption, because no two jobs shared"
