"""`carpool run`, `carpool attach` and `carpool exec`: terminals of jobs, and commands beside their workers."""

import base64
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.job_schema import FIELDS, JobField
from carpool.live.commands.console import Console, window_size, write_out
from carpool.live.commands.options import complete_jobs, connect, home_option
from carpool.live.commands.selection import select_dependencies, select_one
from carpool.live.commands.submit import exit_code, job_options, make_request, upload_directory
from carpool.live.http.client import Client, Refusal, Unreachable, job_path
from carpool.live.http.event_stream import StreamMessage
from carpool.live.shell import run_as_here
from carpool.live.spec import FOR_TERMINALS
from carpool.live.text import how_it_ended, printable

NOT_HERE = ("terminal", "array", "sweep")
"""Fields of a job that `carpool run` has no option for: it is one job with a terminal."""
ENDED = ("finished", "failed", "cancelled")
LOOK_S = 0.2
TAIL_LINES = 200
"""Lines that `carpool attach` shows of what was printed before."""
LEFT = "left job {job} running; `carpool attach {job}` comes back, `carpool cancel {job}` ends it"


def _fields() -> list[JobField]:
    """Return the fields that `carpool run` has options for, with the defaults of jobs with a terminal."""
    changes: dict[str, dict[str, Any]] = {
        "gpus": {"help": "Number of GPUs; one process has them all."},
        **{name: {"default": default, "default_text": "false"} for name, default in FOR_TERMINALS.items()},
    }
    return [replace(one, **changes.get(one.name, {})) for one in FIELDS if one.name not in NOT_HERE]


@click.command(
    short_help="Run a command in a terminal on GPUs of the cluster.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND …", required=True)
@job_options(_fields())
@click.option("--clean-env", is_flag=True, help="Send nothing of this shell's environment with the job.")
@click.option("--detach", is_flag=True, help="Only submit the job; `carpool attach` reaches its terminal.")
@home_option
def run(words: tuple[str, ...], home: Path | None, clean_env: bool, detach: bool, **given: Any) -> None:
    """Run a command in a terminal on GPUs of the cluster, such as `carpool run --gpus 1 -- bash`.

    It is a job: it waits for its turn, shows in the queue, and its output is in its log. One process has all of its
    GPUs. It is never paused by the scheduler unless --can-pause is given, and ends when nothing was typed or printed
    for the time of --idle. Ctrl-] d leaves it running.
    """
    request = make_request(words, {**dict.fromkeys(NOT_HERE), **given})
    request["terminal"] = True
    if not clean_env:
        warning = run_as_here(request)
        if warning:
            click.echo(f"warning: {warning}", err=True)
    if "TERM" in os.environ:
        request["env"] = {"TERM": os.environ["TERM"], **request.get("env", {})}
    client = connect(home)
    if "after" in request:
        request["after"] = select_dependencies(client, request["after"])
    if request.pop("snapshot", False):
        request["snapshot"] = upload_directory(client, Path(request["directory"]), quiet=False)
    job = client.post("/v1/jobs", request)["job"]
    if detach:
        click.echo(f"job {printable(job)}")
        return
    try:
        _wait_for_start(client, job)
    except KeyboardInterrupt:
        client.post(f"{job_path(job)}/cancel")
        click.echo(f"\njob {printable(job)} is cancelled", err=True)
        raise SystemExit(130) from None
    raise SystemExit(_use_terminal(home, job, tail=None))


@click.command(short_help="Use the terminal of a job that runs.")
@click.argument("job", metavar="JOB", shell_complete=complete_jobs)
@home_option
def attach(job: str, home: Path | None) -> None:
    """Use the terminal of a running job, from any machine. Several users can share it.

    Ctrl-] d leaves it running. The exit code is that of the job, if it ends meanwhile.
    """
    client = connect(home)
    job = select_one(client, job)
    row = client.get(job_path(job))
    if row["status"] in ENDED:
        raise InputError(f"{how_it_ended(job, row['status'])}; `carpool logs {job}` shows what its terminal printed")
    if not row.get("spec", {}).get("terminal", True):
        raise InputError(f"job {job} has no terminal; `carpool logs {job}` shows its output, `carpool exec` works")
    _wait_for_start(client, job)
    raise SystemExit(_use_terminal(home, job, tail=TAIL_LINES))


