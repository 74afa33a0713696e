"""The channel between a worker and the scheduler: two small files in the worker's directory, so that neither waits.

`control.json` carries what the scheduler wants (accumulation, checkpoint, stop); the executor replaces it atomically.
`report` carries what the worker does; the training library writes it through a memory map, the executor reads it at
leisure. It holds two slots that are written in turn, each sealed by a checksum: a reader never sees half a record, and
a worker killed in mid-write loses that record only. Both sides import this module; it depends on nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

CONTROL = "control.json"
REPORT = "report"

ENV_DIRECTORY = "CARPOOL_WORKER_DIR"
"""The worker's directory, which holds the two files. Unset: the script runs without Carpool."""
ENV_ATTEMPT = "CARPOOL_ATTEMPT"
"""Which start of the job this is; it comes back in every report, so that a stale one is harmless."""
ENV_CHECKPOINTS = "CARPOOL_CHECKPOINT_DIR"
"""The job's directory for checkpoints, the same for every worker of the gang and for every attempt."""
ENV_CHECK = "CARPOOL_CHECK"
"""Set by `carpool check` only: the file into which the verdict goes; the script ends at its first step."""
ENV_CHECK_OPTIONS = "CARPOOL_CHECK_OPTIONS"
"""With it: a JSON object with `accumulation` and `steps`."""
ENV_VERDICT = "CARPOOL_VERDICT"
"""The file with the verdict that an earlier check gave this job."""

EXIT_STOPPED = 75
"""Exit status of a worker that stopped on request and wants to be run again (EX_TEMPFAIL)."""


class State(IntEnum):
    RUNNING = 0
    STOPPED = 1  # on request, after saving
    DONE = 2
    OUT_OF_MEMORY = 3  # gave up; `needs_alone` and `note` say what it wants


class Shrinking(IntEnum):
    """The verdict on splitting this job's batch."""

    UNKNOWN = 0
    CERTIFIED = 1
    WARNED = 2  # the same in distribution, not bit by bit (dropout)
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Control:
    """What the scheduler wants of a worker."""

    sequence: int = 0
    """Grows by one with every change; the worker's report repeats the last one it obeyed."""
    accumulation: int = 1
    checkpoint: int = 0
    """The number of checkpoints asked for so far: raise it by one to ask for another."""
    stop: bool = False
    """Save a checkpoint at the next step boundary, then exit with `EXIT_STOPPED`."""
    may_shrink: bool | None = None
    """May the batch be split? None: the worker goes by its own verdict. True overrides a refusal: the owner said so."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker does. Sizes are bytes; memory is zero where there is no GPU."""

    attempt: int = 0
    iteration: int = 0
    """Full-batch iterations done since the job's first start."""
    seconds: float = 0.0
    """Per iteration, a moving average; zero until it is known."""
    samples_per_second: float = 0.0
    accumulation: int = 1
    peak_memory: int = 0
    """Allocated by tensors, at most, since the accumulation last changed."""
    reserved_memory: int = 0
    """Held by the allocator, at most, over the same time; the CUDA context comes on top."""
    checkpoint: int = -1
    """The iteration of the last checkpoint; −1 if there is none."""
    checkpoints_taken: int = 0
    """The last `Control.checkpoint` that was obeyed."""
    control: int = 0
    """The last `Control.sequence` that was obeyed."""
    time: float = 0.0
    """Wall clock (seconds since the epoch) of this record."""
    out_of_memory: int = 0
    """How often a step was repeated with smaller micro-batches."""
    state: State = State.RUNNING
    shrinking: Shrinking = Shrinking.UNKNOWN
    needs_alone: bool = False
    """It ran out of memory and may not shrink: give it a GPU of its own."""
    note: str = ""
    """One sentence for people, cut to fit."""


VERSION = 1
_MAGIC = b"CPR1"
_NOTE_BYTES = 240
_HEAD = struct.Struct("<4sHH")  # magic, version, length of the note
_HOT = struct.Struct("<QQddd")  # serial, then what changes with every step
_REST = struct.Struct(f"<II QQqIII BBBx {_NOTE_BYTES}s")
_SEAL = struct.Struct("<I")
_BODY_BYTES = _HEAD.size + _HOT.size + _REST.size
_SLOT = 512
assert _BODY_BYTES + _SEAL.size <= _SLOT
_HOT_FIELDS = ("iteration", "seconds", "samples_per_second", "time")
_REST_FIELDS = (
    *("attempt", "accumulation", "peak_memory", "reserved_memory", "checkpoint", "checkpoints_taken"),
    *("control", "out_of_memory"),
)


