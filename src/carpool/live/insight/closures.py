"""Drained and reserved GPUs as operators and users see them. Pure functions over the state."""

from collections.abc import Mapping
from typing import Any

from carpool.core.model import Closure, GpuId
from carpool.core.state import State
from carpool.live.text import clock as time_of_day


def closure_row(state: State, closure: Closure, labels: Mapping[GpuId, str]) -> dict[str, Any]:
    """Return a closure as operators see it."""
    there = {record.job.id for gpu in closure.gpus if gpu in state.topology.node_of for record in state.jobs_on(gpu)}
    return {
        "name": closure.id,
        "kind": "drain" if closure.group is None else "reservation",
        "on": [labels.get(gpu, f"GPU {gpu}") for gpu in closure.gpus],
        "group": closure.group,
        "start": closure.start,
        "end": closure.end,
        "begun": closure.id in state.closures_begun,
        "jobs": sorted(there, key=int),
    }


def closed_why(state: State, gpu: GpuId, now: float) -> str:
    """Return why nothing new, or not everything, may start on a GPU; empty: nothing is closed there."""
    said = []
    for closure in state.closures.values():
        if gpu in closure.gpus:
            what = "drained" if closure.group is None else f"reserved for {closure.group}"
            until = f" to {time_of_day(closure.end, now)}" if closure.end is not None else ""
            since = f" from {time_of_day(closure.start, now)}" if closure.start > now or until else ""
            said.append(f"{what}{since}{until}")
    return ", ".join(said)
