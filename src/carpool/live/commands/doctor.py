"""`carpool doctor`: find problems of this set-up and say how to fix them.

It looks at the installation, the home directory, the GPUs and the running service, and changes nothing.
"""

import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import click

from carpool import __version__
from carpool.errors import InputError
from carpool.live.accounts import installation_problem
from carpool.live.commands.diagnosis import Diagnosis
from carpool.live.commands.doctor_agent import examine_agent, is_agents_home
from carpool.live.commands.doctor_database import examine_database
from carpool.live.commands.options import database_option, home_option, json_option, print_json
from carpool.live.commands.system_service import unit_file, unit_problem
from carpool.live.commands.tables import gpus_of
from carpool.live.grounds.base import HAND
from carpool.live.home import OWN_JSON_BYTES, Home, read_json
from carpool.live.http.auth import AGENT
from carpool.live.http.client import ENV_URL, Client, Refusal, Unreachable
from carpool.live.text import printable, size, span

LITTLE_DISK = 1 << 30
MARKS = {"ok": "✓", "note": "·", "warning": "!", "error": "✗"}
COLOURS = {"ok": "green", "note": "", "warning": "yellow", "error": "red"}


@click.command()
@home_option
@database_option
@json_option
def doctor(home: Path | None, database: str | None, as_json: bool) -> None:
    """Check this set-up and say how to fix problems. Exits with 1 if something must be fixed."""
    findings = list(examine(home, database))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    raise SystemExit(any(finding.level == "error" for finding in findings))


def examine(home: Path | None, database: str | None = None) -> Iterator[Diagnosis]:
    yield from _installation()
    place = Home(home)
    yield from _home(place)
    yield from examine_agent(place)
    if is_agents_home(place):  # a node: the service is elsewhere
        yield from _gpus()
        return
    yield from examine_database(database, place)
    yield from _users(place)
    yield from _gpus()
    yield from _units()
    yield from _service(place, home)


def _units() -> Iterator[Diagnosis]:
    """Check the units that `carpool service install` wrote."""
    for user in (True, False):
        path = unit_file(user=user)
        if path.exists():
            problem = unit_problem(path, user=user)
            again = "install it again: `carpool service install`"
            yield Diagnosis("systemd", "error" if problem else "ok", problem or f"{path} is active", problem and again)


def _installation() -> Iterator[Diagnosis]:
    yield Diagnosis("version", "ok", f"carpool {__version__}, Python {platform.python_version()}")
    missing = [name for name in ("fastapi", "uvicorn", "sqlalchemy", "yaml") if find_spec(name) is None]
    if missing:
        yield Diagnosis("packages", "error", f"{', '.join(missing)} missing", "pip install 'carpool[live]'")
    if find_spec("torch") is None:
        yield Diagnosis(
            "PyTorch",
            "note",
            "not installed in this environment",
            "jobs may use another environment: see docs/how-to/prepare-a-training-script.md",
        )
    if sys.platform != "linux":
        yield Diagnosis("system", "warning", f"{sys.platform} is not supported", "run the service on Linux")
    _, hard = _open_files()
    if hard < 4096:
        yield Diagnosis("open files", "warning", f"at most {hard} for one process", "raise it: ulimit -n 65536")


def _open_files() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _home(place: Home) -> Iterator[Diagnosis]:
    if not place.path.exists():
        yield Diagnosis("home", "note", f"{place.path} does not exist", "`carpool serve` creates it")
        return
    for path, wanted in ((place.path, 0o077), (place.admin_token, 0o077), (place.journal, 0o077)):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except PermissionError:
            note = "to use its service, set CARPOOL_URL and CARPOOL_TOKEN"
            yield Diagnosis("home", "note", f"{path} belongs to another user", note)
            return
        loose = stat.S_IMODE(found.st_mode) & wanted
        if loose & 0o066:
            yield Diagnosis("permissions", "error", f"others can read or write {path}", f"chmod go-rw {path}")
    for path in (place.path, place.lock, place.journal, place.jobs, place.running):
        if path.exists() and not os.access(path, os.W_OK):
            yield Diagnosis("home", "error", f"{path} cannot be written", f"chmod -R u+w {place.path}")
            return
    free = shutil.disk_usage(place.path).free
    level: Literal["ok", "error"] = "ok" if free > LITTLE_DISK else "error"
    remedy = "" if free > LITTLE_DISK else "free disk space: no job can be submitted when the disk is full"
    yield Diagnosis("home", level, f"{place.path}, {size(free)} free", remedy)


