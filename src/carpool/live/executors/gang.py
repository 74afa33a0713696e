"""A gang on this machine as its files show it: directories, records of the wrappers, exit codes, and the outcome.

Used by the local executor. Nothing here waits or starts anything.
"""

import contextlib
import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from carpool import channel
from carpool.core.model import GpuId
from carpool.live import rank as wrapper
from carpool.live import worker_directory as files
from carpool.live.clock import since_boot
from carpool.live.executors.base import GangEnded, GangKey, GangOutcome, GpuSlot
from carpool.live.executors.processes import ProcessIdentity, boot_id, kill_strays
from carpool.live.freezer import remove_cgroup
from carpool.live.home import read_json, write_private

OUT_OF_MEMORY = re.compile(rb"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
"""Pattern in the log's last lines that shows that GPU memory ran out, for scripts without the training library."""
TAIL_BYTES = 16_384
MAX_RANKS = 1 << 20
"""Largest number of workers that a gang can have."""
LATEST = 2.0**40
"""Latest time in a record, in seconds; NaN is no time either."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
KILLED = 137
"""Exit code of a worker whose wrapper was killed: the kernel killed the worker too."""
DONE_BY_WORKERS = frozenset(
    (0, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV)
)
"""Errors that a worker can cause in its own directory. Others come from the machine, and pass."""
GANG_FILE, FAILURE_FILE = "gang.json", "broken.json"


@dataclass(slots=True)
class LocalRank:
    """One worker and its wrapper."""

    directory: Path
    identity: ProcessIdentity | None = None
    exit: dict[str, Any] | None = None
    gone: bool = False
    """The wrapper has ended and no process of the worker is left."""
    began: float | None = None
    """When the worker started, on the clock `since_boot`; None: not known."""
    can_pause: bool = False
    """The wrapper can pause its worker; those of release 0.1 cannot."""
    home: tuple[int, int] | None = None
    """Device and inode of the home in which the directory was found; None: it was not found so far."""

    def refresh(self) -> None:
        """Read what the wrapper has recorded. Raise OSError while that cannot be read: the home is away, or the machine
        has a fault. What a worker did to its own directory is no such reason."""
        with self._opened() as directory:
            record = _read_in(directory, files.RECORD)
            ended = _read_in(directory, files.EXIT)
        self.identity = ProcessIdentity.of(record) or self.identity
        self.can_pause = bool(record.get("pauses"))
        self.began = _moment(record, "began", self.rebooted)
        self.exit = ended or None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open the directory, None if it is gone for good: its home is there, and the directory is not. The home is
        held open meanwhile, because it may go and come at any moment."""
        place = self.directory.parents[3]
        with contextlib.ExitStack() as stack:
            home = os.open(place, FOLDER)
            stack.callback(os.close, home)
            found = os.fstat(home)
            same = self.home in (None, (found.st_dev, found.st_ino))
            directory = None
            try:
                directory = os.open(self.directory.relative_to(place), FOLDER, dir_fd=home)
                stack.callback(os.close, directory)
                self.home = (found.st_dev, found.st_ino)
            except OSError as error:
                if error.errno not in DONE_BY_WORKERS or not same:
                    raise
            yield directory

    def kill_leftovers(self) -> int:
        """Kill what a killed wrapper left behind, remove its cgroup, and return the number of processes. Blocks."""
        killed = kill_strays(str(self.directory), self.identity, cgroup=self._cgroup())
        self.remove_cgroup()
        return killed

    def remove_cgroup(self) -> None:
        """Remove the cgroup of a wrapper that was killed before it could, also after it recorded the exit. Blocks."""
        cgroup = self._cgroup()
        if cgroup is not None:
            remove_cgroup(cgroup)

    def _cgroup(self) -> str | None:
        """Return the cgroup that the wrapper recorded."""
        cgroup = read_object(self.directory / files.RECORD).get("cgroup")
        own = isinstance(cgroup, str) and os.path.basename(cgroup).startswith(wrapper.CGROUP)
        return str(cgroup) if own else None

    @property
    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()

    @property
    def rebooted(self) -> bool:
        """The machine restarted since the worker started."""
        return self.identity is not None and self.identity.boot != boot_id()

    @property
    def code(self) -> int | None:
        return _integer(self.exit, "code") if self.exit else None

    @property
    def ended(self) -> float | None:
        """When the worker ended, on the clock `since_boot`; None: not known."""
        return _moment(self.exit, "ended", self.rebooted) if self.exit else None

    def report(self) -> channel.Report | None:
        return channel.read_report(self.directory)

    def stands_at(self, sequence: int) -> bool:
        """Return whether the worker waits at a step boundary, as the control with this number asked."""
        report = self.report()
        return report is not None and report.standing and report.control >= sequence


@dataclass(slots=True)
class LocalGang:
    """The workers of one attempt."""

    key: GangKey
    directory: Path
    slots: tuple[GpuSlot, ...]
    exclusive: bool = False
    """The gang has its GPUs to itself and is outside MPS."""
    ranks: list[LocalRank] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    """Pipe ends that keep the wrappers waiting; closing them lets the wrappers look for the file `go`."""
    stop: str = ""
    """Latest `StopMode` that was asked for; empty: none."""
    delay: str = ""
    """Why it could not be started so far; empty: nothing hindered it."""
    failure: str = ""
    """How the worker ended whose end made the others stop; empty: none did."""
    failure_code: int | None = None
    paused: bool | None = None
    """Whether the latest request was to pause it, which one that starts ahead of its turn has from the start; None:
    there was none."""
    swap: bool = False
    """Whether the latest request to pause it was to move its memory away, too."""
    swapped: bool = False
    """Its memory was moved to main memory."""
    switched: bool = False
    """The latest request is carried out."""
    switch: int = 0
    """Number of requests to pause and resume in this life of the service."""
    pause_sequence: int = 0
    """Number of the latest request that was written for the wrappers."""
    control: channel.Control = field(default_factory=channel.Control)
    world_size: int = 1
    """Number of workers of the gang on all nodes."""
    port: int = 0
    """Port on this machine at which the gang may meet."""

    went: bool = False
    """The file `go` was seen."""
    unread: str = ""
    """Why its files cannot be read at present, so that nothing is known about its end; empty: they can."""

    @property
    def launched(self) -> bool:
        self.went = self.went or (self.directory / files.GO).exists()  # the home may be away later
        return self.went

    @property
    def started_at(self) -> float | None:
        """When its last worker started, on the clock `since_boot`; None: not known."""
        return _latest(rank.began for rank in self.ranks)

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        return tuple(slot.id for slot in self.slots)

    @property
    def agrees_on_steps(self) -> bool:
        """Whether it has several workers, all of which stop at the same step boundary when they are asked to."""
        reports = [rank.report() for rank in self.ranks]
        return self.world_size > 1 and all(report is not None and report.can_stand for report in reports)

    def ask_to_switch(self, paused: bool, *, swap: bool = False) -> int:
        """Note a request to pause it or to let it go on; return its number."""
        self.switch += 1
        self.paused, self.swap, self.switched = paused, swap, False
        return self.switch

    def ask_for_checkpoint(self) -> None:
        """Ask its workers to save at their next step boundary. Its wrappers may have asked before."""
        found = channel.read_control(self.ranks[0].directory)
        asked = max(self.control.checkpoint, found.checkpoint if found is not None else 0)
        self.write_control(replace(self.control, sequence=self.control.sequence + 1, checkpoint=asked + 1))

    def write_control(self, control: channel.Control) -> None:
        found = channel.read_control(self.ranks[0].directory) if self.ranks else None
        if found is not None and found.checkpoint > control.checkpoint:  # its wrapper asked for a checkpoint
            control = replace(control, checkpoint=found.checkpoint)
        self.control = control
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # a worker that does not get it is stopped by a signal anyway
                channel.write_control(rank.directory, control)

    def signal(self) -> None:
        """Make the wrappers read how they should stop."""
        for rank in self.ranks:
            if rank.identity is not None and not rank.gone:
                rank.identity.signal(signal.SIGTERM)

    def failed_rank(self) -> LocalRank | None:
        """Return the first worker that is gone and did not succeed."""
        return next((rank for rank in self.ranks if rank.gone and not self._succeeded(rank)), None)

    def _succeeded(self, rank: LocalRank) -> bool:
        if rank.code == 0 or (self.stop and rank.code == channel.EXIT_STOPPED):
            return True
        report = rank.report() if self.stop else None  # a worker that saved may fail at exit, in a library
        return report is not None and report.status is channel.WorkerStatus.STOPPED

    def ended(self) -> GangEnded:
        """Return how the gang ended, once all ranks are gone."""
        job, attempt = self.key
        reports = [report for rank in self.ranks if (report := rank.report()) and report.attempt == attempt]
        saved = [report.checkpoint for report in reports if report.checkpoint >= 0]
        codes = [rank.code for rank in self.ranks]
        outcome, reason = self._outcome(reports)
        exit_code = self.failure_code or next((code for code in codes if code), None)
        if exit_code is None and outcome is GangOutcome.FAILED and None in codes:
            exit_code = KILLED
        return GangEnded(
            job,
            attempt,
            outcome,
            reason,
            exit_code=0 if outcome is GangOutcome.FINISHED else exit_code,
            checkpoint=float(max(saved)) if saved else None,
            needs_alone=any(report.needs_alone for report in reports),
            ended_at=_latest(rank.ended for rank in self.ranks),
        )

    def _outcome(self, reports: list[channel.Report]) -> tuple[GangOutcome, str]:
        codes = [rank.code for rank in self.ranks]
        if not codes:
            return GangOutcome.FAILED, self.failure or "it could not be prepared"
        if all(code == 0 for code in codes) and (not self._was_signalled() or _all_done(reports)):
            return GangOutcome.FINISHED, ""
        if any(rank.exit is None and rank.rebooted for rank in self.ranks):
            return GangOutcome.LOST, "the machine restarted"
        if any(rank.exit and rank.exit.get("idle") for rank in self.ranks):
            return GangOutcome.FINISHED, ""
        if any(rank.exit and rank.exit.get("never") for rank in self.ranks):
            return GangOutcome.LOST, "the service ended before the gang was complete"
        if any(rank.exit and rank.exit.get("fenced") for rank in self.ranks):
            return GangOutcome.LOST, "its node was cut off from the service for too long"
        if not self.stop and any(rank.exit and rank.exit.get("unasked") for rank in self.ranks):
            return GangOutcome.LOST, "something other than the service ended its workers"
        reported = any(report.status is channel.WorkerStatus.OUT_OF_MEMORY or report.needs_alone for report in reports)
        if not self.stop and (reported or any(_log_shows_out_of_memory(rank) for rank in self.ranks if rank.code)):
            return GangOutcome.OUT_OF_MEMORY, "out of GPU memory"
        if self.stop and not self.failure:
            return GangOutcome.STOPPED, ""
        saved = any(report.status is channel.WorkerStatus.STOPPED for report in reports)
        if saved and all(code in (0, channel.EXIT_STOPPED) for code in codes):
            return GangOutcome.LOST, "stopped on a request that is not recorded"
        return GangOutcome.FAILED, self.failure or self._failure_on_disk()

    def _was_signalled(self) -> bool:
        """Return whether a worker got a signal to leave. An exit code of 0 then does not mean that it finished."""
        return any(rank.exit and rank.exit.get("stage") in ("ending", "killed") for rank in self.ranks)

    def _failure_on_disk(self) -> str:
        failed = self.failed_rank()
        return self.describe(failed) if failed else "its workers ended without an exit code"

    def record_failure(self, failed: LocalRank) -> None:
        """Remember which worker failed first, before the others are stopped."""
        self.failure = self.describe(failed)
        self.failure_code = KILLED if failed.code is None else failed.code
        with contextlib.suppress(OSError):
            data = {"reason": self.failure, "code": self.failure_code}
            write_private(self.directory / FAILURE_FILE, json.dumps(data))

    def describe(self, rank: LocalRank) -> str:
        """Say in one sentence how a worker ended."""
        worker = f"worker {rank.directory.name.removeprefix('rank-')}"
        if rank.exit is None:
            return f"{worker}: its wrapper was killed"
        number = _integer(rank.exit, "signal")
        if number:
            with contextlib.suppress(ValueError):
                return f"{worker} was killed by {signal.Signals(number).name}"
            return f"{worker} was killed by signal {number}"
        return f"{worker} ended with exit code {rank.code}"


def _all_done(reports: list[channel.Report]) -> bool:
    return bool(reports) and all(report.status is channel.WorkerStatus.DONE for report in reports)


def _log_shows_out_of_memory(rank: LocalRank) -> bool:
    with contextlib.suppress(OSError):
        descriptor = channel.open_regular(rank.directory / "stderr.log")
        try:
            start = max(0, os.fstat(descriptor).st_size - TAIL_BYTES)
            return OUT_OF_MEMORY.search(os.pread(descriptor, TAIL_BYTES, start)) is not None
        finally:
            os.close(descriptor)
    return False


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a worker's directory; an empty one if the worker replaced it."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _read_in(directory: int | None, name: str) -> dict[str, Any]:
    """Read a JSON object from a worker's directory; an empty one if the worker replaced it. Raise OSError
    if the file may be there and cannot be read."""
    if directory is None:
        return {}
    try:
        found = channel.read_json_in(directory, name)
    except OSError as error:
        if error.errno not in DONE_BY_WORKERS:
            raise
        return {}
    return found if isinstance(found, dict) else {}


def _integer(record: dict[str, Any], name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int else None


def _moment(record: dict[str, Any], name: str, rebooted: bool) -> float | None:
    """Return a time of a wrapper's record on the clock `since_boot`; after a reboot, the wall clock tells it."""
    value = record.get(name) if rebooted else record.get(f"{name}_uptime")
    if not isinstance(value, int | float) or not abs(value) < LATEST:
        return None
    return since_boot() - (time.time() - value) if rebooted else float(value)


def _latest(moments: Iterable[float | None]) -> float | None:
    """Return the last of some moments; None if one of them is not known."""
    known = list(moments)
    return None if not known or None in known else max(moment for moment in known if moment is not None)


def open_gang(directory: Path, key: GangKey) -> LocalGang | None:
    """Read a gang of an earlier service from its files; None if it was never complete enough to run."""
    record = read_object(directory / GANG_FILE)
    if not record or not (directory / files.GO).exists():
        return None
    try:
        return _gang_of(directory, key, record)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):  # not what the service wrote
        return None


def _gang_of(directory: Path, key: GangKey, record: dict[str, Any]) -> LocalGang:
    slots = tuple(GpuSlot(**slot) for slot in record["slots"])
    gang = LocalGang(key, directory, slots, exclusive=record.get("exclusive", False))
    if type(record["ranks"]) is not int or not 0 < record["ranks"] <= MAX_RANKS:
        raise ValueError("no number of workers")
    first = record.get("first", 0)
    if type(first) is not int or not 0 <= first <= MAX_RANKS:
        raise ValueError("no first rank")
    gang.world_size = int(record.get("world_size", record["ranks"]))
    for number in range(record["ranks"]):
        rank = LocalRank(directory / f"rank-{first + number}")
        with contextlib.suppress(OSError):  # it is looked at again
            rank.refresh()
        gang.ranks.append(rank)
        stop = read_object(rank.directory / files.STOP)
        gang.stop = gang.stop or (str(stop.get("how", "end")) if stop else "")
        request = read_object(rank.directory / files.PAUSE)
        if request:
            gang.paused = bool(request.get("paused")) or bool(gang.paused)
            gang.pause_sequence = max(gang.pause_sequence, int(request.get("sequence", 0)))
    if gang.paused is None and record.get("ahead") is True:
        gang.paused = True
    gang.control = channel.read_control(gang.ranks[0].directory) or gang.control
    failure = read_object(directory / FAILURE_FILE)
    gang.failure, gang.failure_code = str(failure.get("reason", "")), _integer(failure, "code")
    return gang
