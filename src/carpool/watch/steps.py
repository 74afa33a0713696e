"""Counts the steps of a job's optimizers and reports them. Loaded by `injected/sitecustomize.py`, in the job's process.

The first optimizer that steps counts: a step of it is an iteration, whatever other optimizers do. Frameworks that
accumulate gradients step an optimizer once per full batch, so their iterations are full batches, too. One process of a
worker reports, the first that steps. A script that uses `carpool.train` reports by itself and is not watched.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import math
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from weakref import ref

SIGN = "watch"
"""Name of the file of reports, `channel.WATCH`: importing PyTorch should not have to load the channel."""
REPORT_EVERY_S = 0.05
"""Minimum seconds between reports: the scheduler reads about once a second."""
MEMORY_EVERY_S = 1.0
SMOOTHING = 0.1
"""Weight of the newest measurement in the moving average of the iteration time."""
GAP_S, GAP_TIMES = 1.0, 10.0
"""A step that takes longer than this, and this many times the average, spans something else: an evaluation, a
checkpoint, a pause. Its time does not count."""
LOOKS_FOR_TOTAL = 3
"""Number of reports at which the frameworks are asked for the total number of steps."""


def attach(module: ModuleType) -> None:
    """Watch the classes of a module that was just imported: PyTorch's optimizers, or a framework's trainers."""
    if module.__name__ in TRAINERS:
        note_trainers(module.Trainer, TRAINERS[module.__name__])
        return
    watch = StepWatch(os.environ["CARPOOL_WORKER_DIR"], os.environ.get("CARPOOL_ATTEMPT", ""))

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        watch.stepped(optimizer)

    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled step calls it as it is
    module.register_optimizer_step_post_hook(stepped)
    atexit.register(watch.end)
    watch.sign()


def load_channel() -> Any:
    """Return the module `carpool.channel`, loaded by its path."""
    name = "_carpool_channel"
    if name not in sys.modules:
        file = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "channel.py")
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class StepWatch:
    """The steps of one process."""

    def __init__(self, directory: str, attempt: str) -> None:
        self.directory = directory
        self.attempt = int(attempt) if attempt.isdigit() else 0
        self.off = False
        """Nothing is reported any more: the job reports by itself, another process does, or something failed."""
        self.iteration = 0
        self.seconds = 0.0
        self.total = 0
        """Number of steps that the framework plans in all; 0: not known."""
        self._first: Any = None  # the optimizer that counts
        self._pid = os.getpid()
        self._writer: Any = None
        self._lock = -1
        self._channel: Any = None
        self._last = time.perf_counter()
        self._since = 0  # steps since `_last`
        self._measured = 0
        self._due = self._memory_due = 0.0
        self._looks = 0
        self._memory = (0, 0)

    def sign(self) -> None:
        """Write an empty report, which shows the scheduler that a training is about to begin. Never fails."""
        with contextlib.suppress(Exception):
            os.close(os.open(os.path.join(self.directory, SIGN), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def stepped(self, optimizer: Any) -> None:
        """Count a step of an optimizer; report it if the last report is some time ago. Never fails."""
        if self.off:
            return
        try:
            first = self._first
            if first is None or (optimizer is not first() and first() is None):
                self._first = ref(optimizer)
            elif optimizer is not first():
                return
            self.iteration += 1
            self._since += 1
            now = time.perf_counter()
            if now >= self._due:
                self._report(optimizer, now)
        except Exception:
            self._give_up()

    def end(self) -> None:
        """Report the last steps."""
        try:
            if not self.off and self._since:
                self._report(self._first(), time.perf_counter())
        except Exception:
            self._give_up()

    def _report(self, optimizer: Any | None, now: float) -> None:
        if os.getpid() != self._pid:  # a forked child: its parent reports
            self._give_up()
            return
        if _reports_by_itself():
            self._give_up()
            return
        if self._writer is None and not self._open():
            self._give_up()
            return
        self._due = now + REPORT_EVERY_S
        self._measure(now)
        if now >= self._memory_due and optimizer is not None:
            self._memory_due = now + MEMORY_EVERY_S
            self._memory = _peak_memory(optimizer)
        if self._looks < LOOKS_FOR_TOTAL and not self.total:
            self._looks += 1
            self.total = _framework_total()
        report = self._channel.Report(
            attempt=self.attempt,
            iteration=self.iteration,
            seconds=self.seconds,
            peak_memory=self._memory[0],
            reserved_memory=self._memory[1],
            time=time.time(),
            watched=True,
            total=self.total,
        )
        self._writer.write(report)

    def _measure(self, now: float) -> None:
        """Bring the iteration time up to date. The first step is not timed: it starts with the script."""
        steps, self._since = self._since, 0
        took, self._last = (now - self._last) / steps, now
        if self.iteration <= 1 or steps == 0:
            return
        if self._measured and took > max(GAP_S, GAP_TIMES * self.seconds):
            return
        self._measured += 1
        weight = max(SMOOTHING, 1.0 / self._measured)
        self.seconds += weight * (took - self.seconds)

    def _open(self) -> bool:
        """Open the report, unless another process of this worker has it."""
        self._channel = load_channel()
        path = os.path.join(self.directory, self._channel.WATCH)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._writer = self._channel.ReportWriter(self.directory, self._channel.WATCH)
        return True

    def _give_up(self) -> None:
        self.off = True
        self._writer = None
        if self._lock >= 0 and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1


def _reports_by_itself() -> bool:
    """Return whether the script uses Carpool's training library."""
    link = sys.modules.get("carpool.train.link")
    return link is not None and bool(getattr(link, "in_use", lambda: False)())


def _peak_memory(optimizer: Any) -> tuple[int, int]:
    """Return the largest memory so far of tensors and of the allocator, on the device of the parameters."""
    device = optimizer.param_groups[0]["params"][0].device
    if device.type != "cuda":
        return 0, 0
    torch = sys.modules["torch"]
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _framework_total() -> int:
    """Return the number of steps that the newest trainer of a framework plans in all; 0: not known."""
    for reference, total_of in reversed(_trainers):
        trainer = reference()
        total = total_of(trainer) if trainer is not None else 0
        if 0 < total < math.inf:
            return int(total)
    return 0


def _transformers_total(trainer: Any) -> float:
    return float(trainer.state.max_steps)


def _lightning_total(trainer: Any) -> float:
    """Return the estimate of Lightning, which counts the steps of all optimizers together."""
    return float(trainer.estimated_stepping_batches) if len(trainer.optimizers) == 1 else 0.0


TRAINERS = {
    "transformers.trainer": _transformers_total,
    "lightning.pytorch.trainer.trainer": _lightning_total,
    "pytorch_lightning.trainer.trainer": _lightning_total,
}
"""The modules whose class `Trainer` states how many steps it makes, each with the function that reads it."""
_trainers: list[tuple[Any, Callable[[Any], float]]] = []  # weak references, oldest first


def note_trainers(trainer: Any, total_of: Callable[[Any], float]) -> None:
    """Note the objects that are made of a framework's class of trainers."""
    make = trainer.__init__

    @wraps(make)
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            _trainers.append((ref(self), total_of))

    trainer.__init__ = make_and_note
