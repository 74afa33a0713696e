"""How a training scales with its batch: statistical efficiency along the training, and the limits of a task.

A larger batch makes more progress an iteration, but less a sample: with a gradient noise scale φ (in samples) a
sample of a batch B is worth (φ + B₀) / (φ + B) of one at the task's initial batch B₀ (Qiao et al., OSDI 2021). The
noise changes along the training, so a training is cut into phases, each with a noise scale of its own. The performance
model asks here for the pace of a job whose batch the scheduler chose; policies ask for the limits.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

SLACK = 1e-8
"""Of rounding, where a batch is cut into micro-steps."""


@dataclass(frozen=True, slots=True)
class NoisePhase:
    """A phase of a training: up to which share of its progress it goes, and the noise scale in it, in samples."""

    until: float
    noise: float


class JobPhase(NamedTuple):
    """A phase as one job sees it: up to which of its own iterations it goes."""

    until: float
    noise: float


class Pace(NamedTuple):
    """Seconds per useful iteration, and up to which iteration that holds."""

    iteration_s: float
    until: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """Within which limits a task may be scaled, and what its batch is worth in each phase."""

    initial_batch: int
    """B₀, of the whole gang; no smaller one is chosen."""
    max_batch: int
    """Of the whole gang."""
    min_sub_batch: int
    max_sub_batch: int
    """Samples per GPU in one micro-step."""
    phases: tuple[NoisePhase, ...]
    max_gpus: int | None = None

    def efficiency(self, noise: float, batch: int) -> float:
        """What a sample of this batch is worth, against one of the initial batch."""
        return (noise + self.initial_batch) / (noise + batch)

    def micro_steps(self, batch: float, gpus: int, max_sub_batch: int) -> int:
        """Into how many micro-steps the batch of each GPU is cut, if a GPU holds so many samples."""
        steps = max(1, ceil(batch / max_sub_batch - SLACK))
        if gpus == 1 and batch > self.initial_batch + SLACK:
            return max(2, steps)  # one GPU learns the noise of the gradient from several micro-steps
        return steps

    def job_phases(self, batch: int, iterations: int) -> tuple[JobPhase, ...]:
        """The phases counted in the iterations of a job with this batch, which needs so many of them in all."""
        before, lengths = 0.0, []
        for phase in self.phases:
            lengths.append((phase.until - before) / (batch * self.efficiency(phase.noise, batch)))
            before = phase.until
        whole, done, found = sum(lengths), 0.0, []
        for phase, length in zip(self.phases, lengths, strict=True):
            done += length
            found.append(JobPhase(iterations * done / whole, phase.noise))
        found[-1] = JobPhase(float(iterations), found[-1].noise)
        return tuple(found)


def own_iterations(noise: float, batch: int, own_batch: int) -> float:
    """How many iterations of a job's own batch one iteration of another batch stands for."""
    return batch / own_batch * (noise + own_batch) / (noise + batch)
