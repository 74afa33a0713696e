"""What a performance model that learns is told: how fast a job was seen to run, and beside whom.

`State` calls `learn` while it applies `Observed` and `Finished`, and nowhere else: the belief is part of the state, so
a journal of events, replayed, gives the same belief and the same decisions again. What a model has learned may change
its answers; the state then refreshes all that it derived from them and counts `belief_version` up.
"""

from enum import Flag, auto
from typing import Any, NamedTuple, Protocol, runtime_checkable

from carpool.core.cluster import Cluster
from carpool.core.model import Job, Status
from carpool.core.perf import Mate, PerformanceModel, Placement
from carpool.core.record import JobRecord


class Observation(NamedTuple):
    """How fast a job ran, in seconds per full-batch iteration."""

    job: Job
    attempt: int
    accumulation: int
    placement: Placement
    iteration_s: float
    alone_iteration_s: float
    """The iteration time alone at this place and accumulation."""
    alone_seen: bool
    """Was that measured in this launch, or is it what the model believes?"""
    cells: tuple[tuple[Mate, ...], ...]
    """The different sets of mates on its GPUs, the empty one left out; no sets: it ran alone."""


class ModelChange(Flag):
    """Which answers of the model may have changed."""

    NOTHING = 0
    SLOWDOWNS = auto()
    SPEEDS = auto()


@runtime_checkable
class LearningModel(PerformanceModel, Protocol):
    version: int
    """Grows whenever an answer may have changed."""

    def learn(self, seen: Observation) -> ModelChange:
        """Take note of what was seen."""

    def dump(self) -> dict[str, Any]:
        """All that was learned, as plain data."""

    def restore(self, data: dict[str, Any]) -> None:
        """Know what was dumped, and nothing else that was learned."""


def observe_running(cluster: Cluster, record: JobRecord, iteration_s: float) -> Observation | None:
    """What a report of a running job says; None while a mate comes up or goes, as nobody knows whom it disturbs."""
    cells: list[tuple[Mate, ...]] = []
    for cell in sorted(cluster.shared_cells(record), key=lambda cell: [other.seq for other in cell]):
        if any(other.status is not Status.RUNNING for other in cell):
            return None
        cells.append(tuple([(other.job, other.accumulation) for other in cell if other is not record]))
    return Observation(
        record.job,
        record.attempt,
        record.accumulation,
        Placement(len(record.gpus), cluster.topology.nodes_spanned(record.gpus)),
        iteration_s,
        record.alone_iteration_s,
        record.alone_seen,
        tuple(cells),
    )


def observe_finished(cluster: Cluster, record: JobRecord) -> Observation | None:
    """What the end of a job says that never reported: its run time, less what sharing is believed to have cost."""
    if record.reported or record.attempt != 1 or not record.gpus or record.alone_s <= 0.0:
        return None
    placement = Placement(len(record.gpus), cluster.topology.nodes_spanned(record.gpus))
    iteration_s = record.alone_s / record.job.iterations
    return Observation(record.job, 1, record.accumulation, placement, iteration_s, iteration_s, False, ())
