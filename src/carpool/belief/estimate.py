"""Estimates with a range and a source: how long a job takes alone, and how much a mate slows it down.

The live service shows them in `explain` and `submit --dry-run`. A range should contain the true value four times out
of five. It is derived from observations once there are any, and from a fixed factor before that.
"""

import re
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

from carpool.belief.pairs import FOUR_IN_FIVE, SCRIPT, job_class
from carpool.belief.speeds import SpeedKey
from carpool.core.model import Job, sub_batch
from carpool.core.perf import GENERIC, Placement

if TYPE_CHECKING:
    from carpool.belief.model import Belief

GIVEN_SPREAD = 2.0
"""Factor, both ways, by which a duration that a user gave may be wrong."""
ASSUMED = "an assumption, because nothing is known of the job"
"""Source of the default duration."""
DEFAULT_SPREAD = 10.0
"""Factor, both ways, by which the default duration may be wrong."""


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float
    source: str
    """Where the value comes from, in words."""
    kind: str
    """One of measured, profile, history, time, default; for slow-downs also relatives."""


def model_name(model: str | None, name: str) -> str:
    """Return the model under which the belief groups similar jobs.

    This is the model that the user gave. Without one it is the job's name without an array index, prefixed so that it
    cannot clash with a profile's model. Without either it is `GENERIC`.
    """
    plain = re.sub(r"\[\d+\]$", "", name)
    return model or (f"name:{plain}" if plain else GENERIC)


def run_time(belief: "Belief", job: Job) -> Estimate:
    """Estimate how long the whole job takes alone, with its whole batch, at the most consolidated placement."""
    placement = Placement(job.gpus, belief.fewest_nodes(job.gpus))
    seconds = job.iterations * belief.iteration_time(job, 1, placement)
    known = job.model in belief.fitted.tasks
    given = job.duration_s is not None
    if job.model == GENERIC or (known and given):
        return _spread(seconds, GIVEN_SPREAD, "the duration that was given", "time") if given else _default(seconds)
    times = belief.speeds.times.get(SpeedKey(job.model, job.batch, 1, *placement))
    if times is not None:
        source = f"{_runs(times.count)} of {_said(job.model)} with this batch and this many GPUs"
        return _spread(seconds, exp(FOUR_IN_FIVE * times.sd), source, "measured" if known else "history")
    ratio = belief.speeds.ratios.get(job.model)
    if known:
        source = f"the profile of {job.model}" + (f", corrected by {_runs(ratio.count)}" if ratio else "")
        return _spread(seconds, exp(FOUR_IN_FIVE * belief.speeds.error_sd), source, "profile")
    if ratio is not None:
        source = f"{_runs(ratio.count)} of {_said(job.model)} at other sizes"
        return _spread(seconds, max(GIVEN_SPREAD, exp(FOUR_IN_FIVE * ratio.sd)), source, "history")
    return _spread(seconds, GIVEN_SPREAD, "the duration that was given", "time") if given else _default(seconds)


def slowdown(belief: "Belief", job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> Estimate:
    """Estimate ξ of a job beside one mate."""
    own = job_class(job.model, sub_batch(job.batch, accumulation))
    cell = (own, job_class(mate.model, sub_batch(mate.batch, mate_accumulation)))
    value = belief.pairs.xi(cell)
    factor = exp(FOUR_IN_FIVE * sqrt(belief.pairs.variance(cell)))
    if cell in belief.pairs.rows:
        source, kind = "observations of this pair", "measured"
    elif belief.pairs.has_seen(cell):
        source, kind = "observations of similar pairs", "relatives"
    elif belief.pairs.prior(cell) is not None:
        source, kind = "how busy each job keeps a GPU alone", "profile"
    else:
        source, kind = "no information about this pair", "default"
    return Estimate(value, max(1.0, value / factor), value * factor, source, kind)


def _spread(value: float, factor: float, source: str, kind: str) -> Estimate:
    return Estimate(value, value / factor, value * factor, source, kind)


def _default(seconds: float) -> Estimate:
    return _spread(seconds, DEFAULT_SPREAD, ASSUMED, "default")


def _said(model: str) -> str:
    """Return a model in words. The model of a script contains a hash, which is left out."""
    return f"the same command ({model.removeprefix(SCRIPT).rpartition(':')[0]})" if model.startswith(SCRIPT) else model


def _runs(count: int) -> str:
    return f"{count} earlier run{'s' if count > 1 else ''}"
