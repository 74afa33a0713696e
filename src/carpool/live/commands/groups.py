"""`carpool group`: groups of users, their shares, guarantees, caps and time limits, and how strongly shares count."""

from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.field_types import Duration, RealNumber
from carpool.job_schema import GROUP_FIELDS
from carpool.live.commands.options import OptionType, connect, home_option, json_option, print_json
from carpool.live.commands.tables import new_table
from carpool.live.commands.users import NO_LIMIT, LimitType
from carpool.live.http.client import segment
from carpool.live.text import printable, span
from carpool.report.console import new_console, print_table


@click.group()
def group() -> None:
    """Divide the cluster among groups of users."""


@group.command("list", short_help="List the groups, their shares and what they use.")
@home_option
@json_option
def list_groups(home: Path | None, as_json: bool) -> None:
    """List the groups with their shares, holdings and usage."""
    answer = connect(home).get("/v1/groups")
    if as_json:
        print_json(answer)
        return
    columns = ("group", "weight", "guarantee", "cap", "time limit", "users", "jobs", "GPUs", "used", "of its share")
    table = new_table(*columns, right=columns[1:])
    for row in answer["groups"]:
        table.add_row(
            printable(row["name"]) or "(none)",
            f"{row['weight']:g}",
            str(row["guarantee"]),
            "-" if row["cap"] is None else str(row["cap"]),
            _limits(row),
            str(len(row["users"])),
            str(row["jobs"]),
            str(row["gpus"]),
            "-" if row["used_gpu_s"] is None else f"{row['used_gpu_s'] / 3600:.1f} GPU h",
            "-" if row["of_share"] is None else f"{100 * row['of_share']:.0f} %",
        )
    if answer["groups"]:
        print_table(new_console(), table, ("users", "jobs", "GPUs"))
    else:
        click.echo("no groups")
    fair = answer["fair_share"]
    click.echo(f"fair share: strength {fair['strength']:g}, half-life {span(fair['half_life_s'])}")


@group.command("set")
@click.argument("name")
@click.option("--weight", type=OptionType(GROUP_FIELDS["weight"]), help="Share, relative to the other groups.")
@click.option(
    "--guarantee",
    type=OptionType(GROUP_FIELDS["guarantee"]),
    help="Number of GPUs that are the group's when its jobs want them.",
)
@click.option("--cap", type=LimitType(GROUP_FIELDS["cap"]), help="Number of GPUs held at the same time, or `none`.")
@click.option(
    "--default-limit",
    "default_limit_s",
    type=LimitType(GROUP_FIELDS["default_limit_s"]),
    help="Time limit of jobs that name none, or `none`.",
)
@click.option(
    "--max-limit", "max_limit_s", type=LimitType(GROUP_FIELDS["max_limit_s"]), help="Longest time limit, or `none`."
)
@home_option
@json_option
def set_group(name: str, home: Path | None, as_json: bool, **given: Any) -> None:
    """Create or change a group. Settings that are not given stay."""
    if name == NO_LIMIT:
        raise InputError(f"no group can be called {NO_LIMIT}; `carpool user group USER {NO_LIMIT}` means no group")
    request = {key: None if value == NO_LIMIT else value for key, value in given.items() if value is not None}
    answer = connect(home).put(f"/v1/groups/{segment(name)}", request)
    if as_json:
        print_json(answer)
        return
    cap = "no cap" if answer["cap"] is None else f"cap {answer['cap']}"
    limit = f", {_limits(answer)}" if _limits(answer) != "-" else ""
    click.echo(f"group {answer['name']}: weight {answer['weight']:g}, guarantee {answer['guarantee']}, {cap}{limit}")


def _limits(row: dict[str, Any]) -> str:
    """Return the time limits of a group's jobs: the default and the longest."""
    default, most = row["default_limit_s"], row["max_limit_s"]
    shown = [f"{span(default)}" if default is not None else "", f"at most {span(most)}" if most is not None else ""]
    return ", ".join(filter(None, shown)) or "-"


@group.command(short_help="Choose how strongly shares count, from 0 to 1.")
@click.argument("strength", type=OptionType(RealNumber(0.0, 1.0)), required=False)
@click.option("--half-life", type=OptionType(Duration(1.0, 1e10)), help="Time after which used GPU time counts half.")
@home_option
@json_option
def share(strength: float | None, half_life: float | None, home: Path | None, as_json: bool) -> None:
    """Choose how strongly shares count, from 0 to 1.

    0: not at all, 1: more than anything else; 0.5 is a good choice.
    """
    request = {"strength": strength, "half_life_s": half_life}
    given = {key: value for key, value in request.items() if value is not None}
    if not given:
        raise InputError("nothing to change: give a strength from 0 to 1, or --half-life")
    answer = connect(home).put("/v1/fair-share", given)
    if as_json:
        print_json(answer)
        return
    click.echo(f"fair share: strength {answer['strength']:g}, half-life {span(answer['half_life_s'])}")
