"""Options that the commands of the live service share, and how they print JSON."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from carpool.errors import InputError
from carpool.field_types import FieldError, FieldType
from carpool.live.http.client import Client
from carpool.live.text import printable

Command = Callable[..., Any]
ENV_DATABASE = "CARPOOL_DATABASE"


class OptionType(click.ParamType[Any]):
    """A value on the command line that a field type reads, with the same checks as every other edge."""

    def __init__(self, kind: FieldType) -> None:
        self.kind, self.name = kind, kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.kind.from_option(value)
        except FieldError as error:
            # Click does not tell which of its spellings was typed
            known = " or ".join(param.opts) if isinstance(param, click.Option) else ""
            place = known or str(param and param.human_readable_name)
            raise InputError(f"{place}: {error}") from None


def home_option(command: Command) -> Command:
    return click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        help="Home directory of the service.  [default: CARPOOL_HOME, else the user's state directory]",
    )(command)


def database_option(command: Command) -> Command:
    return click.option(
        "--database",
        metavar="URL",
        envvar=ENV_DATABASE,
        help="Journal in PostgreSQL, postgresql://user@host/database, which several services can share: one leads, the "
        "others stand by. The password belongs in ~/.pgpass.  [default: CARPOOL_DATABASE, else a file in the home]",
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(command)


def connect(home: Path | None) -> Client:
    """Return a client of the service; one that is starting is waited for."""
    return Client.find(home, say=lambda text: click.echo(text, err=True))


def complete_jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the jobs that run or wait, for the completion of a shell; none where no service answers."""
    home = context.params.get("home")
    try:
        rows = Client.find(Path(home) if home else None, wait=False).jobs()
    except (InputError, OSError):
        return []
    return [CompletionItem(row["job"], help=row["name"]) for row in rows if row["job"].startswith(incomplete)]


def print_sentences(sentences: Iterable[str]) -> None:
    """Print each sentence as a line; a terminal breaks long ones between words."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for one in map(printable, sentences):
        click.echo(textwrap.fill(one, width, break_long_words=False, break_on_hyphens=False) if width > 20 else one)


def print_json(data: Any) -> None:
    """Print data as JSON. Non-ASCII characters are escaped, and so is everything that a terminal would obey."""
    click.echo(json.dumps(data, indent=2 if sys.stdout.isatty() else None))
