"""The files by which workers on emulated GPUs see each other: which are on a GPU, and how far a gang is.

Each GPU has a folder with one file for each worker on it; each gang has a folder with one file for each worker and one
for what its first worker decides. Files are replaced as a whole, and a folder is read again only when it has changed.
The entry of a process that has ended counts for nothing and is removed by the next worker that sees it.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from carpool.channel import read_json
from carpool.live.freezer import GONE, STOPPED, cgroup_of, process_stat
from carpool.live.rank import boot_id as read_boot_id

STATE = "state"
"""Name of the file with a gang's state, without its ending."""
SETTLED_NS = 50_000_000
"""Age of a folder's last change, in nanoseconds, from which no other change can have the same time."""
Load = tuple[str, int, int]
"""What a mate computes: its model, batch and accumulation."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker, as its file says."""

    job: str
    attempt: int
    rank: int
    gpu: str
    """Label of its GPU, such as "node0:1"."""
    pid: int
    start: int
    """Start time of the process, which tells it from a later one with the same pid."""
    boot: str
    model: str
    batch: int
    accumulation: int = 1
    memory: int = 0
    """Bytes that it holds on its GPU."""
    computes: bool = False
    """It iterates, unless its process is stopped; False: it starts up, or stands at a step boundary."""
    mates: tuple[Load, ...] = ()
    """What other workers compute on its GPU, in a gang's folder."""

    @property
    def name(self) -> str:
        return f"{self.job}-{self.attempt}-{self.rank}.json"

    @property
    def node(self) -> str:
        return self.gpu.rpartition(":")[0]

    @property
    def load(self) -> Load:
        return self.model, self.batch, self.accumulation


@dataclass(frozen=True, slots=True)
class GangState:
    """What the first worker of a gang decides for all."""

    computes: bool = False
    stands: bool = False
    """It waits at a step boundary."""
    accumulation: int = 1
    memory: int = 0
    """Bytes that each worker holds on its GPU."""
    code: int | None = None
    """Exit status with which all workers end; None: not so far."""


def own_entry(job: str, attempt: int, rank: int, gpu: str, load: tuple[str, int], memory: int = 0) -> WorkerEntry:
    """Return the entry of this process. `load`: model and batch."""
    stat = process_stat("self")
    start = int(stat[19]) if stat else 0
    return WorkerEntry(job, attempt, rank, gpu, os.getpid(), start, boot_id(), *load, memory=memory)


@dataclass
class WatchedFolder:
    """A folder of entries, read again when it has changed."""

    path: Path
    entries: tuple[WorkerEntry, ...] = ()
    _seen: tuple[int, int] = (-1, 0)
    """Time of the last change that was read, and the time when that was."""

    def look(self) -> bool:
        """Read the entries if the folder may have changed; return whether it was read."""
        try:
            changed = os.stat(self.path).st_mtime_ns
        except OSError:
            changed = 0
        now = time.time_ns()
        before, at = self._seen
        if changed == before and at - changed > SETTLED_NS:
            return False
        self._seen = changed, now
        self.entries = tuple(_read_entries(self.path))
        return True


def _read_entries(folder: Path) -> list[WorkerEntry]:
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".json") and not name.startswith((".", STATE)):
                entry = _entry(read_json(folder / name))
                if entry is not None:
                    found.append(entry)
    return found


def _entry(data: Any) -> WorkerEntry | None:
    try:
        mates = tuple((str(model), int(batch), int(split)) for model, batch, split in data["mates"])
        return WorkerEntry(**{one.name: data[one.name] for one in fields(WorkerEntry)} | {"mates": mates})
    except (KeyError, TypeError, ValueError):
        return None


