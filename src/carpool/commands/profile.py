"""`carpool profile`: measure trainings on this machine's GPU, alone and beside each other, and write a profile."""

import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from carpool import __version__
from carpool.errors import InputError, nearest
from carpool.gpu import mps, nvml
from carpool.profile.fields import ProfileError
from carpool.profile.measure import examples
from carpool.profile.measure.conclude import Naming, conclude
from carpool.profile.measure.plan import MPS, TIME_SLICING, Scope, TaskSource, plan
from carpool.profile.measure.pool import Pool
from carpool.profile.measure.raw import Contents, MeasuredMachine, Measurement, Origin, RawFile, Setting, read, tasks_of
from carpool.profile.measure.session import MeasuredGpu, MechanismEnvironment, Session, SessionResult
from carpool.profile.measure.timing import Windows
from carpool.profile.measure.worker import ENDLESS, WorkerError
from carpool.profile.schema import dumps, save
from carpool.report.progress import waiting


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--example", "example", multiple=True, metavar="NAME[:BATCHES]", help="Measure one of the examples.")
@click.option("--with", "mates", multiple=True, metavar="NAME[:BATCHES]", help="Example to run beside the others.")
@click.option("--task", help="Name of COMMAND's task.  [default: that of its script]")
@click.option("--batch", "batches", help="Batches for COMMAND, such as 16,64; needs --batch-option.")
@click.option("--batch-option", help="Option of COMMAND that takes the batch, such as --batch-size.")
@click.option("--accumulation", default="2,4", show_default=True, help="Accumulations to measure besides 1.")
@click.option(
    "--mechanism",
    "mechanisms",
    multiple=True,
    type=click.Choice([MPS, TIME_SLICING]),
    help="Sharing mechanism to measure.  [default: both]",
)
@click.option("--solo", is_flag=True, help="Measure each training alone only.")
@click.option("--across/--no-across", default=True, help="Measure pairs of different batches.  [default: yes]")
@click.option(
    "--groups",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Number of groups of three and of four jobs to measure under MPS.",
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    help="Number of pairs per phase to measure twice.",
)
@click.option("--alone", multiple=True, metavar="NAME:BATCHES", help="More batches of a task to measure alone.")
@click.option(
    "--at-once",
    type=click.IntRange(1),
    help="Maximum number of processes at a time, most of them paused.  [default: all of a phase]",
)
@click.option("--gpu", "which", help="Index or UUID of the GPU.  [default: the first]")
@click.option("--cpu", is_flag=True, help="Measure on the CPU, without a GPU.")
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    help="Stop after this many minutes; the same command resumes. 0: only fit what was measured.",
)
@click.option(
    "--precision",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Relative error, in per cent, at which a measurement ends.",
)
@click.option("--window", default="1.2,3", show_default=True, help="Shortest and longest window in seconds.")
@click.option("--examples", "scripts", type=click.Path(file_okay=False), help="Folder of the example scripts.")
@click.option("--name", help="Name of the profile.  [default: that of the task]")
@click.option("--description", default="", help="Description to keep in the profile.")
@click.option(
    "--batch-norm", multiple=True, metavar="TASK", help="Task with BatchNorm, whose training accumulation changes."
)
@click.option("--note", multiple=True, help="Remark to keep in the file.")
@click.option("--out", metavar="FILE", help="File for the profile.  [default: NAME.json]")
@click.option(
    "--state", metavar="FILE", help="File of raw measurements, from which a call resumes.  [default: NAME.raw.jsonl]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def profile(as_json: bool, **options: Any) -> None:
    """Measure training on this machine's GPU and write a profile.

    COMMAND is a training script that uses carpool.train. Examples can be measured instead of it, or beside it. Every
    process is started once and timed alone, then beside the others, under time-slicing and under MPS. Measurements are
    kept, and the same call resumes where the last one stopped.
    """
    asked = ProfileOptions(**options)
    name, outcome = asked.name, SessionResult()
    if asked.minutes == 0:
        if name is None:
            raise InputError("--minutes 0 only fits what was measured before; say with --name what")
        state = asked.state or f"{name}.raw.jsonl"
        known: Contents | RawFile = read(state)
        asked.check_batch_norm(tasks_of(known.measurements))
    else:
        gpu = asked.gpu()
        sources = asked.sources(gpu)
        job = _Job(gpu, sources, asked.scope(gpu.device is not None), asked.windows(), asked.at_once)
        _check(job)
        name = name or sources[0].task
        state = asked.state or f"{name}.raw.jsonl"
        known = raw = RawFile(state, _machine(gpu), {source.task: Origin.of(source.command) for source in sources})
        asked.check_batch_norm({source.task for source in sources} | tasks_of(raw.measurements))
        for task in raw.unsure:
            click.echo(f"{state}: does not say what was measured as {task}; taken to be this command", err=True)
        with _reporting_what_is_kept(raw):
            outcome = _measure(job, raw, asked.minutes, quiet=as_json)
    measurements = known.measurements
    for problem in outcome.problems:
        click.echo(f"left out: {problem}", err=True)
    if not measurements:
        raise InputError(outcome.problems[0] if outcome.problems else "nothing was measured; give more --minutes")
    notes = (*asked.note, *_remarks(known.memory_limit))
    naming = Naming(name, asked.description, _batch_norm(asked, measurements), notes)
    try:
        found = conclude(known.machine, measurements, naming)
    except ProfileError as error:
        if outcome.left <= 0:
            raise
        kept = (
            f"{len(measurements)} measurements are kept in {state}, and the same call resumes with {outcome.left} more"
        )
        raise InputError(f"{error}; {kept}") from None
    out = asked.out or f"{name}.json"
    save(found, out)
    if as_json:
        click.echo(dumps(found), nl=False)
        return
    from carpool.commands.profiles import show

    show(found)
    left = f"; {outcome.left} left for the next call" if outcome.left > 0 else ""
    click.echo(f"\nwrote {out}; {len(measurements)} measurements in {state}{left}")


def _batch_norm(asked: "ProfileOptions", measurements: Sequence[Measurement]) -> tuple[str, ...]:
    tasks = tasks_of(measurements)
    return asked.batch_norm or tuple(task for task in examples.BATCH_NORM if task in tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of the command, checked when they are used."""

    example: tuple[str, ...]
    mates: tuple[str, ...]
    task: str | None
    batches: str | None
    batch_option: str | None
    accumulation: str
    mechanisms: tuple[str, ...]
    solo: bool
    across: bool
    groups: int
    repeats: int
    alone: tuple[str, ...]
    at_once: int | None
    which: str | None
    cpu: bool
    minutes: float | None
    precision: float
    window: str
    scripts: str | None
    name: str | None
    description: str
    batch_norm: tuple[str, ...]
    note: tuple[str, ...]
    out: str | None
    state: str | None
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        for option, value in (("--minutes", self.minutes), ("--precision", self.precision)):
            if value is not None and not math.isfinite(value):
                raise InputError(f"{option} {value}: give a finite number")

    def check_batch_norm(self, tasks: Collection[str]) -> None:
        for task in self.batch_norm:
            if task not in tasks:
                raise InputError(f"--batch-norm {task}: not among the tasks that are measured; {nearest(task, tasks)}")

    def gpu(self) -> MeasuredGpu:
        if self.cpu:
            return MeasuredGpu(None)
        devices = nvml.devices()
        if not devices:
            raise InputError("no GPU was found (is nvidia-ml-py installed?); --cpu measures on the processor")
        if self.which is None:
            return MeasuredGpu(devices[0])
        for device in devices:
            if self.which in (str(device.index), device.uuid):
                return MeasuredGpu(device)
        raise InputError(f"--gpu {self.which}: no such GPU; there are {', '.join(str(d.index) for d in devices)}")

    def sources(self, gpu: MeasuredGpu) -> list[TaskSource]:
        on_gpu = gpu.device is not None
        found = [self._own()] if self.command else []
        if self.example or self.mates:
            if any(text.partition(":")[0] == own.task for own in found for text in self.mates):
                raise InputError(
                    f"--with {found[0].task}: COMMAND's task has that name, too; give it another with --task"
                )
            scripts = examples.folder(self.scripts)
            found += [examples.source(text, scripts, sys.executable, on_gpu) for text in self.example]
            known = {source.task for source in found}
            mates = [examples.source(text, scripts, sys.executable, on_gpu, mate_only=True) for text in self.mates]
            found += [mate for mate in mates if mate.task not in known]
        if not found:
            raise InputError("nothing to measure; give -- and a training command, or --example bert")
        names = [source.task for source in found]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{name}: given twice; list its batches together, as {name}:12,64")
        return found

    def _own(self) -> TaskSource:
        if self.batches and not self.batch_option:
            raise InputError("--batch: say with --batch-option how COMMAND takes it, as --batch-size")
        script = next((Path(word).stem for word in self.command if word.endswith(".py")), Path(self.command[0]).stem)
        sizes = examples.parse_batches(self.batches, "--batch") if self.batches else ()
        return TaskSource(self.task or script, self.command, self.batch_option, sizes)

    def scope(self, on_gpu: bool) -> Scope:
        mechanisms = self.mechanisms or ((MPS, TIME_SLICING) if on_gpu else (TIME_SLICING,))
        reason = mps.available() if on_gpu else "there is no GPU"
        if MPS in mechanisms and reason is not None:
            if self.mechanisms:
                raise InputError(f"--mechanism mps: {reason}")
            click.echo(f"without MPS: {reason}", err=True)
            mechanisms = (TIME_SLICING,)
        if self.groups and MPS not in mechanisms:
            click.echo("without groups: they are measured under MPS only", err=True)
        alone = []
        for text in self.alone:
            task, _, sizes = text.partition(":")
            alone += [Setting(task, batch) for batch in examples.parse_batches(sizes, f"--alone {text}")]
        return Scope(
            mechanisms=tuple(dict.fromkeys(mechanisms)),
            accumulations=examples.parse_batches(self.accumulation, "--accumulation") if self.accumulation else (),
            pairs=not self.solo,
            across=self.across,
            groups=self.groups,
            repeats=self.repeats,
            alone=tuple(alone),
        )

    def windows(self) -> Windows:
        try:
            least, most = map(float, self.window.split(","))
        except ValueError:
            least = most = 0.0
        if not 0 < least <= most < ENDLESS:
            raise InputError(f"--window {self.window}: give the shortest and the longest in seconds, as 1.2,3")
        return Windows(least_s=least, most_s=most, precision=self.precision / 100)


@dataclass(frozen=True, slots=True)
class _Job:
    """What to measure, where, and how precisely."""

    gpu: MeasuredGpu
    sources: Sequence[TaskSource]
    scope: Scope
    windows: Windows
    at_once: int | None


def _check(job: _Job) -> None:
    """Refuse what cannot be measured, before anything is started or written."""
    device = job.gpu.device
    if device is not None and (others := nvml.processes(device.uuid)):
        raise InputError(f"{len(others)} other processes use {device.name}; times would not hold, so free it first")
    for setting in job.scope.alone:
        found = next((source for source in job.sources if source.task == setting.task), None)
        if found is None:
            raise InputError(f"--alone {setting.task}: not among the tasks that are measured")
        if found.batch_option is None:
            raise InputError(
                f"--alone {setting.task}:{setting.batch}: say with --batch-option how COMMAND takes the batch, "
                "as --batch-size"
            )


def _measure(job: _Job, raw: RawFile, minutes: float | None, quiet: bool) -> SessionResult:
    deadline = ENDLESS if minutes is None else time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="carpool-") as place:
        folder = Path(place)
        with waiting("starting the training, to learn its batch", quiet):
            known = [_with_batches(source, job.gpu, folder, deadline) for source in job.sources]
        phases = plan(known, job.scope)
        todo = sum(not raw.has(request) for phase in phases for request in phase.requests)
        with _progress(todo, quiet) as step:
            return Session(known, raw, job.gpu, folder, job.windows, deadline, step, job.at_once).run(phases)


@contextmanager
def _reporting_what_is_kept(raw: RawFile) -> Iterator[None]:
    """On an interrupt or SIGTERM, say that the measurements are kept and that no profile was written."""
    try:
        yield
    except (Exception, SystemExit):
        raise
    except BaseException as stop:
        interrupted = isinstance(stop, KeyboardInterrupt)
        kept = len(read(raw.path).measurements)  # the stop may have come between writing one and counting it
        resume = f"{kept} measurements are kept in {raw.path}, and the same call resumes there"
        what = resume if kept else "nothing was measured"
        click.echo(f"{'interrupted' if interrupted else 'terminated'}; no profile was written; {what}", err=True)
        raise click.exceptions.Exit(130 if interrupted else 143) from None


def _with_batches(source: TaskSource, gpu: MeasuredGpu, folder: Path, deadline: float = ENDLESS) -> TaskSource:
    """Return the source with its batches; if they are unknown, start it once and read its report."""
    if source.batches:
        return source
    with Pool(folder / source.task, lambda setting: source.start(0), MechanismEnvironment(gpu, None), deadline) as pool:
        (worker,) = pool.lend([Setting(source.task, 0)])
        batch = worker.batch
    if batch is None:
        raise WorkerError(f"{source.task}: its reports have no batch; give --batch and --batch-option")
    return replace(source, batches=(batch,))


def _machine(gpu: MeasuredGpu) -> MeasuredMachine:
    device, today = gpu.device, datetime.now(UTC).date().isoformat()
    software = f"Carpool {__version__}, Python {platform.python_version()}"
    with suppress(PackageNotFoundError):
        software += f", PyTorch {version('torch')}"
    if device is None:
        return MeasuredMachine("CPU", None, None, today, software)
    idle = None if nvml.processes(device.uuid) else nvml.free_memory(device.uuid)
    return MeasuredMachine(device.name, idle or device.memory, device.driver, today, software, device.uuid)


def _remarks(memory_limit: bool | None) -> list[str]:
    if memory_limit is None:
        return []
    holds = "holds" if memory_limit else "does NOT hold"
    return [f"MPS: the memory limit of a client {holds} here (tried with a client that asked for more)."]


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on standard error, or a line for each phase without a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda what: click.echo(what, err=True) if what.startswith("starting") and not quiet else None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        seen = 0

        def step(what: str) -> None:
            nonlocal seen
            measuring = not what.startswith("starting")
            progress.update(task, description=what, completed=seen)
            seen += measuring

        yield step