def _users(place: Home) -> Iterator[Diagnosis]:
    """Check that the jobs of users can read the installation, which only root can try."""
    rows = read_json(place.users, OWN_JSON_BYTES)
    if os.geteuid() != 0 or not isinstance(rows, dict):
        return
    known = {name: row for name, row in rows.items() if isinstance(row, dict) and not row.get("revoked")}
    uids = {name: row.get("uid") for name, row in known.items() if row.get("role") != AGENT}
    for name, uid in uids.items():
        problem = installation_problem(uid) if isinstance(uid, int) else "no uid; revoke and add the user again"
        if problem:
            yield Diagnosis("users", "error", f"{name}: {problem}", "see docs/how-to/several-users.md")


def _gpus() -> Iterator[Diagnosis]:
    try:
        from carpool.gpu import mps, nvml
    except ModuleNotFoundError:
        yield Diagnosis(
            "GPUs", "note", "this installation cannot search for GPUs", "`carpool serve --gpus N` works without"
        )
        return
    devices = nvml.devices()
    if not devices:
        yield Diagnosis("GPUs", "note", "NVML finds none", "`carpool serve --gpus N` offers N logical GPUs")
        return
    for device in devices:
        uses = nvml.processes(device.uuid)
        held = sum(use.memory or 0 for use in uses)
        found = f"{device.index}: {device.name}, {size(device.memory)}"
        yield Diagnosis("GPU", "ok", found + (f", {size(held)} held by {len(uses)} processes" if uses else ""))
    why = mps.available()
    if why:
        yield Diagnosis(
            "MPS", "warning", f"not usable: {why}", "jobs that share a GPU are time-sliced, which slows them down more"
        )
    else:
        yield Diagnosis("MPS", "ok", "is usable")


def _service(place: Home, home: Path | None) -> Iterator[Diagnosis]:
    try:
        client = Client.find(home, wait=False)
        status: dict[str, Any] = client.get("/v1/status")
    except Unreachable as error:
        address = place.read_address()
        gone = address is not None and not os.environ.get(ENV_URL) and not _alive(address.get("pid"))
        remedy = "the service ended unexpectedly; `carpool serve` resumes where it was" if gone else ""
        yield Diagnosis("service", "warning", str(error), remedy)
        return
    except InputError as error:
        yield Diagnosis("service", "error", str(error))
        return
    yield Diagnosis("service", "ok", f"answers at {client.url}, policy {status['policy']}")
    if problem := status.get("journal_problem"):
        remedy = "make room, or bring back the home; if journal.db itself is lost, restart the service"
        what = f"the service cannot write it ({problem}), so it refuses jobs and changes"
        yield Diagnosis("journal", "error", what, remedy)
    if status["policy_failure"]:
        yield Diagnosis("policy", "error", status["policy_failure"], "fix the policy, or serve with another --policy")
    if status["version"] != __version__:
        yield Diagnosis(
            "service", "warning", f"runs release {status['version']}", "restart it; running jobs are not interrupted"
        )
    if not status["as_root"]:
        yield Diagnosis("users", "note", "all jobs run as the service's user", "add only users who trust each other")
    yield from _retention(client)
    gpus = client.get("/v1/gpus")
    emulated = [name for gpu in gpus_of(gpus) if str(name := gpu.get("name") or "").startswith("emulated ")]
    if emulated:
        yield Diagnosis("GPUs", "ok", f"{len(emulated)} {emulated[0]}; `carpool emulate` is a job for them")
    if gpus.get("nodes"):
        yield Diagnosis("sharing", "ok", str(gpus.get("mechanism", "unknown")))
    yield from _nodes(client)


