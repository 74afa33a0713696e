"""The worker's end of the channel: reads the scheduler's requests and reports progress.

Without Carpool (no `CARPOOL_WORKER_DIR`) every call is a cheap no-op. No call waits or raises: if the scheduler is down
or the directory cannot be written, only the reports are lost.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from carpool.channel import (
    ENV_ATTEMPT,
    ENV_DIRECTORY,
    Control,
    ControlReader,
    Report,
    ReportWriter,
    Shrinking,
    WorkerStatus,
)

_SMOOTHING = 0.1
_MEMORY_EVERY_S = 1.0
_LOOK_S = 0.01
"""Seconds between two looks at the control while the worker stands at a step boundary."""
_REPORT_EVERY_S = 0.05
"""Minimum seconds between reports. The scheduler reads about once a second, so more reports would only cost time."""


_links = 0
"""Number of links that report."""


def in_use() -> bool:
    """Return whether this process reports through the training library, so that it need not be watched."""
    return _links > 0


class Link:
    def __init__(self, directory: str | None = None, memory: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        directory = directory if directory is not None else os.environ.get(ENV_DIRECTORY)
        self.control = Control()
        self._memory = memory
        self._reader = ControlReader(directory) if directory else None
        self._writer: ReportWriter | None = None
        self._rest = Report(attempt=_number(os.environ.get(ENV_ATTEMPT)))
        self._iteration = self._samples = self._timed = 0
        self._seconds = self._memory_due = self._report_due = 0.0
        self._last = time.perf_counter()
        self._resumed = 0
        if directory:
            try:
                self._writer = ReportWriter(directory)
                globals()["_links"] += 1
            except (OSError, ValueError) as error:
                warnings.warn(f"Carpool: no reports, the worker's directory is unusable ({error})", stacklevel=3)
        self._resumed = self.poll().resumed

    @property
    def connected(self) -> bool:
        """Whether a scheduler controls this training."""
        return self._reader is not None

    @property
    def report(self) -> Report:
        seconds = self._seconds
        rate = self._samples / seconds if seconds > 0 else 0.0
        return replace(
            self._rest, iteration=self._iteration, seconds=seconds, samples_per_second=rate, time=time.time()
        )

    @property
    def checkpoint(self) -> int:
        return self._rest.checkpoint

    @property
    def checkpoints_taken(self) -> int:
        return self._rest.checkpoints_taken

    def poll(self) -> Control:
        """Return the scheduler's present request."""
        if self._reader is not None:
            self.control = self._reader.read() or self.control
        return self.control

    def begin(self) -> None:
        """Start timing a step. The time since the last step (setup, evaluation, a checkpoint) does not count."""
        self._last = time.perf_counter()

    def stepped(self, iteration: int, samples: int) -> None:
        """Report a full batch."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self.poll().resumed != self._resumed:  # the worker was paused during this step
            self._resumed, seconds = self.control.resumed, self._seconds
        else:
            if self._timed > 1:  # first a mean, later a moving average
                seconds = self._seconds + max(_SMOOTHING, 1 / self._timed) * (seconds - self._seconds)
            self._timed += 1  # the first step warms caches: its time is reported and then replaced by the second
        self._iteration, self._seconds, self._samples = iteration, seconds, samples
        if now >= self._memory_due:
            self._memory_due = now + _MEMORY_EVERY_S if self._timed > 2 else 0.0
            peak, reserved = self._memory()
            self.say(peak_memory=peak, reserved_memory=reserved)
        elif now >= self._report_due and self._writer is not None:
            self._report_due = now + _REPORT_EVERY_S
            try:
                self._writer.progress(iteration, seconds, samples / seconds if seconds > 0 else 0.0, time.time())
            except Exception as error:
                self._fail(error)

    def stand(self, sequence: int, seconds: float) -> None:
        """Wait at a step boundary until a later control than this one comes, or until this many seconds have passed."""
        self.say(standing=True, control=sequence)
        until = time.monotonic() + seconds
        while self.poll().sequence <= sequence and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self._resumed = self.control.resumed
        self.say(standing=False)
        self.begin()

    def retuned(self, accumulation: int) -> None:
        """Report a new accumulation and restart the measurement of times and memory."""
        self._timed = 0
        self._seconds = self._memory_due = 0.0
        self.say(accumulation=accumulation)

    def say(self, **changes: object) -> None:
        """Change some fields of the report and write it at once."""
        self._iteration = changes.pop("iteration", self._iteration)  # type: ignore[assignment]
        self._rest = replace(self._rest, **changes)  # type: ignore[arg-type]
        if self._writer is not None:
            try:
                self._writer.write(self.report)
            except Exception as error:
                self._fail(error)

    def verdict(self, shrinking: Shrinking, note: str) -> None:
        self.say(shrinking=shrinking, note=note)

    def done(self) -> None:
        peak, reserved = self._memory()
        self.say(status=WorkerStatus.DONE, peak_memory=peak, reserved_memory=reserved)

    def _fail(self, error: Exception) -> None:
        """Stop reporting. Training continues whatever the error is."""
        self._writer = None
        warnings.warn(f"Carpool: reports end here ({error})", stacklevel=4)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
