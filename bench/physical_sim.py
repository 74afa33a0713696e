"""The simulated world of the physical experiment, and how far it is from the real one."""

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from physical_work import Box, Case, MeasuredModel, Work, policy, table

from carpool import policies
from carpool.core.model import Job, Node
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile
from carpool.sim.engine import Costs, Engine
from carpool.sim.metrics import summarise

FIGURES = ("makespan_s", "mean_jct_s", "mean_queue_s", "gpu_utilisation", "preemptions")


def simulate(
    case: Case,
    jobs: Sequence[Work],
    profile: Profile,
    options: argparse.Namespace,
    costs: Costs,
    box: Box | None = None,
) -> dict[str, float]:
    model = MeasuredModel(profile, table(case.mechanism, profile), box)
    memory = profile.gpu.memory_bytes if profile.gpu and profile.gpu.memory_bytes else 2**50
    node = Node("node", tuple(range(options.gpus or 1)), memory)
    coming = [Job(job.name, job.submitted, job.task, 1, job.batch, job.iterations) for job in jobs]
    rule = policies.make(policy(case.policy, options))
    state = Engine(coming, [node], rule, belief=model, jobs_per_gpu=case.jobs_per_gpu, costs=costs).run()
    found = summarise(state, policy=case.policy, workload="physical")
    return {("occupied" if key == "gpu_utilisation" else key): getattr(found, key) for key in FIGURES}


def box_of(rows: Sequence[Mapping[str, Any]]) -> Box:
    """What a probe's file says."""
    each = {Setting(row["task"], row["batch"]): row for row in rows}
    return Box(
        {setting: row["iteration_s"] for setting, row in each.items()},
        {setting: row["overhead_s"] for setting, row in each.items()},
        median(row["exit_s"] for row in rows),
    )


def compare(
    done: Sequence[Mapping[str, Any]],
    boxes: Mapping[str, Box],
    jobs: Sequence[Work],
    profile: Profile,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Measured against simulated, per case, as lists over the runs; each run is simulated with the box it ran on."""
    runs: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in done:
        runs.setdefault(Case(**result["case"]).kind, []).append(result)
    stops = [took for result in done for took in result["stops_s"]]
    rows = []
    for kind, same in runs.items():
        simulated = []
        for result in same:
            box = boxes.get(result.get("probe", ""))
            costs = box.costs(_stop_s(stops)) if box else _pooled(done, kind[1], stops)
            simulated.append(simulate(Case(*kind), jobs, profile, options, costs, box))
        rows.append(
            {"policy": kind[0], "mechanism": kind[1], "jobs_per_gpu": kind[2]}
            | {"measured": _columns([result["measured"] for result in same]), "simulated": _columns(simulated)}
        )
    return rows


def _stop_s(stops: Sequence[float]) -> float:
    return median(stops) if stops else 0.0


def _pooled(done: Sequence[Mapping[str, Any]], mechanism: str, stops: Sequence[float]) -> Costs:
    """For runs on a box that was not probed: the median launch of all such runs."""
    unprobed = [result for result in done if not result.get("probe") and result["case"]["mechanism"] == mechanism]
    rows = [row for result in unprobed for row in result["jobs"] if row["launch_s"] is not None]
    return Costs(median(row["launch_s"] + row["exit_s"] for row in rows), _stop_s(stops))


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def deviation(row: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    """Measured, simulated, and by how much the latter is off, as means over the runs."""
    real, model = fmean(row["measured"][key]), fmean(row["simulated"][key])
    return real, model, model / real - 1 if real else 0.0
