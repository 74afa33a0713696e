"""The simulated side of the physical experiment, and how far it is from the real one."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod, sqrt
from statistics import fmean, median, variance
from typing import Any

from physical_work import (
    EXCLUSIVE,
    RETIRED,
    ExperimentCase,
    ExperimentJob,
    MachineCosts,
    MachineEffects,
    MachineModel,
    MeasuredModel,
    policy,
    table,
)

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Decision, Node, Status
from carpool.core.record import JobRecord
from carpool.profile.measure.plan import MPS, TIME_SLICING
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile
from carpool.report.paper.measured import WORLDS, FigureComparison
from carpool.sim.engine import Engine
from carpool.sim.metrics import summarise

DRAWS = 20
"""Number of random draws per run. Start times vary and the queue amplifies that, so one simulation says little."""
FIGURES = ("makespan_s", "mean_jct_s", "mean_queue_s", "preemptions")


class ServiceEngine(Engine):
    """An engine that sees processes as the service does: a process that is up counts as iterating until it reports.

    The time that a process takes to end is counted at its start, so its iterations lag behind by that time.
    """

    costs: MachineCosts

    def _act(self, now: float, decisions: Sequence[Decision]) -> list[ev.Event]:
        prompt = super()._act(now, decisions)
        for decision in decisions:
            record = self.belief.jobs[decision.job]
            if record.status is Status.STARTING:
                self.belief.apply(ev.Started(now, decision.job, record.attempt))
        return prompt

    def _stopped(self, now: float, record: JobRecord) -> ev.Stopped | ev.Finished:
        """Return the end of a stopped job; a job that has completed its iterations finishes instead."""
        if not record.done:
            return super()._stopped(now, record)
        left_s = (record.job.iterations - record.done) * record.alone_iteration_s
        if left_s <= self.costs.effects.exit_s:
            return ev.Finished(now + left_s, record.job.id, record.attempt)
        done = record.done + self.costs.effects.exit_s / record.alone_iteration_s
        return ev.Stopped(now + self.costs.stop_s, record.job.id, record.attempt, done)


def simulate(
    case: ExperimentCase,
    jobs: Sequence[ExperimentJob],
    profile: Profile,
    options: argparse.Namespace,
    effects: MachineEffects,
    draw: int = 0,
    truth: Profile | None = None,
) -> dict[str, float]:
    """Simulate a case. The policy believes in the service's profile; the world follows `truth` (None: the same)."""
    truth = truth or profile
    on = IterationSpans()
    memory = profile.gpu.memory_bytes if profile.gpu and profile.gpu.memory_bytes else 2**50
    state = ServiceEngine(
        [work.job for work in jobs],
        [Node("node", tuple(range(options.gpus or 1)), memory)],
        policies.make(policy(case.policy)),
        belief=MeasuredModel(profile, table(case.mechanism, profile)),
        truth=MachineModel(truth, table(case.mechanism, truth), effects, draw),
        jobs_per_gpu=case.jobs_per_gpu,
        costs=effects.costs(draw),
        log=on.note,
    ).run()
    found = summarise(state, policy=case.policy, workload="physical")
    shares = {job.name: _busy(truth, job.setting) for job in jobs}
    busy = on.busy_s(shares) / found.makespan_s / (options.gpus or 1)
    return {key: getattr(found, key) for key in FIGURES} | {"gpu_utilisation": busy}


