"""`carpool nodes`: the nodes of a cluster, their join tokens, and taking nodes out of use."""

import time
from pathlib import Path
from typing import Any

import click

from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.live.commands.tables import new_table
from carpool.live.http.client import segment
from carpool.live.text import clock, printable, span
from carpool.report.console import new_console, print_table


@click.group(invoke_without_command=True)
@home_option
@json_option
@click.pass_context
def nodes(ctx: click.Context, home: Path | None, as_json: bool) -> None:
    """Show the nodes of a cluster, or change them."""
    if ctx.invoked_subcommand is None:
        answer = connect(home).get("/v1/nodes")
        print_json(answer["nodes"]) if as_json else print_nodes(answer["nodes"], answer.get("ground"))


def print_nodes(rows: list[dict[str, Any]], ground: dict[str, Any] | None = None) -> None:
    console, now = new_console(), time.time()
    ends = ("ends",) if any(row.get("ends_at") for row in rows) else ()
    columns = ("node", "state", "ground", "GPUs", "jobs", "lease", "since", *ends, "home", "")
    table = new_table(*columns, right=("jobs", "lease"))
    for row in rows:
        told = row.get("shared_home")  # None: its agent has not said it to this service
        shared = "" if told is None else "shared" if told else "own"
        table.add_row(
            printable(row["node"]),
            printable(row["state"]),
            printable(row.get("ground", "")),
            printable(f"{row['gpus']} {row.get('device') or ''}".strip()),
            str(row.get("jobs", "")),
            span(row.get("lease_s")),
            clock(row["since"], now) if row.get("since") else "-",
            *(clock(row.get("ends_at"), now) for _ in ends),
            shared,
            printable("; ".join(filter(None, (row.get("why"), row.get("closed"))))),
        )
    empty = "no node has joined so far"
    if rows:
        print_table(console, table, ("home", "ground", "lease", "since"))
    else:
        console.print(empty if ground else f"{empty}; `carpool nodes add NAME` makes a join token")
    if ground:
        console.print(ground_line(ground), highlight=False)


def ground_line(ground: dict[str, Any]) -> str:
    """Return one line about where nodes come from."""
    wanted = f"{ground['least']} to {ground['most']} nodes"
    waiting = f", {ground['waiting']} waiting" if ground["waiting"] else ""
    why = f" ({printable(ground['why_waiting'])})" if ground["waiting"] and ground["why_waiting"] else ""
    trouble = f"; it cannot be asked: {printable(ground['problem'])}" if ground["problem"] else ""
    if not trouble and ground.get("refusal"):
        trouble = f"; it gives no node: {printable(ground['refusal'])}"
    if not trouble and ground.get("failure"):
        trouble = f"; {printable(ground['failure'])}"
    return f"from {ground['name']}: {wanted}; pilots: {ground['running']} running{waiting}{why}{trouble}"


@nodes.command()
@click.argument("name")
@home_option
@json_option
def add(name: str, home: Path | None, as_json: bool) -> None:
    """Make the join token of a node and print it. It is shown only once."""
    answer = connect(home).post("/v1/nodes", {"name": name})
    if as_json:
        print_json(answer)
        return
    click.echo(f"join token of node {answer['node']}, which is shown only now:", err=True)
    click.echo(answer["token"])


@nodes.command()
@click.argument("name")
@home_option
@json_option
def revoke(name: str, home: Path | None, as_json: bool) -> None:
    """Revoke a node's join token at once. Its jobs end with its lease and start elsewhere."""
    answer = connect(home).delete(f"/v1/nodes/{segment(name)}/token")
    print_json(answer) if as_json else click.echo(f"token of node {answer['node']} revoked; its lease runs out")


def _change(name: str, state: str, home: Path | None, as_json: bool) -> None:
    answer = connect(home).put(f"/v1/nodes/{segment(name)}", {"state": state})
    print_json(answer) if as_json else click.echo(f"node {answer['node']} is {answer['state']}")


@nodes.command()
@click.argument("name")
@home_option
@json_option
def drain(name: str, home: Path | None, as_json: bool) -> None:
    """Let nothing new start on a node. Jobs there run to their end."""
    _change(name, "drained", home, as_json)


@nodes.command("open")
@click.argument("name")
@home_option
@json_option
def reopen(name: str, home: Path | None, as_json: bool) -> None:
    """Let jobs start on a drained node again."""
    _change(name, "open", home, as_json)


@nodes.command()
@click.argument("name")
@home_option
@json_option
def lost(name: str, home: Path | None, as_json: bool) -> None:
    """Give a node up at once. Only for a machine that is switched off: nothing may run there any more."""
    _change(name, "lost", home, as_json)
