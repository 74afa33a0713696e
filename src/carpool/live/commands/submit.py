"""`carpool submit`: makes a request from options and job files, and with --wait returns the job's exit code."""

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.field_types import AbsolutePath, FieldError, JobIds, Variables, YesNo
from carpool.job_schema import FIELDS, Edge, JobField, on, request_of
from carpool.live.commands import job_file, sbatch
from carpool.live.commands.options import Command, OptionType, connect, home_option, json_option, print_json
from carpool.live.commands.selection import select_dependencies, split_words
from carpool.live.commands.tables import dry_run_lines
from carpool.live.http.client import Client
from carpool.live.http.code_snapshot import pack
from carpool.live.shell import run_as_here
from carpool.live.text import printable, size
from carpool.notices import NoticeTargets
from carpool.report.progress import sending, waiting
from carpool.sweeps import SweepValues

EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": 130}
"""Exit codes for jobs whose workers left none."""
NOTICE_S = 5.0
"""Seconds that `notify-send` may take."""


def job_options(among: Sequence[JobField] = FIELDS) -> Callable[[Command], Command]:
    """Return a decorator that adds one option for each field of a job."""

    def decorate(command: Command) -> Command:
        for one in reversed(on(Edge.OPTION, among)):
            command = _option(one)(command)
        return command

    return decorate


def _option(one: JobField) -> Callable[[Command], Command]:
    text = one.help + (f"  [default: {one.shown_default.partition(';')[0]}]" if one.shown_default else "")
    if isinstance(one.type, YesNo):
        names = f"{one.option}/{one.negated}" if one.negated else one.option
        return click.option(names, one.name, is_flag=True, default=None, help=text)
    if isinstance(one.type, Variables | AbsolutePath | JobIds):  # read later, because it needs more than the text
        kind: Any = click.STRING
    else:
        kind = OptionType(one.type)
    metavar, several = one.type.metavar, one.type.repeatable
    text += " Repeatable." if several else ""
    return click.option(*one.options, one.name, type=kind, metavar=metavar, multiple=several, help=text)


@click.command(
    short_help="Submit a job: a command, or a file that describes one.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[JOBFILE | SCRIPT … | [--] COMMAND …]")
@job_options()
@click.option("--clean-env", is_flag=True, help="Send nothing of this shell's environment with the job.")
@click.option("--dry-run", is_flag=True, help="Print what would happen, without submitting the job.")
@click.option("--wait", is_flag=True, help="Wait for the end of the job and return its exit code.")
@click.option("--desktop", is_flag=True, help="With --wait, show a notice on this screen at the end.")
@home_option
@json_option
def submit(words: tuple[str, ...], home: Path | None, as_json: bool, dry_run: bool, wait: bool, **given: Any) -> None:
    """Submit a job: a command after `--`, a YAML or TOML file with the same fields, or a batch script of Slurm.

    Options override the fields of the file. The command runs as it would in this shell: with the program that this
    shell finds, in the active virtual environment or conda environment, and with the settings of Python, CUDA and the
    usual libraries. Other variables are not sent: `--env NAME` passes one on, `--env NAME=VALUE` sets one.
    """
    clean, desktop = given.pop("clean_env"), given.pop("desktop")
    if desktop and not wait:
        raise InputError("--desktop: needs --wait; without it, use --notify")
    if desktop and shutil.which("notify-send") is None:
        click.echo("warning: --desktop: notify-send is not installed here, so no notice will be shown", err=True)
        desktop = False
    request = make_request(words, given)
    warning = "" if clean else run_as_here(request)
    if warning:
        click.echo(f"warning: {warning}", err=True)
    client = connect(home)
    if "after" in request:
        request["after"] = select_dependencies(client, request["after"])
    if dry_run:
        request.pop("snapshot", None)
        answer = client.post("/v1/jobs/dry-run", request)
        print_json(answer) if as_json else click.echo("\n".join(dry_run_lines(answer)))
        return
    if request.pop("snapshot", False):
        request["snapshot"] = upload_directory(client, Path(request["directory"]), quiet=as_json)
    answer = client.post("/v1/jobs", request)
    if not wait:
        print_json(answer) if as_json else click.echo(_submitted(answer["jobs"]))
        return
    if not as_json:
        click.echo(f"{_submitted(answer['jobs'])}; waiting for its end", err=True)
    raise SystemExit(_wait(client, answer, as_json, show_notice if desktop else lambda text: None))


