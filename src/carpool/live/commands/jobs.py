"""Commands that show submitted jobs: `jobs`, `show`, `explain`, `logs`.

Each sends a request to the service and prints its answer.
"""

import sys
import time
from pathlib import Path
from typing import Any

import click

from carpool.live.commands import tables
from carpool.live.commands.options import complete_jobs, connect, home_option, json_option, print_json, print_sentences
from carpool.live.commands.selection import filter_options, filters_of, find_rows, select_one
from carpool.live.http.client import job_path
from carpool.live.text import harmless, printable

POLL_S = 0.5
job_argument = click.argument("job", shell_complete=complete_jobs)


@click.command(short_help="List the jobs that run or wait.")
@click.argument("words", nargs=-1, metavar="[JOB…]")
@click.option("--all", "everything", is_flag=True, help="Include the jobs that have ended.")
@filter_options
@click.option(
    "--sort", metavar="COLUMN", help="Sort by a column; -COLUMN sorts downwards.  [default: running, waiting, ended]"
)
@click.option("--format", "columns", metavar="COLUMNS", help="Columns to show, as in job,name,status,waited_s.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Number of rows to show.")
@click.option("--watch", is_flag=True, help="Refresh the table every second until interrupted.")
@home_option
@json_option
def jobs(words: tuple[str, ...], limit: int, watch: bool, home: Path | None, as_json: bool, **given: Any) -> None:
    """List the jobs that run or wait.

    JOB is an id, a range such as 25-31, a part of an array such as 12[3-5], or a name, in which * stands for any text.
    Columns are the fields of --json, also by their titles.
    """
    client = connect(home)
    filters, columns = filters_of(given), tables.columns_of(given["columns"])
    by = tables.sort_column(given["sort"])

    def rows() -> list[tables.Row]:
        found = find_rows(client.jobs(given["everything"]), words, filters, lambda: client.get("/v1/me")["name"])
        tables.check_columns(found, columns, by)
        return tables.sort(found, by)

    if as_json:
        print_json([{name: row.get(name) for name in columns} for row in rows()] if columns else rows())
    elif watch:
        tables.watch(lambda: tables.jobs_table(rows(), limit, columns=columns))
    else:
        tables.print_jobs(rows(), limit, columns)
        status = client.get("/v1/status")
        if status["policy_failure"]:
            click.echo(f"warning: {printable(status['policy_failure'])}", err=True)
        if problem := status.get("journal_problem"):
            click.echo(f"warning: the journal cannot be written ({printable(problem)}), so nothing changes", err=True)


@click.command(short_help="Show a job and what sharing gained or cost it.")
@job_argument
@home_option
@json_option
def show(job: str, home: Path | None, as_json: bool) -> None:
    """Show all details of a job, and its receipt: the time that sharing gained or cost it."""
    client = connect(home)
    row = client.get(job_path(select_one(client, job)))
    print_json(row) if as_json else tables.print_job(row)


@click.command(short_help="Explain why a job waits or runs where it does.")
@job_argument
@home_option
@json_option
def explain(job: str, home: Path | None, as_json: bool) -> None:
    """Explain why a job waits or where it runs, and forecast its start and end."""
    client = connect(home)
    row = client.get(f"{job_path(select_one(client, job))}/explain")
    print_json(row) if as_json else print_sentences(row["sentences"])


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
    job = select_one(client, job)
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
