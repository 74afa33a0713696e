"""The commands `gpus` and `history`: the machine as it is now, and the jobs that have ended."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from carpool.live.commands import tables
from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.live.text import clock, printable, span
from carpool.report.console import new_console


@click.command()
@home_option
@json_option
def gpus(home: Path | None, as_json: bool) -> None:
    """Show the GPUs, the jobs on them, and how jobs share them."""
    answer = connect(home).get("/v1/gpus")
    print_json(answer) if as_json else tables.print_gpus(answer)


@click.command(short_help="Show the jobs that have ended.")
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="Number of jobs to show, the latest first.",
)
@click.option("--accuracy", is_flag=True, help="Show how accurate the estimates were, instead of the jobs.")
@home_option
@json_option
def history(limit: int, accuracy: bool, home: Path | None, as_json: bool) -> None:
    """Show the jobs that have ended, with the time that sharing gained or cost them."""
    client = connect(home)
    if accuracy:
        answer = client.get("/v1/accuracy")
        print_json(answer) if as_json else _print_accuracy(answer)
        return
    rows = client.get("/v1/history", limit=limit)["jobs"]
    print_json(rows) if as_json else _print_history(rows)


def _print_history(rows: list[dict[str, Any]]) -> None:
    console, now = new_console(), time.time()
    columns = ("job", "name", "user", "status", "GPUs", "ended", "waited", "ran", "× alone", "gained")
    table = tables.new_table(*columns, right=("GPUs", "waited", "ran", "× alone", "gained"))
    for row in rows:
        receipt = row.get("receipt") or {}
        slowdown = receipt.get("slowdown")
        table.add_row(
            *(printable(row[key]) for key in ("job", "name", "user", "status", "gpus")),
            clock(row["finished"], now),
            span(receipt.get("waited_s")),
            span(receipt.get("ran_s")),
            "-" if slowdown is None else f"{slowdown:.2f}",
            span(receipt.get("gained_s")),
        )
    console.print(table if rows else "no job has ended so far")


def _print_accuracy(answer: Mapping[str, Any]) -> None:
    """Print one row for each kind of estimate that the service judges."""
    console = new_console()
    kinds = {name: part for name, part in answer.items() if isinstance(part, Mapping)}
    columns = list(dict.fromkeys(key for part in kinds.values() for key in part))
    table = tables.new_table("estimate", *(column.replace("_", " ") for column in columns))
    for name, part in kinds.items():
        table.add_row(printable(name), *(_number(part.get(column)) for column in columns))
    console.print(table if kinds else "no estimate has been judged so far")


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else printable(value)
