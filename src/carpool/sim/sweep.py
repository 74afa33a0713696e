"""Many simulations on all cores: policies × workloads, and what they amount to over the seeds."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from math import sqrt
from multiprocessing import get_context, parent_process
from statistics import fmean, stdev
from threading import Thread

from carpool.errors import InputError
from carpool.report.output import uninterrupted
from carpool.sim.metrics import Summary, jct
from carpool.sim.run import Setup, simulate
from carpool.sim.workload import Workload


@dataclass(frozen=True)
class Case:
    """One workload of a sweep; the cases that differ only in their seed are averaged."""

    label: str
    seed: str
    workload: Workload
    draw: int | None = None
    """The seed of what is random within a run; None: the setup's."""


@dataclass(frozen=True)
class Outcome:
    policy: str
    case: str
    seed: str
    summary: Summary
    jcts_s: tuple[float, ...]
    """Of every job, ascending."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds with its standard error (None where there is only one seed)."""

    value: float
    error: float | None


def run_all(
    policies: Sequence[str],
    cases: Sequence[Case],
    setup: Setup,
    *,
    workers: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Every policy on every case, in that order. One process per core; an interrupt ends them all."""
    tasks = [(policy, case, setup) for case in cases for policy in policies]
    workers = min(workers or os.cpu_count() or 1, len(tasks))
    if workers == 1:
        outcomes = []
        for task in tasks:
            outcomes.append(_run(*task))
            progress()
        return outcomes
    # spawned, not forked: the parent may have threads (a progress bar)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        with uninterrupted():  # the workers inherit it: only the parent hears an interrupt, and ends them
            futures = [pool.submit(_run, *task) for task in tasks]
        for future in as_completed(futures):
            future.result()
            progress()
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise InputError("a worker process died, perhaps for lack of memory; try --workers 1") from None
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """A worker must not outlive a parent that was killed."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def _run(policy: str, case: Case, setup: Setup) -> Outcome:
    if case.draw is not None:
        setup = replace(setup, seed=case.draw)
    result = simulate(case.workload, policy, setup)
    return Outcome(policy, case.label, case.seed, result.summary, tuple(sorted(jct(job) for job in result.jobs)))


def mean(values: Sequence[float]) -> Mean:
    return Mean(fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None)
