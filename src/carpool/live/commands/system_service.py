"""`carpool service`: let systemd start the service, at boot or with the user's first session, and again if it fails.

`install` writes a unit, `uninstall` removes it. The jobs are no part of the unit: they go on while the service is
stopped, restarted or upgraded.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from carpool.errors import InputError
from carpool.files import whole_file
from carpool.live.home import Home

UNIT = "carpool.service"
FORBIDDEN = ("\n", "\r", "\0")


def unit_file(*, user: bool) -> Path:
    """Return where the unit belongs: that of a user, or that of the machine."""
    if user:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / UNIT
    return Path("/etc/systemd/system") / UNIT


def unit_text(command: Sequence[str], *, user: bool) -> str:
    """Return the unit that runs a command.

    Only the main process is stopped with the unit (`KillMode`): the jobs' wrappers outlive the service on purpose.
    """
    line = " ".join(map(quote, command))
    return f"""[Unit]
Description=Carpool, a scheduler for deep-learning jobs on GPUs
After=network.target

[Service]
Type=exec
ExecStart={line}
KillMode=process
Restart=on-failure
RestartSec=2
TimeoutStopSec=60
LimitNOFILE=65536

[Install]
WantedBy={"default.target" if user else "multi-user.target"}
"""


def quote(word: str) -> str:
    """Return a word as systemd reads it: in quotes, with its own special characters doubled or escaped."""
    if any(character in word for character in FORBIDDEN):
        raise InputError(f"{word!a}: a unit cannot hold line breaks; remove them")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


@click.group("service", short_help="Let systemd run the service.")
def service() -> None:
    """Let systemd run the service: for you, or for the whole machine."""


def _whose(command: click.decorators.FC) -> click.decorators.FC:
    words = "For you, or for the whole machine, which needs root.  [default: the machine for root, else you]"
    return click.option("--user/--system", "user", default=None, help=words)(command)


@service.command(short_help="Write a unit and start the service.", context_settings={"allow_interspersed_args": False})
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF SERVE …]")
@_whose
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="Home directory of the service.")
@click.option("--no-start", is_flag=True, help="Only write the unit.")
def install(options: tuple[str, ...], user: bool | None, home: Path | None, no_start: bool) -> None:
    """Write a unit that runs `carpool serve`, and start it now and after every boot.

    Options of `serve` follow `--`, as in `carpool service install -- --policy carpool`. An existing unit is replaced.
    """
    for_user = os.geteuid() != 0 if user is None else user
    _check_options(options)
    program = [sys.executable, "-m", "carpool.cli", "serve", "--home", str(Home(home).path), *options]
    path = unit_file(user=for_user)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(unit_text(program, user=for_user))
    except OSError as error:
        remedy = "run it as root, or with --user" if isinstance(error, PermissionError) else "make room for it"
        raise InputError(f"{path}: {error.strerror}; {remedy}") from None
    click.echo(f"wrote {path}")
    if no_start:
        return
    _systemctl(for_user, "daemon-reload")
    _systemctl(for_user, "enable", UNIT)
    _systemctl(for_user, "restart", UNIT)
    click.echo(f"the service runs; its log: journalctl {'--user ' if for_user else ''}-u {UNIT} -f")
    if for_user:
        click.echo("it stops with your last session, unless an administrator lets you linger: loginctl enable-linger")


@service.command(short_help="Stop the service and remove its unit.")
@_whose
def uninstall(user: bool | None) -> None:
    """Stop the service and remove its unit. Running jobs go on, and `carpool serve` finds them again."""
    for_user = os.geteuid() != 0 if user is None else user
    path = unit_file(user=for_user)
    if not path.exists():
        raise InputError(f"{path}: there is no such unit; nothing was installed there")
    _systemctl(for_user, "disable", "--now", UNIT)
    path.unlink()
    _systemctl(for_user, "daemon-reload")
    click.echo(f"removed {path}; running jobs go on")


def _check_options(options: Sequence[str]) -> None:
    """Let `serve` itself read its options, so that a wrong one is refused now and not at the next boot."""
    from carpool.live.commands.serve import serve

    given = serve.make_context("carpool serve", list(options), resilient_parsing=False)
    if given.params["database"]:
        from carpool.live.journal.postgres import PostgresJournal

        if PostgresJournal(given.params["database"]).has_password:
            raise InputError("--database: a unit is no place for a password; write it into ~/.pgpass of its user")


def unit_problem(path: Path, *, user: bool) -> str:
    """Return what is wrong with an installed unit; empty: it runs."""
    line = next((line for line in path.read_text(errors="replace").splitlines() if line.startswith("ExecStart=")), "")
    program = line.removeprefix("ExecStart=").partition('" ')[0].strip('"')
    if not Path(program).exists():
        return f"it runs {program}, which does not exist any more"
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return "this machine does not run systemd"
    command = [systemctl, *(["--user"] if user else []), "is-active", UNIT]
    state = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    return "" if state == "active" else f"systemd says that it is {state or 'unknown'}"


def _systemctl(user: bool, *words: str) -> None:
    program = shutil.which("systemctl")
    if program is None:
        raise InputError("systemctl: not found; this machine does not run systemd. Start `carpool serve` otherwise")
    command = [program, *(["--user"] if user else []), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"{' '.join(command[1:])}: systemctl failed: {said[-1] if said else done.returncode}")
