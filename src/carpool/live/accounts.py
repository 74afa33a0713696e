"""System accounts of Carpool's users. A service that runs as root runs each user's jobs under that user's uid. A user
without a login on this machine gets a uid from a range of Carpool's own."""

import contextlib
import os
import pwd
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from carpool.errors import InputError

ADMIN = "admin"
"""Name of the administrator, whose jobs run as the service's own user."""
NOBODY = 65_534
"""Uid without rights of its own."""
LONGEST_S = 10.0
"""Seconds that a look at files with a shell may take."""
FIRST_UID = 7_000_000
"""First uid of Carpool's own range, above those for logins (60,000) and containers (6,000,000 by default)."""


def account(uid: int) -> pwd.struct_passwd:
    """Return name, group, home and shell of a uid, also of one that the system does not know."""
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return pwd.struct_passwd((f"uid{uid}", "x", uid, uid, "", "/", "/bin/sh"))


def login_name(uid: int) -> str:
    """Return the login name of a uid; empty: the system knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def runs_as(uid: int | None, script: str, *words: str) -> bool:
    """Return whether a shell script succeeds under a uid within some seconds; None: that of this process. Blocks."""
    owner = None if uid is None or uid == os.getuid() else account(uid)
    options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    if owner is not None:
        groups = os.getgrouplist(owner.pw_name, owner.pw_gid)
        options |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": groups}
    command = ["/bin/sh", "-c", script, "sh", *words]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # nothing of the service's own, which this user could read
    process = subprocess.Popen(command, env=env, cwd="/", **options)
    try:
        return process.wait(LONGEST_S) == 0
    except subprocess.TimeoutExpired:  # a file system that does not answer, for which it may wait for ever
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return False


def check_directory(path: str, uid: int | None) -> None:
    """Refuse a directory that does not exist or that a job under this uid could not enter. Root looks as that user,
    so that the answer reveals nothing about directories that are closed to that user."""
    if uid is None or uid == os.getuid():
        usable = os.path.isdir(path) and os.access(path, os.X_OK)
    else:
        usable = runs_as(uid, 'cd -- "$1"', path)
    if not usable:
        raise InputError(f"directory: {path!a} does not exist here, or its job may not enter it; give another one")


def installation_problem(uid: int) -> str:
    """Return what a job under this uid could not read of this installation; empty: nothing. Blocks."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for script, path in (('"$1" -S -c ""', sys.executable), ('test -r "$1/__init__.py" && test -x "$1"', package)):
        if not runs_as(uid, script, path):
            return (
                f"uid {uid} cannot use {path}, so its jobs would not find this Python; install under /opt, for example"
            )
    return ""


def uid_for(name: str, taken: Iterable[int | None], before: int | None = None) -> int:
    """Return the uid of a login name; else the one that the user had `before`, which owns their files; else the next
    uid of Carpool's range."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        if before is not None:
            return before
        return max((uid for uid in taken if uid is not None and uid >= FIRST_UID), default=FIRST_UID - 1) + 1
