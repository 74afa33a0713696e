"""The channel between a worker and the scheduler: two small files in the worker's directory, so that neither waits.

`control.json` carries the scheduler's requests (accumulation, checkpoint, stop); the executor replaces it atomically.
`report` carries the worker's progress; the training library writes it through a memory map, and the executor reads it
at any time. It has two slots that are written in turn, each with a checksum: a reader never sees half a record, and a
worker that is killed during a write loses only that record. Both sides import this module, which has no dependencies.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import stat
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

CONTROL = "control.json"
REPORT = "report"
WATCH = "watch"
"""File in which `carpool.watch` reports for a script that does not use the training library; as `REPORT`."""

ENV_DIRECTORY = "CARPOOL_WORKER_DIR"
"""Variable with the worker's directory, which holds the two files. Unset when a script runs without Carpool."""
ENV_ATTEMPT = "CARPOOL_ATTEMPT"
"""Variable with the number of the attempt. Every report repeats it, so that stale reports are recognised."""
ENV_CHECKPOINTS = "CARPOOL_CHECKPOINT_DIR"
"""Variable with the job's checkpoint directory, the same for all workers of the gang and all attempts."""
ENV_EMULATED = "CARPOOL_EMULATED"
"""Variable with the file that describes the emulated GPUs of the service, if it has such GPUs."""
ENV_CHECK = "CARPOOL_CHECK"
"""Variable with the file for the verdict, set by `carpool check` only. The script ends at its first step."""
ENV_CHECK_OPTIONS = "CARPOOL_CHECK_OPTIONS"
"""Variable with the options of `carpool check`: a JSON object with `accumulation` and `steps`."""
ENV_VERDICT = "CARPOOL_VERDICT"
"""Variable with the file that holds the verdict of an earlier `carpool check` of this job."""

JSON_BYTES = 1 << 20
"""Largest JSON file in a worker's directory that is read."""
EXIT_STOPPED = 75
"""Exit status of a worker that stopped on request and is to be started again (EX_TEMPFAIL)."""


class WorkerStatus(IntEnum):
    """Where a worker is in its life, as its report says."""

    RUNNING = 0
    STOPPED = 1  # on request, after saving
    DONE = 2
    OUT_OF_MEMORY = 3  # gave up; `needs_alone` and `note` say why


class Shrinking(IntEnum):
    """The verdict on splitting this job's batch."""

    UNKNOWN = 0
    CERTIFIED = 1
    WARNED = 2  # the same in distribution, not bit by bit (dropout)
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Control:
    """What the scheduler wants a worker to do."""

    sequence: int = 0
    """Number of the change. The worker's report repeats the last one that it applied."""
    accumulation: int = 1
    checkpoint: int = 0
    """Number of checkpoints requested so far. Increase it by one to request another."""
    stop: bool = False
    """Save a checkpoint at the next step boundary, then exit with `EXIT_STOPPED`."""
    can_shrink: bool | None = None
    """Whether the batch may be split. None: the worker's own verdict decides. True overrides the worker's refusal."""
    pause_s: float = 0.0
    """Wait at the next step boundary, the same for the whole gang, until a later control comes, at most for this many
    seconds; 0: do not wait."""
    resumed: int = 0
    """Number of times that the worker went on after a pause. The step in which it changes does not count for its
    speed."""


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's progress. Sizes are bytes; memory is zero without a GPU."""

    attempt: int = 0
    iteration: int = 0
    """Full-batch iterations done since the job's first start."""
    seconds: float = 0.0
    """Seconds per iteration, a moving average. Zero until it is known."""
    samples_per_second: float = 0.0
    accumulation: int = 1
    peak_memory: int = 0
    """Maximum allocated by tensors since the accumulation last changed."""
    reserved_memory: int = 0
    """Maximum held by the allocator in the same period, without the CUDA context."""
    checkpoint: int = -1
    """The iteration of the last checkpoint; −1 if there is none."""
    checkpoints_taken: int = 0
    """The last `Control.checkpoint` that was applied."""
    control: int = 0
    """The last `Control.sequence` that was applied."""
    time: float = 0.0
    """Wall clock (seconds since the epoch) of this record."""
    out_of_memory: int = 0
    """Number of steps that were repeated with smaller micro-batches."""
    status: WorkerStatus = WorkerStatus.RUNNING
    shrinking: Shrinking = Shrinking.UNKNOWN
    needs_alone: bool = False
    """Whether the worker ran out of memory and may not split its batch, so that it needs a GPU to itself."""
    can_stand: bool = False
    """Whether the worker obeys `Control.pause_s`."""
    standing: bool = False
    """Whether the worker waits at a step boundary, as the control named by `control` asked."""
    note: str = ""
    """One sentence for people, truncated to fit."""
    watched: bool = False
    """Whether `carpool.watch` counts the steps of an unmodified script. Such a worker obeys no control."""
    total: int = 0
    """Number of iterations of the whole job, where its script states it; 0: not known."""


