"""Commands that change submitted jobs: `cancel`, `hold`, `release`, `pause`, `resume`, `requeue`, `prune`, `priority`.

Each takes ids, ranges, arrays, names and filters (`selection`), sends a request for every job and prints the answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.job_schema import PRIORITY
from carpool.live.commands.options import (
    Command,
    OptionType,
    complete_jobs,
    connect,
    home_option,
    json_option,
    print_json,
)
from carpool.live.commands.selection import filter_options, filters_of, select_to_change, yes_option
from carpool.live.http.client import Client, job_id, job_path
from carpool.live.text import printable, size

AT_ONCE = 10_000
"""Number of jobs that one request cancels."""
WHICH = """JOB is an id, a range such as 25-31, a part of an array such as 12[3-5], or a name, in which * stands for any
text. Without JOB, the filters select the jobs."""


@dataclass(frozen=True, slots=True)
class Selected:
    """The jobs that a command is to change, and how it answers."""

    client: Client
    jobs: list[str]
    one: bool
    """A single job was named by its id: the answer is about that job, not a list."""
    as_json: bool

    def change(self, change: Callable[[str], Any], words: Callable[[Any], str] | None = None) -> None:
        """Change each job by its path. A refusal does not keep the other jobs from being changed. `words` returns the
        line for the answer about a job."""
        rows, refused = [], []
        for job in self.jobs:
            try:
                rows.append(change(job_path(job)))
            except InputError as error:
                refused.append(error)
        self.answer(rows, refused, words)

    def answer(self, rows: list[Any], refused: Sequence[InputError], words: Callable[[Any], str] | None = None) -> None:
        """Print what became of each job, and fail if one was refused."""
        if refused and self.one:
            raise refused[0]
        for error in refused:
            click.echo(f"error: {printable(error)}", err=True)
        if self.as_json:
            print_json(rows[0] if self.one else rows)
        else:
            for row in rows:
                click.echo((words or _status_words)(row))
        if refused:
            raise SystemExit(2)


def _status_words(row: Any) -> str:
    held = ""
    if row.get("held"):
        waits = row["status"] == "pending"
        held = f"; it stays on hold after it stops, until `carpool release {printable(row['job'])}`"
        held = ", on hold" if waits else held
    return f"job {printable(row['job'])} is {row['status']}{held}"


def _selecting(words: str, short: str, *, ended: bool = False) -> Callable[[Command], Any]:
    """Return a decorator that makes a command which selects jobs. The function gets them as its first argument."""

    def decorate(function: Command) -> Any:
        @wraps(function)
        def command(jobs: tuple[str, ...], home: Path | None, as_json: bool, yes: bool, **given: Any) -> None:
            filters = filters_of(given)
            client = connect(home)
            chosen = select_to_change(client, jobs, filters, yes, ended=ended)
            one = not filters and chosen == list(dict.fromkeys(jobs)) and len(chosen) == 1
            function(Selected(client, chosen, one, as_json), **given)

        selecting: Command = command
        for option in (json_option, home_option, yes_option, filter_options):
            selecting = option(selecting)
        jobs = click.argument("jobs", nargs=-1, metavar="[JOB…]", shell_complete=complete_jobs)
        return click.command(help=f"{words}\n\n{WHICH}", short_help=short)(jobs(selecting))

    return decorate


def _simple(action: str, words: str, short: str | None = None) -> click.Command:
    @_selecting(words, short or words)
    def command(selected: Selected) -> None:
        selected.change(lambda path: selected.client.post(f"{path}/{action}"))

    command.name = action
    result: click.Command = command
    return result


@_selecting("Stop all workers of jobs for good.", "Stop all workers of jobs for good.")
def cancel(selected: Selected) -> None:
    done: list[Any] = []
    refused: list[InputError] = []
    jobs = [job_id(job) for job in selected.jobs]
    for start in range(0, len(jobs), AT_ONCE):
        answer = selected.client.post("/v1/jobs/cancel", {"jobs": jobs[start : start + AT_ONCE]})
        done += answer["jobs"]
        refused += [InputError(one["error"]) for one in answer["refused"]]
    selected.answer(done, refused)


hold = _simple("hold", "Keep waiting jobs from starting until `carpool release`.")
release = _simple("release", "Allow held jobs to start.")
pause = _simple(
    "pause",
    "Pause running jobs until `carpool resume`. They keep their memory on their GPUs.",
    "Pause running jobs; they keep their memory on their GPUs.",
)
resume = _simple("resume", "Let paused jobs go on as soon as their GPUs have room.")
requeue = _simple(
    "requeue",
    "Stop running jobs after they have saved, and put them back into the queue.",
    "Save and stop running jobs, and queue them again.",
)


@_selecting(
    "Remove the logs, the code snapshot and the checkpoints of jobs that have ended. Their history stays.",
    "Remove the files of jobs that have ended.",
    ended=True,
)
def prune(selected: Selected) -> None:
    selected.change(
        lambda path: selected.client.delete(f"{path}/files"),
        lambda row: f"job {printable(row['job'])}: removed {size(row['bytes'])}",
    )


@click.argument("value", type=OptionType(PRIORITY), metavar="PRIORITY")
@_selecting(
    "Change the priority of jobs; a higher one starts first. Write `--` before a negative number.",
    "Change the priority of jobs.",
)
def priority(selected: Selected, value: int) -> None:
    selected.change(
        lambda path: selected.client.put(f"{path}/priority", {"priority": value}),
        lambda row: f"job {printable(row['job'])} has priority {value}",
    )
