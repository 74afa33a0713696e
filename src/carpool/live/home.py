"""The home directory: where the journal, the tokens and the jobs' files are, and which users can read them.

Everything that a restarted service needs is in here. Directories have mode 0700 and files 0600: environments, logs and
checkpoints belong to the service's user alone. If root runs the service, directories have mode 0711, so that a job that
runs under its user's own id finds its files.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from carpool.channel import open_regular, read_json
from carpool.errors import InputError
from carpool.live.errors import HomeInUse

__all__ = ["OWN_JSON_BYTES", "Home", "default_home", "read_json", "read_own_json", "sync_directory", "write_private"]

ENV_HOME = "CARPOOL_HOME"
OWN_JSON_BYTES = 1 << 26
"""Largest JSON file of the service itself that is read."""
LOCK_S = 2.0
"""Seconds to wait for the lock. A service killed during a launch leaves it to its child until that is a wrapper."""


def default_home() -> Path:
    """Return `CARPOOL_HOME`, else the directory for state that XDG gives the user."""
    given = os.environ.get(ENV_HOME)
    if given:
        return Path(given).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "carpool"


def folder_mode() -> int:
    """Return the mode of folders that lead to those of users. Root runs jobs under their users' ids: these must reach
    their own directories."""
    return 0o711 if os.getuid() == 0 else 0o700


class Home:
    """Layout of the directory. `create` makes it; clients only read."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path).expanduser().absolute() if path is not None else default_home().absolute()
        self.journal = self.path / "journal.db"
        self.admin_token = self.path / "admin.token"
        self.address = self.path / "address.json"
        self.retention = self.path / "retention.json"
        self.cancelled = self.path / "cancelled"
        """Ids of jobs that were cancelled while the journal could not be written."""
        self.reserve = self.path / "reserve"
        """Room that a starting service frees on a full disk."""
        self.lock = self.path / "lock"
        self.journal_record = self.path / "journal.json"
        """Which journal this home belongs to, if that is in a database."""
        self.users = self.path / "users.json"
        """Copy of the users beside the journal."""
        self.settings = self.path / "settings.json"
        """Copy of the groups, shares, drains and reservations beside the journal."""
        self.alive = self.path / "alive"
        """Touched while a service runs: see `executors/switching.py`."""
        self.jobs = self.path / "jobs"
        self.running = self.path / "running"
        """One empty file for each gang that may have processes, for a restarted service."""
        self.mps = self.path / "mps"
        self.emulated = self.path / "emulated"
        """Emulated GPUs: their description, the files by which workers see each other, and homes of agents."""
        self.certificate = self.path / "certificate.pem"
        """Copy of the service's TLS certificate, by which clients of this home recognise it."""
        self.nodes = self.path / "nodes.json"
        """The nodes of a cluster."""
        self.pilots = self.path / "pilots"
        """Tickets and output of the pilots of a ground."""
        self.pilot_key = self.path / "pilots.key"
        self._locked: int | None = None
        self._locked_ahead = False

    def create(self) -> None:
        mode = folder_mode()
        try:
            self.path.mkdir(mode=mode, parents=True, exist_ok=True)
            self.path.chmod(mode)
            self.make_folders()
        except OSError as error:
            raise InputError(f"home {self.path}: {error.strerror}; give another --home") from error
        owner = self.path.stat().st_uid
        if os.getuid() == 0 and owner != 0:  # its owner could write any job into it, also one of the administrator
            raise InputError(
                f"home {self.path}: belongs to uid {owner}, and root would run what that user writes there; "
                "give another --home, or `chown -R root` it if you trust everything in it"
            )

    def make_folders(self) -> None:
        """Make the folders for jobs, which may have been removed while a service runs."""
        self.jobs.mkdir(mode=folder_mode(), exist_ok=True)
        self.running.mkdir(mode=0o700, exist_ok=True)

    def acquire(self, journal: str = "") -> None:
        """Lock the home for this process until `release` or its end, so that only one service uses it.

        `journal`: id of a journal whose leader this process is. The lock of an earlier leader of the same journal is
        taken over, because a stopped process keeps it; what that process may do, the journal decides.
        """
        if self._locked_ahead:
            self._locked_ahead = False
            return
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(
                f"{self.lock}: {error.strerror}; make the home writable (`chmod -R u+w {self.path}`), or give --home"
            ) from None
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                holder, _, held = os.pread(descriptor, 128, 0).decode(errors="replace").strip().partition(" ")
                if journal and held == journal:
                    os.close(descriptor)
                    descriptor = self._new_lock()
                    break
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
            os.close(descriptor)
            other = f"another service or agent (process {holder})" if holder.isdigit() else "another service or agent"
            raise HomeInUse(f"home {self.path}: {other} uses it; stop that one or give --home")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {journal}".strip().encode(), 0)
        self._locked = descriptor

    def acquire_ahead(self) -> None:
        """Lock the home for a service that this process is about to open. The next `acquire` finds it locked."""
        self.acquire()
        self._locked_ahead = True

    def _new_lock(self) -> int:
        """Replace the file of the lock by a new one, locked by this process."""
        fresh = self.lock.with_name(f".{self.lock.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(fresh, self.lock)
        return descriptor

    def release(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked, self._locked_ahead = None, False

    def holder(self) -> int | None:
        """Return the process that has locked the home; None: none has, or this user cannot see it."""
        try:
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment: `acquire` tries again
            return None
        except OSError:
            holder = os.pread(descriptor, 128, 0).decode(errors="replace").partition(" ")[0]
            return int(holder) if holder.isdecimal() else 0  # 0: it has not written its id
        finally:
            os.close(descriptor)

    # ---- where clients find the service ----------------------------------------------------------------------------

    def write_address(self, url: str) -> None:
        write_private(self.address, json.dumps({"url": url, "pid": os.getpid()}))

    def read_address(self) -> dict[str, Any] | None:
        """Return `url` and `pid` of the service; None if no service runs."""
        data = read_json(self.address)
        return data if isinstance(data, dict) and isinstance(data.get("url"), str) else None

    def remove_address(self, url: str | None = None) -> None:
        """Remove the address; with a `url` only if it is that of this process, and not of a service that took over."""
        if url is not None and self.read_address() != {"url": url, "pid": os.getpid()}:
            return
        with contextlib.suppress(OSError):
            self.address.unlink()

    # ---- a job's files ---------------------------------------------------------------------------------------------

    def job(self, job: str) -> Path:
        """Return a job's directory. Anything but an id that the service made is refused before it becomes a path."""
        if not re.fullmatch(r"[0-9]{1,18}", job):
            raise InputError(f"{job!r} is not a job's id; `carpool jobs --all` lists them")
        return self.jobs / job

    def snapshot(self, job: str) -> Path:
        return self.job(job) / "snapshot"

    def checkpoints(self, job: str) -> Path:
        return self.job(job) / "checkpoints"

    def attempt(self, job: str, attempt: int) -> Path:
        return self.job(job) / f"attempt-{attempt}"

    def rank(self, job: str, attempt: int, rank: int) -> Path:
        return self.attempt(job, attempt) / f"rank-{rank}"


def write_private(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace a file atomically; only its owner can read it, from the moment it exists."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)  # in a worker's directory, something else may be in its place
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_own_json(path: Path) -> Any:
    """Read a JSON file that only this process's user (or root) can have written; None for any other file."""
    try:
        with open(open_regular(path)) as file:
            found = os.fstat(file.fileno())
            own = found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022
            return json.loads(file.read(OWN_JSON_BYTES)) if own else None
    except (OSError, ValueError, RecursionError):
        return None
