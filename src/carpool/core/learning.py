"""What a performance model learns from: observations of how fast a job ran, and beside which mates.

`pace.learn` passes them to the model while `Observed` and `Finished` are applied, and nowhere else: the belief is part
of the state, so a replayed journal gives the same belief and the same decisions. Where the model's answers change, the
state computes again all that follows from them and increments `belief_version`.
"""

from enum import Flag, auto
from typing import Any, NamedTuple, Protocol, runtime_checkable

from carpool.core.cluster import Cluster
from carpool.core.model import GpuDemand, Job, Status
from carpool.core.perf import Mate, Placement, UncertainModel
from carpool.core.record import JobRecord


class Observation(NamedTuple):
    """How fast a job ran."""

    job: Job
    attempt: int
    accumulation: int
    placement: Placement
    iteration_s: float
    """Observed seconds per full-batch iteration."""
    alone_iteration_s: float
    """Iteration time alone at this placement and accumulation."""
    alone_seen: bool
    """`alone_iteration_s` was measured in this attempt, not predicted by the model."""
    cells: tuple[tuple[Mate, ...], ...]
    """The mates in each cell in which the job has mates; empty: it ran alone."""


class StartUp(NamedTuple):
    """How long a job took from its claim to its first iteration."""

    job: Job
    seconds: float
    told: bool = True
    """Whether the job reported when it was up; False: it is assumed."""


class ModelChange(Flag):
    """The answers of the model that an observation may have changed."""

    NOTHING = 0
    SLOWDOWNS = auto()
    SPEEDS = auto()
    STARTUPS = auto()


@runtime_checkable
class LearningModel(UncertainModel, Protocol):
    """A performance model that learns from observations."""

    version: int
    """Number that grows whenever an answer may have changed."""

    def learn(self, seen: Observation) -> ModelChange:
        """Learn from an observation and return which answers may have changed."""

    def learn_startup(self, seen: StartUp) -> ModelChange:
        """Learn how long a job took to start up, and return whether answers may have changed."""

    def give_up(self, job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> None:
        """Count a pair as observed, with what is known: a trial of it ended without a verdict."""

    def dump(self) -> dict[str, Any]:
        """Return all that was learned, as plain data."""

    def restore(self, data: dict[str, Any]) -> None:
        """Replace all that was learned by what `dump` returned."""


@runtime_checkable
class WeighsGuesses(Protocol):
    """A model that believes in a user's guess of a duration only where it knows nothing better."""

    def relies_on_guess(self, job: Job) -> bool:
        """Return whether the iteration times of a job follow from the duration that its user gave."""


@runtime_checkable
class DemandLearner(Protocol):
    """A model that learns from demands."""

    def learn_demand(self, job: Job, accumulation: int, demand: GpuDemand) -> ModelChange:
        """Learn what a job uses of a GPU when it runs alone, and return which answers may have changed."""


def observe_running(cluster: Cluster, record: JobRecord, iteration_s: float) -> Observation | None:
    """Return the observation that a report of a running job gives.

    It is None while a mate starts up, stops, pauses or resumes, because its influence is unknown then. Mates that are
    paused have none.
    """
    cells: list[tuple[Mate, ...]] = []
    for cell in sorted(cluster.shared_cells(record), key=lambda cell: [other.seq for other in cell]):
        computing = [other for other in cell if other.status is not Status.PAUSED]
        if not all(other.computing for other in computing):
            return None
        if len(computing) > 1:
            cells.append(tuple([(other.job, other.accumulation) for other in computing if other is not record]))
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
    """Return the observation from the end of a job that never reported its speed: its run time, less the time that
    sharing is believed to have cost; None where there is none."""
    if record.reported or record.attempt != 1 or not record.gpus or record.alone_s <= 0.0:
        return None
    placement = Placement(len(record.gpus), cluster.topology.nodes_spanned(record.gpus))
    iteration_s = record.alone_s / record.job.iterations
    return Observation(record.job, 1, record.accumulation, placement, iteration_s, iteration_s, False, ())
