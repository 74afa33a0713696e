"""The raw file of a measurement: one line for each, appended as it is made, so that a broken-off call can be resumed.

The first line names the GPU, the driver and the date; all others hold one measurement: a mechanism, and the time of an
iteration for every job that ran together. `session.py` writes it, `conclude.py` fits to it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from carpool.profile.fields import Fields, ProfileError

VERSION = 1


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One job as it ran: `batch` samples an iteration, in `accum` micro-batches."""

    task: str
    batch: int
    accum: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """How fast a job ran in one window, and what memory it held."""

    setting: Setting
    iter_s: float
    error: float
    """Half the width of the 95 % confidence interval, relative to `iter_s`; of this window, not of a repetition."""
    iterations: int
    peak_bytes: int | None = None
    """By tensors, at most, without the context; None without a GPU."""
    context_bytes: int | None = None
    """What the driver says the process holds, beyond what its allocator does."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured: jobs that run together under a mechanism, for the `run`-th time."""

    mechanism: str
    settings: tuple[Setting, ...]
    run: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    wish: Wish
    samples: tuple[Sample, ...]
    seconds: float
    """How long the window was."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when it was measured."""

    gpu: str
    memory_bytes: int | None
    driver: str | None
    date: str
    software: str


class RawFile:
    """Measurements of one GPU on disk. Opening it reads what is there; `add` appends."""

    def __init__(self, path: str | Path, machine: Machine) -> None:
        self.path = Path(path)
        self.machine = machine
        self.measurements: list[Measurement] = []
        if self.path.exists() and self.path.stat().st_size:
            self.machine, self.measurements = read(self.path)
            if self.machine.gpu != machine.gpu:
                raise ProfileError(
                    f"{path}: measured on {self.machine.gpu}, and this is {machine.gpu}; give another --state"
                )
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"version": VERSION, **asdict(machine)}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"{path}: cannot write there ({error.strerror}); give another --state") from None

    def has(self, wish: Wish) -> bool:
        return any(done.wish == wish for done in self.measurements)

    def add(self, done: Measurement) -> None:
        """Keep it, rounded as the file has it: a later fit of the file gives the very same profile."""
        self.measurements.append(measurement(Fields(plain(done), str(self.path))))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(done)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: str | Path) -> tuple[Machine, list[Measurement]]:
    """A raw file; a last line that was cut off by a crash is left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read as measurements ({error}); give another file") from None
    header = Fields(_json(lines[0], path, 1), str(path), "line 1")
    if header.whole("version", 1) > VERSION:
        header.fail("version", f"newer than this Carpool reads ({VERSION}); upgrade Carpool")
    machine = Machine(
        gpu=header.text("gpu"),
        memory_bytes=header.maybe("memory_bytes", lambda key: header.whole(key, 1)),
        driver=header.maybe("driver", header.text),
        date=header.text("date"),
        software=header.text("software"),
    )
    header.done()
    whole = lines[1:-1]  # what follows the last newline is nothing, or a line that was cut off
    return machine, [
        measurement(Fields(_json(line, path, n), str(path), f"line {n}")) for n, line in enumerate(whole, 2)
    ]


def _json(line: str, path: str | Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ProfileError(f"{path}: line {number}: not a measurement; remove the line, or give another file") from None


def plain(done: Measurement) -> dict[str, Any]:
    """As it stands in the raw file and in a profile: short, since there are hundreds. Memory is told alone."""
    jobs = []
    for sample in done.samples:
        job: dict[str, Any] = {"task": sample.setting.task, "batch": sample.setting.batch}
        if sample.setting.accum > 1:
            job["accum"] = sample.setting.accum
        job |= {
            "iter_s": float(f"{sample.iter_s:.5g}"),
            "error": float(f"{sample.error:.2g}"),
            "iterations": sample.iterations,
        }
        for key in ("peak_bytes", "context_bytes"):
            if len(done.samples) == 1 and getattr(sample, key) is not None:
                job[key] = getattr(sample, key)
        jobs.append(job)
    return {"mechanism": done.wish.mechanism, "run": done.wish.run, "seconds": round(done.seconds, 2), "jobs": jobs}


def measurement(f: Fields) -> Measurement:
    """The reverse of `plain`."""
    samples = tuple(_sample(job) for job in f.children("jobs"))
    wish = Wish(f.text("mechanism"), tuple(sample.setting for sample in samples), f.whole("run", 0))
    done = Measurement(wish, samples, f.number("seconds", 0))
    f.done()
    if not samples:
        f.fail("jobs", "nobody ran; remove the measurement")
    return done


def _sample(f: Fields) -> Sample:
    sample = Sample(
        Setting(f.text("task"), f.whole("batch", 1), f.whole("accum", 1, default=1)),
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
