"""`carpool usage`: what jobs used of the GPUs, by user, group, project or day."""

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from carpool.errors import InputError
from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.report.usage_tables import parse_keys, print_usage, write_csv

DAYS_BACK = re.compile(r"([0-9]{1,4})d")


class DayOption(click.ParamType[date]):
    """A day in UTC: a date, or a number of days before today."""

    name = "DAY"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date:
        if isinstance(value, date):
            return value
        back = DAYS_BACK.fullmatch(value)
        if back is not None:
            return datetime.now(UTC).date() - timedelta(days=int(back[1]))
        try:
            return date.fromisoformat(value)
        except ValueError:
            option = param.opts[0] if param is not None else "day"
            raise InputError(f"{option} {value!a}: write a date such as 2026-03-01, or days back such as 7d") from None


@click.command(short_help="Show what jobs used of the GPUs.")
@click.option(
    "--by", default="user", show_default=True, metavar="KEYS", help="user, group, project, day, or several: user,day."
)
@click.option("--since", type=DayOption(), default="30d", show_default=True, help="First day, in UTC.")
@click.option("--until", type=DayOption(), help="Last day, in UTC.  [default: today]")
@click.option("--all", "everything", is_flag=True, help="Everything that was ever counted, instead of --since.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, in GPU-seconds.")
@home_option
@json_option
def usage(
    by: str, since: date, until: date | None, everything: bool, as_csv: bool, home: Path | None, as_json: bool
) -> None:
    """Show the GPU hours that jobs held, computed, shared, were paused, saved by sharing and lost to failures.

    Together with the hours of unused GPUs they add up to the hours that the GPUs existed.
    """
    if as_csv and as_json:
        raise InputError("--csv: cannot be given with --json; choose one")
    if everything and click.get_current_context().get_parameter_source("since") is not ParameterSource.DEFAULT:
        raise InputError("--since: cannot be given with --all; choose one")
    if not everything and until is not None and until < since:
        raise InputError(f"--until {until}: lies before --since {since}; give an earlier --since")
    query = {"by": ",".join(parse_keys(by, "--by")), "until": None if until is None else until.isoformat()}
    if not everything:
        query["since"] = since.isoformat()
    answer = connect(home).get("/v1/usage", **query)
    if as_json:
        print_json(answer)
    elif as_csv:
        write_csv(answer)
    else:
        print_usage(answer)
        begun = datetime.fromtimestamp(answer["counted_since"], UTC)
        if everything or begun.date() >= since:
            click.echo(f"counted since {begun:%Y-%m-%d %H:%M} UTC")
