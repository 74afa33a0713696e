"""The worker's end of the channel: reads what the scheduler wants, reports what the training does.

Without Carpool (no `CARPOOL_WORKER_DIR`) every call is a cheap no-op. No call waits, and none raises: a scheduler that
is away, or a directory that cannot be written, costs the reports and nothing else.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from carpool.channel import ENV_ATTEMPT, ENV_DIRECTORY, Control, ControlReader, Report, ReportWriter, Shrinking, State

_SMOOTHING = 0.1
_MEMORY_EVERY_S = 1.0
_REPORT_EVERY_S = 0.05
"""The scheduler looks about once a second: a report of every step of a fast training would only cost time."""


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
        if directory:
            try:
                self._writer = ReportWriter(directory)
            except (OSError, ValueError) as error:
                warnings.warn(f"Carpool: no reports, the worker's directory is unusable ({error})", stacklevel=3)
        self.poll()

    @property
    def connected(self) -> bool:
        """Does somebody tell this training what to do?"""
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
        """What the scheduler wants now."""
        if self._reader is not None:
            self.control = self._reader.read() or self.control
        return self.control

    def begin(self) -> None:
        """A step starts after a pause that is none of its business (setup, evaluation, a checkpoint)."""
        self._last = time.perf_counter()

    def stepped(self, iteration: int, samples: int) -> None:
        """A full batch was done."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._timed > 1:  # a mean at first, a moving average later
            seconds = self._seconds + max(_SMOOTHING, 1 / self._timed) * (seconds - self._seconds)
        self._timed += 1  # the very first step warms caches up: it is shown, and replaced by the second
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

    def retuned(self, accumulation: int) -> None:
        """From now on another accumulation: times and memory start afresh."""
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
        self.say(state=State.DONE, peak_memory=peak, reserved_memory=reserved)

    def _fail(self, error: Exception) -> None:
        """Whatever it is, training goes on."""
        self._writer = None
        warnings.warn(f"Carpool: reports end here ({error})", stacklevel=4)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
