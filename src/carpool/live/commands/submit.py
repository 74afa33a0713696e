"""`carpool submit`: from options and job files to a request, and with --wait to the job's exit code."""

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.live.commands import job_file
from carpool.live.commands.options import connect, home_option, json_option, print_json
from carpool.live.commands.tables import dry_run_lines
from carpool.live.http.client import Client, job_id
from carpool.live.http.snapshot import pack
from carpool.live.text import duration, printable, size
from carpool.units import parse_bytes

ENDED_WITHOUT_CODE = {"finished": 0, "failed": 1, "cancelled": 130}


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[JOBFILE | -- COMMAND …]")
@click.option("--name", help="What the queue shows.")
@click.option("--gpus", type=click.IntRange(1), help="One worker process on each.  [default: 1]")
@click.option("--batch-size", type=click.IntRange(1), help="Samples per GPU per iteration.  [default: 1]")
@click.option("--iterations", type=click.IntRange(1), help="Full-batch steps in all.")
@click.option("--model", help="The profile's name for this training; see `carpool profiles`.")
@click.option("--time", "time_s", help="How long it runs alone, such as 45m or 2h: a guess that measurements replace.")
@click.option("--priority", type=click.IntRange(-1000, 1000), help="Higher goes first.  [default: 0]")
@click.option("--exclusive", is_flag=True, default=None, help="Never share a GPU.")
@click.option("--max-slowdown", type=click.FloatRange(1.0, 1000.0), help="Share only if this much slower or less.")
@click.option("--can-shrink/--no-shrink", default=None, help="May its batch be split?  [default: as the library finds]")
@click.option("--after", multiple=True, metavar="JOB", help="Start once these have finished well: 3 or 3,5.")
@click.option("--array", metavar="RANGE", help="One job for each index of 0-9 or 1,4,7-8; see CARPOOL_ARRAY_INDEX.")
@click.option("--retries", type=click.IntRange(0, 1000), help="Start again after a failure, so often.  [default: 0]")
@click.option("--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="For the workers; repeatable.")
@click.option("--cpus", type=click.IntRange(1), help="Cores for each worker.")
@click.option("--memory", help="Main memory for each worker, such as 16GiB.")
@click.option("--grace", help="Time to save before a stopped worker is killed.  [default: 30s]")
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), help="Where it runs.  [default: here]")
@click.option("--snapshot", is_flag=True, default=None, help="Copy the directory now: later edits do not matter.")
@click.option("--dry-run", is_flag=True, help="Say what would happen; queue nothing.")
@click.option("--wait", is_flag=True, help="Return when it has ended, with its exit code.")
@home_option
@json_option
def submit(words: tuple[str, ...], home: Path | None, as_json: bool, dry_run: bool, wait: bool, **given: Any) -> None:
    """Queue a job: a command after `--`, or a YAML or TOML file with the same fields.

    What is given as an option beats what the file says. The command gets none of your environment but what --env
    names: `--env NAME` passes on a variable of yours, `--env NAME=VALUE` sets one.
    """
    request = _request(words, given)
    client = connect(home)
    if dry_run:
        request.pop("snapshot", None)
        answer = client.post("/v1/jobs/dry-run", request)
        print_json(answer) if as_json else click.echo("\n".join(dry_run_lines(answer)))
        return
    if request.pop("snapshot", False):
        request["snapshot"] = _upload(client, Path(request["directory"]), quiet=as_json)
    answer = client.post("/v1/jobs", request)
    if not wait:
        print_json(answer) if as_json else click.echo(_said(answer["jobs"]))
        return
    if not as_json:
        click.echo(f"{_said(answer['jobs'])}; waiting for the end", err=True)
    raise SystemExit(_wait(client, answer, as_json))


def _request(words: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """What the API wants, from a file where one is named, and the options."""
    request: dict[str, Any] = {"directory": str(Path.cwd())}
    if len(words) == 1 and words[0].endswith(job_file.SUFFIXES):
        request = job_file.read(Path(words[0]))
        if "command" not in request:
            raise InputError(f"{words[0]}: command: is missing; write `command: python train.py`")
    elif words and words[0].endswith(job_file.SUFFIXES):
        raise InputError(f"{words[0]!a}: give options before the job file, as in `carpool submit --gpus 2 job.yaml`")
    elif words:
        request["command"] = list(words)
    else:
        raise InputError("nothing to run: give a command after --, as in `carpool submit -- python train.py`")
    plain = (
        "name",
        "gpus",
        "iterations",
        "model",
        "priority",
        "exclusive",
        "max_slowdown",
        "can_shrink",
        "array",
        "retries",
    )
    options = {key: given[key] for key in (*plain, "cpus", "snapshot")}
    options["batch"] = given["batch_size"]
    options["after"] = [job_id(job.strip()) for some in given["after"] for job in some.split(",")] or None
    options["time_s"] = duration(given["time_s"]) if given["time_s"] else None
    options["grace_s"] = duration(given["grace"], "--grace") if given["grace"] else None
    options["memory"] = parse_bytes(given["memory"], "--memory") if given["memory"] else None
    options["directory"] = str(given["directory"].absolute()) if given["directory"] else None
    request.update({key: value for key, value in options.items() if value is not None})
    if given["variables"]:
        request["env"] = {**request.get("env", {}), **_environment(given["variables"])}
    return request


def _environment(variables: tuple[str, ...]) -> dict[str, str]:
    env = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise InputError(f"--env {name!a}: is not set here; write --env {name}=VALUE")
        env[name] = value if equals else os.environ[name]
    return env


def _upload(client: Client, directory: Path, quiet: bool) -> str:
    with tempfile.TemporaryFile() as file:
        packed = pack(directory, file)
        length = file.tell()
        file.seek(0)
        if not quiet:
            click.echo(f"snapshot of {directory}: {packed.files} files, {size(packed.size)}", err=True)
        name: str = client.upload("/v1/snapshots", file, length)["snapshot"]
        return name


def _said(jobs: list[str]) -> str:
    if len(jobs) == 1:
        return f"job {printable(jobs[0])}"
    return f"jobs {printable(jobs[0])} to {printable(jobs[-1])} ({len(jobs)})"


def exit_code(row: dict[str, Any]) -> int:
    """What a shell would have said: the first worker's code that is not 0, 128 + n for signal n; 130 for a job that
    was cancelled, however its workers took it."""
    code = row.get("exit_code")
    if code is None or row["state"] == "cancelled":
        return ENDED_WITHOUT_CODE[row["state"]]
    return 128 - code if code < 0 else int(code) or ENDED_WITHOUT_CODE[row["state"]]


def _away() -> None:
    click.echo("the service is away and the job goes on; waiting for it to come back", err=True)


def _wait(client: Client, answer: dict[str, Any], as_json: bool) -> int:
    """Wait for all; the first exit code that is not 0."""
    try:
        rows = [client.wait(job, _away) for job in answer["jobs"]]
    except Exception:
        raise
    except BaseException as stopped:  # Ctrl-C or SIGTERM
        click.echo("stopped waiting; the job goes on (`carpool cancel` ends it)", err=True)
        return 130 if isinstance(stopped, KeyboardInterrupt) else 143
    if as_json:
        print_json({**answer, "state": rows[0]["state"], "exit_code": rows[0].get("exit_code"), "ended": rows})
    else:
        for row in rows:
            why = f": {printable(row['reason'])}" if row.get("reason") else ""
            click.echo(f"job {printable(row['job'])} {row['state']}{why}", err=True)
    return next((code for row in rows if (code := exit_code(row))), 0)
