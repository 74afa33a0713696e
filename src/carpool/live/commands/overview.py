"""The commands `gpus` and `history`: the machine as it is now, and the jobs that have ended."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from carpool.live.commands import tables
from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.live.http.client import Client
from carpool.live.text import clock, printable, span
from carpool.report.console import new_console, print_table
from carpool.report.progress import waiting

LEAST_SLOWDOWN = 0.995
"""Slow-down below which it is not shown, because the job was too short to measure it: none is below 1."""
BELIEVED = "≈"


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
@click.option("--fairness", is_flag=True, help="Show how evenly groups (or users) were treated, instead of the jobs.")
@home_option
@json_option
def history(limit: int, accuracy: bool, fairness: bool, home: Path | None, as_json: bool) -> None:
    """Show the jobs that have ended, with the time that sharing gained or cost them."""
    client = connect(home)
    if fairness:
        _show_fairness(client, as_json)
        return
    if accuracy:
        answer = client.get("/v1/accuracy")
        print_json(answer) if as_json else _print_accuracy(answer)
        return
    rows = client.get("/v1/history", limit=limit)["jobs"]
    print_json(rows) if as_json else _print_history(rows)


def _show_fairness(client: Client, as_json: bool) -> None:
    """Simulate each tenant's finished jobs on its share of this cluster, and compare with what happened."""
    from carpool.live.insight.what_if import fairness_of
    from carpool.report.tables import fairness_table

    groups = client.get("/v1/groups")["groups"]
    shape = tables.cluster_of(client.get("/v1/gpus"))
    with waiting("simulating each group on its share", quiet=as_json):
        weights = {row["name"]: row["weight"] for row in groups}
        found = fairness_of(client.get("/v1/workload")["jobs"], shape, weights)
    if as_json:
        print_json(None if found is None else asdict(found))
    elif found is None:
        click.echo("the jobs that finished belong to one user; fairness needs two groups or users")
    else:
        fairness_table(new_console(), found)


def _print_history(rows: list[dict[str, Any]]) -> None:
    console, now = new_console(), time.time()
    columns = ("job", "name", "user", "status", "GPUs", "ended", "waited", "ran", "× alone", "gained")
    table = tables.new_table(*columns, right=("GPUs", "waited", "ran", "× alone", "gained"))
    for row in rows:
        receipt = row.get("receipt") or {}
        table.add_row(
            *(printable(row[key]) for key in ("job", "name", "user", "status", "gpus")),
            clock(row["finished"], now),
            span(receipt.get("waited_s")),
            span(receipt.get("ran_s")),
            slowdown_text(receipt),
            span(receipt.get("gained_s")),
        )
    if not rows:
        console.print("no job has ended so far")
        return
    print_table(console, table, ("user", "waited", "GPUs", "ran"))
    if any(slowdown_text(row.get("receipt") or {}).startswith(BELIEVED) for row in rows):
        console.print(f"{BELIEVED} believed, not measured: the job did not report its speed")


def slowdown_text(receipt: Mapping[str, Any]) -> str:
    """Return a job's slow-down, marked where it is believed: the job shared GPUs and did not report its speed."""
    slowdown = receipt.get("slowdown")
    if slowdown is None or slowdown < LEAST_SLOWDOWN:
        return "-"
    shared = receipt.get("shares") or receipt.get("hosted")
    return f"{BELIEVED if shared and not receipt.get('measured') else ''}{slowdown:.2f}"


def _print_accuracy(answer: Mapping[str, Any]) -> None:
    """Print one row for each kind of estimate that the service judges."""
    console = new_console()
    trials = answer.get("trials") or {}
    kinds = {name: part for name, part in answer.items() if isinstance(part, Mapping) and name != "trials"}
    columns = ("judged", "median error", "9 of 10 errors below", "median error, relative", "within range")
    table = tables.new_table("estimate", *columns, right=columns)
    for name, part in kinds.items():
        errors = (span(part.get("median_error_s")), span(part.get("p90_error_s")))
        shares = (_percent(part.get("median_error")), _percent(part.get("within_range")))
        table.add_row(printable(name), printable(part.get("judged")), *errors, *shares)
    if kinds:
        print_table(console, table, ("median error, relative", "9 of 10 errors below"))
    else:
        console.print("no estimate has been judged so far")
    if trials.get("begun"):
        cost = span(trials["cost_s"])
        console.print(f"{trials['begun']} trials of unknown pairs: {trials['kept']} kept, cost {cost} in all")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
