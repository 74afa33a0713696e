"""`carpool drain`, `undrain`, `reserve`, `unreserve` and `reservations`: GPUs that are closed for a time."""

import re
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.live.commands.tables import new_table
from carpool.live.http.client import segment
from carpool.live.text import clock, printable
from carpool.report.console import new_console, print_table
from carpool.units import parse_duration


class MomentType(click.ParamType[Any]):
    """A time of day, a date and time, or a duration from now."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return moment(value, time.time(), param.opts[0] if param is not None else "")


def moment(text: str, now: float, option: str = "") -> float:
    """Return `18:30`, `2026-12-01 18:30` or `2h` (from now) in seconds since 1970. A time of day is the next one."""
    today = datetime.fromtimestamp(now)
    if match := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text):
        at = today.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
        return (at if at > today else at + timedelta(days=1)).timestamp()
    if re.match(r"\d{4}-", text):
        try:
            return datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            raise InputError(f"{option} {text!a}: write a date and time such as 2026-12-01T18:30".lstrip()) from None
    try:
        return now + parse_duration(text)
    except InputError:
        remedy = "write a time such as 18:30 or 2026-12-01T18:30, or a duration from now such as 2h"
        raise InputError(f"{option} {text!a}: {remedy}".lstrip()) from None


@click.command()
@click.argument("gpus")
@click.option("--at", type=MomentType(), help="When it begins: 18:30, 2026-12-01T18:30, or 2h.  [default: now]")
@home_option
@json_option
def drain(gpus: str, at: float | None, home: Path | None, as_json: bool) -> None:
    """Let nothing new start on a node or GPU.

    GPUS are nodes or some of their GPUs, such as node0 or node0:1. Without --at, jobs there run to their ends. With
    --at, no job starts there that would run into that time. Jobs that are still there then save and move, or are
    paused.
    """
    answer = connect(home).post("/v1/drains", {"gpus": gpus, "at": at})
    if as_json:
        print_json(answer)
        return
    begins = "now" if at is None else f"at {clock(answer['start'], time.time())}"
    click.echo(f"{printable(answer['name'])} is drained, beginning {begins}{_there(answer)}")


@click.command()
@click.argument("gpus")
@home_option
@json_option
def undrain(gpus: str, home: Path | None, as_json: bool) -> None:
    """Let jobs start again on what was drained."""
    answer = connect(home).delete(f"/v1/drains/{segment(gpus)}")
    print_json(answer) if as_json else click.echo(f"{printable(answer['name'])} is open again")


@click.command()
@click.argument("gpus")
@click.option("--for", "group", required=True, help="Group whose jobs may use the GPUs.")
@click.option("--from", "start", type=MomentType(), help="When it begins.  [default: now]")
@click.option("--to", "end", type=MomentType(), required=True, help="When it ends: 18:30, 2026-12-01T18:30, or 8h.")
@home_option
@json_option
def reserve(gpus: str, group: str, start: float | None, end: float, home: Path | None, as_json: bool) -> None:
    """Reserve nodes or GPUs for a group for some time.

    GPUS are nodes or some of their GPUs, such as node0,node1:0-3, or a number of GPUs such as 4. For a number, the
    service chooses the GPUs that other jobs leave soonest, on as few nodes as possible.
    """
    request = {"gpus": gpus, "group": group, "start": time.time() if start is None else start, "end": end}
    answer = connect(home).post("/v1/reservations", request)
    print_json(answer) if as_json else click.echo(f"reservation {answer['name']}: {_span(answer)}{_there(answer)}")


@click.command()
@click.argument("name")
@home_option
@json_option
def unreserve(name: str, home: Path | None, as_json: bool) -> None:
    """Cancel a reservation.

    `carpool reservations` shows its name.
    """
    answer = connect(home).delete(f"/v1/reservations/{segment(name)}")
    print_json(answer) if as_json else click.echo(f"reservation {answer['name']} is taken back")


@click.command()
@home_option
@json_option
def reservations(home: Path | None, as_json: bool) -> None:
    """List the reservations and drains, now and later."""
    rows = connect(home).get("/v1/closures")["closures"]
    if as_json:
        print_json(rows)
        return
    table = new_table("name", "for", "from", "to", "GPUs", "jobs there")
    now = time.time()
    for row in rows:
        table.add_row(
            printable(row["name"]),
            printable(row["group"] or "no job (drained)"),
            clock(row["start"], now),
            clock(row["end"], now),
            printable(" ".join(row["on"])),
            printable(" ".join(row["jobs"])) or "-",
        )
    if rows:
        print_table(new_console(), table)
    else:
        click.echo("nothing is reserved or drained")


def _span(row: dict[str, Any]) -> str:
    now = time.time()
    on = printable(" ".join(row["on"]))
    return f"{on} for {printable(row['group'])}, {clock(row['start'], now)} to {clock(row['end'], now)}"


def _there(row: dict[str, Any]) -> str:
    return f"; jobs there: {', '.join(row['jobs'])}" if row["jobs"] else ""
