"""The simulated world of the physical experiment, and how far it is from the real one."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from physical_work import Box, Case, MeasuredModel, Work, policy, table

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Decision, Job, Node, Status
from carpool.profile.measure.plan import MPS, TIME_SLICING
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile
from carpool.report.paper.measured import Both
from carpool.sim.engine import Costs, Engine
from carpool.sim.metrics import summarise

DRAWS = 20
"""Starts take different times from process to process, and the queue multiplies that: one simulation says little."""
FIGURES = ("makespan_s", "mean_jct_s", "mean_queue_s", "gpu_utilisation", "preemptions")


class ServiceEngine(Engine):
    """The world as the service sees it: a process that is up counts as iterating until its first report says better."""

    def _act(self, now: float, decisions: Sequence[Decision]) -> list[ev.Event]:
        prompt = super()._act(now, decisions)
        for decision in decisions:
            record = self.belief.jobs[decision.job]
            if record.status is Status.STARTING:
                self.belief.apply(ev.Started(now, decision.job, record.attempt))
        return prompt


def simulate(
    case: Case,
    jobs: Sequence[Work],
    profile: Profile,
    options: argparse.Namespace,
    costs: Costs,
    box: Box | None = None,
) -> dict[str, float]:
    known = table(case.mechanism, profile)
    belief, truth = MeasuredModel(profile, known), MeasuredModel(profile, known, box)
    memory = profile.gpu.memory_bytes if profile.gpu and profile.gpu.memory_bytes else 2**50
    node = Node("node", tuple(range(options.gpus or 1)), memory)
    coming = [Job(job.name, job.submitted, job.task, 1, job.batch, job.iterations) for job in jobs]
    rule = policies.make(policy(case.policy))
    state = ServiceEngine(
        coming, [node], rule, belief=belief, truth=truth, jobs_per_gpu=case.jobs_per_gpu, costs=costs
    ).run()
    found = summarise(state, policy=case.policy, workload="physical")
    return {("occupied" if key == "gpu_utilisation" else key): getattr(found, key) for key in FIGURES}


def box_of(result: Mapping[str, Any], done: Sequence[Mapping[str, Any]], jobs: Sequence[Work], profile: Profile) -> Box:
    """What other cases say of the machine: those that ran on it; where there are none, those on any machine.

    Times alone come from jobs that had the GPU to themselves, the rest from cases with the same mechanism (a client of
    MPS starts more slowly). The case itself has no part in it, nor has one that found the machine cold.
    """
    others = [other for other in done if other is not result and not other.get("cold")]
    here = [other for other in others if other.get("machine") == result.get("machine")]
    alike = [other for other in here if other["case"]["mechanism"] == result["case"]["mechanism"]]
    work = {job.name: job for job in jobs}
    model = MeasuredModel(profile, table(TIME_SLICING, profile))
    stretch: dict[Setting, list[float]] = {}
    overheads_s: dict[Setting, list[float]] = {}
    for row in _rows(here, shared=False) or _rows(others, shared=False):
        job = work[row["name"]]
        stretch.setdefault(job.setting, []).append((row["ran_s"] - _overhead_s(row)) / model.alone_s(job))
    started = _rows(alike) or _rows(here) or _rows(others)
    for row in started:
        overheads_s.setdefault(work[row["name"]].setting, []).append(_overhead_s(row))
    return Box(
        {kind: median(values) for kind, values in stretch.items()},
        overheads_s,
        median(row["exit_s"] for row in started) if started else 0.0,
    )


def _rows(results: Iterable[Mapping[str, Any]], shared: bool = True) -> list[Mapping[str, Any]]:
    """The jobs that ran in one piece; without `shared`, only those that never shared the GPU, not even by MPS."""
    own_pace = [result for result in results if shared or result["case"]["mechanism"] != MPS]
    rows = [row for result in own_pace for row in result["jobs"]]
    return [row for row in rows if not row["preemptions"] and (shared or not row["shared"])]


def _overhead_s(row: Mapping[str, Any]) -> float:
    return float(row["launch_s"] + row["exit_s"])


def compare(
    done: Sequence[Mapping[str, Any]], jobs: Sequence[Work], profile: Profile, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measured and simulated, per case, as lists over the runs; each run is simulated often, with the box it ran on."""
    runs: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in done:
        runs.setdefault(Case(**result["case"]).kind, []).append(result)
    stops = [took for result in done for took in result["stops_s"]]
    rows = []
    for kind, same in runs.items():
        simulated = []
        for result in same:
            box = box_of(result, done, jobs, profile)
            for draw in range(DRAWS):
                costs = box.costs(median(stops) if stops else 0.0, draw)
                simulated.append(simulate(Case(*kind), jobs, profile, options, costs, box))
        rows.append(
            {"policy": kind[0], "mechanism": kind[1], "jobs_per_gpu": kind[2]}
            | {"cold": any(result.get("cold") for result in same)}
            | {"measured": _columns([result["measured"] for result in same]), "simulated": _columns(simulated)}
        )
    return rows


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def compared(row: Mapping[str, Any], key: str) -> Both:
    """One figure of a case: means over its runs and draws."""
    draws = row["simulated"][key]
    return Both(fmean(row["measured"][key]), fmean(draws), stdev(draws))