def _nodes(client: Client) -> Iterator[Diagnosis]:
    """Say which nodes of a cluster take jobs, and why the others do not."""
    try:
        answer = client.get("/v1/nodes")
    except Refusal:  # a service that runs jobs on its own machine
        return
    yield from _ground(answer.get("ground"))
    for row in answer["nodes"]:
        if row["state"] == "lost" and row["ground"] != HAND:  # it was given back, or the ground took it
            continue
        name, state = f"node {row['node']}", row["state"]
        if state == "awaited":
            yield Diagnosis(name, "note", "has a token and never joined", f"`carpool agent --name {row['node']}` there")
        elif state == "open" and row["release"] != __version__:
            yield Diagnosis(name, "warning", f"its agent runs release {row['release']}", "restart it; jobs run on")
        elif state == "open" and row["witness"] == "silent":
            found = f"its agent cannot ask {row['ground']}"
            yield Diagnosis(name, "warning", found, "its jobs end with the lease when the service is away")
        elif state == "open" and not row["shared_home"]:
            yield Diagnosis(name, "note", "does not see the service's home", "jobs that span nodes are refused there")
        elif state == "open":
            vouched = f", {row['ground']} answers it" if row["witness"] else ""
            ends = f", ends in {span(row['ends_at'] - time.time())}" if row["ends_at"] else ""
            yield Diagnosis(name, "ok", f"{row['gpus']} GPUs, lease {span(row['lease_s'])}{ends}{vouched}")
        else:
            yield Diagnosis(name, "warning", f"{state}: {row['why']}", "see `carpool nodes` and the agent's output")


def _ground(ground: dict[str, Any] | None) -> Iterator[Diagnosis]:
    """Say whether the service can ask the ground that its nodes come from, and whether that hands any out."""
    if ground is None:
        return
    name = f"ground {ground['name']}"
    if ground["problem"] or ground["asked_s"] is None:
        found = f"cannot be asked: {ground['problem']}" if ground["problem"] else "was not asked so far"
        yield Diagnosis(name, "error" if ground["problem"] else "note", found, "no node is given up or asked for")
    elif ground.get("refusal"):
        remedy = "correct the options of `carpool serve`; it is asked again every two minutes"
        yield Diagnosis(name, "error", f"gives no node: {ground['refusal']}", remedy)
    elif ground.get("failure"):
        yield Diagnosis(name, "error", str(ground["failure"]), "read what it says; the next pilot comes by itself")
    elif ground["waiting"] and not ground["running"]:
        found = f"all {ground['waiting']} pilots wait ({ground['why_waiting'] or 'no reason given'})"
        yield Diagnosis(name, "warning", found, "see its own queue, and the options of `carpool serve`")
    else:
        pilots = f"{ground['running']} running, {ground['waiting']} waiting"
        found = f"pilots: {pilots}; asked {span(ground['asked_s'])} ago"
        yield Diagnosis(name, "ok", found)


def _retention(client: Client) -> Iterator[Diagnosis]:
    """Say what is removed next, so that users can copy it before."""
    answer = client.get("/v1/retention")
    limits, planned = answer["limits"], answer["planned"]
    kept = f"logs are kept {span(limits['files_s'])}, checkpoints {span(limits['checkpoints_s'])} after a job's end"
    yield Diagnosis("retention", "ok", f"{kept}; {size(limits['size'])} of logs for each user")
    users = sorted({one["user"] for one in planned})
    for user in users:
        own = [one for one in planned if one["user"] == user]
        first = min(own, key=lambda one: one["in_s"])
        total = size(sum(one["bytes"] for one in own))
        jobs = len({one["job"] for one in own})  # its logs and its checkpoints are two removals
        whose = f"{jobs} of {user}'s jobs" if jobs > 1 else f"{user}'s job {first['job']}"
        found = f"files of {whose} ({total}) are removed soon, the first in {span(first['in_s'])}"
        yield Diagnosis("retention", "warning", found, f"copy what is needed: `carpool show {first['job']}`")


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _print(findings: list[Diagnosis]) -> None:
    from rich.text import Text

    from carpool.report.console import new_console

    console = new_console()
    for finding in findings:
        remedy = f" – {finding.remedy}" if finding.remedy else ""
        line = f"{MARKS[finding.level]} {finding.what}: {printable(finding.found)}{printable(remedy)}"
        console.print(Text(line, COLOURS[finding.level]))
    bad = sum(finding.level == "error" for finding in findings)
    console.print(f"{bad} to fix" if bad else "nothing to fix")
