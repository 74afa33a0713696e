"""`carpool policies`: the policies that `--policy` accepts."""

import json
from typing import Any

import click

from carpool import policies as registry
from carpool.errors import InputError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def policies(as_json: bool) -> None:
    """List the policies with their options and defaults.

    Give options as name:key=value,… and your own policy as path/to/file.py:Class, with options as
    path/to/file.py:Class:key=value,….
    """
    known = registry.known()
    if as_json:
        click.echo(json.dumps({name: _facts(cls) for name, cls in known.items()}, indent=1))
        return
    from rich.table import Table
    from rich.text import Text

    from carpool.report.console import new_console

    table = Table("policy", "what it does, its options and their defaults", show_lines=True)
    for name, cls in known.items():
        if isinstance(cls, InputError):
            table.add_row(Text(name, "bold"), Text(str(cls), "red"))
            continue
        lines = [Text(registry.summary(cls))]
        for option in registry.options(cls):
            lines.append(Text.assemble((option.name, "bold"), f"={_shown(option.default)}  {option.help}"))
        table.add_row(Text(name, "bold"), Text("\n").join(lines))
    new_console().print(table)


def _facts(cls: type[Any] | InputError) -> dict[str, Any]:
    if isinstance(cls, InputError):
        return {"error": str(cls)}
    return {
        "summary": registry.summary(cls),
        "options": {o.name: {"default": _plain(o.default), "help": o.help} for o in registry.options(cls)},
    }


def _plain(default: Any) -> Any:
    """Return a default as JSON can hold it; None for an option without one."""
    if default is registry.REQUIRED or isinstance(default, bool | int | float | str | None):
        return None if default is registry.REQUIRED else default
    return str(default)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        return f"{default:g}"
    return "…" if default is registry.REQUIRED else str(default)
