"""How a training scales with its batch: statistical efficiency along the training, and the limits of a task.

A larger batch makes more progress per iteration but less per sample: with a gradient noise scale φ (in samples) a
sample of a batch B is worth (φ + B₀) / (φ + B) of one at the task's initial batch B₀ (Qiao et al., OSDI 2021). The
noise changes along the training, so a training consists of phases, each with its own noise scale. The performance model
uses this module for the pace of a job whose batch the scheduler chose; policies use the limits.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

SLACK = 1e-8
"""Rounding tolerance where a batch is divided into micro-steps."""


@dataclass(frozen=True, slots=True)
class NoisePhase:
    """A phase of a training, as its task's profile describes it."""

    until: float
    """Share of the whole progress at which the phase ends."""
    noise: float
    """Gradient noise scale in the phase, in samples."""


class JobPhase(NamedTuple):
    """A phase of a training, counted in the iterations of one job."""

    until: float
    """Iteration of the job at which the phase ends."""
    noise: float
    """Gradient noise scale in the phase, in samples."""


class Pace(NamedTuple):
    """How fast a running job is, and for how long."""

    iteration_s: float
    """Seconds per iteration of the job's own batch."""
    until: float
    """Iteration up to which that holds."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The limits within which a task may be scaled, and the value of its batch in each phase."""

    initial_batch: int
    """B₀: batch of the whole gang; no smaller one is chosen."""
    max_batch: int
    """Largest batch of the whole gang."""
    min_sub_batch: int
    """Fewest samples per GPU in one micro-step."""
    max_sub_batch: int
    """Most samples per GPU in one micro-step."""
    phases: tuple[NoisePhase, ...]
    max_gpus: int | None = None

    def efficiency(self, noise: float, batch: int) -> float:
        """Return the value of a sample of this batch, relative to one of the initial batch."""
        return (noise + self.initial_batch) / (noise + batch)

    def micro_steps(self, batch: float, gpus: int, max_sub_batch: int) -> int:
        """Return the number of micro-steps for the batch of each GPU, if a GPU holds `max_sub_batch` samples."""
        steps = max(1, ceil(batch / max_sub_batch - SLACK))
        if gpus == 1 and batch > self.initial_batch + SLACK:
            return max(2, steps)  # one GPU needs several micro-steps to measure the noise of the gradient
        return steps

    def job_phases(self, batch: int, iterations: int) -> tuple[JobPhase, ...]:
        """Return the phases of a job with this batch and this number of iterations."""
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
    """Return how many iterations of a job's own batch one iteration of another batch is worth."""
    return batch / own_batch * (noise + own_batch) / (noise + batch)
