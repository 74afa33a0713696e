"""Goodput: useful samples per second, which is throughput × statistical efficiency; and the batch that maximises it.

Pollux asks here for the goodput of a job on a number of GPUs. The answer depends on the task, the phase of its
training, the memory and what the scheduler believes about speeds, but not on the single job. It is computed once and
kept until the belief changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from carpool.core.elastic import SLACK, Scaling
from carpool.core.model import Job
from carpool.core.perf import PerformanceModel, Placement

BATCHES = 50
"""Number of batches that are tried between the smallest and the largest, at equal ratios, as in Pollux."""


class BatchChoice(NamedTuple):
    """The best batch for a number of GPUs."""

    goodput: float
    batch: int
    """Samples per GPU per iteration."""
    accumulation: int


NOTHING = BatchChoice(0.0, 0, 1)


@dataclass(frozen=True, slots=True)
class ElasticKind:
    """All that decides what GPUs are worth to an elastic job."""

    model: str
    noise: float
    max_sub_batch: int
    can_shrink: bool


class Goodputs:
    """The best batch for each kind of job and placement, as one performance model believes at one time."""

    def __init__(self) -> None:
        self._perf: PerformanceModel | None = None
        self._version = 0
        self._known: dict[ElasticKind, dict[Placement, BatchChoice]] = {}
        self._micro_steps: dict[tuple[str, int], int] = {}
        self._least_memory: dict[str, int] = {}

    def under(self, perf: PerformanceModel, belief_version: int) -> None:
        """Use this model from now on. Forget the answers of another one, or of this one before it learned."""
        if perf is not self._perf or belief_version != self._version:
            self._perf, self._version = perf, belief_version
            self._known.clear()
            self._micro_steps.clear()
            self._least_memory.clear()

    def best(self, kind: ElasticKind, job: Job, scaling: Scaling, placement: Placement) -> BatchChoice:
        """Return the batch with the largest goodput; `NOTHING` where no batch is possible."""
        table = self._known.setdefault(kind, {})
        found = table.get(placement)
        if found is None:
            found = table[placement] = self._search(kind, job, scaling, placement)
        return found

    def _search(self, kind: ElasticKind, job: Job, scaling: Scaling, placement: Placement) -> BatchChoice:
        perf, gpus, best = self._perf, placement.gpus, NOTHING
        assert perf is not None
        for samples, accumulation in _batches(scaling, gpus, kind.max_sub_batch):
            if accumulation > 1 and not kind.can_shrink:
                continue
            batch = samples * accumulation
            # named after its model, so that errors of a belief about single jobs do not enter
            sized = replace(job, id=job.model, gpus=gpus, batch=batch, duration_s=None)
            throughput = gpus * batch / perf.iteration_time(sized, accumulation, placement)
            goodput = throughput * scaling.efficiency(kind.noise, gpus * batch)
            if goodput > best.goodput:
                best = BatchChoice(goodput, batch, accumulation)
        return best

    def least_memory(self, job: Job, scaling: Scaling) -> int:
        """Return the bytes that the smallest micro-step of a task takes."""
        found = self._least_memory.get(job.model)
        if found is None:
            assert self._perf is not None
            found = self._least_memory[job.model] = self._perf.memory(replace(job, batch=scaling.min_sub_batch), 1)
        return found

    def max_sub_batch(self, job: Job, scaling: Scaling, memory: int) -> int:
        """Return the most samples per micro-step within the task's limit and the memory; 0: not even the fewest fit."""
        key = (job.model, memory)
        found = self._micro_steps.get(key)
        if found is None:
            found = self._micro_steps[key] = self._fitting(job, scaling, memory)
        return found

    def _fitting(self, job: Job, scaling: Scaling, memory: int) -> int:
        assert self._perf is not None
        fits, above = 0, scaling.max_sub_batch + 1
        while above - fits > 1:
            middle = above - 1 if not fits and above > scaling.max_sub_batch else (fits + above) // 2
            if self._perf.memory(replace(job, batch=middle), 1) <= memory:
                fits = middle
            else:
                above = middle
        return fits if fits >= scaling.min_sub_batch else 0


def _batches(scaling: Scaling, gpus: int, max_sub_batch: int) -> Iterator[tuple[int, int]]:
    """Yield the samples per micro-step and the accumulation for each batch that is tried."""
    least, most = max(scaling.initial_batch, scaling.min_sub_batch * gpus), scaling.max_batch
    if least > most or not max_sub_batch:
        return
    tried = set()
    for number in range(BATCHES):
        per_gpu = least * (most / least) ** (number / (BATCHES - 1)) / gpus
        accumulation = scaling.micro_steps(per_gpu, gpus, max_sub_batch)
        samples = min(ceil(per_gpu / accumulation - SLACK), most // (gpus * accumulation))
        if samples >= scaling.min_sub_batch and (samples, accumulation) not in tried:
            tried.add((samples, accumulation))
            if gpus * samples * accumulation >= scaling.initial_batch:
                yield samples, accumulation
