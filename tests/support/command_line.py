"""How the tests call the command: in this process where only the output matters, as a process where exit codes do."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner

import carpool
from carpool.cli import NO_ARGUMENTS, cli, input_message, usage_message
from carpool.errors import InputError

HEADER = "job,submitted_s,model,gpus,batch,iterations"
SOURCE = str(Path(carpool.__file__).parents[1])
COMMAND = (sys.executable, "-m", "carpool.cli")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def call(*arguments: object, env: Mapping[str, str | None] | None = None) -> Said:
    """As `main` would, without the cost of a process; a variable of `env` that is None is unset."""
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(cli, words, prog_name="carpool", env=env, standalone_mode=False)
    error = result.exception
    if isinstance(error, InputError):
        return Said(2, result.stdout, f"error: {input_message(error)}\n")
    if isinstance(error, click.ClickException) and not isinstance(error, NO_ARGUMENTS):
        return Said(error.exit_code, result.stdout, f"{result.stderr}error: {usage_message(error)}\n")
    if error is not None and not isinstance(error, SystemExit):
        raise error
    code = result.return_value if isinstance(result.return_value, int) else result.exit_code
    return Said(code, result.stdout, result.stderr)


def environment(**more: str) -> dict[str, str]:
    """For a process that must run this source, whatever is installed."""
    return {**os.environ, "PYTHONPATH": SOURCE, **more}


def process(*arguments: object, cwd: Path | None = None, **more: str) -> Said:
    """The real command."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment(**more), timeout=60
    )
    return Said(done.returncode, done.stdout, done.stderr)


def csv_file(folder: Path, *rows: str, header: str = HEADER, name: str = "jobs.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def everything_in(folder: Path) -> set[str]:
    """All files and folders below, hidden ones too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
