"""Carries a plan out on one GPU within a budget: phases, windows, and every result written at once.

`commands.py` calls `measure`. A script that fails, a client that falls back from MPS or a window that never fills ends
that measurement with one line and, where it is the fault of one task, costs that task alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from carpool.channel import Report
from carpool.gpu import mps, nvml
from carpool.profile.measure.plan import MPS, Phase, Source
from carpool.profile.measure.pool import Pool
from carpool.profile.measure.raw import Measurement, RawFile, Sample, Setting, Wish
from carpool.profile.measure.timing import Stamp, Timing, Windows, timing
from carpool.profile.measure.worker import ENDLESS, ShortOfMemory, Worker, WorkerError

POLL_S = 0.005
SETTLE_S = 0.1
"""After a pause the GPU may still finish what it was given."""
OBEY_S = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU to measure on; None where the processor takes its place."""

    device: nvml.Device | None

    def env(self) -> dict[str, str]:
        return {} if self.device is None else {"CUDA_VISIBLE_DEVICES": self.device.uuid}

    def memory_of(self, pid: int) -> int | None:
        return None if self.device is None else nvml.memory_of(self.device.uuid, pid)


@dataclass(frozen=True, slots=True)
class Ground:
    """The GPU under one mechanism; `daemon` is there under MPS."""

    gpu: Gpu
    daemon: mps.Daemon | None

    def env(self) -> Mapping[str, str]:
        # Without MPS the pipe directory must not lead to anybody's daemon.
        outside = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"} if self.gpu.device else {}
        return {**self.gpu.env(), **(self.daemon.env() if self.daemon else outside)}

    def accept(self, worker: Worker) -> None:
        if self.daemon is not None and not self.daemon.verify(worker.pid):
            raise WorkerError(f"{worker.name}: runs outside MPS although the daemon is up; see {self.daemon.log}")


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    done: int = 0
    left: int = 0
    """Wishes for which the budget did not suffice."""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    sources: Sequence[Source]
    raw: RawFile
    gpu: Gpu
    folder: Path
    windows: Windows = field(default_factory=Windows)
    deadline: float = ENDLESS
    """On the monotonic clock."""
    on_step: Callable[[str], None] = lambda what: None
    at_once: int | None = None
    """Processes to keep at the same time; None: all of a phase."""
    outcome: Outcome = field(default_factory=Outcome)
    _failed: set[Setting] = field(default_factory=set)
    _given_up: int = 0
    """Wishes that were tried in vain, or not at all after a failure."""

    def run(self, phases: Sequence[Phase]) -> Outcome:
        for number, phase in enumerate(phases):
            open_wishes = [wish for wish in phase.wishes if not self.raw.has(wish)]
            if open_wishes and time.monotonic() < self.deadline:
                self._phase(Phase(phase.mechanism, tuple(open_wishes)), self.folder / f"{number}")
            self.outcome.left += sum(not self.raw.has(wish) for wish in phase.wishes)
        self.outcome.left -= self._given_up
        return self.outcome

    def _phase(self, phase: Phase, folder: Path) -> None:
        with ExitStack() as stack:
            daemon = None
            if phase.mechanism == MPS and self.gpu.device is not None:
                daemon = stack.enter_context(mps.Daemon(self.folder / "mps", [self.gpu.device.uuid]))
                if self.raw.memory_limit is None:
                    self.raw.keep_memory_limit(daemon.check(self.gpu.device.uuid).limited)
            ground = Ground(self.gpu, daemon)
            pool = stack.enter_context(Pool(folder, self._command, ground, self.deadline, self.at_once))
            number = sum(phase.copies().values())
            number = min(number, self.at_once or number)
            self.on_step(f"starting {number} process{'es' if number > 1 else ''}, {phase.mechanism}")
            cold = pool.warm(phase.copies())
            for wish in phase.wishes:
                if time.monotonic() >= self.deadline:
                    break
                self._try(pool, wish)
                for setting in wish.settings:
                    cold.pop(Setting(setting.task, setting.batch), None)
        # Who did not start and was not tried again: its script is wrong, or the budget short. Memory may do when alone.
        self.outcome.problems += [str(error) for error in cold.values() if not isinstance(error, ShortOfMemory)]

    def _try(self, pool: Pool, wish: Wish) -> None:
        needed = {*wish.settings, *(Setting(s.task, s.batch) for s in wish.settings)}
        if needed & self._failed:
            self._given_up += 1
            self.outcome.problems.append(f"{_name(wish)}: left out after an earlier failure")
            return
        self.on_step(_name(wish))
        try:
            self.raw.add(self._measure(pool.lend(wish.settings), wish))
            self.outcome.done += 1
        except WorkerError as error:
            self._given_up += 1
            self.outcome.problems.append(str(error))
            if len(wish.settings) == 1:  # alone and failed: it would fail beside others, too
                self._failed.update(wish.settings)
            pool.forget(wish.settings)

    def _measure(self, workers: Sequence[Worker], wish: Wish) -> Measurement:
        time.sleep(SETTLE_S)
        try:
            for worker, setting in zip(workers, wish.settings, strict=True):
                worker.split(setting.accumulation)
                worker.resume()
            self._warm_up(workers)
            timings, seconds = self._watch(workers)
            samples = tuple(self._sample(*pair) for pair in zip(workers, wish.settings, timings, strict=True))
        finally:
            for worker in workers:
                worker.pause()
        return Measurement(wish, samples, seconds)

    def _warm_up(self, workers: Sequence[Worker]) -> None:
        """Until everybody obeys and has done a few iterations since it went on."""
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

    def _source(self, setting: Setting) -> Source:
        return next(source for source in self.sources if source.task == setting.task)


def _steps(worker: Worker, since: int) -> int:
    stamp = worker.stamp()
    return stamp[0] - since if stamp is not None else 0


def _accumulation_advice(report: Report, asked: int) -> str:
    if report.out_of_memory:
        return "it ran out of memory, so give a smaller batch"
    if report.accumulation > asked:
        return "run it without an accumulation of its own: a profile needs its times at 1"
    return f"its batch cannot be split so, and the profile does without (--accumulation without {asked})"


def _name(wish: Wish) -> str:
    jobs = " + ".join(
        f"{s.task} {s.batch}" + (f"/{s.accumulation}" if s.accumulation > 1 else "") for s in wish.settings
    )
    return f"{jobs}, {wish.mechanism}"
