"""Commands on submitted jobs: `jobs`, `show`, `explain`, `logs`, `cancel`, `hold`, `release`, `pause`, `resume`,
`requeue`, `prune`, `priority`.

Each sends a request to the service and prints its answer.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.job_schema import PRIORITY
from carpool.live.commands import tables
from carpool.live.commands.options import OptionType, connect, home_option, json_option, print_json
from carpool.live.http.client import Client, job_id, job_path
from carpool.live.text import harmless, printable, size

POLL_S = 0.5
AT_ONCE = 10_000
"""Number of jobs that one request cancels."""
job_argument = click.argument("job")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Include the jobs that have ended.")
@click.option("--mine", is_flag=True, help="Only your own jobs.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Number of rows to show.")
@click.option("--watch", is_flag=True, help="Refresh the table every second until interrupted.")
@home_option
@json_option
def jobs(everything: bool, mine: bool, limit: int, watch: bool, home: Path | None, as_json: bool) -> None:
    """List the jobs that run or wait."""
    client = connect(home)

    def rows() -> list[dict[str, Any]]:
        found = client.jobs(everything)
        name = client.get("/v1/me")["name"] if mine else None
        return [row for row in found if name is None or row["user"] == name]

    if as_json:
        print_json(rows())
    elif watch:
        tables.watch(lambda: tables.jobs_table(rows(), limit))
    else:
        tables.print_jobs(rows(), limit)
        failure = client.get("/v1/status")["policy_failure"]
        if failure:
            click.echo(f"warning: {printable(failure)}", err=True)


@click.command(short_help="Show a job and what sharing gained or cost it.")
@job_argument
@home_option
@json_option
def show(job: str, home: Path | None, as_json: bool) -> None:
    """Show all details of a job, and its receipt: the time that sharing gained or cost it."""
    row = connect(home).get(job_path(job))
    print_json(row) if as_json else tables.print_job(row)


@click.command(short_help="Explain why a job waits or runs where it does.")
@job_argument
@home_option
@json_option
def explain(job: str, home: Path | None, as_json: bool) -> None:
    """Explain why a job waits or where it runs, and forecast its start and end."""
    row = connect(home).get(f"{job_path(job)}/explain")
    print_json(row) if as_json else click.echo("\n".join(printable(line) for line in row["sentences"]))


@click.command(short_help="Print the output of a job's worker.")
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job has ended.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Rank of the worker.")
@click.option("--attempt", type=click.IntRange(1), help="Number of the attempt.  [default: the latest]")
@click.option(
    "--stream",
    type=click.Choice(["stdout", "stderr", "both"]),
    default="both",
    show_default=True,
    help="Stream to print.",
)
@click.option("--tail", type=click.IntRange(0, 100_000), metavar="LINES", help="Print only the last lines.")
@click.option("--raw", is_flag=True, help="Keep escape sequences on a terminal, too.")
@home_option
def logs(
    job: str, follow: bool, rank: int, attempt: int | None, stream: str, tail: int | None, raw: bool, home: Path | None
) -> None:
    """Print the output of a worker: its standard output to standard output, its standard error to standard error."""
    client = connect(home)
    streams = ("stdout", "stderr") if stream == "both" else (stream,)
    readers = {name: client.log(job, rank=rank, stream=name, attempt=attempt, tail=tail) for name in streams}
    try:
        while readers:
            quiet = True
            for name in list(readers):
                data, _, ended = next(readers[name])
                quiet = quiet and not data
                _write(name, data, raw)
                if ended or (not data and not follow):
                    del readers[name]
            if quiet and readers:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _write(stream: str, data: bytes, raw: bool) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    if not data:
        return
    if target.isatty() and not raw:
        data = harmless(data)
    target.flush()
    target.buffer.write(data)
    target.buffer.flush()


# ---- changes ---------------------------------------------------------------------------------------------------------


def _changes(
    names: tuple[str, ...], home: Path | None, as_json: bool, change: Any, words: Callable[[Any], str] | None = None
) -> None:
    """Change each job. A refusal is printed and does not keep the other jobs from being changed. `words` returns the
    line for the answer about a job."""
    client = connect(home)
    rows, refused = [], []
    for name in names:
        try:
            rows.append(change(client, job_path(name)))
        except ValueError as error:
            refused.append(error)
            if len(names) > 1:
                click.echo(f"error: {printable(error)}", err=True)
    if as_json:
        print_json(rows[0] if len(names) == 1 and rows else rows)
    else:
        for row in rows:
            click.echo((words or _status_words)(row))
    if refused:
        if len(names) == 1:
            raise refused[0]
        raise SystemExit(2)


def _status_words(row: Any) -> str:
    held = ""
    if row.get("held"):
        waits = row["status"] == "pending"
        held = f"; it stays on hold after it stops, until `carpool release {printable(row['job'])}`"
        held = ", on hold" if waits else held
    return f"job {printable(row['job'])} is {row['status']}{held}"


def _simple(action: str, words: str, short: str | None = None) -> click.Command:
    @click.command(action, help=words, short_help=short)
    @click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
    @home_option
    @json_option
    def command(jobs: tuple[str, ...], home: Path | None, as_json: bool) -> None:
        def change(client: Client, path: str) -> Any:
            return client.post(f"{path}/{action}")

        _changes(jobs, home, as_json, change)

    return command


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@home_option
@json_option
def cancel(jobs: tuple[str, ...], home: Path | None, as_json: bool) -> None:
    """Stop all workers of jobs for good."""
    client = connect(home)
    ids = [job_id(job) for job in dict.fromkeys(jobs)]
    done: list[Any] = []
    refused: list[Any] = []
    for start in range(0, len(ids), AT_ONCE):
        answer = client.post("/v1/jobs/cancel", {"jobs": ids[start : start + AT_ONCE]})
        done += answer["jobs"]
        refused += answer["refused"]
    if refused and len(ids) == 1:
        raise InputError(refused[0]["error"])
    for one in refused:
        click.echo(f"error: {printable(one['error'])}", err=True)
    if as_json:
        print_json(done[0] if len(ids) == 1 else done)
    else:
        for row in done:
            click.echo(_status_words(row))
    if refused:
        raise SystemExit(2)


hold = _simple("hold", "Keep a waiting job from starting until `carpool release`.")
release = _simple("release", "Allow a held job to start.")
pause = _simple(
    "pause",
    "Let a running job stand still, with its memory on its GPUs, until `carpool resume`.",
    "Let a running job stand still on its GPUs.",
)
resume = _simple("resume", "Let a paused job go on as soon as its GPUs have room.")
requeue = _simple(
    "requeue",
    "Stop a running job after it has saved, and put it back into the queue.",
    "Save and stop a running job, and queue it again.",
)


@click.command(short_help="Remove the files of a job that has ended.")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@home_option
@json_option
def prune(jobs: tuple[str, ...], home: Path | None, as_json: bool) -> None:
    """Remove the logs, the code snapshot and the checkpoints of jobs that have ended. Their history stays."""

    def change(client: Client, path: str) -> Any:
        return client.delete(f"{path}/files")

    _changes(jobs, home, as_json, change, lambda row: f"job {printable(row['job'])}: removed {size(row['bytes'])}")


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@click.argument("value", type=OptionType(PRIORITY), metavar="PRIORITY")
@home_option
@json_option
def priority(jobs: tuple[str, ...], value: int, home: Path | None, as_json: bool) -> None:
    """Change the priority of a job; a higher one starts first. Write `--` before a negative number."""

    def change(client: Client, path: str) -> Any:
        return client.put(f"{path}/priority", {"priority": value})

    _changes(jobs, home, as_json, change, lambda row: f"job {printable(row['job'])} has priority {value}")