def write_file(path: Path, data: dict[str, Any]) -> None:
    """Replace a file as a whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data))
    partial.replace(path)


class GpuResidents:
    """The workers on one emulated GPU, seen from one of them."""

    def __init__(self, directory: Path, own: WorkerEntry) -> None:
        self.own = own
        self._folder = WatchedFolder(directory / "gpus" / own.gpu)
        self._cgroups: dict[int, str | None] = {}
        self._folder.path.mkdir(exist_ok=True)

    def enter(self) -> None:
        self.change()

    def change(self, **changes: Any) -> None:
        """Change this worker's entry, which all others on the GPU read."""
        self.own = replace(self.own, **changes)
        write_file(self._folder.path / self.own.name, asdict(self.own))

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder.path / self.own.name).unlink(missing_ok=True)

    def mates(self) -> tuple[WorkerEntry, ...]:
        """Return the entries of other workers whose processes run; entries that a killed process left are removed."""
        self._folder.look()
        alive = []
        for entry in self._folder.entries:
            if entry.name == self.own.name:
                continue
            if process_state(entry) in GONE:
                with contextlib.suppress(OSError):
                    (self._folder.path / entry.name).unlink()
            else:
                alive.append(entry)
        return tuple(alive)

    def loads(self) -> tuple[Load, ...]:
        """Return what others compute on the GPU now."""
        return tuple(entry.load for entry in self.mates() if entry.computes and not self._is_stopped(entry))

    def memory(self) -> int:
        """Return the bytes that all workers hold on the GPU."""
        return self.own.memory + sum(entry.memory for entry in self.mates())

    def _is_stopped(self, entry: WorkerEntry) -> bool:
        """Return whether a worker is paused, by a signal or by its cgroup."""
        if process_state(entry) in STOPPED:
            return True
        if entry.pid not in self._cgroups:
            self._cgroups[entry.pid] = cgroup_of(entry.pid)
        cgroup = self._cgroups[entry.pid]
        if cgroup is None:
            return False
        with contextlib.suppress(OSError), open(f"{cgroup}/cgroup.events") as file:
            return "frozen 1" in file.read()
        return False


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return read_boot_id()


def process_state(entry: WorkerEntry) -> str:
    """Return the state of a worker's process, as in /proc; one of `GONE` if it has ended."""
    stat = process_stat(entry.pid)
    if stat is None or entry.boot != boot_id() or int(stat[19]) != entry.start:
        return GONE[0]
    return stat[0]


@dataclass
class GangMeeting:
    """The folder of a gang, seen from one of its workers. Workers on other machines may read it, too."""

    directory: Path
    own: WorkerEntry
    workers: int
    state: GangState = field(default_factory=GangState)
    _read: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.path = self.directory / "gangs" / f"{self.own.job}-{self.own.attempt}"
        self._folder = WatchedFolder(self.path)

    def arrive(self) -> None:
        if self.own.rank == 0:
            self.sweep()
        self.path.mkdir(exist_ok=True)
        self.tell()

    def tell(self, **changes: Any) -> None:
        """Change this worker's entry, which the first worker reads."""
        self.own = replace(self.own, **changes)
        write_file(self.path / self.own.name, asdict(self.own))

    def members(self) -> tuple[WorkerEntry, ...]:
        """Return the workers that have arrived."""
        self._folder.look()
        return self._folder.entries

    def decide(self, **changes: Any) -> None:
        """Change what holds for all workers. Only the first worker calls it."""
        new = replace(self.state, **changes)
        if new != self.state:
            self.state = new
            write_file(self.path / f"{STATE}.json", asdict(new))

    def look(self) -> GangState:
        """Return what the first worker decided."""
        path = self.path / f"{STATE}.json"
        with contextlib.suppress(OSError, KeyError, TypeError):
            found = os.stat(path)
            if (found.st_ino, found.st_mtime_ns) != self._read:
                data = read_json(path)
                self.state = GangState(**{one.name: data[one.name] for one in fields(GangState)})
                self._read = found.st_ino, found.st_mtime_ns
        return self.state

    def leave(self) -> None:
        """Remove this worker's entry, and the folder if it was the last one."""
        with contextlib.suppress(OSError):
            (self.path / self.own.name).unlink(missing_ok=True)
            if not _read_entries(self.path):
                _remove(self.path)

    def sweep(self) -> None:
        """Remove the folders of gangs that were killed on this machine."""
        with contextlib.suppress(OSError):
            for folder in (self.directory / "gangs").iterdir():
                entries = _read_entries(folder)
                if entries and all(entry.boot == boot_id() and process_state(entry) in GONE for entry in entries):
                    _remove(folder)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
