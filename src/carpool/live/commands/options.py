"""What the commands of the live service share: options, and how an answer is printed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from carpool.live.http.client import Client

Command = Callable[..., Any]


def home_option(command: Command) -> Command:
    return click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        help="The service's home directory.  [default: CARPOOL_HOME, else the user's state directory]",
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def connect(home: Path | None) -> Client:
    return Client.find(home)


def print_json(data: Any) -> None:
    """Non-ASCII characters are escaped, and with them everything that a terminal would obey."""
    click.echo(json.dumps(data, indent=2 if sys.stdout.isatty() else None))
