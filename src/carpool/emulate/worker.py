"""The program of a job on emulated GPUs: `carpool emulate`, once for each worker of the gang.

The first worker drives the iterations of the gang by the clock: an iteration takes the profile's time for the gang's
placement and accumulation, times the largest slow-down over its GPUs. The other workers watch their own GPUs for it and
wait for its end. All report through the channel, obey it as the training library does, and go on from what was saved.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from carpool.channel import (
    ENV_ATTEMPT,
    ENV_CHECKPOINTS,
    ENV_DIRECTORY,
    ENV_EMULATED,
    EXIT_STOPPED,
    Control,
    ControlReader,
    Report,
    ReportWriter,
    Shrinking,
    WorkerStatus,
    read_json,
)
from carpool.emulate.residents import GangMeeting, GangState, GpuResidents, Load, own_entry, write_file

if TYPE_CHECKING:
    from carpool.emulate.gpus import EmulatedGpus
    from carpool.profile.values import TaskProfile

TICK_S = 0.03
"""Seconds between two looks of the first worker."""
WATCH_S = 0.05
"""Seconds between two looks of the other workers, and of all before the gang is complete."""
REPORT_S = 0.1
"""Least seconds between two reports of progress."""
DELAY_S = 3 * TICK_S
"""Seconds between two looks from which a pause is considered."""
ROUNDING = 1e-6
"""Part of an iteration that counts as none."""
PAUSED_S = 2.0
"""Seconds between two looks from which the worker counts as paused in any case."""
SPEC_S = 5.0
"""Seconds that the service may take to write a job's spec."""
SPEC = "job.json"
"""Name of the file with a job's spec, in its directory of the service's home."""
SAVED = "emulated.json"
"""Name of the file with the progress, in the job's checkpoint directory."""


class EmulationError(Exception):
    """What ends a worker with one line and exit status 1."""


@dataclass(frozen=True)
class WorkerTask:
    """What a worker has to do, and where it is."""

    directory: Path
    """Directory of the emulation in the service's home."""
    job: str
    attempt: int
    rank: int
    workers: int
    gpu: str
    model: str
    batch: int
    iterations: int
    startup_s: float = 0.0


class Reporter:
    """Writes a worker's report and reads the scheduler's requests."""

    def __init__(self, task: WorkerTask) -> None:
        place = os.environ[ENV_DIRECTORY]
        self._reader, self._writer = ControlReader(place), ReportWriter(place)
        self.report = Report(attempt=task.attempt, can_stand=True, total=task.iterations)

    def control(self) -> Control:
        return self._reader.read() or Control()

    def say(self, **changes: Any) -> None:
        self.report = replace(self.report, time=time.time(), **changes)
        self._writer.write(self.report)


