"""Many simulations on all cores: every policy on every workload, and means over seeds.

`carpool compare`, `replay`, `study` and `paper` run their simulations through `run_all` or `run_each`.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from math import sqrt
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.resource_tracker import ensure_running
from statistics import fmean, stdev
from traceback import format_exc
from typing import Any

from carpool.errors import InputError
from carpool.interrupts import uninterrupted
from carpool.sim.metrics import Summary, jct
from carpool.sim.run import Setup, simulate
from carpool.sim.workload import Workload


@dataclass(frozen=True)
class SweepCase:
    """One workload of a sweep. Cases that differ only in their seed are averaged."""

    label: str
    seed: str
    workload: Workload
    draw: int | None = None
    """Seed of the estimation errors in a run; None for the setup's seed."""


@dataclass(frozen=True)
class CaseResult:
    """The result of one policy on one case."""

    policy: str
    case: str
    seed: str
    summary: Summary
    jcts_s: tuple[float, ...]
    """Completion times of all jobs, ascending."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds with its standard error, which is None for a single seed."""

    value: float
    error: float | None


def run_all(
    policies: Sequence[str],
    cases: Sequence[SweepCase],
    setup: Setup,
    *,
    workers: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[CaseResult]:
    """Run every policy on every case and return the results in that order.

    One process per core does the work; an interrupt ends all processes.
    """
    tasks = [(policy, case, setup) for case in cases for policy in policies]
    done: dict[int, CaseResult] = {}
    with closing(run_each(tasks, workers)) as results:
        for number, outcome in results:
            done[number] = outcome
            progress()
    return [done[number] for number in range(len(tasks))]


SweepTask = tuple[str, SweepCase, Setup]


def run_each(tasks: Sequence[SweepTask], workers: int | None = None) -> Generator[tuple[int, CaseResult], None, None]:
    """Yield the number and the result of each task as it completes. Close the generator to end its processes."""
    workers = min(workers or os.cpu_count() or 1, len(tasks))
    if workers <= 1:
        for number, task in enumerate(tasks):
            yield number, _run(*task)
        return
    with closing(_in_parallel(tasks, workers)) as results:
        yield from results


def _in_parallel(tasks: Sequence[SweepTask], workers: int) -> Generator[tuple[int, CaseResult], None, None]:
    """Run tasks in several processes, each with its own pipe.

    Unlike the queues of a process pool, a pipe cannot block the parent when it ends a worker in the middle of a
    message, and a worker whose parent was killed finds its pipe closed.
    """
    waiting = iter(enumerate(tasks))
    at_work: dict[Any, int] = {}

    def give(pipe: Any) -> None:
        for number, task in waiting:
            pipe.send(task)
            at_work[pipe] = number
            return

    with _started(workers) as pipes:
        try:
            for pipe in pipes:
                give(pipe)
            while at_work:
                ready: list[Any] = wait(list(at_work))
                for pipe in ready:
                    outcome = pipe.recv()
                    if isinstance(outcome, Exception):
                        raise outcome
                    yield at_work.pop(pipe), outcome
                    give(pipe)
        except (EOFError, ConnectionError):
            raise InputError("a worker process died, perhaps because memory ran out; try --workers 1") from None


@contextmanager
def _started(workers: int) -> Iterator[list[Any]]:
    """Start worker processes, yield the pipes that lead to them, and end them all afterwards."""
    context = get_context("spawn")  # not forked, because the parent may have threads (a progress bar)
    if os.name == "posix":
        ensure_running()  # Python's resource tracker; starting it later would unblock interrupts
    started = []
    try:
        with uninterrupted():  # workers inherit the mask, so that only the parent receives an interrupt and ends them
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours))
        yield [ours for _, ours in started]
    finally:
        for process, ours in started:
            process.terminate()
            ours.close()
        for process, _ in started:
            process.join()


def _work(pipe: Any) -> None:
    """Serve as a worker process: receive tasks and send results or errors, until the parent closes the pipe."""
    with suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            try:
                outcome: object = _run(*task)
            except InputError as error:
                outcome = error
            except Exception:
                outcome = RuntimeError(f"in a worker process:\n{format_exc()}")
            pipe.send(outcome)


def _run(policy: str, case: SweepCase, setup: Setup) -> CaseResult:
    if case.draw is not None:
        setup = replace(setup, seed=case.draw)
    result = simulate(case.workload, policy, setup)
    return CaseResult(policy, case.label, case.seed, result.summary, tuple(sorted(jct(job) for job in result.jobs)))


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of the values with its standard error."""
    return Mean(fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None)