VERSION = 2
"""Version of the report that this release writes. It reads version 1 as well, which lacks `total`."""
RENAMED = {"may_shrink": "can_shrink"}
"""Keys of control files of release 0.1 that have another name now."""
_MAGIC = b"CPR1"
_NOTE_BYTES = 240
_HEAD = struct.Struct("<4sHH")  # magic, version, length of the note
_HOT = struct.Struct("<QQddd")  # serial, then what changes with every step
_REST = struct.Struct(f"<II QQqIII BBBB {_NOTE_BYTES}s")
_CAN_STAND, _STANDING, _WATCHED = 1, 2, 4  # bits of the last byte before the note, which was 0 in release 0.1
_ADDED = struct.Struct("<Q")  # version 2: total
_SEAL = struct.Struct("<I")
_FIRST_BYTES = _HEAD.size + _HOT.size + _REST.size
"""Size of a record of version 1, without its checksum."""
_BODY_BYTES = _FIRST_BYTES + _ADDED.size
_SLOT = 512
assert _BODY_BYTES + _SEAL.size <= _SLOT
_HOT_FIELDS = ("iteration", "seconds", "samples_per_second", "time")
_REST_FIELDS = (
    *("attempt", "accumulation", "peak_memory", "reserved_memory", "checkpoint", "checkpoints_taken"),
    *("control", "out_of_memory"),
)


