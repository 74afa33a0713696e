"""Options that the commands of the live service share, and how they print JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.field_types import FieldError, FieldType
from carpool.live.http.client import Client

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
            place = param.opts[0] if isinstance(param, click.Option) else str(param and param.human_readable_name)
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
    return Client.find(home)


def print_json(data: Any) -> None:
    """Print data as JSON. Non-ASCII characters are escaped, and so is everything that a terminal would obey."""
    click.echo(json.dumps(data, indent=2 if sys.stdout.isatty() else None))
