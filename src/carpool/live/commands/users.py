"""`carpool user`: who may talk to the service. Only the administrator's token may use it."""

from pathlib import Path
from typing import Any

import click

from carpool.job_schema import PRIORITY
from carpool.live.commands.options import Command, OptionType, connect, home_option, json_option, print_json
from carpool.live.commands.tables import new_table
from carpool.live.http.client import segment
from carpool.live.text import printable
from carpool.report.console import new_console

LIMITS = ("max_jobs", "max_gpus", "max_priority")


def limit_options(command: Command) -> Command:
    for option in (
        click.option("--max-priority", type=OptionType(PRIORITY), help="Highest priority.  [default: no limit]"),
        click.option("--max-gpus", type=click.IntRange(0), help="GPUs at a time.  [default: no limit]"),
        click.option("--max-jobs", type=click.IntRange(0), help="Running jobs at a time.  [default: no limit]"),
    ):
        command = option(command)
    return command


@click.group()
def user() -> None:
    """Let people in, shut them out, and limit what they hold."""


@user.command()
@click.argument("name")
@click.option("--uid", type=click.IntRange(1), help="Whose uid their jobs get.  [default: that of the login name]")
@limit_options
@home_option
@json_option
def add(name: str, uid: int | None, home: Path | None, as_json: bool, **limits: int | None) -> None:
    """Let somebody in; prints their token, this once."""
    request = {"name": name, "uid": uid, **limits}
    answer = connect(home).post("/v1/users", {key: value for key, value in request.items() if value is not None})
    if as_json:
        print_json(answer)
        return
    click.echo(f"{answer['name']} may come in with this token, which is shown only now:", err=True)
    click.echo(answer["token"])


@user.command("list")
@home_option
@json_option
def list_users(home: Path | None, as_json: bool) -> None:
    """Who has or had a token, and their limits."""
    rows = connect(home).get("/v1/users")["users"]
    if as_json:
        print_json(rows)
        return
    table = new_table("user", "uid", "jobs", "GPUs", "priority", "", right=("uid", "jobs", "GPUs", "priority"))
    for row in rows:
        numbers = ["-" if row.get(key) is None else str(row[key]) for key in ("uid", *LIMITS)]
        table.add_row(printable(row["name"]), *numbers, "revoked" if row["revoked"] else "")
    new_console().print(table if rows else "nobody but the administrator")


@user.command()
@click.argument("name")
@home_option
@json_option
def revoke(name: str, home: Path | None, as_json: bool) -> None:
    """Shut somebody out at once. Their jobs go on."""
    answer = connect(home).delete(f"/v1/users/{segment(name)}")
    print_json(answer) if as_json else click.echo(f"{answer['name']} may not come in any more; their jobs go on")


@user.command()
@click.argument("name")
@limit_options
@home_option
@json_option
def limit(name: str, home: Path | None, as_json: bool, **limits: int | None) -> None:
    """Set what somebody may hold at a time; what is not given has no limit any more."""
    answer: dict[str, Any] = connect(home).put(f"/v1/users/{segment(name)}/limits", limits)
    if as_json:
        print_json(answer)
        return
    shown = ", ".join(f"{key.removeprefix('max_')} {answer[key]}" for key in LIMITS if answer.get(key) is not None)
    click.echo(f"{answer['name']}: {shown or 'no limits'}")
