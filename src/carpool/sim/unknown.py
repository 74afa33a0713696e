"""Jobs that were never measured: the belief of a scheduler that has only a guess of their durations.

`sim.run` uses it for `--belief unknown`. With `--belief unknown:unique` every job is a family of its own: the world
renames its model, and the true model reads the real one from the name.
"""

from collections.abc import Sequence
from dataclasses import replace

from carpool.belief.model import Belief
from carpool.belief.prior import unknown_pairs
from carpool.core.elastic import Pace, Scaling
from carpool.core.model import Job
from carpool.core.perf import ConstantInterference, FittedModel, Mate, PerformanceModel, Placement
from carpool.profile.values import Profile

UNKNOWN = "unknown"
"""Name of the belief that starts from a guess of each job's duration, its memory and its family alone."""
UNIQUE = "unknown:unique"
"""The same, where no two jobs have a family in common."""
REPORT_S = 2.0
"""Seconds after which a job reports its speed in such a world, unless a setup says otherwise."""
MARK = "#"
"""Separates a real model from the id of the only job of a family."""


def make_unique(job: Job) -> Job:
    """Return the job as one of a family of its own."""
    return replace(job, model=f"{job.model}{MARK}{job.id}")


def real_model(name: str) -> str:
    """Return the model behind the name of a family."""
    return name.partition(MARK)[0]


class UnknownBelief(Belief):
    """A belief without a profile. Users give the memory of their jobs and a guess of the duration."""

    def __init__(self, guess: PerformanceModel, node_gpus: int, profile: Profile, mechanism: str) -> None:
        fitted = FittedModel({}, ConstantInterference(1.0), node_gpus)  # the belief replaces the table by its own
        super().__init__(fitted, busy={}, kappa=1.0, mechanism=mechanism, unknown=unknown_pairs(profile, mechanism))
        self.guess = guess

    def memory(self, job: Job, accumulation: int) -> int:
        return self.guess.memory(job, accumulation)

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        return self.guess.iteration_time(job, accumulation, placement)

    def relies_on_guess(self, job: Job) -> bool:
        return job.duration_s is not None

    def scaling(self, job: Job) -> Scaling | None:
        return self.guess.scaling(job)

    def noise(self, job: Job, done: float) -> float:
        return self.guess.noise(job, done)

    def scaled_pace(self, job: Job, batch: int, accumulation: int, placement: Placement, done: float) -> Pace:
        return self.guess.scaled_pace(job, batch, accumulation, placement, done)


class RealModels:
    """A true model of jobs whose model was renamed by `make_unique`."""

    def __init__(self, model: PerformanceModel) -> None:
        self.model = model
        self._jobs: dict[str, Job] = {}
        self.fewest_nodes = model.fewest_nodes

    def _real(self, job: Job) -> Job:
        """Return the job under its real model. Elastic jobs are scaled, so the id alone does not identify it."""
        known = self._jobs.get(job.id)
        if known is None or known.batch != job.batch or known.gpus != job.gpus:
            known = self._jobs[job.id] = replace(job, model=real_model(job.model))
        return known

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        return self.model.iteration_time(self._real(job), accumulation, placement)

    def memory(self, job: Job, accumulation: int) -> int:
        return self.model.memory(self._real(job), accumulation)

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        real = [(self._real(mate), mate_accumulation) for mate, mate_accumulation in mates]
        return self.model.slowdown(self._real(job), accumulation, real)

    def startup_s(self, job: Job) -> float:
        return self.model.startup_s(self._real(job))

    def scaling(self, job: Job) -> Scaling | None:
        return self.model.scaling(self._real(job))

    def noise(self, job: Job, done: float) -> float:
        return self.model.noise(self._real(job), done)

    def scaled_pace(self, job: Job, batch: int, accumulation: int, placement: Placement, done: float) -> Pace:
        return self.model.scaled_pace(self._real(job), batch, accumulation, placement, done)
