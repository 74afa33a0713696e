"""The belief: a performance model that starts from a profile and learns from what jobs report.

It answers like any other `PerformanceModel`, in the simulator (`--belief learned`) and in the live service alike, and
`State` tells it what was seen while it applies events. Its answers change only in `learn`, and `version` grows when
they do. Nothing but events enters, so a journal replayed gives the same belief and the same decisions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from carpool.belief import codec
from carpool.belief.pairs import EPISODE_SD, MEASURED_SD, Cell, Kind, PairBelief, kind_of
from carpool.belief.speeds import NOTICEABLE, Place, Speeds
from carpool.core.elastic import Pace, Scaling
from carpool.core.learning import Lesson, Observation
from carpool.core.model import Job, sub_batch
from carpool.core.perf import GENERIC, FittedModel, Mate, PerformanceModel, Placement
from carpool.profile.values import Busy

DEFAULT_RUN_S = 3600.0
"""How long a job runs alone of which nothing at all is known."""
LEAST_Y, MOST_Y = log(1 / 1.5), log(20.0)
"""What an episode can say: a job that hangs beside a mate must not teach that all its relatives do."""
MOST_EPISODES = 10_000
"""Jobs whose latest episode is remembered."""


@dataclass(slots=True)
class Episode:
    """A stretch of a job's life at one place beside the same mates."""

    key: tuple[object, ...]
    reports: int
    mean_s: float
    counted: float = 0.0
    """The logarithm that was learned from it: of the slow-down, or of the iteration time alone."""
    cells: tuple[Cell, ...] = ()
    precision: float = 0.0
    alone_s: float = 0.0
    """The iteration time alone, as known or predicted when the episode began."""


