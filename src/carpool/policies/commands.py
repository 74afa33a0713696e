"""`carpool policies`: what there is to choose from."""

import json

import click

from carpool import policies as registry


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def policies(as_json: bool) -> None:
    """List the policies with their options and defaults.

    Write options as name:key=value,… and a policy of your own as path/to/file.py:Class.
    """
    known = registry.known()
    if as_json:
        entries = {
            name: {
                "summary": registry.summary(cls),
                "options": {o.name: {"default": o.default, "help": o.help} for o in registry.options(cls)},
            }
            for name, cls in known.items()
        }
        click.echo(json.dumps(entries, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "what it does and its options", show_lines=True)
    for name, cls in known.items():
        lines = [registry.summary(cls)]
        for option in registry.options(cls):
            default = str(option.default).lower() if isinstance(option.default, bool) else f"{option.default:g}"
            lines.append(f"[bold]{option.name}[/bold]={default}  {option.help}")
        table.add_row(f"[bold]{name}[/bold]", "\n".join(lines))
    Console().print(table)