def open_regular(path: str | os.PathLike[str], directory: int | None = None) -> int:
    """Open a file that another process may have replaced, for reading; raise OSError if it is not a regular file.

    Nothing is followed and nothing is waited for: a link, a FIFO or a device is refused. `directory`: a descriptor of
    the directory that the path starts from.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=directory)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(0, "is not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], limit: int, directory: int | None = None) -> bytes:
    """Return at most the first `limit` bytes of a file that another process may have replaced: see `open_regular`."""
    descriptor = open_regular(path, directory)
    try:
        return os.pread(descriptor, limit, 0)
    finally:
        os.close(descriptor)


def read_json(path: str | os.PathLike[str], limit: int = JSON_BYTES) -> Any:
    """Read a JSON file that another process may have replaced; None if it is missing, too large or not readable."""
    try:
        return read_json_in(None, path, limit)
    except OSError:
        return None


def read_json_in(directory: int | None, path: str | os.PathLike[str], limit: int = JSON_BYTES) -> Any:
    """Read a JSON file as `read_json` does; raise OSError if it cannot be read. `directory`: see `open_regular`."""
    data = read_regular(path, limit + 1, directory)
    try:
        return json.loads(data) if len(data) <= limit else None
    except (ValueError, RecursionError):
        return None


def write_control(directory: str | os.PathLike[str], control: Control) -> None:
    """Replace the control file atomically: a reader sees the old or the new one, never a part."""
    path = Path(directory) / CONTROL
    partial = path.with_name(f".{CONTROL}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(partial, flags, 0o644), "w") as file:
        file.write(json.dumps({"version": 1, **asdict(control)}))
    os.replace(partial, path)


def read_control(directory: str | os.PathLike[str]) -> Control | None:
    """Return the current control, or None if there is no valid one."""
    try:
        return _parse(read_json(Path(directory) / CONTROL))
    except ValueError:
        return None


def _parse(raw: Any) -> Control:
    """Check and convert a control. Unknown keys are ignored, so that a newer scheduler can control an older worker."""
    if not isinstance(raw, dict):
        raise ValueError("control.json must hold an object")
    raw = {RENAMED.get(key, key): value for key, value in raw.items()}
    known = {f.name: raw[f.name] for f in fields(Control) if f.name in raw}
    for name in ("sequence", "accumulation", "checkpoint", "resumed"):
        if name in known and (type(known[name]) is not int or known[name] < 0):
            raise ValueError(f"{name} must be a whole number")
    if known.get("accumulation", 1) < 1:
        raise ValueError("accumulation must be at least 1")
    if not isinstance(known.get("stop", False), bool) or known.get("can_shrink") not in (None, True, False):
        raise ValueError("stop and can_shrink must be true or false")
    if type(known.get("pause_s", 0.0)) not in (int, float) or not known.get("pause_s", 0.0) >= 0.0:
        raise ValueError("pause_s must be a number of seconds")
    return Control(**known)


class ControlReader:
    """Reads `control.json` for a worker: one `fstat` per step, and a parse only when the file was replaced.

    It keeps the file open. A file that was replaced has no name left, which `fstat` shows without a path lookup.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = os.path.join(directory, CONTROL)
        self._descriptor = -1
        self._written = 0
        self._control: Control | None = None

    def read(self) -> Control | None:
        """Return the latest valid control. An unreadable file leaves the previous one in force."""
        try:
            if self._descriptor >= 0:
                stat = os.fstat(self._descriptor)
                if stat.st_nlink and stat.st_mtime_ns == self._written:
                    return self._control
            self._open()
        except OSError:
            pass  # not written yet, or removed
        return self._control

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self.close()
        self._descriptor = descriptor
        stat = os.fstat(descriptor)
        self._written = stat.st_mtime_ns
        data = os.pread(descriptor, JSON_BYTES + 1, 0)
        with contextlib.suppress(ValueError, RecursionError):
            self._control = _parse(json.loads(data) if len(data) <= JSON_BYTES else None)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def pack(report: Report, serial: int) -> bytearray:
    note = report.note.encode("utf-8", "replace")
    if len(note) > _NOTE_BYTES:
        note = note[: _NOTE_BYTES - 3].decode("utf-8", "ignore").encode() + "…".encode()
    record = bytearray(_BODY_BYTES + _SEAL.size)
    _HEAD.pack_into(record, 0, _MAGIC, VERSION, len(note))
    _HOT.pack_into(record, _HEAD.size, serial, *(getattr(report, name) for name in _HOT_FIELDS))
    rest = (getattr(report, name) for name in _REST_FIELDS)
    flags = _CAN_STAND * report.can_stand | _STANDING * report.standing | _WATCHED * report.watched
    last = (report.status, report.shrinking, report.needs_alone, flags, note)
    _REST.pack_into(record, _HEAD.size + _HOT.size, *rest, *last)
    _ADDED.pack_into(record, _FIRST_BYTES, report.total)
    _SEAL.pack_into(record, _BODY_BYTES, zlib.crc32(memoryview(record)[:_BODY_BYTES]))
    return record


