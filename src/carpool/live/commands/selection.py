"""Which jobs a command means: ids, ranges, arrays, names, and filters such as `--status pending`.

`carpool cancel`, `hold`, `release`, `pause`, `resume`, `requeue`, `priority` and `prune` use it, `submit --after` for
the jobs to wait for, `jobs` for the rows to list, and commands about one job for that one. Ids are passed on as they
were written, so that the service answers for each of them. Everything else is looked up among the jobs that the user
may change.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import click

from carpool.errors import InputError, nearest
from carpool.field_types import ArrayIndexes, FieldError
from carpool.live.commands.options import Command
from carpool.live.http.client import Client
from carpool.live.statuses import SHOWN
from carpool.live.text import printable

MOST_UNASKED = 10
"""Number of jobs that a range, a name or a filter may select without a question."""
ID = re.compile(r"[0-9]{1,18}")
RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
ARRAY = re.compile(r"(.+)\[([0-9,\- ]+|\*)\]")
Row = Mapping[str, Any]


class StatusList(click.ParamType[tuple[str, ...]]):
    """Statuses of jobs, separated by commas."""

    name = "STATUS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if not isinstance(value, str):
            return tuple(value)
        words = tuple(word.strip().lower() for word in value.split(","))
        for word in words:
            if word not in SHOWN:
                raise InputError(f"--status {word!a}: no such status; {nearest(word, SHOWN)}")
        return words


@dataclass(frozen=True, slots=True)
class Filters:
    """What the jobs of a selection have in common."""

    mine: bool = False
    user: str | None = None
    statuses: tuple[str, ...] = ()
    name: str | None = None
    """Pattern for the name, in which `*` stands for any text."""
    project: str | None = None

    def __bool__(self) -> bool:
        return self != Filters()

    def accept(self, row: Row, me: str) -> bool:
        return (
            (not self.mine or row["user"] == me)
            and (self.user is None or row["user"] == self.user)
            and (not self.statuses or filtered_status(row) in self.statuses)
            and (self.name is None or fnmatchcase(row["name"], self.name))
            and (self.project is None or row.get("project", "") == self.project)
        )


def filtered_status(row: Row) -> str:
    """Return the status by which a filter finds a job: a job on hold is `held`, although it is pending."""
    return "held" if row["status"] == "pending" and row.get("held") else str(row["status"])


def filter_options(command: Command) -> Command:
    """Add the options that make `Filters`; `filters_of` takes them out of a command's arguments."""
    for option in reversed(
        (
            click.option("--mine", is_flag=True, help="Only your own jobs."),
            click.option("--user", metavar="NAME", help="Only jobs of this user."),
            click.option(
                "--status", "--state", "statuses", type=StatusList(), default=(), help="Only jobs in these statuses."
            ),
            click.option("--name", metavar="PATTERN", help="Only jobs with such a name, as in 'sweep*'."),
            click.option("--project", metavar="NAME", help="Only jobs of this project."),
        )
    ):
        command = option(command)
    return command


def yes_option(command: Command) -> Command:
    return click.option("--yes", is_flag=True, help=f"Do not ask before changing more than {MOST_UNASKED} jobs.")(
        command
    )


def filters_of(given: dict[str, Any]) -> Filters:
    """Take the filters out of a command's arguments."""
    return Filters(*(given.pop(one) for one in ("mine", "user", "statuses", "name", "project")))


def select(client: Client, words: Sequence[str], filters: Filters, *, ended: bool = False) -> list[str]:
    """Return the ids of the jobs that words and filters select, each once. `ended`: also of jobs that have ended.

    With both, a job must match one of the words and all filters. A word that matches no job is an error.
    """
    if not words and not filters:
        raise InputError("no jobs: give ids, ranges such as 25-31, names, or filters such as --mine --status pending")
    if not filters and all(map(ID.fullmatch, words)):
        return list(dict.fromkeys(words))
    me = client.get("/v1/me")
    rows = [row for row in client.jobs(ended) if me["admin"] or row["user"] == me["name"]]
    rows = [row for row in rows if filters.accept(row, me["name"])]
    if not words:
        return [row["job"] for row in rows]
    chosen: dict[str, None] = {}
    for word in words:
        found = [word] if ID.fullmatch(word) and not filters else match(word, rows)
        if not found:
            kind = "" if ended else " that has not ended"
            also = " and the filters" if filters else ""
            raise InputError(f"{ascii(word)[:80]}: no job of yours{kind} matches it{also}; `carpool jobs` lists them")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def find_rows(rows: Iterable[Row], words: Sequence[str], filters: Filters, me: Callable[[], str]) -> list[Row]:
    """Return the rows that words and filters select, of all users."""
    name = me() if filters.mine else ""
    found = [row for row in rows if filters.accept(row, name)]
    if not words:
        return found
    chosen = {job for word in words for job in match(word, found)}
    return [row for row in found if row["job"] in chosen]


