"""The belief: a performance model that starts from profiles and learns from what jobs report.

It answers like any other `PerformanceModel`, in the simulator (`--belief learned`) and in the live service alike, and
`State` tells it what was seen while it applies events. Its answers change only in `learn`, and `version` grows when they
do. Nothing but the events enters, so a journal replayed gives the same belief, bit for bit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from carpool.belief.busy import KAPPA, Sweep, predicted
from carpool.belief.pairs import EPISODE_SD, MEASURED_SD, NOTICEABLE, Cell, Kind, PairBelief, kind_of
from carpool.belief.speeds import Place, Speeds
from carpool.core.learning import Lesson, Sighting
from carpool.core.model import Job, sub_batch
from carpool.core.perf import GENERIC, FittedModel, Mate, PerformanceModel, Placement

DEFAULT_RUN_S = 3600.0
"""How long a job runs of which nothing at all is known."""
LEAST_Y, MOST_Y = log(1 / 1.5), log(20.0)
"""What an episode can say: a job that hangs beside a mate must not teach that its relatives do."""
MOST_EPISODES = 10_000
"""Jobs whose latest episode is remembered."""


@dataclass(slots=True)
class Episode:
    """A stretch of a job's life at one place beside the same mates."""

    key: tuple[object, ...]
    reports: int
    mean_s: float
    counted: float
    """The logarithm that was learned from it: of the slow-down, or of the iteration time alone."""
    cells: tuple[Cell, ...] = ()
    precision: float = 0.0
    predicted_s: float = 0.0


class BelievedPairs:
    """What the core asks of an interference table, answered by the pairs' belief."""

    def __init__(self, pairs: PairBelief) -> None:
        self.pairs = pairs

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        return self.pairs.xi((kind_of(model, samples), kind_of(mate, mate_samples)))


