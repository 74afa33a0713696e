"""`carpool user`: add, list, limit and revoke the users of a service. It needs the administrator's token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.field_types import WholeNumber
from carpool.job_schema import PRIORITY
from carpool.live.commands.options import Command, OptionType, connect, home_option, json_option, print_json
from carpool.live.commands.tables import new_table
from carpool.live.http.client import Client, segment
from carpool.live.text import printable
from carpool.report.console import new_console, print_table

COUNT = WholeNumber(0, 1_000_000)
NO_LIMIT = "none"


class LimitType(OptionType):
    """A number, or `none` for no limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == NO_LIMIT else super().convert(value, param, ctx)


LIMITS = ("max_jobs", "max_gpus", "max_priority")


def limit_options(command: Command) -> Command:
    for option in (
        click.option("--max-priority", type=LimitType(PRIORITY), help="Highest priority of a job, or `none`."),
        click.option("--max-gpus", type=LimitType(COUNT), help="Number of GPUs held at the same time, or `none`."),
        click.option("--max-jobs", type=LimitType(COUNT), help="Number of jobs running at the same time, or `none`."),
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
@click.option("--group", help="Group whose share the user's jobs use; `carpool group list` lists them.")
@limit_options
@home_option
@json_option
def add(name: str, uid: int | None, group: str | None, home: Path | None, as_json: bool, **limits: int | None) -> None:
    """Add a user and print their token. It is shown only once.

    A user whose token was revoked gets a new one, and keeps the group and the limits that no option names.
    """
    request = {"name": name, "uid": uid, "group": group, **limits}
    given = {key: None if value == NO_LIMIT else value for key, value in request.items() if value is not None}
    client = connect(home)
    known = _groups(client)
    answer = client.post("/v1/users", given)
    _note_new(group, known)
    if answer.get("warning"):
        click.echo(f"warning: {printable(answer['warning'])}", err=True)
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
    columns = ("user", "group", "uid", "jobs", "GPUs", "priority", "")
    table = new_table(*columns, right=("uid", "jobs", "GPUs", "priority"))
    for row in rows:
        numbers = ["-" if row.get(key) is None else str(row[key]) for key in ("uid", *LIMITS)]
        names = (printable(row["name"]), printable(row.get("group") or "-"))
        table.add_row(*names, *numbers, "revoked" if row["revoked"] else "")
    if rows:
        print_table(new_console(), table, ("uid",))
    else:
        click.echo("no users besides the administrator")


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
def limit(name: str, home: Path | None, as_json: bool, **limits: int | str | None) -> None:
    """Change limits of a user; `none` removes a limit. Limits that are not given stay."""
    given = {key: None if value == NO_LIMIT else value for key, value in limits.items() if value is not None}
    if not given:
        raise InputError("no limit: give --max-jobs, --max-gpus or --max-priority, a number or `none`")
    answer: dict[str, Any] = connect(home).put(f"/v1/users/{segment(name)}/limits", given)
    if as_json:
        print_json(answer)
        return
    shown = ", ".join(f"{key.removeprefix('max_')} {answer[key]}" for key in LIMITS if answer.get(key) is not None)
    click.echo(f"{answer['name']}: {shown or 'no limits'}")


@user.command("group")
@click.argument("name")
@click.argument("group")
@home_option
@json_option
def join_group(name: str, group: str, home: Path | None, as_json: bool) -> None:
    """Move a user to a group, or to none with `none`. Jobs that exist stay with their group."""
    request = {"group": None if group == NO_LIMIT else group}
    client = connect(home)
    known = _groups(client)
    answer: dict[str, Any] = client.put(f"/v1/users/{segment(name)}/group", request)
    _note_new(request["group"], known)
    print_json(answer) if as_json else click.echo(f"{answer['name']}: group {answer.get('group') or '-'}")


def _groups(client: Client) -> list[str]:
    return [row["name"] for row in client.get("/v1/groups")["groups"]]


def _note_new(group: str | None, known: Sequence[str]) -> None:
    """Say that a group is new: its name may be misspelt."""
    if group and group not in (NO_LIMIT, *known):
        click.echo(f"note: group {group} is new, with weight 1; `carpool group set {group}` changes that", err=True)
