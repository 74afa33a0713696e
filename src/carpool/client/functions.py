"""`carpool.Executor`: runs Python functions as jobs, with the interface of `concurrent.futures`.

A call is written to a folder with cloudpickle, so that functions of notebooks and lambdas work. The job calls it with
the interpreter and the environment of the caller (`function_job`), and writes the result or the exception beside it.
The folder must be visible where the job runs; by default it is in the caller's cache directory.
"""

import concurrent.futures
import contextlib
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures._base import CANCELLED, PENDING, RUNNING
from pathlib import Path
from typing import Any, TypeVar

from carpool.client import function_job
from carpool.client.connection import ENDED, Connection, SubmittedJob, connect
from carpool.errors import InputError
from carpool.live.http.client import Refusal, Unreachable

LOOK_S = 0.2
"""Seconds between two looks at the jobs."""
TAIL = 2000
"""Characters of a failed worker's standard error that an exception shows."""
Result = TypeVar("Result")


class JobFailed(RuntimeError):
    """A job ended without a result: it was killed, ran out of memory, or could not start."""


class FunctionFuture(concurrent.futures.Future[Result]):
    """The result of a function that runs as a job."""

    job: SubmittedJob
    """The job that runs the function."""
    _file: Path

    def cancel(self) -> bool:
        """Cancel the job, even if it runs. Return whether it had not ended."""
        if self.done():
            return self.cancelled()
        self.job.cancel()
        with self._condition:  # `cancel` of the base class refuses a future that runs
            if self._state not in (PENDING, RUNNING):
                return self.cancelled()
            self._state = CANCELLED
            self._condition.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]
        return True


class FunctionExecutor(concurrent.futures.Executor):
    """An executor whose workers are jobs of a service.

    `connection` defaults to `carpool.connect()`. `folder` is where calls and results are kept. All other parameters are
    fields of the jobs, as in a job file: `gpus=1, duration="10m"`.
    """

    def __init__(self, connection: Connection | None = None, folder: str | Path | None = None, **fields: Any) -> None:
        self.connection = connection or connect()
        base = Path(folder) if folder is not None else _cache()
        base.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="calls-", dir=base)).absolute()
        self.fields = fields
        self._calls = 0
        self._lock = threading.Lock()
        self._open: dict[str, FunctionFuture[Any]] = {}
        self._watching: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> FunctionFuture[Result]:
        """Submit a job that calls a function, and return its future."""
        return self._submit(fn, [(args, kwargs)], {})[0]

    def map_array(self, fn: Callable[..., Result], *iterables: Iterable[Any]) -> list[FunctionFuture[Result]]:
        """Submit one array of jobs that call a function with the items of the iterables, all or none."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(args, {}) for args in zip(*iterables, strict=False)]
        return self._submit(fn, calls, {"array": f"0-{len(calls) - 1}"}) if calls else []

    def _submit(
        self, fn: Callable[..., Result], calls: list[tuple[tuple[Any, ...], dict[str, Any]]], more: dict[str, Any]
    ) -> list[FunctionFuture[Result]]:
        try:
            import cloudpickle  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise InputError("functions need an extra: pip install 'carpool[client]'") from None
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is shut down; make a new one")
            first, self._calls = self._calls, self._calls + len(calls)
        for number, (args, kwargs) in enumerate(calls, start=first):
            function_job.write(self.folder / f"{number}.call", cloudpickle.dumps((fn, args, kwargs)))
        command = [sys.executable, "-m", function_job.__name__, str(self.folder), str(first)]
        named = {"name": getattr(fn, "__name__", type(fn).__name__)[:100], **self.fields, **more}
        jobs = self.connection.submit_many(command, **named)
        futures: list[FunctionFuture[Result]] = []
        for number, job in enumerate(jobs, start=first):
            future: FunctionFuture[Result] = FunctionFuture()
            future.job, future._file = job, self.folder / f"{number}.result"
            futures.append(future)
        with self._lock:
            self._open |= {future.job.id: future for future in futures}
            if self._watching is None:
                self._watching = threading.Thread(target=self._watch, name="carpool-futures", daemon=True)
                self._watching.start()
        return futures

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more functions. Wait for those that were submitted, or cancel their jobs."""
        with self._lock:
            self._closed = True
            waiting, watching = list(self._open.values()), self._watching
        if cancel_futures:
            for future in waiting:
                future.cancel()
        if wait and watching is not None:
            watching.join()

    # ---- the thread that resolves futures --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the open jobs until there are none."""
        pause = threading.Event()
        while True:
            with self._lock:
                if not self._open:
                    self._watching = None
                    return
                futures = dict(self._open)
            with contextlib.suppress(Unreachable):  # a service that is started again answers later; its jobs go on
                self._look(futures)
            pause.wait(LOOK_S)

    def _look(self, futures: dict[str, FunctionFuture[Any]]) -> None:
        """Resolve the futures whose jobs have ended."""
        rows = {row["job"]: row for row in self.connection.jobs()}
        for job, future in futures.items():
            if job in rows:
                _note_running(future, rows[job]["status"])
                continue
            try:
                ended = future.job.refresh()["status"] in ENDED
            except Refusal as error:
                future.set_exception(JobFailed(f"job {job}: {error}"))
                ended = True
            else:
                if ended:
                    _resolve(future)
            if ended:
                with self._lock:
                    del self._open[job]


def _note_running(future: FunctionFuture[Any], status: str) -> None:
    if status == "running" and not future.running() and not future.cancelled():
        future.set_running_or_notify_cancel()


def _resolve(future: FunctionFuture[Any]) -> None:
    """Give a future the result of its job, or the exception."""
    if future.cancelled():
        if future._state == CANCELLED:  # otherwise its waiters have been notified
            future.set_running_or_notify_cancel()
        return
    if not future.running():
        future.set_running_or_notify_cancel()
    if future.job.status == "cancelled":
        future.set_exception(concurrent.futures.CancelledError(f"job {future.job.id} was cancelled"))
        return
    try:
        returned, value = pickle.loads(future._file.read_bytes())
    except FileNotFoundError:
        future.set_exception(_failure(future.job))
    except Exception as error:  # a class of the job that is not known here
        future.set_exception(JobFailed(f"job {future.job.id}: its result cannot be read: {error!r}"))
    else:
        future.set_result(value) if returned else future.set_exception(value)


def _failure(job: SubmittedJob) -> JobFailed:
    row = job.row
    said = ""
    with contextlib.suppress(InputError):  # the log may be gone
        said = job.logs(stream="stderr")[-TAIL:].strip()
    why = f" ({row['reason']})" if row.get("reason") else ""
    return JobFailed(f"job {job.id} {row['status']}{why} without a result" + (f":\n{said}" if said else ""))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool"