class Belief:
    def __init__(
        self,
        fitted: FittedModel,
        *,
        sweeps: Mapping[str, Sweep] | None = None,
        kappa: float = KAPPA["unknown"],
        times: PerformanceModel | None = None,
    ) -> None:
        """`fitted` predicts speeds; its own interference table is left aside. `times` may misjudge them on purpose."""
        self.fitted = fitted
        self.times: PerformanceModel = times or fitted
        self.sweeps = dict(sweeps or {})
        for name, task in fitted.tasks.items():
            if name != GENERIC and task.beta_s > 0.0:
                self.sweeps.setdefault(name, Sweep(task.alpha_s, task.beta_s))
        self.kappa = kappa
        self.version = 0
        self.pairs = PairBelief(self._prior)
        self.speeds = Speeds()
        self.interference = fitted.interference = BelievedPairs(self.pairs)
        self._episodes: dict[str, Episode] = {}

    def _prior(self, cell: Cell) -> float | None:
        """log ξ by how busy both keep the GPU."""
        own, mate = self.busy(cell[0]), self.busy(cell[1])
        return None if own is None or mate is None else log(predicted(self.kappa, own, mate))

    def busy(self, kind: Kind) -> float | None:
        sweep = self.sweeps.get(kind.family)
        return None if sweep is None else sweep.busy(2.0**kind.size)

    # ---- answers -----------------------------------------------------------------------------------------------------

    def fewest_nodes(self, gpus: int) -> int:
        return self.fitted.fewest_nodes(gpus)

    def memory(self, job: Job, accum: int) -> int:
        return self.fitted.memory(job, accum) if job.model in self.fitted.tasks else 0

    def iteration_time(self, job: Job, accum: int, placement: Placement) -> float:
        if job.model in self.fitted.tasks:
            if job.alone_s is not None or job.model == GENERIC:  # this very job's duration is known
                return self.times.iteration_time(job, accum, placement)
            guess = self.times.iteration_time(job, accum, placement)
        else:
            guess = 1.0
        place = Place(job.model, job.batch, accum, *placement)
        measured = self.speeds.seconds(place, guess)
        if measured is not None:
            return measured
        if job.model in self.fitted.tasks:
            return guess
        return (DEFAULT_RUN_S if job.alone_s is None else job.alone_s) / job.iterations

    def slowdown(self, job: Job, accum: int, mates: Sequence[Mate]) -> float:
        return self.fitted.slowdown(job, accum, mates)

    # ---- learning ----------------------------------------------------------------------------------------------------

    def learn(self, seen: Sighting) -> Lesson:
        if not seen.iteration_s > 0.0:
            return Lesson.NOTHING
        mates = tuple(tuple((mate.id, accum) for mate, accum in cell) for cell in seen.cells)
        key = (seen.attempt, seen.accum, seen.placement, mates)
        episode = self._episodes.get(seen.job.id)
        if episode is not None and episode.key == key:
            episode.reports += 1
            episode.mean_s += (seen.iteration_s - episode.mean_s) / episode.reports
        else:
            episode = Episode(key, 1, seen.iteration_s, 0.0)
            self._episodes.pop(seen.job.id, None)
            self._episodes[seen.job.id] = episode
            if len(self._episodes) > MOST_EPISODES:
                del self._episodes[next(iter(self._episodes))]
        lesson = self._learn_pair(seen, episode) if seen.cells else self._learn_speed(seen, episode)
        if lesson:
            self.version += 1
        return lesson

    def _learn_pair(self, seen: Sighting, episode: Episode) -> Lesson:
        y = min(MOST_Y, max(LEAST_Y, log(episode.mean_s / seen.alone_s)))
        if episode.reports == 1:
            episode.cells = self._responsible(seen, y)
            episode.counted = y
            variance = EPISODE_SD**2 + (0.0 if seen.alone_seen else self.speeds.error_sd**2)
            episode.precision = 1.0 / variance
            for cell in episode.cells:
                self.pairs.row(cell).known.add(y, episode.precision)
        elif abs(y - episode.counted) > NOTICEABLE:
            for cell in episode.cells:
                self.pairs.row(cell).known.revise(y - episode.counted, episode.precision)
            episode.counted = y
        if not any(self.pairs.row(cell).is_news for cell in episode.cells):
            return Lesson.NOTHING
        self.pairs.take_up()
        self.fitted.forget_pairs()
        return Lesson.SLOWDOWNS

    def _responsible(self, seen: Sighting, y: float) -> tuple[Cell, ...]:
        """The pairs of which an episode tells. A gang runs at the worst of its cells, so those believed to be as bad as
        what was seen are at most that bad; if none is, the worst one must be it. Groups of three tell of no pair."""
        own = kind_of(seen.job.model, sub_batch(seen.job.batch, seen.accum))
        if any(len(cell) > 1 for cell in seen.cells):
            return ()
        mates = dict.fromkeys(kind_of(m.model, sub_batch(m.batch, accum)) for ((m, accum),) in seen.cells)
        believed = {(own, mate): self.pairs.mean((own, mate)) for mate in mates}
        as_bad = tuple(cell for cell, mean in believed.items() if mean >= y)
        return as_bad or (max(believed, key=lambda cell: believed[cell]),)

    def _learn_speed(self, seen: Sighting, episode: Episode) -> Lesson:
        job = seen.job
        first = episode.reports == 1
        if first and not seen.alone_seen and seen.alone_s > 0.0:
            self.speeds.check(seen.iteration_s, seen.alone_s)
        if job.model == GENERIC or (job.model in self.fitted.tasks and job.alone_s is not None):
            return Lesson.NOTHING  # its duration is its own, and says nothing about others
        value = log(episode.mean_s)
        if not first and abs(value - episode.counted) <= NOTICEABLE:
            return Lesson.NOTHING
        place = Place(job.model, job.batch, seen.accum, *seen.placement)
        if first:
            known = job.model in self.fitted.tasks
            plain = replace(job, alone_s=None)
            episode.predicted_s = self.fitted.iteration_time(plain, seen.accum, seen.placement) if known else 1.0
        before = self.speeds.seconds(place, episode.predicted_s)
        if not first:
            self.speeds.take_back(place, episode.counted, episode.predicted_s)
        self.speeds.add(place, value, episode.predicted_s)
        episode.counted = value
        after = self.speeds.seconds(place, episode.predicted_s)
        return Lesson.NOTHING if before == after else Lesson.SPEEDS
