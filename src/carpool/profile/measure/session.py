"""Runs a plan on one GPU within a budget, phase by phase, and writes every result at once.

`carpool profile` calls it. A script that fails, a client outside MPS or a window without iterations ends that
measurement with one line. If one task is the cause, only that task is left out.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from carpool.channel import Report
from carpool.gpu import mps, nvml
from carpool.profile.measure.plan import MPS, MeasurementPhase, TaskSource
from carpool.profile.measure.pool import Pool
from carpool.profile.measure.raw import Measurement, MeasurementRequest, RawFile, Sample, Setting
from carpool.profile.measure.timing import Stamp, Timing, Windows, timing
from carpool.profile.measure.worker import ENDLESS, ShortOfMemory, Worker, WorkerError

POLL_S = 0.005
SETTLE_S = 0.1
"""Seconds to wait after a pause, in which the GPU finishes its queued work."""
OBEY_S = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredGpu:
    """The GPU to measure on; `device` is None when the CPU is measured."""

    device: nvml.Device | None

    def env(self) -> dict[str, str]:
        return {} if self.device is None else {"CUDA_VISIBLE_DEVICES": self.device.uuid}

    def memory_of(self, pid: int) -> int | None:
        return None if self.device is None else nvml.memory_of(self.device.uuid, pid)


@dataclass(frozen=True, slots=True)
class MechanismEnvironment:
    """The GPU under one mechanism, with the daemon under MPS."""

    gpu: MeasuredGpu
    daemon: mps.Daemon | None

    def env(self) -> Mapping[str, str]:
        # Without MPS the pipe directory must not lead to a daemon of another user.
        outside = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"} if self.gpu.device else {}
        return {**self.gpu.env(), **(self.daemon.env() if self.daemon else outside)}

    def accept(self, worker: Worker) -> None:
        if self.daemon is not None and not self.daemon.verify(worker.pid):
            raise WorkerError(f"{worker.name}: runs outside MPS although the daemon is up; see {self.daemon.log}")


@dataclass(slots=True)
class SessionResult:
    """The result of a session: measurements made, measurements left, and problems."""

    done: int = 0
    left: int = 0
    """Number of requests for which the budget was too short."""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    sources: Sequence[TaskSource]
    raw: RawFile
    gpu: MeasuredGpu
    folder: Path
    windows: Windows = field(default_factory=Windows)
    deadline: float = ENDLESS
    """End of the budget on the monotonic clock."""
    on_step: Callable[[str], None] = lambda what: None
    at_once: int | None = None
    """Maximum number of processes to keep at the same time; None for all of a phase."""
    result: SessionResult = field(default_factory=SessionResult)
    _failed: set[Setting] = field(default_factory=set)
    _given_up: int = 0
    """Number of requests that failed, or were left out after a failure."""

    def run(self, phases: Sequence[MeasurementPhase]) -> SessionResult:
        for number, phase in enumerate(phases):
            open_requests = [request for request in phase.requests if not self.raw.has(request)]
            if open_requests and time.monotonic() < self.deadline:
                self._phase(MeasurementPhase(phase.mechanism, tuple(open_requests)), self.folder / f"{number}")
            self.result.left += sum(not self.raw.has(request) for request in phase.requests)
        self.result.left -= self._given_up
        return self.result

    def _phase(self, phase: MeasurementPhase, folder: Path) -> None:
        with ExitStack() as stack:
            daemon = None
            if phase.mechanism == MPS and self.gpu.device is not None:
                daemon = stack.enter_context(mps.Daemon(self.folder / "mps", [self.gpu.device.uuid]))
                if self.raw.memory_limit is None:
                    self.raw.keep_memory_limit(daemon.check(self.gpu.device.uuid).limited)
            environment = MechanismEnvironment(self.gpu, daemon)
            pool = stack.enter_context(Pool(folder, self._command, environment, self.deadline, self.at_once))
            number = sum(phase.copies().values())
            number = min(number, self.at_once or number)
            self.on_step(f"starting {number} process{'es' if number > 1 else ''}, {phase.mechanism}")
            cold = pool.warm(phase.copies())
            for request in phase.requests:
                if time.monotonic() >= self.deadline:
                    break
                self._try(pool, request)
                for setting in request.settings:
                    cold.pop(Setting(setting.task, setting.batch), None)
        # A worker that did not start and was not tried again has a wrong script, or the budget was too short. One that
        # ran out of memory may fit when it is alone.
        self.result.problems += [str(error) for error in cold.values() if not isinstance(error, ShortOfMemory)]

    def _try(self, pool: Pool, request: MeasurementRequest) -> None:
        needed = {*request.settings, *(Setting(s.task, s.batch) for s in request.settings)}
        if needed & self._failed:
            self._given_up += 1
            self.result.problems.append(f"{_name(request)}: left out after an earlier failure")
            return
        self.on_step(_name(request))
        try:
            self.raw.add(self._measure(pool.lend(request.settings), request))
            self.result.done += 1
        except WorkerError as error:
            self._given_up += 1
            self.result.problems.append(str(error))
            if len(request.settings) == 1:  # a job that fails alone would also fail beside others
                self._failed.update(request.settings)
            pool.forget(request.settings)

    def _measure(self, workers: Sequence[Worker], request: MeasurementRequest) -> Measurement:
        time.sleep(SETTLE_S)
        try:
            for worker, setting in zip(workers, request.settings, strict=True):
                worker.split(setting.accumulation)
                worker.resume()
            self._warm_up(workers)
            timings, seconds = self._watch(workers)
            samples = tuple(self._sample(*pair) for pair in zip(workers, request.settings, timings, strict=True))
        finally:
            for worker in workers:
                worker.pause()
        return Measurement(request, samples, seconds)

    def _warm_up(self, workers: Sequence[Worker]) -> None:
        """Wait until every worker has applied its control and done a few iterations since it was resumed."""
        began, first = time.monotonic(), {}
        while True:
            for worker in workers:
                worker.check()
                stamp = worker.stamp()
                if worker.pid not in first and worker.obeyed() and stamp is not None:
                    first[worker.pid] = stamp[0]
            waited = time.monotonic() - began
            moved = [
                w for w in workers if w.pid in first and _steps(w, first[w.pid]) >= self.windows.warm_up_iterations
            ]
            if len(moved) == len(workers) and waited >= self.windows.warm_up_s:
                return
            if waited > OBEY_S:
                raise WorkerError(f"{workers[0].name}: no iteration within {OBEY_S:.0f} s after a pause")
            time.sleep(POLL_S)

    def _watch(self, workers: Sequence[Worker]) -> tuple[list[Timing], float]:
        stamps: list[list[Stamp]] = [[] for _ in workers]
        began = time.monotonic()
        while True:
            for worker, seen in zip(workers, stamps, strict=True):
                stamp = worker.stamp()
                if stamp is not None and (not seen or stamp[0] > seen[-1][0]):
                    seen.append(stamp)
            seconds = time.monotonic() - began
            if seconds >= self.windows.least_s:
                found = [timing(seen) for seen in stamps]
                if self.windows.over(seconds, found):
                    break
            time.sleep(POLL_S)
        for worker in workers:
            worker.check()
        known = [one for one in found if one is not None]
        if len(known) < len(workers):
            raise WorkerError(f"{workers[0].name}: no iteration within {seconds:.0f} s")
        return known, seconds

    def _sample(self, worker: Worker, setting: Setting, found: Timing) -> Sample:
        report = worker.report()
        assert report is not None
        if report.accumulation != setting.accumulation:
            raise WorkerError(
                f"{worker.name}: ran with accumulation {report.accumulation} instead of {setting.accumulation}; "
                f"{_accumulation_advice(report, setting.accumulation)}"
            )
        if worker.batch not in (None, setting.batch):
            raise WorkerError(f"{worker.name}: ran at {worker.batch} instead; {self._source(setting).batch_advice()}")
        held = self.gpu.memory_of(worker.pid)
        context = held - report.reserved_memory if held is not None and held > report.reserved_memory else None
        peak = report.peak_memory or None
        return Sample(setting, found.iter_s, found.error, found.iterations, peak, context)

    def _command(self, setting: Setting) -> tuple[str, ...]:
        return self._source(setting).start(setting.batch)

    def _source(self, setting: Setting) -> TaskSource:
        return next(source for source in self.sources if source.task == setting.task)


def _steps(worker: Worker, since: int) -> int:
    stamp = worker.stamp()
    return stamp[0] - since if stamp is not None else 0


def _accumulation_advice(report: Report, asked: int) -> str:
    if report.out_of_memory:
        return "it ran out of memory, so give a smaller batch"
    if report.accumulation > asked:
        return "run it without its own accumulation: a profile needs times at accumulation 1"
    return f"its batch cannot be split that way; leave {asked} out of --accumulation"


def _name(request: MeasurementRequest) -> str:
    jobs = " + ".join(
        f"{s.task} {s.batch}" + (f"/{s.accumulation}" if s.accumulation > 1 else "") for s in request.settings
    )
    return f"{jobs}, {request.mechanism}"