@click.command(
    "exec",
    short_help="Run a command beside a running job, such as nvidia-smi.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("job", metavar="JOB", shell_complete=complete_jobs)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND …", required=True)
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Rank of the worker.")
@home_option
def exec_command(job: str, words: tuple[str, ...], rank: int, home: Path | None) -> None:
    """Run a command beside a worker of a running job: with its user, folder, environment and GPUs.

    It ends when the job or this command ends, and has a terminal if this command has one.
    """
    words = words[1:] if words[0] == "--" else words
    if not words:
        raise InputError("no command: give one after --, as in `carpool exec 3 -- nvidia-smi`")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    request: dict[str, Any] = {"command": list(words)}
    if terminal:
        request["rows"], request["columns"] = window_size() or (24, 80)
    client, typing = connect(home), connect(home)
    job = select_one(client, job, ended=False)
    messages = client.run_beside(job, rank, request)
    command = next(messages, StreamMessage(0)).data
    if not isinstance(command, dict) or "command" not in command:
        raise Unreachable("the connection broke; the command was ended")
    shown = _CommandOutput(messages)
    send = _sender(typing, f"{job_path(job)}/exec/{command['command']}?rank={rank}")
    Console(terminal=terminal, can_leave=False).run(shown.show, send)
    if shown.code is None:
        raise Unreachable(f"{shown.problem}; the command was ended")
    raise SystemExit(shown.code)


class _CommandOutput:
    """Shows the output of a command and keeps its exit code."""

    def __init__(self, messages: Iterator[StreamMessage]) -> None:
        self._messages = messages
        self.code: int | None = None
        self.problem = "the connection broke"

    def show(self) -> None:
        for message in self._messages:
            if message.kind == "Lost":
                self.problem = printable(str(message.data["reason"]).removesuffix("; try again"))
            elif message.kind == "Output":
                descriptor = 2 if message.data["stream"] == "stderr" else 1
                write_out(descriptor, base64.b64decode(message.data["data"]))
            elif message.kind == "End":
                self.code = int(message.data["exit_code"])
                return


def _sender(client: Client, path: str) -> Callable[[dict[str, Any]], bool]:
    def send(keys: dict[str, Any]) -> bool:
        return bool(client.patiently(lambda: client.post(path, keys))["taken"])

    return send


class _TerminalOutput:
    """Shows what the terminal of a job prints, also over a restart of the service."""

    def __init__(self, client: Client, job: str, tail: int | None) -> None:
        self._client, self._job, self._tail = client, job, tail
        self.attempt: int | None = None
        self._offset = 0
        self._away = False
        """The user was told that the terminal cannot be reached, and nothing was shown since."""

    def show(self) -> None:
        """Return when the worker has ended."""
        while True:
            opened = partial(self._client.terminal, self._job, self.attempt, self._offset, self._tail)
            for message in self._client.patiently(opened, _show_away):
                if message.kind == "End":
                    return
                if message.kind == "Hello":
                    self.attempt, self._tail = message.data["attempt"], None
                elif message.kind == "Output":
                    self._away = False
                    write_out(1, base64.b64decode(message.data["data"]))
                elif message.kind == "Away" and not self._away:
                    self._away = True
                    _show_away(printable(str(message.data["reason"]).removesuffix("; try again")))
                self._offset = message.number
            time.sleep(LOOK_S)  # the connection broke


def _show_away(why: str = "the service does not answer") -> None:
    write_out(2, f"\r\n[{why}; the job keeps running, and its terminal comes back]\r\n".encode())


def _wait_for_start(client: Client, job: str) -> None:
    """Wait until a job runs or has ended, and say why it waits."""
    told = ""
    while True:
        row = client.patiently(lambda: client.get(job_path(job)))
        if row["status"] in ENDED or row["status"] not in ("pending", "held", "blocked", "starting"):
            return
        why = f"job {printable(job)} {row['status']}"
        why += f": {printable(row['reason'])}" if row.get("reason") else ""
        if why != told and row["status"] != "starting":
            click.echo(why, err=True)
            told = why
        time.sleep(LOOK_S)


def _use_terminal(home: Path | None, job: str, tail: int | None) -> int:
    """Use the terminal of a job until it has ended or the user leaves; return the exit code."""
    attempt = 0
    while True:
        client, typing = connect(home), connect(home)
        if sys.stdin.isatty():
            click.echo(f"job {printable(job)}: Ctrl-] d leaves it running", err=True)
        shown = _TerminalOutput(client, job, tail)
        console = Console(terminal=True, can_leave=True)
        try:
            if not console.run(shown.show, _sender(typing, f"{job_path(job)}/terminal")):
                client.abort()
                click.echo(f"\n{LEFT.format(job=printable(job))}", err=True)
                return 0
        except Refusal as refusal:
            if refusal.status != 409:  # 409: its worker has ended, and it may start again
                raise
        row = _end_or_start(connect(home), job, attempt := shown.attempt or attempt)
        if row["status"] in ENDED:
            if row["status"] != "finished" and row.get("reason"):
                click.echo(f"job {printable(job)} {row['status']}: {printable(row['reason'])}", err=True)
            return exit_code(row)
        tail = None


def _end_or_start(client: Client, job: str, attempt: int) -> dict[str, Any]:
    """Return the row of a job whose worker has ended, once it has ended or runs again."""
    while True:
        row: dict[str, Any] = client.patiently(lambda: client.get(job_path(job)))
        if row["status"] in ENDED or (row["attempt"] > attempt and row["status"] == "running"):
            return row
        time.sleep(LOOK_S)
