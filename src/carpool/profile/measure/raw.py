"""The raw file of `carpool profile`: one line per measurement, appended at once, so that a call can be resumed.

The first line names the GPU, the driver and the date. A line with `command` records what was run as a task, one with
`memory_limit` whether MPS enforces a client's memory limit. All other lines are measurements: a mechanism, and the
iteration time of every job that ran together. `session.py` writes the file, `conclude.py` fits a profile to it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from carpool.fields import NotReadable, read_json_text
from carpool.profile.fields import ProfileError, ProfileFields

VERSION = 3
"""Version of the file. Version 1 did not record what was run, version 2 not which GPU of its kind."""
MECHANISMS = ("mps", "time-slicing", "unknown")


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One job as it ran: `batch` samples an iteration, in `accumulation` micro-batches."""

    task: str
    batch: int
    accumulation: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """The speed and memory of a job in one window."""

    setting: Setting
    iter_s: float
    error: float
    """Half-width of the window's 95 % confidence interval, relative to `iter_s`."""
    iterations: int
    peak_bytes: int | None = None
    """Maximum bytes held by tensors, without the context; None without a GPU."""
    context_bytes: int | None = None
    """Bytes that the process holds according to the driver, minus those of its allocator."""


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """A measurement to make: jobs that run together under a mechanism, for the `run`-th time."""

    mechanism: str
    settings: tuple[Setting, ...]
    run: int = 0

    def same(self, other: "MeasurementRequest") -> bool:
        together = sorted(self.settings) == sorted(other.settings)
        return together and (self.mechanism, self.run) == (other.mechanism, other.run)


@dataclass(frozen=True, slots=True)
class Measurement:
    request: MeasurementRequest
    samples: tuple[Sample, ...]
    seconds: float
    """Length of the window."""
    series: int = 0
    """Number of the series: measurements of one machine in one session, whose times can be compared closely."""


def tasks_of(measurements: Iterable[Measurement]) -> set[str]:
    return {setting.task for done in measurements for setting in done.request.settings}


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """The machine and date of the measurements."""

    gpu: str
    memory_bytes: int | None
    driver: str | None
    date: str
    software: str
    uuid: str | None = None
    """UUID of the GPU; None for merged profiles, older files and CPUs."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The command that was run as a task."""

    command: tuple[str, ...]
    script: str | None = None
    """Path of the script in the command; None for a command without one, such as `python -m train`."""
    sha256: str | None = None
    """Hash of the script's contents."""

    @classmethod
    def of(cls, command: Sequence[str]) -> "Origin":
        words = [word for word in command if word.endswith((".py", ".sh"))] + [command[0]]
        for word in words:
            try:
                contents = Path(word).read_bytes()
            except OSError:
                continue
            if word != command[0] or contents.startswith(b"#!"):
                return cls(tuple(command), word, hashlib.sha256(contents).hexdigest())
        return cls(tuple(command))

    def same(self, other: "Origin") -> bool:
        """Return whether it is the same script with the same arguments, wherever script and interpreter are."""
        return self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        first, *rest = ("" if word == self.script else word for word in self.command)
        return (Path(first).name, *rest, self.sha256)


@dataclass(slots=True)
class Contents:
    """The contents of a raw file."""

    machine: MeasuredMachine
    measurements: list[Measurement]
    origins: dict[str, Origin] = field(default_factory=dict)
    """Commands by task; empty for older files."""
    memory_limit: bool | None = None
    """Whether MPS enforced a client's memory limit; None if that was not tried."""


