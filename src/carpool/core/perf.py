"""The paper's performance model: iteration time (eq. 3, 4, 7), memory, and the slow-down of sharing (eq. 5, 6).

A `PerformanceModel` is either what a policy believes or what the simulator takes as true. `FittedModel` implements it
from a profile's tasks and one interference table. One model describes one sharing mechanism.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from carpool.core.elastic import JobPhase, Pace, Scaling, own_iterations
from carpool.core.model import Job, sub_batch

GENERIC = "generic"
"""Model name of a job of which only the duration is known."""


class Placement(NamedTuple):
    """The properties of its GPUs that decide a gang's speed: their number, and the number of nodes they are on."""

    gpus: int
    nodes: int


Mate = tuple[Job, int]
"""A job on the same GPU, with its accumulation."""


class PerformanceModel(Protocol):
    """Predicts how fast jobs run and how much memory they need."""

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        """Return the seconds per full-batch iteration, running alone."""

    def fewest_nodes(self, gpus: int) -> int:
        """Return the number of nodes of the most consolidated placement of a gang."""

    def memory(self, job: Job, accumulation: int) -> int:
        """Return the bytes that the job needs on each of its GPUs."""

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        """Return ξ ≥ 1: the job's iteration time beside these mates on one GPU, divided by its iteration time alone."""

    def startup_s(self, job: Job) -> float:
        """Return the seconds from a job's claim to its first iteration; 0.0 where the model does not know."""

    def scaling(self, job: Job) -> Scaling | None:
        """Return the limits within which the job's GPUs and batch may be changed; None: not at all."""

    def noise(self, job: Job, done: float) -> float:
        """Return the gradient noise scale, in samples, of an elastic job after `done` iterations."""

    def scaled_pace(self, job: Job, batch: int, accumulation: int, placement: Placement, done: float) -> Pace:
        """Return the pace of an elastic job with another batch (per GPU) or number of GPUs, in iterations of its own
        batch."""


@runtime_checkable
class FollowsNodes(Protocol):
    """A performance model that depends on how large the nodes are."""

    def node_joined(self, gpus: int) -> None:
        """Note that there is a node with this many GPUs."""


class SlowdownRange(NamedTuple):
    """A believed slow-down and the range in which it lies four times out of five."""

    low: float
    mean: float
    high: float