def write_control(directory: str | os.PathLike[str], control: Control) -> None:
    """Replace the control file atomically: a reader sees the old or the new one, never a part."""
    path = Path(directory) / CONTROL
    partial = path.with_name(f".{CONTROL}.{os.getpid()}")
    partial.write_text(json.dumps({"version": VERSION, **asdict(control)}))
    os.replace(partial, path)


def read_control(directory: str | os.PathLike[str]) -> Control | None:
    """The present control, or None if there is none that can be understood."""
    try:
        return _parse(json.loads((Path(directory) / CONTROL).read_text()))
    except (OSError, ValueError):
        return None


def _parse(raw: Any) -> Control:
    """Unknown keys are ignored, so that a newer scheduler can talk to an older worker."""
    if not isinstance(raw, dict):
        raise ValueError("control.json must hold an object")
    known = {f.name: raw[f.name] for f in fields(Control) if f.name in raw}
    for name in ("sequence", "accumulation", "checkpoint"):
        if name in known and (type(known[name]) is not int or known[name] < 0):
            raise ValueError(f"{name} must be a whole number")
    if known.get("accumulation", 1) < 1:
        raise ValueError("accumulation must be at least 1")
    if not isinstance(known.get("stop", False), bool) or known.get("may_shrink") not in (None, True, False):
        raise ValueError("stop and may_shrink must be true or false")
    return Control(**known)


class ControlReader:
    """The worker's eye on `control.json`: one `fstat` a step, a parse only when the file was replaced.

    It keeps the file open; a file that was replaced has no name left, which `fstat` tells without looking up a path.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = os.path.join(directory, CONTROL)
        self._descriptor = -1
        self._written = 0
        self._control: Control | None = None

    def read(self) -> Control | None:
        """The latest control that could be read; an unreadable one leaves the previous in force."""
        try:
            if self._descriptor >= 0:
                stat = os.fstat(self._descriptor)
                if stat.st_nlink and stat.st_mtime_ns == self._written:
                    return self._control
            self._open()
        except OSError:
            pass  # not there (yet, or any more)
        return self._control

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self.close()
        self._descriptor = descriptor
        stat = os.fstat(descriptor)
        self._written = stat.st_mtime_ns
        with contextlib.suppress(ValueError):
            self._control = _parse(json.loads(os.pread(descriptor, stat.st_size, 0)))

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
    _REST.pack_into(record, _HEAD.size + _HOT.size, *rest, report.state, report.shrinking, report.needs_alone, note)
    _SEAL.pack_into(record, _BODY_BYTES, zlib.crc32(memoryview(record)[:_BODY_BYTES]))
    return record


def _unpack(slot: bytes) -> tuple[int, Report] | None:
    body, seal = slot[:_BODY_BYTES], slot[_BODY_BYTES : _BODY_BYTES + _SEAL.size]
    if len(seal) < _SEAL.size or _SEAL.unpack(seal)[0] != zlib.crc32(body):
        return None
    magic, version, length = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != VERSION:
        return None
    serial, *hot = _HOT.unpack_from(body, _HEAD.size)
    *rest, state, shrinking, needs_alone, note = _REST.unpack_from(body, _HEAD.size + _HOT.size)
    report = Report(
        **dict(zip(_HOT_FIELDS, hot, strict=True)),
        **dict(zip(_REST_FIELDS, rest, strict=True)),
        state=State(state),
        shrinking=Shrinking(shrinking),
        needs_alone=bool(needs_alone),
        note=note[:length].decode("utf-8", "replace"),
    )
    return serial, report


class ReportWriter:
    """The worker's side of `report`. `write` copies a few hundred bytes into memory; it never waits for a disk."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = os.path.join(directory, REPORT)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < 2 * _SLOT:
                os.truncate(descriptor, 2 * _SLOT)
            self._map = mmap.mmap(descriptor, 2 * _SLOT)
        finally:
            os.close(descriptor)
        # A restart in the same directory goes on counting, so that its first record beats the old ones.
        latest = _latest(self._map[:])
        self._serial = latest[0] if latest else 0
        self._record = pack(Report(), 0)
        self._body = memoryview(self._record)[:_BODY_BYTES]

    def write(self, report: Report) -> None:
        """A whole new record."""
        self._record[:] = pack(report, self._serial + 1)
        self._publish()

    def progress(self, iteration: int, seconds: float, samples_per_second: float, time: float) -> None:
        """The last record again, one step further: a third of the cost of a whole one."""
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
    """The newest whole record, or None if the worker has not written one yet."""
    path = Path(directory) / REPORT
    for _ in range(3):  # both slots torn at once needs two writes during one read; try again
        try:
            found = _latest(path.read_bytes())
        except OSError:
            return None
        if found:
            return found[1]
    return None