def make_request(words: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON request for what is to run and the options."""
    request = _what_to_run(words, given["name"])
    for one in on(Edge.OPTION):
        value = given[one.name]
        if value is None or value == ():
            continue
        if one.name == "directory":
            value = str(Path(value).expanduser().absolute())
        elif one.name == "env":
            value = {**request.get("env", {}), **_environment(value)}
        elif isinstance(one.type, NoticeTargets):
            try:
                value = one.type.merge(value)
            except FieldError as error:
                raise InputError(f"{one.option}: {error}") from None
        elif isinstance(one.type, SweepValues):
            value = {name: values for some in value for name, values in some.items()}
        elif isinstance(one.type, JobIds):
            value = [word for text in value for word in split_words(text, one.option)]
        request[one.name] = one.type.to_json(value)
    return request


def _what_to_run(words: tuple[str, ...], name: str | None) -> dict[str, Any]:
    """Return the request for a job file, a batch script or a command. `name`: that of the option, None: not given."""
    if not words:
        raise InputError("no command: give one after --, as in `carpool submit -- python train.py`")
    if words[0].endswith(job_file.SUFFIXES):
        if len(words) > 1:
            remedy = "give options before the job file, as in `carpool submit --gpus 2 job.yaml`"
            raise InputError(f"{words[0]!a}: {remedy}")
        request = job_file.read(Path(words[0]))
        if "command" not in request:
            raise InputError(f"{words[0]}: command: is missing; write `command: python train.py`")
        return request
    if sbatch.is_batch_script(words[0]):
        fields, ignored = sbatch.read(Path(words[0]), words[1:], name)
        if ignored:
            click.echo(f"ignored: {printable(', '.join(ignored))}", err=True)
        return request_of(fields, words[0])
    return {"directory": str(Path.cwd()), "command": list(words)}


def _environment(variables: tuple[str, ...]) -> dict[str, str]:
    env = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise InputError(f"--env {name!a}: is not set here; write --env {name}=VALUE")
        env[name] = value if equals else os.environ[name]
    return env


def upload_directory(client: Client, directory: Path, quiet: bool) -> str:
    with tempfile.TemporaryFile() as file:
        with waiting(f"copying {directory}", quiet):
            packed = pack(directory, file)
        length = file.tell()
        file.seek(0)
        if not quiet:
            click.echo(f"copied {directory}: {packed.files} files, {size(packed.size)}", err=True)
        with sending("uploading", file, length, quiet) as counted:
            name: str = client.upload("/v1/snapshots", counted, length)["snapshot"]
        return name


def _submitted(jobs: list[str]) -> str:
    if len(jobs) == 1:
        return f"job {printable(jobs[0])}"
    return f"jobs {printable(jobs[0])} to {printable(jobs[-1])} ({len(jobs)})"


def exit_code(row: dict[str, Any]) -> int:
    """Return the exit code as a shell would: that of the first worker that failed, 128 + n for signal n, and 130 for a
    job that was cancelled, however its workers ended."""
    code = row.get("exit_code")
    if code is None or row["status"] == "cancelled":
        return EXIT_CODES[row["status"]]
    return 128 - code if code < 0 else int(code) or EXIT_CODES[row["status"]]


def _print_away() -> None:
    click.echo("the service does not answer; the job keeps running; waiting for the service to come back", err=True)


def show_notice(text: str) -> None:
    """Show a notice on the user's screen, or say why none was shown."""
    words = ["notify-send", "--app-name=Carpool", "--", "Carpool", text]
    try:
        done = subprocess.run(words, check=False, timeout=NOTICE_S, capture_output=True, text=True, errors="replace")
        why = done.returncode and (done.stderr.strip() or f"notify-send ended with code {done.returncode}")
    except subprocess.TimeoutExpired:
        why = f"notify-send did not end within {NOTICE_S:.0f} s"
    except OSError as error:
        why = f"notify-send: {error.strerror}"
    if why:
        click.echo(f"no notice was shown: {printable(why)}", err=True)


def _notice(rows: list[dict[str, Any]]) -> str:
    """Return what a notice says of jobs that have ended."""
    first = rows[0]
    if len(rows) == 1:
        name = f" ({printable(first['name'])})" if first.get("name") else ""
        why = f": {printable(first['reason'])}" if first.get("reason") and first["status"] != "finished" else ""
        return f"job {printable(first['job'])}{name} {first['status']}{why}"
    counts = Counter(row["status"] for row in rows)
    return f"{_submitted([row['job'] for row in rows])}: " + ", ".join(
        f"{number} {status}" for status, number in counts.items()
    )


def _wait(client: Client, answer: dict[str, Any], as_json: bool, tell: Callable[[str], None]) -> int:
    """Wait for all jobs and return the first exit code that is not 0."""
    try:
        rows = [client.wait(job, _print_away) for job in answer["jobs"]]
    except Exception:
        raise
    except BaseException as stopped:  # Ctrl-C or SIGTERM
        click.echo("stopped waiting; the job keeps running (`carpool cancel` ends it)", err=True)
        return 130 if isinstance(stopped, KeyboardInterrupt) else 143
    tell(_notice(rows))
    if as_json:
        print_json({**answer, "status": rows[0]["status"], "exit_code": rows[0].get("exit_code"), "ended": rows})
    else:
        for row in rows:
            why = f": {printable(row['reason'])}" if row.get("reason") else ""
            click.echo(f"job {printable(row['job'])} {row['status']}{why}", err=True)
    return next((code for row in rows if (code := exit_code(row))), 0)
