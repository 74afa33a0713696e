"""The belief: a performance model that starts from a profile and learns from what jobs report.

It answers like any other `PerformanceModel`, in the simulator (`--belief learned`) and in the live service. `State`
passes it observations while it applies events. Its answers change only in `learn`, and `version` grows when they do.
Events are its only input, so replaying a journal gives the same belief and the same decisions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

from carpool.belief import codec
from carpool.belief.demand import Demands
from carpool.belief.pairs import (
    EPISODE_SD,
    FOUR_IN_FIVE,
    MEASURED_SD,
    Cell,
    JobClass,
    PairBelief,
    UnknownPairs,
    is_python_script,
    is_script,
    job_class,
)
from carpool.belief.speeds import NOTICEABLE, SpeedKey, Speeds, StartUps
from carpool.core.elastic import Pace, Scaling
from carpool.core.learning import ModelChange, Observation, StartUp
from carpool.core.model import GpuDemand, Job, sub_batch
from carpool.core.perf import GENERIC, FittedModel, Mate, PerformanceModel, Placement, SlowdownRange
from carpool.profile.values import Busy

DEFAULT_RUN_S = 3600.0
"""Duration assumed for a job about which nothing is known."""
TRAINING_STARTUP_S = 5.0
"""Start-up expected of a Python script before any job has started: it most likely imports PyTorch."""
LEAST_Y, MOST_Y = log(1 / 1.5), log(20.0)
"""Range of log ξ that one episode can contribute, so that a job that hangs beside a mate does not spoil its family."""
MOST_EPISODES = 10_000
"""Maximum number of jobs whose latest episode is kept."""


@dataclass(slots=True)
class Episode:
    """A period in which a job ran at one place beside the same mates."""

    key: tuple[object, ...]
    reports: int
    mean_s: float
    counted: float = 0.0
    """Logarithm learned from the episode so far: of the slow-down, or of the iteration time alone."""
    cells: tuple[Cell, ...] = ()
    precision: float = 0.0
    alone_s: float = 0.0
    """Iteration time alone, as known or predicted when the episode began."""


class BelievedPairs:
    """An interference table, as the core expects it, backed by the belief about pairs."""

    def __init__(self, pairs: PairBelief, busy: Mapping[str, Busy], demands: Mapping[str, tuple[int, float]]) -> None:
        self.pairs = pairs
        self.busy = busy
        self.demands = demands

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        return self.pairs.xi((job_class(model, samples), job_class(mate, mate_samples)))

    def demand(self, model: str, samples: int) -> float:
        """Return the share of a GPU that a job needs, or 0.0 if unknown. It bounds groups of three or more from below.

        It is known at one batch; below that batch it scales with the busy share.
        """
        if model not in self.demands:
            return 0.0
        batch, demand = self.demands[model]
        busy = self.busy.get(model)
        return demand if busy is None else demand * min(1.0, busy.share(samples) / busy.share(batch))


class Belief:
    def __init__(
        self,
        fitted: FittedModel,
        *,
        busy: Mapping[str, Busy],
        kappa: float,
        times: PerformanceModel | None = None,
        probe: float | None = None,
        demands: Mapping[str, tuple[int, float]] | None = None,
        mechanism: str = "unknown",
        unknown: UnknownPairs | None = None,
    ) -> None:
        """Start from the fitted model, whose interference table is replaced by the belief about pairs.

        `times` replaces the fitted speeds where an experiment needs wrong ones. `probe` caps the slow-down believed of
        families that were never observed sharing. `demands` holds, by model, a batch that saturates a GPU and the share
        of the GPU that the model needs at that batch. `unknown` is expected of pairs of which nothing is known, under
        the mechanism of the GPUs.
        """
        self.fitted = fitted
        self.times: PerformanceModel = times or fitted
        self.busy = dict(busy)
        self.kappa = kappa
        self.probe = probe
        self.version = 0
        self.measured = Demands(mechanism)
        self.pairs = PairBelief(self._prior, unknown, self._prior_sd)
        self.speeds = Speeds()
        self.startups = StartUps()
        self.tried: set[Cell] = set()
        """Pairs whose trial ended without a verdict."""
        self.episodes: dict[str, Episode] = {}
        fitted.interference = self.interference = BelievedPairs(self.pairs, self.busy, demands or {})
        fitted.forget_pairs()

    def _prior(self, cell: Cell) -> float | None:
        """Return log ξ from how busy both jobs keep the GPU, or from what they use of it; None if that is unknown."""
        own, mate = self._share(cell[0]), self._share(cell[1])
        if own is not None and mate is not None:
            return log(1.0 + self.kappa * own * mate)
        if own is None and mate is None:
            return self.measured.log_xi(cell)
        return self.measured.log_xi(cell, own, mate)

    def _prior_sd(self, cell: Cell) -> float | None:
        """Return the standard deviation of the prior where it follows from demands."""
        profiled = cell[0].family in self.busy and cell[1].family in self.busy
        return None if profiled else self.measured.sd

    def _share(self, kind: JobClass) -> float | None:
        busy = self.busy.get(kind.family)
        return None if busy is None else busy.share(2**kind.size)

    # ---- answers -----------------------------------------------------------------------------------------------------

    def node_joined(self, gpus: int) -> None:
        self.fitted.node_joined(gpus)

    def fewest_nodes(self, gpus: int) -> int:
        return self.fitted.fewest_nodes(gpus)

    def memory(self, job: Job, accumulation: int) -> int:
        return self.fitted.memory(job, accumulation) if job.model in self.fitted.tasks else 0

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        known = job.model in self.fitted.tasks
        if known and (job.duration_s is not None or job.model == GENERIC):
            return self.times.iteration_time(job, accumulation, placement)  # the user gave this job's duration
        predicted = self.times.iteration_time(job, accumulation, placement) if known else 1.0
        measured = self.speeds.seconds(SpeedKey(job.model, job.batch, accumulation, *placement), predicted)
        if measured is not None:
            return measured
        if known:
            return predicted
        return (DEFAULT_RUN_S if job.duration_s is None else job.duration_s) / job.iterations

    def relies_on_guess(self, job: Job) -> bool:
        if job.duration_s is None or job.model in self.fitted.tasks:
            return job.duration_s is not None
        placement = Placement(job.gpus, self.fewest_nodes(job.gpus))
        return self.speeds.seconds(SpeedKey(job.model, job.batch, 1, *placement), 1.0) is None

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        believed = self.fitted.slowdown(job, accumulation, mates)
        if self.probe is None or len(mates) > 1 or believed <= self.probe:
            return believed
        mate, mate_accumulation = mates[0]
        if job.max_slowdown is not None or mate.max_slowdown is not None:
            return believed  # probing must not break a promised max_slowdown
        cell = (_class_of(job, accumulation), _class_of(mate, mate_accumulation))
        return believed if self.pairs.has_seen(cell) else self.probe

    def slowdown_range(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> SlowdownRange:
        """Return ξ beside these mates with its range. That of a group is as wide as that of its widest pair."""
        mean = self.slowdown(job, accumulation, mates)
        own = _class_of(job, accumulation)
        widest = max(self.pairs.variance((own, _class_of(*mate))) for mate in mates)
        factor = exp(FOUR_IN_FIVE * sqrt(max(0.0, widest)))
        return SlowdownRange(max(1.0, mean / factor), mean, mean * factor)

    def is_observed(self, job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> bool:
        """Return whether ξ of a job beside this mate was observed, in a profile or while they ran."""
        cell = (_class_of(job, accumulation), _class_of(mate, mate_accumulation))
        return cell in self.tried or self.pairs.is_observed(cell)

    def give_up(self, job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> None:
        own, other = _class_of(job, accumulation), _class_of(mate, mate_accumulation)
        self.tried.update([(own, other), (other, own)])

    def startup_s(self, job: Job) -> float:
        own, overall = self.startups.mean_s.get(job.model), self.startups.overall_s
        if own is not None:
            return own
        if is_python_script(job.model):
            return TRAINING_STARTUP_S if overall is None else overall
        return 0.0 if is_script(job.model) else overall or 0.0  # a command that is no training computes at once

    def scaling(self, job: Job) -> Scaling | None:
        return self.times.scaling(job) if job.model in self.fitted.tasks else None

    def noise(self, job: Job, done: float) -> float:
        return self.times.noise(job, done)

    def scaled_pace(self, job: Job, batch: int, accumulation: int, placement: Placement, done: float) -> Pace:
        return self.times.scaled_pace(job, batch, accumulation, placement, done)

    # ---- learning ----------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        return codec.dump(self)

    def restore(self, data: dict[str, Any]) -> None:
        codec.restore(self, data)
        self.fitted.forget_pairs()

    def note(self, model: str, samples: int, mate: str, mate_samples: int, xi: float) -> None:
        """Record a pair that a profile measured. It takes effect at the next `pairs.take_up`."""
        cell = (job_class(model, samples), job_class(mate, mate_samples))
        self.pairs.row(cell).known.add(log(max(1.0, xi)), 1.0 / MEASURED_SD**2)

    def learn(self, seen: Observation) -> ModelChange:
        if not seen.iteration_s > 0.0:
            return ModelChange.NOTHING
        mates = tuple([tuple([(mate.id, accumulation) for mate, accumulation in cell]) for cell in seen.cells])
        key = (seen.attempt, seen.accumulation, tuple(seen.placement), mates)
        episode = self.episodes.get(seen.job.id)
        if episode is not None and episode.key == key:
            episode.reports += 1
            episode.mean_s += (seen.iteration_s - episode.mean_s) / episode.reports
        else:
            episode = Episode(key, 1, seen.iteration_s)
            self.episodes.pop(seen.job.id, None)  # keeps the dictionary ordered by age
            self.episodes[seen.job.id] = episode
            if len(self.episodes) > MOST_EPISODES:
                del self.episodes[next(iter(self.episodes))]
        lesson = self._learn_pair(seen, episode) if seen.cells else self._learn_speed(seen, episode)
        self.version += bool(lesson)
        return lesson

    def announces(self, job: Job) -> bool | None:
        if job.model in self.startups.silent:
            return False
        return True if job.model in self.startups.mean_s else None

    def learn_startup(self, seen: StartUp) -> ModelChange:
        if not seen.told:  # the time was assumed
            self.startups.silent.add(seen.job.model)
            return ModelChange.NOTHING
        self.startups.silent.discard(seen.job.model)
        return ModelChange.STARTUPS if self.startups.add(seen.job.model, seen.seconds) else ModelChange.NOTHING

    def learn_demand(self, job: Job, accumulation: int, demand: GpuDemand) -> ModelChange:
        kind = _class_of(job, accumulation)
        if job.model == GENERIC or kind.family in self.busy or not self.measured.add(kind, demand):
            return ModelChange.NOTHING
        self.version += 1
        self.pairs.forget_priors()
        self.fitted.forget_pairs()
        return ModelChange.SLOWDOWNS

    def knows_alone(self, job: Job, accumulation: int) -> bool:
        demand = self.demand_of(job, accumulation)
        placement = Placement(job.gpus, self.fewest_nodes(job.gpus))
        measured = SpeedKey(job.model, job.batch, accumulation, *placement) in self.speeds.times
        return measured or (demand is not None and demand.iteration_s > 0.0)

    def demand_of(self, job: Job, accumulation: int) -> GpuDemand | None:
        """Return what jobs like this one use of a GPU; None: it was never measured."""
        return self.measured.known.get(_class_of(job, accumulation))

    def _learn_pair(self, seen: Observation, episode: Episode) -> ModelChange:
        first = episode.reports == 1
        if first:
            episode.alone_s, error_sd = self._alone(seen)
            episode.precision = 1.0 / (EPISODE_SD**2 + error_sd**2)
        y = min(MOST_Y, max(LEAST_Y, log(episode.mean_s / episode.alone_s)))
        if first:
            episode.cells = self._informed_cells(seen, y)
        rows = [self.pairs.row(cell) for cell in episode.cells]
        if first or abs(y - episode.counted) > NOTICEABLE:
            for row in rows:
                if first:
                    row.known.add(y, episode.precision)
                else:
                    row.known.revise(y - episode.counted, episode.precision)
            episode.counted = y
        if not any(row.is_news for row in rows):
            return ModelChange.NOTHING
        self.pairs.take_up()
        self.fitted.forget_pairs()
        return ModelChange.SLOWDOWNS

    def _alone(self, seen: Observation) -> tuple[float, float]:
        """Return a job's iteration time alone and the standard deviation of its logarithm.

        In this order of preference: its own report, reports of similar jobs at the same place, the profile corrected by
        reports from other places, and the time that the state uses.
        """
        if seen.alone_seen:
            return seen.alone_iteration_s, 0.0
        job = seen.job
        others = self.speeds.times.get(SpeedKey(job.model, job.batch, seen.accumulation, *seen.placement))
        if others is not None:
            return exp(others.mean), others.sd
        ratio = self.speeds.ratios.get(job.model) if job.model in self.fitted.tasks else None
        if ratio is not None and ratio.sd < self.speeds.error_sd:
            return self._fitted_s(seen) * exp(ratio.mean), ratio.sd
        return seen.alone_iteration_s, self.speeds.error_sd

    def _fitted_s(self, seen: Observation) -> float:
        """Return the iteration time that the profile predicts, ignoring the duration that the user gave."""
        return self.fitted.iteration_time(replace(seen.job, duration_s=None), seen.accumulation, seen.placement)

    def _informed_cells(self, seen: Observation, y: float) -> tuple[Cell, ...]:
        """Return the pairs that an episode gives information about.

        A gang runs at the speed of its slowest pair. Pairs believed to be at least as slow as observed are therefore at
        most that slow; if there is none, the slowest believed pair must be the cause. Groups of three give no
        information about pairs.
        """
        if any(len(cell) > 1 for cell in seen.cells):
            return ()
        own = _class_of(seen.job, seen.accumulation)
        mates = dict.fromkeys([_class_of(*mate) for (mate,) in seen.cells])
        believed = {(own, mate): self.pairs.mean((own, mate)) for mate in mates}
        as_bad = tuple([cell for cell, mean in believed.items() if mean >= y])
        return as_bad or (max(believed, key=lambda cell: believed[cell]),)

    def _learn_speed(self, seen: Observation, episode: Episode) -> ModelChange:
        job, first = seen.job, episode.reports == 1
        if first and not seen.alone_seen:
            self.speeds.check(seen.iteration_s, seen.alone_iteration_s)
        if job.model == GENERIC:
            return ModelChange.NOTHING  # generic jobs have nothing in common
        value, place = log(episode.mean_s), SpeedKey(job.model, job.batch, seen.accumulation, *seen.placement)
        if first:
            episode.alone_s = self._fitted_s(seen) if job.model in self.fitted.tasks else 1.0
        elif abs(value - episode.counted) <= NOTICEABLE:
            return ModelChange.NOTHING
        instead_of = None if first else episode.counted
        episode.counted = value
        return ModelChange.SPEEDS if self.speeds.add(place, value, episode.alone_s, instead_of) else ModelChange.NOTHING


def _class_of(job: Job, accumulation: int) -> JobClass:
    return job_class(job.model, sub_batch(job.batch, accumulation))