class UncertainModel(PerformanceModel, Protocol):
    """A performance model that says how certain it is."""

    def announces(self, job: Job) -> bool | None:
        """Return whether jobs like this one report the end of their start-up; None: none was seen."""

    def is_observed(self, job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> bool:
        """Return whether ξ of a job beside this mate was observed, in a profile or while they ran."""

    def slowdown_range(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> SlowdownRange:
        """Return ξ beside these mates with the range in which it lies four times out of five."""

    def knows_alone(self, job: Job, accumulation: int) -> bool:
        """Return whether the speed alone of a job like this one was measured, at its whole size."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """t_comm of n GPUs: base + per_gpu·(n − 2). Fits the measured data better than eq. 4's term in the message size."""

    base_s: float
    per_gpu_s: float

    def time(self, gpus: int) -> float:
        """Return the seconds of one all-reduce over this many GPUs."""
        return self.base_s + self.per_gpu_s * (gpus - 2)


@dataclass(frozen=True, slots=True)
class Task:
    """The fitted constants of one training task."""

    alpha_s: float
    beta_s: float
    intra: AllReduce
    inter: AllReduce
    delta: float
    memory_static: int = 0
    memory_per_sample: float = 0.0
    scaling: Scaling | None = None
    """Limits and efficiency of other batches; None: unknown."""
    knee: float = 1.0
    """Sharpness of the bend between small batches, which take α seconds, and large ones, which take β seconds per
    sample; 1: eq. 3, a straight line."""

    def compute(self, samples: int) -> float:  # eq. 3
        """Return the seconds to compute the gradients of one micro-batch."""
        if self.knee == 1.0:
            return self.alpha_s + self.beta_s * samples
        longer, shorter = self.alpha_s, self.beta_s * samples
        if shorter > longer:
            longer, shorter = shorter, longer
        return longer * math.pow(1.0 + math.pow(shorter / longer, self.knee), 1.0 / self.knee)

    def communicate(self, placement: Placement) -> float:  # eq. 4
        """Return the seconds of one all-reduce."""
        if placement.gpus == 1:
            return 0.0
        return (self.intra if placement.nodes == 1 else self.inter).time(placement.gpus)

    def iteration(self, batch: int, accumulation: int, placement: Placement) -> float:  # eq. 7
        """Return the seconds of one iteration."""
        last = self.compute(batch // accumulation)  # the micro-batch whose backward pass overlaps the all-reduce
        before = self._all_micro_batches(batch, accumulation) - last
        comm = self.communicate(placement)
        if comm <= 0.0:
            return before + last
        longer, shorter = max(last, comm), min(last, comm)
        return before + longer * math.pow(1.0 + math.pow(shorter / longer, self.delta), 1.0 / self.delta)

    def _all_micro_batches(self, batch: int, accumulation: int) -> float:
        if self.knee == 1.0:
            return accumulation * self.alpha_s + self.beta_s * batch
        size, larger = divmod(batch, accumulation)
        return larger * self.compute(size + 1) + (accumulation - larger) * self.compute(size)

    def memory(self, samples: int) -> int:
        """Return the bytes on one GPU at this sub-batch."""
        return self.memory_static + round(self.memory_per_sample * samples)


GENERIC_TASK = Task(1.0, 0.0, AllReduce(0.0, 0.0), AllReduce(0.0, 0.0), 1.0)
"""Task of a generic job: its speed comes from its duration alone, and its memory counts as zero."""


class Interference(Protocol):
    """The slow-down of pairs, and the demands from which that of groups follows."""

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        """Return ξ of `model` beside one `mate`, each at its sub-batch; 1.0: they do not slow each other down."""

    def demand(self, model: str, samples: int) -> float:
        """Return the share of a GPU that `model` needs at its sub-batch; 0.0: unknown."""


def group_slowdown(pairs: Iterable[float], demands: Iterable[float]) -> float:
    """Return ξ of a job beside several mates: max(1 + Σ (ξ − 1), Σ demand).

    `pairs` are its ξ beside each mate alone; `demands` are those of all residents, its own included. The costs of the
    mates add up, and where the residents together need more than one GPU, each of them gets that much less.
    """
    return max(1.0 + sum(max(1.0, xi) - 1.0 for xi in pairs), sum(demands))


@dataclass(frozen=True, slots=True)
class ConstantInterference:
    """The same ξ for all pairs."""

    xi: float

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        return self.xi

    def demand(self, model: str, samples: int) -> float:
        return 0.0


class UnknownPair(LookupError):
    """An interference table has no entry for a pair of models."""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """One entry of an interference table: ξ of a model beside a mate at the sub-batches that were measured (0: any)."""

    xi: float
    samples: int = 0
    mate_samples: int = 0


class TableInterference:
    """ξ by model and mate; where a pair was measured at several sub-batches, the nearest (in ratio) counts."""

    def __init__(
        self,
        cells: Mapping[tuple[str, str], Sequence[MeasuredPair]],
        demands: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    ) -> None:
        self.cells = {pair: tuple(measured) for pair, measured in cells.items()}
        self.models = {model for pair in self.cells for model in pair}
        self.demands = {model: sorted(known) for model, known in (demands or {}).items()}
        """The demand of each model at the sub-batches at which it is known (0: any)."""

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        measured = self.cells.get((model, mate))
        if not measured:
            raise UnknownPair(f"no interference is known for {model} beside {mate}")
        if len(measured) == 1:
            return max(1.0, measured[0].xi)
        nearest = min(measured, key=lambda m: _ratio(m.samples, samples) * _ratio(m.mate_samples, mate_samples))
        return max(1.0, nearest.xi)  # below 1 is measurement noise

    def demand(self, model: str, samples: int) -> float:
        """Return the demand at a sub-batch.

        Between two known sub-batches it lies on a straight line in logarithms. Below the smallest it is proportional
        to the sub-batch, because the work shrinks and the iteration time hardly does. Above the largest it is constant.
        """
        known = self.demands.get(model)
        if not known:
            return 0.0
        above = bisect_left(known, (samples, -math.inf))
        if above == len(known) or known[above][0] == samples:
            return known[min(above, len(known) - 1)][1]
        high, demand = known[above]
        if above == 0:
            return demand * samples / high
        low, less = known[above - 1]
        if not (low and less and demand):
            return demand
        share = math.log(samples / low) / math.log(high / low)
        return math.exp(math.log(less) + share * math.log(demand / less))


def _ratio(a: int, b: int) -> float:
    low, high = sorted((max(a, 1), max(b, 1)))
    return high / low


def no_startup(job: Job) -> float:
    """Return the start-up of a job that computes as soon as it has its GPUs."""
    return 0.0


MOST_GROUPS = 100_000
"""Number of groups whose slow-downs a model keeps."""


class FittedModel:
    """Eq. 3–7 over a set of tasks, on a cluster whose nodes have `node_gpus` GPUs each."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        interference: Interference,
        node_gpus: int,
        *,
        ignore_placement: bool = False,
        ignore_memory: bool = False,
        startup: Callable[[Job], float] = no_startup,
    ) -> None:
        self.tasks = {GENERIC: GENERIC_TASK, **tasks}
        self.interference = interference
        self.node_gpus = node_gpus
        self.ignore_placement = ignore_placement
        self.ignore_memory = ignore_memory
        self.startup = startup
        self._iterations: dict[tuple[str, int, int, int, int], float] = {}
        self._memory: dict[tuple[str, int, int], int] = {}
        self._pairs: dict[tuple[str, int, int, str, int, int], float] = {}
        self._groups: dict[tuple[object, ...], float] = {}
        self._job_phases: dict[tuple[str, int, int], tuple[JobPhase, ...]] = {}
        self._demands: dict[tuple[str, int, int], float] = {}

    def node_joined(self, gpus: int) -> None:
        """Note that there is a node with this many GPUs: the largest one counts."""
        self.node_gpus = max(self.node_gpus, gpus)

    def fewest_nodes(self, gpus: int) -> int:
        return -(-gpus // self.node_gpus)

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        gpus, nodes = placement
        fewest = -(-gpus // self.node_gpus)
        if self.ignore_placement:
            nodes = fewest
        if job.duration_s is None:
            return self._fitted(job, accumulation, gpus, nodes)
        given = job.duration_s / job.iterations
        if accumulation == 1 and nodes == fewest and gpus == job.gpus:
            return given
        # The given duration sets the speed; the fit gives only the ratio for another sub-batch or placement.
        best = self._fitted(job, 1, job.gpus, self.fewest_nodes(job.gpus))
        return given * (self._fitted(job, accumulation, gpus, nodes) / best)

    def _fitted(self, job: Job, accumulation: int, gpus: int, nodes: int) -> float:
        return self._timed(job.model, job.batch, accumulation, gpus, nodes)

    def _timed(self, model: str, batch: int, accumulation: int, gpus: int, nodes: int) -> float:
        key = (model, batch, accumulation, gpus, nodes)
        time = self._iterations.get(key)
        if time is None:
            time = self.tasks[model].iteration(batch, accumulation, Placement(gpus, nodes))
            self._iterations[key] = time
        return time

    def memory(self, job: Job, accumulation: int) -> int:
        if self.ignore_memory:
            return 0
        key = (job.model, job.batch, accumulation)
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = self.tasks[job.model].memory(sub_batch(job.batch, accumulation))
        return memory

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        if len(mates) == 1:
            mate, split = mates[0]
            return self._pair(job, accumulation, mate, split)
        key = (job.model, job.batch, accumulation, *[(mate.model, mate.batch, split) for mate, split in mates])
        xi = self._groups.get(key)
        if xi is None:
            if len(self._groups) >= MOST_GROUPS:
                self._groups.clear()
            pairs = [self._pair(job, accumulation, mate, mate_accumulation) for mate, mate_accumulation in mates]
            demands = [self._demand(*one) for one in ((job, accumulation), *mates)]
            xi = self._groups[key] = group_slowdown(pairs, demands)
        return xi

    def _demand(self, job: Job, accumulation: int) -> float:
        key = (job.model, job.batch, accumulation)
        demand = self._demands.get(key)
        if demand is None:
            demand = self._demands[key] = self.interference.demand(job.model, sub_batch(job.batch, accumulation))
        return demand

    def forget_pairs(self) -> None:
        """Forget the cached ξ of pairs and groups: the interference table changed."""
        self._pairs.clear()
        self._groups.clear()

    def _pair(self, job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> float:
        key = (job.model, job.batch, accumulation, mate.model, mate.batch, mate_accumulation)
        xi = self._pairs.get(key)
        if xi is None:
            samples, mate_samples = sub_batch(job.batch, accumulation), sub_batch(mate.batch, mate_accumulation)
            xi = self._pairs[key] = self.interference.pair(job.model, samples, mate.model, mate_samples)
        return xi

    def startup_s(self, job: Job) -> float:
        return self.startup(job)

    def scaling(self, job: Job) -> Scaling | None:
        return self.tasks[job.model].scaling if job.elastic else None

    def noise(self, job: Job, done: float) -> float:
        return self._job_phase(job, done).noise

    def scaled_pace(self, job: Job, batch: int, accumulation: int, placement: Placement, done: float) -> Pace:
        gpus, nodes = placement
        if self.ignore_placement:
            nodes = self.fewest_nodes(gpus)
        time = self._timed(job.model, batch, accumulation, gpus, nodes)
        if job.duration_s is not None:
            # as in `iteration_time`; the given duration holds for micro-steps within the task's limit
            scaling = self.tasks[job.model].scaling
            own = scaling.micro_steps(job.batch, job.gpus, scaling.max_sub_batch) if scaling else 1
            best = self._timed(job.model, job.batch, own, job.gpus, self.fewest_nodes(job.gpus))
            time *= job.duration_s / job.iterations / best
        phase = self._job_phase(job, done)
        return Pace(time / own_iterations(phase.noise, batch * gpus, job.batch * job.gpus), phase.until)

    def _job_phase(self, job: Job, done: float) -> JobPhase:
        """Return the phase that a job is in after `done` iterations."""
        own_batch = job.batch * job.gpus
        key = (job.model, own_batch, job.iterations)
        job_phases = self._job_phases.get(key)
        if job_phases is None:
            scaling = self.tasks[job.model].scaling
            assert scaling is not None, f"{job.model} does not scale"
            job_phases = self._job_phases[key] = scaling.job_phases(own_batch, job.iterations)
        for phase in job_phases:
            if done < phase.until:
                return phase
        return job_phases[-1]
