"""`carpool check -- python train.py`: run a script up to its first step and judge whether its batch may be split.

The script itself does the work, in its own process: `Training` and the adapters detect the check.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from carpool.channel import ENV_CHECK, ENV_CHECK_OPTIONS
from carpool.train.verdict import Verdict

EXIT_REFUSED = 1
EXIT_UNCHECKED = 3
STDERR = 2


@click.command(
    short_help="Check whether a training's batch may be split.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--accumulation", default=4, show_default=True, type=click.IntRange(2), help="Micro-batches to try.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Steps to train both ways.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Keep the verdict in this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def check(accumulation: int, steps: int, output: Path | None, as_json: bool, command: tuple[str, ...]) -> None:
    """Check whether splitting the batch into micro-batches leaves the training the same.

    Runs COMMAND, a training script that uses carpool.train, up to its first step, and compares training with and
    without micro-batches. Nothing is trained or saved. The exit status is 0 if the batch can be split, 1 if splitting
    changes the training, and 3 if the check was not possible.
    """
    with tempfile.TemporaryDirectory(prefix="carpool-check-") as directory:
        found = Path(directory) / "verdict.json"
        options = json.dumps({"accumulation": accumulation, "steps": steps})
        environment = {**_alone(), **os.environ, ENV_CHECK: str(found), ENV_CHECK_OPTIONS: options}
        try:
            # The script's own output goes to stderr, so that stdout has the verdict and nothing else.
            status = subprocess.run(command, env=environment, stdout=STDERR, check=False).returncode
        except OSError as error:
            click.echo(f"carpool check: cannot run {command[0]}: {error.strerror}", err=True)
            sys.exit(EXIT_UNCHECKED)
        if not found.exists():
            click.echo(_unchecked(status), err=True)
            sys.exit(EXIT_UNCHECKED)
        verdict = Verdict.load(found)
    if output is not None:
        verdict.save(output)
    click.echo(json.dumps(verdict.as_dict(), indent=2) if as_json else str(verdict))
    sys.exit(0 if verdict.can_shrink else EXIT_REFUSED)


def _alone() -> dict[str, str]:
    """Return the variables of a gang of one worker, which a script that calls `init_process_group` needs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _unchecked(status: int) -> str:
    if status:
        return f"carpool check: the script failed with status {status} before its first training step; see above"
    return (
        "carpool check: the script ended without a training step that Carpool could see; call "
        "carpool.train.Training.step, or use one of the adapters"
    )