def match(word: str, rows: Iterable[Row]) -> list[str]:
    """Return the ids of the rows that a word means: an id, a range, part of an array, or a name."""
    span, array = RANGE.fullmatch(word), ARRAY.fullmatch(word)
    if ID.fullmatch(word):
        return [row["job"] for row in rows if row["job"] == word]
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if last < first:
            raise InputError(f"{word}: write the smaller id first, as in 25-31")
        return [row["job"] for row in rows if first <= int(row["job"]) <= last]
    if array is not None:
        accept = _in_array(word, array[1], array[2])
        return [row["job"] for row in rows if accept(row)]
    return [row["job"] for row in rows if row["name"] and fnmatchcase(row["name"], word)]


def _in_array(word: str, array: str, indexes: str) -> Callable[[Row], bool]:
    """Return whether a row belongs to the part of an array that a word such as `12[3-5]` or `sweep[*]` names."""
    wanted: set[int] | None = None
    if indexes != "*":
        try:
            wanted = set(ArrayIndexes().indexes(indexes))
        except FieldError as error:
            raise InputError(f"{ascii(word)[:80]}: {error}") from None

    def accept(row: Row) -> bool:
        index = row.get("array_index")
        if index is None or (wanted is not None and index not in wanted):
            return False
        return bool(row.get("array_job") == array or row["name"].startswith(f"{array}["))

    return accept


def select_to_change(
    client: Client, words: Sequence[str], filters: Filters, yes: bool, *, ended: bool = False
) -> list[str]:
    """Return the selected jobs, after a question where a range, a name or a filter selects many."""
    jobs = select(client, words, filters, ended=ended)
    if not filters and set(jobs) <= set(words):
        return jobs
    if not jobs:
        raise InputError("no job of yours matches the filters; `carpool jobs` lists them")
    number = _number(jobs)
    if len(jobs) > MOST_UNASKED and not yes:
        if not sys.stdin.isatty():
            raise InputError(f"this would change {number}; add --yes if that is what you want")
        if not click.confirm(f"This changes {number}: {shortened(jobs)}. Continue?", err=True):
            raise InputError("nothing was changed: the answer was no")
    else:
        click.echo(f"{number}: {shortened(jobs)}", err=True)
    return jobs


def _number(jobs: Sequence[str]) -> str:
    return f"{len(jobs)} job{'s' if len(jobs) > 1 else ''}"


def select_one(client: Client, word: str, *, ended: bool = True) -> str:
    """Return the id of the one job that a word means. `ended`: it may have ended."""
    found = select(client, [word], Filters(), ended=ended)
    if len(found) > 1:
        raise InputError(f"{ascii(word)[:80]}: matches {len(found)} jobs ({shortened(found)}); give the id of one")
    return found[0]


def select_dependencies(client: Client, words: Sequence[str]) -> list[str]:
    """Return the jobs that `--after` means: those that have not ended, else the latest one that ended."""
    found: list[str] = []
    for word in words:
        try:
            found += select(client, [word], Filters())
        except InputError:
            found.append(select(client, [word], Filters(), ended=True)[-1])
    jobs = list(dict.fromkeys(found))
    if not set(jobs) <= set(words):
        click.echo(f"after {_number(jobs)}: {shortened(jobs)}", err=True)
    return jobs


def split_words(text: str, option: str) -> list[str]:
    """Return the words of a list such as `3,prep,12[4,7]`: commas in brackets belong to an array."""
    words = [word.strip() for word in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text)]
    if not words or not all(words):
        raise InputError(f"{option} {text!a}: names no job; write ids, names or ranges, as in 3,5 or prep")
    return words


def shortened(jobs: Sequence[str], most: int = 8) -> str:
    """Return the ids for a message: some of them, where there are many."""
    shown = ", ".join(printable(job) for job in jobs[:most])
    return f"{shown}, …, {printable(jobs[-1])}" if len(jobs) > most else shown
