"""Beliefs with a random error, to measure how much a policy depends on correct estimates.

`sim.run` wraps the believed model with these classes for `--duration-error` and `--interference-error`.
"""

from collections.abc import Sequence
from math import exp
from random import Random

from carpool.core.elastic import Pace, Scaling
from carpool.core.model import Job
from carpool.core.perf import Interference, Mate, PerformanceModel, Placement


class MisestimatedTimes:
    """A performance model whose iteration times are off by a lognormal factor, one per job."""

    def __init__(self, model: PerformanceModel, sigma: float, seed: int) -> None:
        self.model = model
        self.sigma = sigma
        self.seed = seed
        self._factors: dict[str, float] = {}

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        return self._factor(job) * self.model.iteration_time(job, accumulation, placement)

    def fewest_nodes(self, gpus: int) -> int:
        return self.model.fewest_nodes(gpus)

    def memory(self, job: Job, accumulation: int) -> int:
        return self.model.memory(job, accumulation)

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        return self.model.slowdown(job, accumulation, mates)

    def startup_s(self, job: Job) -> float:
        return self.model.startup_s(job)

    def scaling(self, job: Job) -> Scaling | None:
        return self.model.scaling(job)

    def noise(self, job: Job, done: float) -> float:
        return self.model.noise(job, done)

    def scaled_pace(self, job: Job, batch: int, accumulation: int, placement: Placement, done: float) -> Pace:
        pace = self.model.scaled_pace(job, batch, accumulation, placement, done)
        return pace._replace(iteration_s=self._factor(job) * pace.iteration_s)

    def _factor(self, job: Job) -> float:
        factor = self._factors.get(job.id)
        if factor is None:
            # seeded by the job's name, so that the error does not depend on when the policy first asks
            factor = self._factors[job.id] = exp(Random(f"{self.seed} {job.id}").gauss(0.0, self.sigma))
        return factor


class MisestimatedSlowdowns:
    """An interference table whose slow-downs are off by a lognormal factor, one per model and mate."""

    def __init__(self, table: Interference, sigma: float, seed: int) -> None:
        self.table = table
        self.sigma = sigma
        self.seed = seed

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        factor = exp(Random(f"{self.seed} {model} beside {mate}").gauss(0.0, self.sigma))
        return max(1.0, factor * self.table.pair(model, samples, mate, mate_samples))

    def demand(self, model: str, samples: int) -> float:
        return self.table.demand(model, samples)
