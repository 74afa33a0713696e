"""`carpool user`: add, list, limit and revoke the users of a service. It needs the administrator's token."""

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
        click.option(
            "--max-priority", type=OptionType(PRIORITY), help="Highest priority of a job.  [default: no limit]"
        ),
        click.option(
            "--max-gpus", type=click.IntRange(0), help="Number of GPUs held at the same time.  [default: no limit]"
        ),
        click.option(
            "--max-jobs", type=click.IntRange(0), help="Number of jobs running at the same time.  [default: no limit]"
        ),
    ):
        command = option(command)
    return command


@click.group()
def user() -> None:
    """Manage the users of the service and their limits."""


@user.command()
@click.argument("name")
@click.option(
    "--uid", type=click.IntRange(1), help="Uid that the user's jobs run under.  [default: that of the login name]"
)
@limit_options
@home_option
@json_option
def add(name: str, uid: int | None, home: Path | None, as_json: bool, **limits: int | None) -> None:
    """Add a user and print their token. It is shown only once."""
    request = {"name": name, "uid": uid, **limits}
    answer = connect(home).post("/v1/users", {key: value for key, value in request.items() if value is not None})
    if as_json:
        print_json(answer)
        return
    click.echo(f"token of {answer['name']}, which is shown only now:", err=True)
    click.echo(answer["token"])


@user.command("list")
@home_option
@json_option
def list_users(home: Path | None, as_json: bool) -> None:
    """List the users with their limits, including revoked ones."""
    rows = connect(home).get("/v1/users")["users"]
    if as_json:
        print_json(rows)
        return
    table = new_table("user", "uid", "jobs", "GPUs", "priority", "", right=("uid", "jobs", "GPUs", "priority"))
    for row in rows:
        numbers = ["-" if row.get(key) is None else str(row[key]) for key in ("uid", *LIMITS)]
        table.add_row(printable(row["name"]), *numbers, "revoked" if row["revoked"] else "")
    new_console().print(table if rows else "no users besides the administrator")


@user.command()
@click.argument("name")
@home_option
@json_option
def revoke(name: str, home: Path | None, as_json: bool) -> None:
    """Revoke a user's token at once. Their jobs go on."""
    answer = connect(home).delete(f"/v1/users/{segment(name)}")
    print_json(answer) if as_json else click.echo(f"token of {answer['name']} revoked; their jobs go on")


@user.command()
@click.argument("name")
@limit_options
@home_option
@json_option
def limit(name: str, home: Path | None, as_json: bool, **limits: int | None) -> None:
    """Set all limits of a user. A limit that is not given is removed."""
    answer: dict[str, Any] = connect(home).put(f"/v1/users/{segment(name)}/limits", limits)
    if as_json:
        print_json(answer)
        return
    shown = ", ".join(f"{key.removeprefix('max_')} {answer[key]}" for key in LIMITS if answer.get(key) is not None)
    click.echo(f"{answer['name']}: {shown or 'no limits'}")
