"""One training process under measurement: started with its own channel, paused, resumed, and given an accumulation.

A paused process (SIGSTOP to its group) keeps its memory and computes nothing, so that one start serves many
measurements. `pool.py` owns the workers. An error of a script is reported in one line with the script's last output.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from carpool.channel import ENV_DIRECTORY, Control, Report, WorkerStatus, read_report, write_control
from carpool.errors import InputError
from carpool.profile.measure.timing import Stamp

READY_ITERATIONS = 4
"""Number of iterations before a worker is ready. The first ones compile kernels and fill the allocator's cache."""
STOP_S = 8.0
ENDLESS = 10**9
LOG_TAIL = 4000
OUT_OF_MEMORY = "out of memory"
GUARD = 'read group && { read over || kill -s KILL -- "-$group"; }'
"""Shell command that kills the worker's group if our end of its pipe closes without a line, because our process was
killed.

The worker may be paused at that moment, and no other process would end it. Its children belong to the group as well.
"""


class WorkerError(InputError):
    """A training script that cannot be measured."""


class ShortOfMemory(WorkerError):
    """A worker that did not fit on the GPU, perhaps only because of other workers."""


class Worker:
    def __init__(self, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._control = Control(sequence=1, accumulation=1, can_shrink=True)
        write_control(folder, self._control)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with (folder / "log").open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    env={**os.environ, **env, ENV_DIRECTORY: str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                self._dismiss_guard()
                raise WorkerError(f"{command[0]}: cannot be run ({error.strerror}); check the command") from None
        self._tell_guard(f"{self._process.pid}\n")
        self.paused = False
        self.batch: int | None = None
        """Largest number of samples per iteration in the reports. An epoch may end with a smaller batch."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def accumulation(self) -> int:
        return self._control.accumulation

    def report(self) -> Report | None:
        report = read_report(self.folder)
        if report is not None and (samples := round(report.samples_per_second * report.seconds)):
            self.batch = max(samples, self.batch or 0)
        return report

    def stamp(self) -> Stamp | None:
        report = self.report()
        return (report.iteration, report.time) if report is not None else None

    def ready(self) -> bool:
        """Return whether the first iterations are done. Raise if they never will be."""
        self.check()
        report = self.report()
        return report is not None and report.iteration >= READY_ITERATIONS

    def check(self) -> None:
        """Raise unless the process runs and trains."""
        report, status = self.report(), self._process.poll()
        if report is not None and report.status is WorkerStatus.OUT_OF_MEMORY:
            raise ShortOfMemory(f"{self.name}: does not fit on this GPU ({report.note or OUT_OF_MEMORY})")
        if report is not None and report.out_of_memory:  # the library split its batch and continued
            raise ShortOfMemory(f"{self.name}: does not fit on this GPU; give a smaller batch")
        if status is None:
            return
        if OUT_OF_MEMORY in self._log():
            raise ShortOfMemory(f"{self.name}: does not fit on this GPU; give a smaller batch")
        if status != 0:
            raise WorkerError(f"{self.name}: the script failed with status {status}: {self._last_words()}")
        if report is None:
            raise WorkerError(
                f"{self.name}: the script ended without a step that Carpool could see; does it use carpool.train?"
            )
        raise WorkerError(
            f"{self.name}: the training ended after {report.iteration} iterations, too early; let it run longer"
        )

    def silent(self, seconds: float, budget_over: bool) -> WorkerError:
        """Why a worker that never got ready is given up."""
        what = "no report" if self.report() is None else "hardly an iteration"
        more = " If so, give more --minutes" if budget_over else ""
        return WorkerError(f"{self.name}: {what} within {seconds:.0f} s; does the script use carpool.train?{more}")

    def split(self, accumulation: int) -> None:
        """Ask for another number of micro-batches; it takes effect at the next step."""
        if accumulation != self._control.accumulation:
            self._control = Control(sequence=self._control.sequence + 1, accumulation=accumulation, can_shrink=True)
            write_control(self.folder, self._control)

    def obeyed(self) -> bool:
        report = self.report()
        return report is not None and report.control >= self._control.sequence

    def pause(self) -> None:
        if not self.paused:
            self._signal(signal.SIGSTOP)
            self.paused = True

    def resume(self) -> None:
        if self.paused:
            self._signal(signal.SIGCONT)
            self.paused = False

    def ask_to_stop(self) -> None:
        """Ask the worker to end at its next step, which is safer for MPS than a kill. Signal it if it is silent."""
        write_control(self.folder, Control(sequence=self._control.sequence + 1, stop=True))
        self.resume()
        if self.report() is None:
            self._signal(signal.SIGTERM)

    def end(self, until: float) -> None:
        """Wait until a deadline (monotonic clock) for the worker to end, then kill its process group."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._dismiss_guard()

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError):  # the guard was killed
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()

    def _dismiss_guard(self) -> None:
        self._tell_guard("\n")
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _log(self) -> str:
        data = (self.folder / "log").read_bytes()
        return data[-LOG_TAIL:].decode("utf-8", "replace")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log().splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"