class RawFile:
    """Measurements of one GPU on disk. Opening it reads the existing ones; `add` appends.

    `origins` gives the command of each task; a file that measured a task with another command is refused. Tasks whose
    command an older file did not record are listed in `unsure`.
    """

    def __init__(self, path: str | Path, machine: MeasuredMachine, origins: Mapping[str, Origin] | None = None) -> None:
        self.path = Path(path)
        self._origins = dict(origins or {})
        self._known: dict[str, Origin] = {}
        self.unsure: list[str] = []
        self.machine = machine
        self.measurements: list[Measurement] = []
        self.memory_limit: bool | None = None
        if _begun(self.path):
            self._take_up(read(self.path))
            _cut_torn_line(self.path)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"version": VERSION, **asdict(machine)}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"{path}: cannot write there ({error.strerror}); give another --state") from None

    def has(self, request: MeasurementRequest) -> bool:
        """Return whether the request was measured, in any order of its jobs."""
        return any(done.request.same(request) for done in self.measurements)

    def add(self, done: Measurement) -> None:
        """Append a measurement, rounded as in the file, so that a later fit of the file gives the same profile."""
        rounded = measurement(ProfileFields(plain(done), str(self.path)))
        lines = [json.dumps(plain(done))]
        for task in sorted({setting.task for setting in done.request.settings}):
            if task in self._origins and task not in self._known:
                self._known[task] = self._origins[task]
                lines.insert(0, json.dumps({"task": task, **asdict(self._origins[task])}))
        self._append(lines)
        self.measurements.append(rounded)

    def keep_memory_limit(self, holds: bool) -> None:
        self._append([json.dumps({"memory_limit": holds})])
        self.memory_limit = holds

    def _append(self, lines: Iterable[str]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def _take_up(self, found: Contents) -> None:
        if found.machine.gpu != self.machine.gpu:
            raise ProfileError(
                f"{self.path}: measured on {found.machine.gpu}, and this is {self.machine.gpu}; give another --state"
            )
        there, here = found.machine.uuid, self.machine.uuid
        if there is not None and here is not None and there != here:
            raise ProfileError(
                f"{self.path}: measured on another {self.machine.gpu} ({there}), and times alone of this one ({here}) "
                "may differ; give another --state, and make one profile of both with `carpool profiles merge`"
            )
        for task in sorted(tasks_of(found.measurements) & set(self._origins)):
            before, now = found.origins.get(task), self._origins[task]
            if before is None:
                self.unsure.append(task)
            elif not before.same(now):
                raise ProfileError(
                    f"{self.path}: {task} was measured there as {_difference(before, now)}; give another --name or "
                    "--state, or remove the file"
                )
            else:
                self._known[task] = before
        self.machine, self.measurements, self.memory_limit = found.machine, found.measurements, found.memory_limit


def _difference(before: Origin, now: Origin) -> str:
    if before.sha256 != now.sha256 and before.command == now.command:
        return f"{before.script}, which has changed since"
    return f"`{' '.join(before.command)}`, and this is `{' '.join(now.command)}`"


def _begun(path: Path) -> bool:
    """Return whether the file has more than a first line that a crash truncated."""
    try:
        start = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read as measurements ({error}); give another file") from None
    return b"\n" in start or not b'{"version": '.startswith(start[:12])


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line left by a crash, so that the next line does not continue it."""
    contents = path.read_bytes()
    whole = contents.rfind(b"\n") + 1
    if whole < len(contents):
        try:
            os.truncate(path, whole)
        except OSError as error:
            raise ProfileError(f"{path}: cannot write there ({error.strerror}); give another --state") from None


def read(path: str | Path) -> Contents:
    """Read a raw file without an incomplete last line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read as measurements ({error}); give another file") from None
    header = ProfileFields(_json(lines[0], path, 1), str(path), "line 1")
    if header.whole("version", 1) > VERSION:
        header.fail("version", f"newer than this Carpool reads ({VERSION}); upgrade Carpool")
    machine = MeasuredMachine(
        gpu=header.text("gpu"),
        memory_bytes=header.maybe("memory_bytes", lambda key: header.whole(key, 1)),
        driver=header.maybe("driver", header.text),
        date=header.text("date"),
        software=header.text("software"),
        uuid=header.maybe("uuid", header.text),
    )
    header.done()
    found = Contents(machine, [])
    for number, line in enumerate(lines[1:-1], 2):  # after the last newline there is nothing, or an incomplete line
        fields = ProfileFields(_json(line, path, number), str(path), f"line {number}")
        if "command" in fields:
            found.origins.update([_origin(fields)])
        elif "memory_limit" in fields:
            found.memory_limit = fields.flag("memory_limit")
            fields.done()
        else:
            found.measurements.append(measurement(fields))
    return found


def _origin(f: ProfileFields) -> tuple[str, Origin]:
    origin = Origin(f.texts("command"), f.maybe("script", f.text), f.maybe("sha256", f.text))
    task = f.text("task")
    f.done()
    if not origin.command:
        f.fail("command", "empty; remove the line")
    return task, origin


def _json(line: str, path: str | Path, number: int) -> Any:
    try:
        return read_json_text(line)
    except NotReadable:
        raise ProfileError(f"{path}: line {number}: not a measurement; remove the line, or give another file") from None


def plain(done: Measurement) -> dict[str, Any]:
    """Convert a measurement to short JSON for the raw file and the profile. Memory is stored for jobs alone only."""
    jobs = []
    for sample in done.samples:
        job: dict[str, Any] = {"task": sample.setting.task, "batch": sample.setting.batch}
        if sample.setting.accumulation > 1:
            job["accumulation"] = sample.setting.accumulation
        job |= {
            "iter_s": float(f"{sample.iter_s:.5g}"),
            "error": float(f"{sample.error:.2g}"),
            "iterations": sample.iterations,
        }
        for key in ("peak_bytes", "context_bytes"):
            if len(done.samples) == 1 and getattr(sample, key) is not None:
                job[key] = getattr(sample, key)
        jobs.append(job)
    series = {"series": done.series} if done.series else {}
    head = {"mechanism": done.request.mechanism, **series, "run": done.request.run}
    return {**head, "seconds": round(done.seconds, 2), "jobs": jobs}


def measurement(f: ProfileFields) -> Measurement:
    """Parse what `plain` wrote."""
    samples = tuple(_sample(job) for job in f.children("jobs"))
    mechanism = f.text("mechanism")
    if mechanism not in MECHANISMS:
        f.fail("mechanism", f"unknown {mechanism!r}; give {', '.join(MECHANISMS)}")
    request = MeasurementRequest(mechanism, tuple(sample.setting for sample in samples), f.whole("run", 0))
    done = Measurement(request, samples, f.number("seconds", 0), f.whole("series", 0, default=0))
    f.done()
    if not samples:
        f.fail("jobs", "empty; remove the measurement")
    return done


def _sample(f: ProfileFields) -> Sample:
    sample = Sample(
        Setting(
            f.text("task"), f.whole("batch", 1), f.whole("accumulation", 1, default=f.whole("accum", 1, default=1))
        ),
        iter_s=f.number("iter_s", 0),
        error=f.number("error", 0),
        iterations=f.whole("iterations", 1),
        peak_bytes=f.maybe("peak_bytes", lambda key: f.whole(key, 0)),
        context_bytes=f.maybe("context_bytes", lambda key: f.whole(key, 0)),
    )
    f.done()
    if sample.iter_s == 0:
        f.fail("iter_s", "0 s; measure it again")
    return sample
