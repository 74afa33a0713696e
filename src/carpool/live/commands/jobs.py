"""The commands about jobs that are there: `jobs`, `show`, `logs`, `explain`, `cancel`, `hold`, `release`, `requeue`,
`priority`. Each is a request to the service and a way to print its answer."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from carpool.job_schema import PRIORITY
from carpool.live.commands import tables
from carpool.live.commands.options import OptionType, connect, home_option, json_option, print_json
from carpool.live.http.client import Client, job_path
from carpool.live.text import harmless, printable

POLL_S = 0.5
job_argument = click.argument("job")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also those that ended.")
@click.option("--mine", is_flag=True, help="Only your own.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Rows of the table.")
@click.option("--watch", is_flag=True, help="Show it again every second, until interrupted.")
@home_option
@json_option
def jobs(everything: bool, mine: bool, limit: int, watch: bool, home: Path | None, as_json: bool) -> None:
    """The queue and what runs."""
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


@click.command()
@job_argument
@home_option
@json_option
def show(job: str, home: Path | None, as_json: bool) -> None:
    """All that is known of a job, with its receipt: the time it gained or lost by sharing."""
    row = connect(home).get(job_path(job))
    print_json(row) if as_json else tables.print_job(row)


@click.command()
@job_argument
@home_option
@json_option
def explain(job: str, home: Path | None, as_json: bool) -> None:
    """Why a job waits, or with whom it shares; when it starts and ends, and how that is known."""
    row = connect(home).get(f"{job_path(job)}/explain")
    print_json(row) if as_json else click.echo("\n".join(printable(line) for line in row["sentences"]))


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Which worker.")
@click.option("--attempt", type=click.IntRange(1), help="Which start of the job.  [default: the latest]")
@click.option(
    "--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both", show_default=True, help="Which."
)
@click.option("--tail", type=click.IntRange(0, 100_000), metavar="LINES", help="Begin with the last so many lines.")
@click.option("--raw", is_flag=True, help="Leave escape sequences in, also on a terminal.")
@home_option
def logs(
    job: str, follow: bool, rank: int, attempt: int | None, stream: str, tail: int | None, raw: bool, home: Path | None
) -> None:
    """What a worker wrote: its standard output to ours, its standard error to ours."""
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


def _changes(names: tuple[str, ...], home: Path | None, as_json: bool, change: Any) -> None:
    """Do it to each job; what is refused is said, and the rest is done."""
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
            held = f"; stopped, it stays on hold until `carpool release {printable(row['job'])}`"
            if not row.get("held"):
                held = ""
            elif row["status"] == "pending":
                held = ", on hold"
            click.echo(f"job {printable(row['job'])} is {row['status']}{held}")
    if refused:
        if len(names) == 1:
            raise refused[0]
        raise SystemExit(2)


def _simple(action: str, words: str) -> click.Command:
    @click.command(action, help=words)
    @click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
    @home_option
    @json_option
    def command(jobs: tuple[str, ...], home: Path | None, as_json: bool) -> None:
        def change(client: Client, path: str) -> Any:
            return client.post(f"{path}/{action}")

        _changes(jobs, home, as_json, change)

    return command


cancel = _simple("cancel", "Stop a job for good, all of its workers.")
hold = _simple("hold", "Keep a waiting job from starting until `carpool release`.")
release = _simple("release", "Let a held job start again.")
requeue = _simple("requeue", "Stop a running job, which saves first, and put it back into the queue.")


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@click.argument("value", type=OptionType(PRIORITY), metavar="PRIORITY")
@home_option
@json_option
def priority(jobs: tuple[str, ...], value: int, home: Path | None, as_json: bool) -> None:
    """Change a job's place in the queue: higher goes first. A negative one needs `--` before it."""

    def change(client: Client, path: str) -> Any:
        return client.put(f"{path}/priority", {"priority": value})

    _changes(jobs, home, as_json, change)