class BelievedPairs:
    """What the core asks of an interference table, answered by the belief about pairs."""

    def __init__(self, pairs: PairBelief, busy: Mapping[str, Busy], demands: Mapping[str, tuple[int, float]]) -> None:
        self.pairs = pairs
        self.busy = busy
        self.demands = demands

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        return self.pairs.xi((kind_of(model, samples), kind_of(mate, mate_samples)))

    def demand(self, model: str, samples: int) -> float:
        """The share of a GPU that a job asks for, which bounds groups of three and more from below; 0.0: unknown. It
        is known at one batch, and goes with the busy share below that."""
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
    ) -> None:
        """`fitted` predicts speeds; its interference table is replaced by what is believed. `times` may misjudge
        speeds on purpose. A family that nobody has seen share counts as at most `probe`, where given. `demands`: by
        model, a batch that saturates a GPU and the share of it that the model asks for then."""
        self.fitted = fitted
        self.times: PerformanceModel = times or fitted
        self.busy = dict(busy)
        self.kappa = kappa
        self.probe = probe
        self.version = 0
        self.pairs = PairBelief(self._prior)
        self.speeds = Speeds()
        self.episodes: dict[str, Episode] = {}
        fitted.interference = self.interference = BelievedPairs(self.pairs, self.busy, demands or {})
        fitted.forget_pairs()

    def _prior(self, cell: Cell) -> float | None:
        """log ξ by how busy both keep the GPU, where that is known."""
        own, mate = self._share(cell[0]), self._share(cell[1])
        return None if own is None or mate is None else log(1.0 + self.kappa * own * mate)

    def _share(self, kind: Kind) -> float | None:
        busy = self.busy.get(kind.family)
        return None if busy is None else busy.share(2**kind.size)

    # ---- answers -----------------------------------------------------------------------------------------------------

    def fewest_nodes(self, gpus: int) -> int:
        return self.fitted.fewest_nodes(gpus)

    def memory(self, job: Job, accumulation: int) -> int:
        return self.fitted.memory(job, accumulation) if job.model in self.fitted.tasks else 0

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        known = job.model in self.fitted.tasks
        if known and (job.duration_s is not None or job.model == GENERIC):
            return self.times.iteration_time(job, accumulation, placement)  # this very job's duration was given
        predicted = self.times.iteration_time(job, accumulation, placement) if known else 1.0
        measured = self.speeds.seconds(Place(job.model, job.batch, accumulation, *placement), predicted)
        if measured is not None:
            return measured
        if known:
            return predicted
        return (DEFAULT_RUN_S if job.duration_s is None else job.duration_s) / job.iterations

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        believed = self.fitted.slowdown(job, accumulation, mates)
        if self.probe is None or len(mates) > 1 or believed <= self.probe:
            return believed
        mate, mate_accumulation = mates[0]
        if job.max_slowdown is not None or mate.max_slowdown is not None:
            return believed  # nobody is probed at the cost of a promise
        cell = (_kind(job, accumulation), _kind(mate, mate_accumulation))
        return believed if self.pairs.has_seen(cell) else self.probe

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
        """A pair that was measured on purpose; counts from the next `pairs.take_up` on."""
        cell = (kind_of(model, samples), kind_of(mate, mate_samples))
        self.pairs.row(cell).known.add(log(max(1.0, xi)), 1.0 / MEASURED_SD**2)

    def learn(self, seen: Observation) -> Lesson:
        if not seen.iteration_s > 0.0:
            return Lesson.NOTHING
        mates = tuple([tuple([(mate.id, accumulation) for mate, accumulation in cell]) for cell in seen.cells])
        key = (seen.attempt, seen.accumulation, tuple(seen.placement), mates)
        episode = self.episodes.get(seen.job.id)
        if episode is not None and episode.key == key:
            episode.reports += 1
            episode.mean_s += (seen.iteration_s - episode.mean_s) / episode.reports
        else:
            episode = Episode(key, 1, seen.iteration_s)
            self.episodes.pop(seen.job.id, None)  # the latest at the end
            self.episodes[seen.job.id] = episode
            if len(self.episodes) > MOST_EPISODES:
                del self.episodes[next(iter(self.episodes))]
        lesson = self._learn_pair(seen, episode) if seen.cells else self._learn_speed(seen, episode)
        self.version += bool(lesson)
        return lesson

    def _learn_pair(self, seen: Observation, episode: Episode) -> Lesson:
        first = episode.reports == 1
        if first:
            episode.alone_s, error_sd = self._alone(seen)
            episode.precision = 1.0 / (EPISODE_SD**2 + error_sd**2)
        y = min(MOST_Y, max(LEAST_Y, log(episode.mean_s / episode.alone_s)))
        if first:
            episode.cells = self._told_of(seen, y)
        rows = [self.pairs.row(cell) for cell in episode.cells]
        if first or abs(y - episode.counted) > NOTICEABLE:
            for row in rows:
                if first:
                    row.known.add(y, episode.precision)
                else:
                    row.known.revise(y - episode.counted, episode.precision)
            episode.counted = y
        if not any(row.is_news for row in rows):
            return Lesson.NOTHING
        self.pairs.take_up()
        self.fitted.forget_pairs()
        return Lesson.SLOWDOWNS

    def _alone(self, seen: Observation) -> tuple[float, float]:
        """A job's iteration time alone and how wrong that may be: by its own report, else by those of its like in the
        same place or, through the profile, in others, else by what the state goes by."""
        if seen.alone_seen:
            return seen.alone_iteration_s, 0.0
        job = seen.job
        others = self.speeds.times.get(Place(job.model, job.batch, seen.accumulation, *seen.placement))
        if others is not None:
            return exp(others.mean), others.sd
        ratio = self.speeds.ratios.get(job.model) if job.model in self.fitted.tasks else None
        if ratio is not None and ratio.sd < self.speeds.error_sd:
            return self._fitted_s(seen) * exp(ratio.mean), ratio.sd
        return seen.alone_iteration_s, self.speeds.error_sd

    def _fitted_s(self, seen: Observation) -> float:
        """The iteration time by the profile alone, whatever was said about this job."""
        return self.fitted.iteration_time(replace(seen.job, duration_s=None), seen.accumulation, seen.placement)

    def _told_of(self, seen: Observation, y: float) -> tuple[Cell, ...]:
        """The pairs of which an episode tells. A gang runs at the worst of its pairs, so those believed to be as bad as
        what was seen are at most that bad; if none is, the worst one must be it. Groups of three tell of no pair."""
        if any(len(cell) > 1 for cell in seen.cells):
            return ()
        own = _kind(seen.job, seen.accumulation)
        mates = dict.fromkeys([_kind(*mate) for (mate,) in seen.cells])
        believed = {(own, mate): self.pairs.mean((own, mate)) for mate in mates}
        as_bad = tuple([cell for cell, mean in believed.items() if mean >= y])
        return as_bad or (max(believed, key=lambda cell: believed[cell]),)

    def _learn_speed(self, seen: Observation, episode: Episode) -> Lesson:
        job, first = seen.job, episode.reports == 1
        if first and not seen.alone_seen:
            self.speeds.check(seen.iteration_s, seen.alone_iteration_s)
        if job.model == GENERIC:
            return Lesson.NOTHING  # its duration is its own, and says nothing about others
        value, place = log(episode.mean_s), Place(job.model, job.batch, seen.accumulation, *seen.placement)
        if first:
            episode.alone_s = self._fitted_s(seen) if job.model in self.fitted.tasks else 1.0
        elif abs(value - episode.counted) <= NOTICEABLE:
            return Lesson.NOTHING
        instead_of = None if first else episode.counted
        episode.counted = value
        return Lesson.SPEEDS if self.speeds.add(place, value, episode.alone_s, instead_of) else Lesson.NOTHING


def _kind(job: Job, accumulation: int) -> Kind:
    return kind_of(job.model, sub_batch(job.batch, accumulation))