class PauseWatch:
    """Measures time in which the worker could run: none while it was stopped by a signal or a frozen cgroup."""

    def __init__(self) -> None:
        self._resumed = 0
        self._continued = False
        self._last = time.monotonic()
        signal.signal(signal.SIGCONT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._continued = True

    def passed(self, resumed: int) -> float:
        """Return the seconds since the last call; 0 if they contain a pause. `resumed`: as the control says now."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        paused = self._continued or resumed != self._resumed
        self._continued, self._resumed = False, resumed
        return 0.0 if seconds > PAUSED_S or (paused and seconds > DELAY_S) else seconds


@dataclass
class FirstWorker:
    """The first worker of a gang: it drives the iterations."""

    task: WorkerTask
    gpus: "EmulatedGpus"
    profile: "TaskProfile"
    meeting: GangMeeting
    residents: GpuResidents
    reporter: Reporter
    done: float = 0.0
    accumulation: int = 1
    _taken: int = 0
    _reported: float = 0.0
    began: float | None = None
    """When it made its first iteration, on the monotonic clock; None: not so far."""
    _nodes: int = 1
    _alone: dict[int, float] = field(default_factory=dict)
    _slowdowns: dict[tuple[int, tuple[Load, ...]], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from carpool.core.model import Job

        task = self.task
        self._model = self.gpus.model()
        self._job = Job(task.job, 0.0, task.model, task.workers, task.batch, task.iterations)
        self._watch = PauseWatch()

    def run(self) -> int:
        """Iterate to the end, or until the scheduler stops the job; return the exit status."""
        task = self.task
        code = self._start_up()
        while code is None and self.done < task.iterations:
            seconds = self._seconds()
            time.sleep(min(TICK_S, (task.iterations - self.done) * seconds))
            self.done += self._watch.passed(self.reporter.control().resumed) / seconds
            if task.iterations - self.done < ROUNDING:
                self.done = float(task.iterations)
            self._progress(seconds)
            code = self._obey()
        if code is None:
            self.reporter.say(iteration=task.iterations, status=WorkerStatus.DONE)
            code = 0
        return code

    def _start_up(self) -> int | None:
        """Wait until the gang is complete; return the exit status if the scheduler stops it before."""
        saved = read_json(_checkpoint())
        if isinstance(saved, dict):
            self.done = float(saved["iteration"])
            self.reporter.say(iteration=int(self.done), checkpoint=int(self.done))
        self._retune(self.reporter.control().accumulation)
        # a task with BatchNorm computes something else where its batch is split
        self.reporter.say(shrinking=Shrinking.REFUSED if self.profile.batch_norm else Shrinking.CERTIFIED)
        time.sleep(self.task.startup_s)
        while len(members := self.meeting.members()) < self.task.workers:
            if self.reporter.control().stop:
                return self._stop()
            time.sleep(TICK_S)
        self._nodes = len({member.node for member in members})
        check_memory(self.residents, self.gpus.memory, self.reporter)
        code = self._obey()
        if code is None:
            self._begin()
        return code

    def _begin(self) -> None:
        self.meeting.decide(computes=True, stands=False)
        self.residents.change(computes=True)
        self._watch.passed(self.reporter.control().resumed)
        self.began = time.monotonic() if self.began is None else self.began

    def _seconds(self) -> float:
        """Return the seconds of an iteration now."""
        from carpool.core.perf import Placement

        if self.accumulation not in self._alone:
            place = Placement(self.task.workers, self._nodes)
            self._alone[self.accumulation] = self._model.iteration_time(self._job, self.accumulation, place)
        loads = {self.residents.loads(), *(member.mates for member in self.meeting.members() if member.rank)}
        return self._alone[self.accumulation] * max(map(self._slowdown, loads))

    def _slowdown(self, loads: tuple[Load, ...]) -> float:
        if not loads:
            return 1.0
        key = self.accumulation, loads
        if key not in self._slowdowns:
            mates = [(replace(self._job, model=model, batch=batch), split) for model, batch, split in loads]
            self._slowdowns[key] = self._model.slowdown(self._job, self.accumulation, mates)
        return self._slowdowns[key]

    def _progress(self, seconds: float) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_S or self.done >= self.task.iterations:
            self._reported = now
            rate = self.task.batch / seconds
            self.reporter.say(iteration=int(self.done), seconds=seconds, samples_per_second=rate)

    # ---- what the scheduler wants ----------------------------------------------------------------------------------

    def _obey(self) -> int | None:
        """Do what the scheduler requests; return the exit status if that is to stop."""
        control = self.reporter.control()
        if control.stop:
            return self._stop(control.checkpoint)
        if control.checkpoint > self._taken:
            self._taken = control.checkpoint
            self._save(control.checkpoint)
        if control.accumulation != self.accumulation:
            self._retune(control.accumulation)
        if control.sequence != self.reporter.report.control:
            self.reporter.say(control=control.sequence)
        return self._stand(control) if control.pause_s > 0.0 else None

    def _retune(self, accumulation: int) -> None:
        self.accumulation = max(1, min(self.task.batch, accumulation))
        memory = self._model.memory(self._job, self.accumulation)
        self.meeting.decide(accumulation=self.accumulation, memory=memory)
        self.residents.change(accumulation=self.accumulation, memory=memory)
        context = self.profile.memory.context_bytes if self.profile.memory else 0
        tensors = max(0, memory - (context or 0))  # reports leave the CUDA context out
        self.reporter.say(accumulation=self.accumulation, peak_memory=tensors, reserved_memory=tensors)

    def _stand(self, control: Control) -> int | None:
        """Wait at a step boundary until a later control comes, at most for as long as this one says."""
        until = time.monotonic() + control.pause_s
        self.meeting.decide(stands=True, computes=False)
        self.residents.change(computes=False)
        self.reporter.say(standing=True, control=control.sequence, iteration=int(self.done))
        while (now := self.reporter.control()).sequence <= control.sequence and time.monotonic() < until:
            time.sleep(WATCH_S)
        self.reporter.say(standing=False)
        self._begin()
        return self._stop(now.checkpoint) if now.stop else None

    def _save(self, asked: int) -> None:
        path = _checkpoint()
        with contextlib.suppress(OSError):
            write_file(path, {"iteration": int(self.done)})
            self.reporter.say(iteration=int(self.done), checkpoint=int(self.done), checkpoints_taken=asked)

    def _stop(self, asked: int = 0) -> int:
        self._save(asked)
        self.reporter.say(status=WorkerStatus.STOPPED)
        return EXIT_STOPPED


def check_memory(residents: GpuResidents, limit: int, reporter: Reporter) -> None:
    """End the worker if the memory of its GPU does not suffice for all that are on it."""
    held = residents.memory()
    if held > limit:
        reporter.say(status=WorkerStatus.OUT_OF_MEMORY)
        need = f"{held / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        raise EmulationError(f"out of memory on {residents.own.gpu}: its workers would hold {need}")


@dataclass
class OtherWorker:
    """Any other worker of a gang: it watches its GPU, and ends with the first one."""

    task: WorkerTask
    meeting: GangMeeting
    residents: GpuResidents
    reporter: Reporter
    memory: int
    """Bytes on its GPU."""

    def run(self) -> int:
        """Wait for the end of the first worker; return its exit status."""
        self.reporter.say()
        while (state := self.meeting.look()).code is None:
            self._follow(state)
            loads = self.residents.loads()
            if loads != self.meeting.own.mates:
                self.meeting.tell(mates=loads)
            time.sleep(WATCH_S)
        ended = {0: WorkerStatus.DONE, EXIT_STOPPED: WorkerStatus.STOPPED}
        self.reporter.say(status=ended.get(state.code or 0, WorkerStatus.RUNNING))
        return state.code or 0

    def _follow(self, state: GangState) -> None:
        own = self.residents.own
        if (own.computes, own.accumulation, own.memory) != (state.computes, state.accumulation, state.memory):
            self.residents.change(computes=state.computes, accumulation=state.accumulation, memory=state.memory)
            self.reporter.say(accumulation=state.accumulation)
            if state.computes and not own.computes:
                check_memory(self.residents, self.memory, self.reporter)
        control = self.reporter.control()
        standing = state.stands and control.pause_s > 0.0
        if standing != self.reporter.report.standing or control.sequence != self.reporter.report.control:
            self.reporter.say(standing=standing, control=control.sequence)


def _checkpoint() -> Path:
    return Path(os.environ.get(ENV_CHECKPOINTS, ".")) / SAVED


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def read_task(words: Sequence[str] | None, variables: Mapping[str, str]) -> WorkerTask:
    """Return what a worker has to do: from its arguments, else from the job's spec."""
    parser = argparse.ArgumentParser(
        prog="carpool emulate",
        description="Emulate a training on emulated GPUs, as a job of a service with `carpool serve --emulate`.",
    )
    parser.add_argument("--model", help="task of the profile  [default: --model of the job]")
    parser.add_argument("--batch", type=int, help="samples per GPU per iteration  [default: --batch of the job]")
    parser.add_argument("--iterations", type=int, help="iterations in all  [default: --iterations of the job]")
    parser.add_argument("--startup", type=float, default=0.0, metavar="SECONDS", help="additional time to start up")
    given = parser.parse_args(words)
    if not variables.get(ENV_EMULATED) or not variables.get(ENV_DIRECTORY):
        raise EmulationError("there are no emulated GPUs here; submit it to a service with --emulate")
    directory = Path(variables[ENV_EMULATED]).parent
    job = variables["CARPOOL_JOB"]
    asked = {"model": given.model, "batch": given.batch, "iterations": given.iterations}
    if None in asked.values():
        spec = _spec(directory.parent / "jobs" / job / SPEC)
        asked = {name: spec.get(name) if value is None else value for name, value in asked.items()}
    for name, value in asked.items():
        if not value or (name != "model" and value < 1):
            raise EmulationError(f"--{name}: not given; give it to `carpool submit`, or to `carpool emulate`")
    return WorkerTask(
        directory,
        job,
        int(variables[ENV_ATTEMPT]),
        int(variables["RANK"]),
        int(variables["WORLD_SIZE"]),
        variables["CARPOOL_GPUS"].partition(",")[0],
        **asked,
        startup_s=max(0.0, given.startup),
    )


def _spec(path: Path) -> dict[str, Any]:
    """Return a job's spec. The service writes it a moment after it has taken the job."""
    until = time.monotonic() + SPEC_S
    while True:
        data = read_json(path)
        if isinstance(data, dict) and isinstance(data.get("spec"), dict):
            return dict(data["spec"])
        if time.monotonic() > until:
            return {}
        time.sleep(WATCH_S)


@contextlib.contextmanager
def _present(task: WorkerTask) -> Iterator[tuple[GangMeeting, GpuResidents]]:
    """Enter the worker in the folders of its GPU and its gang while the block runs, however it ends."""
    own = own_entry(task.job, task.attempt, task.rank, task.gpu, (task.model, task.batch))
    meeting, residents = GangMeeting(task.directory, own, task.workers), GpuResidents(task.directory, own)
    try:
        residents.enter()
        meeting.arrive()
        yield meeting, residents
    finally:
        residents.leave()
        meeting.leave()


def _run(task: WorkerTask, description: str) -> int:
    reporter = Reporter(task)
    with _present(task) as (meeting, residents):
        if task.rank:
            # the profile takes long to load, and only the first worker needs it
            memory = int((read_json(description) or {})["memory"])
            return OtherWorker(task, meeting, residents, reporter, memory).run()
        from carpool.emulate.gpus import read_gpus
        from carpool.profile.schema import load

        gpus = read_gpus(description)
        tasks = load(gpus.profile).tasks
        if task.model not in tasks:
            known = ", ".join(sorted(tasks))
            raise EmulationError(f"--model {task.model}: not in profile {gpus.profile}, which has {known}")
        first = FirstWorker(task, gpus, tasks[task.model], meeting, residents, reporter)
        code = first.run()
        meeting.decide(computes=False, code=code)
        seconds = time.monotonic() - first.began if first.began is not None else 0.0
        done = f"iteration {int(first.done)} of {task.iterations} after {seconds:.3f} s, at {time.time():.3f}"
        print(f"{task.model} on {task.workers} {gpus.label}: {done}", flush=True)
        return code


def main(words: Sequence[str] | None = None) -> int:
    """Run one worker and return its exit status."""
    signal.signal(signal.SIGTERM, _end)
    try:
        return _run(read_task(words, os.environ), os.environ[ENV_EMULATED])
    except EmulationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"error: {error.args[0]} is not set; submit it to a service with --emulate", file=sys.stderr)
        return 1
