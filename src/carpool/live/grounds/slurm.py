"""Slurm as a ground: one Slurm job a node, in which the supervisor and the agent run.

Slurm decides which machines, for how long and on whose account; jobs of Carpool are no jobs of Slurm. The service finds
its pilots by their job names, so that nothing is lost with an answer of `sbatch`. Every command of Slurm is bounded in
time, because they hang for many seconds while the controller is away. The pilot's Slurm job is not requeued: on another
machine it would confirm a pilot that is gone.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InputError
from carpool.live.grounds.base import JoinTicket, Pilot, PilotStatus
from carpool.live.grounds.tickets import write_ticket

COMMAND_S = 10.0
"""Seconds after which a command of Slurm counts as not answered."""
RUNNING = {"RUNNING", "SUSPENDED", "STOPPED"}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
SENT = ("LD_LIBRARY_PATH", "SLURM_CONF")
"""Variables of the service that its pilots get, where they are set; also those of NCCL and gloo."""
FORMAT = "%i|%j|%T|%N|%e|%r"


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What the operator chooses."""

    partition: str = ""
    account: str = ""
    time_limit_s: float | None = None
    """Time limit of each Slurm job; None: the partition's."""
    save_s: float = 300.0
    """Seconds before its end at which Slurm tells a pilot to leave, in case the service does not."""
    extra: tuple[str, ...] = ()
    """More options of `sbatch`, which come last and take precedence."""
    python: str = sys.executable
    """Interpreter with Carpool on the nodes."""


def check_installed() -> None:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise InputError(f"--on slurm: {', '.join(missing)} not found; install Slurm's commands on this machine")


class SlurmGround:
    """Submits pilots to Slurm and asks about them."""

    name = "slurm"

    def __init__(self, options: SlurmOptions, folder: Path, service: str) -> None:
        """`folder`: for tickets and the output of pilots, seen by all nodes. `service`: short name of the home."""
        check_installed()
        self._options, self._folder = options, folder
        self._prefix = f"carpool-{service}-"

    async def submit(self, ticket: JoinTicket) -> None:
        path = await asyncio.to_thread(write_ticket, self._folder, ticket)
        options, output = self._options, self._folder / f"{ticket.pilot}.log"
        words = ["--parsable", f"--job-name={self._prefix}{ticket.pilot}", "--nodes=1", "--ntasks=1", "--exclusive"]
        words += ["--mem=0", "--no-requeue", "--open-mode=append", f"--output={output}", "--export=NIL"]
        words += [f"--signal=B:TERM@{max(1, round(options.save_s))}"]
        words += [f"--chdir={os.sep}"]
        words += [f"--partition={options.partition}"] if options.partition else []
        words += [f"--account={options.account}"] if options.account else []
        if options.time_limit_s is not None:
            words.append(f"--time={max(1, round(options.time_limit_s / 60))}")
        await _answer(["sbatch", *words, *options.extra], self._script(path))

    def _script(self, ticket: Path) -> str:
        """Return the batch script. `exec`: Slurm's signals reach the supervisor itself."""
        names = [name for name in os.environ if name in SENT or name.startswith(("NCCL_", "GLOO_"))]
        lines = [f"export {name}={shlex.quote(os.environ[name])}" for name in names]
        command = shlex.join([self._options.python, "-m", "carpool.live.agent.pilot", "slurm", str(ticket)])
        path = f"{Path(shutil.which('squeue') or '/usr/bin/squeue').parent}:/usr/bin:/bin"
        return "\n".join(["#!/bin/sh", *lines, f"export PATH={shlex.quote(path)}", f"exec {command}", ""])

    async def pilots(self) -> list[Pilot]:
        rows = await _answer(["squeue", "--noheader", "--states=all", f"--format={FORMAT}", f"--user={os.getuid()}"])
        found: dict[str, Pilot] = {}
        for line in rows.splitlines():
            pilot = read_row(line, self._prefix)
            if pilot is not None and (pilot.id not in found or pilot.alive):
                found[pilot.id] = pilot
        return list(found.values())

    async def give_up(self, pilot: Pilot) -> None:
        await _answer(["scancel", pilot.handle])

    async def close(self) -> None:
        return None


def read_row(line: str, prefix: str) -> Pilot | None:
    """Return the pilot in a line of `squeue`; None: the line is about another job."""
    fields = line.strip().split("|")
    if len(fields) < 6 or not fields[1].startswith(prefix):
        return None
    job, name, state, nodes, ends, *why = fields
    status = PilotStatus.ENDED
    if state in RUNNING:
        status = PilotStatus.RUNNING
    elif state in WAITING:
        status = PilotStatus.WAITING
    ends_at = float(ends) if status is PilotStatus.RUNNING and ends.isdecimal() else None
    reason = "|".join(why)
    shown = reason if status is PilotStatus.WAITING else state.lower()
    return Pilot(name.removeprefix(prefix), node_name(nodes), status, ends_at, job, shown)


def node_name(machine: str) -> str:
    """Return the name of a node in Carpool for the name of a machine in Slurm."""
    return machine.lower()


class SlurmWitness:
    """Asks Slurm's controller whether the pilot's job runs on this machine, and is to go on."""

    def __init__(self, job: str, node: str) -> None:
        self._job, self._node = job, node

    def wanted(self, timeout_s: float) -> bool | None:
        words = ["squeue", "--noheader", "--states=all", f"--jobs={self._job}", "--format=%T|%N"]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=timeout_s, env=_environment(), stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return False if "Invalid job id" in done.stderr else None
        state, _, node = done.stdout.strip().partition("|")
        return state in RUNNING and node == self._node


def _environment() -> dict[str, str]:
    return {**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


async def _answer(words: Sequence[str], text: str = "") -> str:
    """Run a command of Slurm and return what it printed. Raise `InputError` if it fails or takes too long."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe, env=_environment())
    try:
        out, err = await asyncio.wait_for(process.communicate(text.encode()), COMMAND_S)
    except TimeoutError:
        raise InputError(f"{words[0]}: no answer in {COMMAND_S:.0f} s; check slurmctld (`scontrol ping`)") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())
        raise InputError(f"{words[0]}: {said[:300] or f'ended with status {process.returncode}'}")
    return out.decode(errors="replace")