def _unpack(slot: bytes) -> tuple[int, Report] | None:
    if len(slot) < _BODY_BYTES + _SEAL.size:
        return None
    magic, version, length = _HEAD.unpack_from(slot)
    if magic != _MAGIC or version not in (1, VERSION):
        return None
    size = _FIRST_BYTES if version == 1 else _BODY_BYTES
    body = slot[:size]
    if _SEAL.unpack_from(slot, size)[0] != zlib.crc32(body):
        return None
    serial, *hot = _HOT.unpack_from(body, _HEAD.size)
    hot = [value if math.isfinite(value) else 0.0 for value in hot]
    *rest, status, shrinking, needs_alone, flags, note = _REST.unpack_from(body, _HEAD.size + _HOT.size)
    report = Report(
        **dict(zip(_HOT_FIELDS, hot, strict=True)),
        **dict(zip(_REST_FIELDS, rest, strict=True)),
        status=_member(WorkerStatus, status, WorkerStatus.RUNNING),
        shrinking=_member(Shrinking, shrinking, Shrinking.UNKNOWN),
        needs_alone=bool(needs_alone),
        can_stand=bool(flags & _CAN_STAND),
        standing=bool(flags & _STANDING),
        note=note[:length].decode("utf-8", "replace"),
        watched=bool(flags & _WATCHED),
        total=0 if version == 1 else _ADDED.unpack_from(body, _FIRST_BYTES)[0],
    )
    return serial, report


_Member = TypeVar("_Member", bound=IntEnum)


def _member(kind: type[_Member], value: int, neutral: _Member) -> _Member:
    """Return a member of an enumeration; the neutral one for a value that a later release or a mistake wrote."""
    try:
        return kind(value)
    except ValueError:
        return neutral


class ReportWriter:
    """Writes `report` for a worker. `write` copies a few hundred bytes into memory and never waits for a disk."""

    def __init__(self, directory: str | os.PathLike[str], name: str = REPORT) -> None:
        path = os.path.join(directory, name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < 2 * _SLOT:
                os.truncate(descriptor, 2 * _SLOT)
            self._map = mmap.mmap(descriptor, 2 * _SLOT)
        finally:
            os.close(descriptor)
        # A restart in the same directory continues the serial numbers, so that its first record replaces the old ones.
        latest = _latest(self._map[:])
        self._serial = latest[0] if latest else 0
        self._record = pack(Report(), 0)
        self._body = memoryview(self._record)[:_BODY_BYTES]

    def write(self, report: Report) -> None:
        """Write a whole record."""
        self._record[:] = pack(report, self._serial + 1)
        self._publish()

    def progress(self, iteration: int, seconds: float, samples_per_second: float, time: float) -> None:
        """Write the last record again with new progress, at a third of the cost of a whole record."""
        _HOT.pack_into(self._record, _HEAD.size, self._serial + 1, iteration, seconds, samples_per_second, time)
        _SEAL.pack_into(self._record, _BODY_BYTES, zlib.crc32(self._body))
        self._publish()

    def _publish(self) -> None:
        self._serial += 1
        start = _SLOT * (self._serial % 2)
        self._map[start : start + _BODY_BYTES + _SEAL.size] = self._record

    def close(self) -> None:
        self._map.close()


def _latest(data: bytes) -> tuple[int, Report] | None:
    slots = [found for start in (0, _SLOT) if (found := _unpack(data[start : start + _SLOT]))]
    return max(slots, key=lambda found: found[0], default=None)


def read_report(directory: str | os.PathLike[str]) -> Report | None:
    """Return the newest complete record, or None if the worker has not written one yet.

    What the training library reports counts more than what is watched from outside.
    """
    return _read(Path(directory) / REPORT) or _read(Path(directory) / WATCH)


def is_watched(directory: str | os.PathLike[str]) -> bool:
    """Return whether a process of the worker has imported PyTorch and is watched, whether or not it made a step."""
    return (Path(directory) / WATCH).exists()


def _read(path: Path) -> Report | None:
    for _ in range(3):  # both slots torn at once needs two writes during one read; try again
        try:
            found = _latest(read_regular(path, 2 * _SLOT))
        except OSError:
            return None
        if found:
            return found[1]
    return None