class IterationSpans:
    """The times in which each job iterated, from the events."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._spans: list[tuple[float, float, str]] = []

    def note(self, event: ev.Event) -> None:
        if isinstance(event, ev.Started):
            self._since[event.job] = event.at
        elif isinstance(event, ev.Finished | ev.Stopped) and event.job in self._since:
            self._spans.append((self._since.pop(event.job), event.at, event.job))

    def busy_s(self, shares: Mapping[str, float]) -> float:
        """Seconds in which a kernel ran on the GPU, if kernels of different jobs overlap at random."""
        moments = sorted({moment for span in self._spans for moment in span[:2]})
        total = 0.0
        for begin, end in pairwise(moments):
            on = [job for start, stop, job in self._spans if start <= begin and stop >= end]
            total += (end - begin) * (1.0 - prod(1.0 - shares[job] for job in on))
        return total


@dataclass(frozen=True)
class Runs:
    """All results, and the effects of the machines that they ran on."""

    done: Sequence[Mapping[str, Any]]
    jobs: Sequence[ExperimentJob]
    truth: Profile

    def known_effects(self, result: Mapping[str, Any]) -> MachineEffects:
        """Effects with the case's own start times, and with the speed of its cores that they show."""
        own_s = {row["name"]: _overhead_s(row) for row in result["jobs"] if row["launch_s"] is not None}
        return replace(self._effects(result, self.slowness(result)), own_s=own_s)

    def predicted_effects(self, result: Mapping[str, Any]) -> MachineEffects:
        """Effects as predicted from other cases."""
        here = self._nearest(result)
        return self._effects(result, median(map(self.slowness, here)) if here else 1.0)

    def _effects(self, result: Mapping[str, Any], slowness: float) -> MachineEffects:
        here = self._nearest(result)
        alike = [other for other in here if other["case"]["mechanism"] == result["case"]["mechanism"]] or here
        overheads_s: dict[Setting, list[float]] = {}
        for row in _rows(alike):
            overheads_s.setdefault(self._work[row["name"]].setting, []).append(_overhead_s(row))
        exits = [row["exit_s"] for row in _rows(alike)]
        stops = [took for other in self._others(result) for took in other["stops_s"]]
        return MachineEffects(
            alone_s=self._alone_s(result, slowness),
            overheads_s=overheads_s,
            exit_s=median(exits) if exits else 0.0,
            stop_s=median(stops) if stops else 0.0,
        )

    def _others(self, result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [other for other in self.done if other is not result]

    def _nearest(self, result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return other cases on the same machine; those on any machine if there are none."""
        others = self._others(result)
        return [other for other in others if other["machine"] == result["machine"]] or others

    def slowness(self, result: Mapping[str, Any]) -> float:
        """Slowness of the cores: start times of this case relative to those of the same jobs in all cases."""
        starts = [start / self._usual_start_s[setting] for setting, start in self._starts(result)]
        return median(starts) if starts else 1.0

    def _alone_s(self, result: Mapping[str, Any], slowness: float) -> dict[Setting, float]:
        """Return iteration times alone, from jobs of other cases that had the GPU to themselves.

        The part of an iteration in which the GPU waits for kernel launches scales with the slowness of the cores.
        """
        seen: dict[Setting, list[float]] = {}
        for other in self._others(result):
            relative = slowness / self.slowness(other)
            for row in _rows([other], shared=False):
                job = self._work[row["name"]]
                took_s = (row["ran_s"] - _overhead_s(row)) * relative ** self._launching[job.setting]
                seen.setdefault(job.setting, []).append(took_s / job.iterations)
        return {setting: median(values) for setting, values in seen.items()}

    @cached_property
    def _work(self) -> dict[str, ExperimentJob]:
        return {job.name: job for job in self.jobs}

    @cached_property
    def _launching(self) -> dict[Setting, float]:
        """Share of an iteration in which the GPU waits for kernel launches, by job setting."""
        return {job.setting: 1.0 - _busy(self.truth, job.setting) for job in self.jobs}

    @cached_property
    def _usual_start_s(self) -> dict[Setting, float]:
        seen: dict[Setting, list[float]] = {}
        for result in self.done:
            for setting, start in self._starts(result):
                seen.setdefault(setting, []).append(start)
        return {setting: fmean(starts) for setting, starts in seen.items()}

    def _starts(self, result: Mapping[str, Any]) -> list[tuple[Setting, float]]:
        """Return start times without the first one, which may read everything from disk."""
        _, *later = sorted(result["jobs"], key=lambda row: row["started"])
        return [(self._work[row["name"]].setting, row["launch_s"]) for row in later if row["launch_s"] is not None]


def _busy(profile: Profile, setting: Setting) -> float:
    """Return the share of an iteration in which the GPU works; 1 if it is unknown."""
    busy = profile.tasks[setting.task].busy
    return busy.share(setting.batch) if busy is not None else 1.0


def _rows(results: Iterable[Mapping[str, Any]], shared: bool = True) -> list[Mapping[str, Any]]:
    """Return the jobs that were never preempted; without `shared`, only those that never shared the GPU or used MPS."""
    chosen = [result for result in results if shared or result["case"]["mechanism"] != MPS]
    rows = [row for result in chosen for row in result["jobs"]]
    return [row for row in rows if not row["preemptions"] and (shared or not row["shared"])]


def _overhead_s(row: Mapping[str, Any]) -> float:
    return float(row["launch_s"] + row["exit_s"])


def compare(
    done: Sequence[Mapping[str, Any]],
    jobs: Sequence[ExperimentJob],
    profile: Profile,
    options: argparse.Namespace,
    truth: Profile | None = None,
) -> list[dict[str, Any]]:
    """Return measured, simulated and predicted figures per case: a value, or a list of draws, for each run.

    Simulated: each process takes as long to start and to end as it did in this run. Predicted: nothing is known of the
    run. `sjf_jct_s` is the mean JCT that exclusive SJF would have had with the start times and cores of each run.
    """
    runs = Runs(done, jobs, truth or profile)
    known: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in done:
        if result["case"]["policy"] not in RETIRED:
            known.setdefault(ExperimentCase(**result["case"]).kind, []).append(result)

    def draws(case: ExperimentCase, effects: MachineEffects) -> list[dict[str, float]]:
        return [simulate(case, jobs, profile, options, effects, draw, truth) for draw in range(DRAWS)]

    rows = []
    for kind, same in known.items():
        case, known_effects = ExperimentCase(*kind), [*map(runs.known_effects, same)]
        alone = ExperimentCase("sjf", TIME_SLICING if case.mechanism == MPS else case.mechanism)
        sharing = known_effects if case.policy not in EXCLUSIVE else []
        rows.append(
            {"policy": case.policy, "mechanism": case.mechanism, "jobs_per_gpu": case.jobs_per_gpu}
            | {"machines": [result["machine"] for result in same], "slowness": [*map(runs.slowness, same)]}
            | {"measured": _columns([result["measured"] for result in same])}
            | {"simulated": _columns([_columns(draws(case, effects)) for effects in known_effects])}
            | {"predicted": _columns([_columns(draws(case, runs.predicted_effects(result))) for result in same])}
            | {"sjf_jct_s": [fmean(one["mean_jct_s"] for one in draws(alone, effects)) for effects in sharing]}
        )
    return rows


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def compared(row: Mapping[str, Any], key: str, run: int | None = None) -> FigureComparison:
    """Return one figure of a case: the mean over draws, and over runs if `run` is None."""
    chosen = slice(None) if run is None else slice(run, run + 1)
    measured, simulated, predicted = (row[world][key][chosen] for world in WORLDS)
    spread = sqrt(fmean(map(variance, simulated)))  # of the same run; runs differ by more
    return FigureComparison(fmean(measured), fmean(map(fmean, simulated)), fmean(map(fmean, predicted)), spread)
