"""Numbers with a range and a source: how long a job takes alone, and how much a mate slows it down.

The live service shows them (`explain`, `submit --dry-run`). A range is meant to hold four times out of five; it comes
from what was observed as soon as there is something, and from a stated factor before.
"""

import re
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

from carpool.belief.pairs import kind_of
from carpool.belief.speeds import Place
from carpool.core.model import Job, sub_batch
from carpool.core.perf import GENERIC, Placement

if TYPE_CHECKING:
    from carpool.belief.model import Belief

FOUR_IN_FIVE = 1.2816
"""Standard deviations either side within which four out of five normal values lie."""
GIVEN_SPREAD = 2.0
DEFAULT_SPREAD = 10.0
"""How far off, as a factor both ways, a duration may be that a person gave or that nobody knows."""


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float
    source: str
    """In words."""
    kind: str
    """measured, profile, history, time or default; relatives for slow-downs"""


def model_name(model: str | None, name: str) -> str:
    """The model under which jobs are alike to the belief: what the owner said, else the job's name (without its index
    in an array), marked so that it cannot be mistaken for a profile's model, else generic."""
    plain = re.sub(r"\[\d+\]$", "", name)
    return model or (f"name:{plain}" if plain else GENERIC)


def run_time(belief: "Belief", job: Job) -> Estimate:
    """How long the whole job takes alone, uncut, at the most consolidated placement."""
    placement = Placement(job.gpus, belief.fewest_nodes(job.gpus))
    seconds = job.iterations * belief.iteration_time(job, 1, placement)
    known = job.model in belief.fitted.tasks
    given = job.duration_s is not None
    if job.model == GENERIC or (known and given):
        return _spread(seconds, GIVEN_SPREAD, "the duration that was given", "time") if given else _default(seconds)
    times = belief.speeds.times.get(Place(job.model, job.batch, 1, *placement))
    if times is not None:
        source = f"{_runs(times.count)} of {job.model} with this batch and this many GPUs"
        return _spread(seconds, exp(FOUR_IN_FIVE * times.sd), source, "measured" if known else "history")
    ratio = belief.speeds.ratios.get(job.model)
    if known:
        source = f"the profile of {job.model}" + (f", corrected by {_runs(ratio.count)}" if ratio else "")
        return _spread(seconds, exp(FOUR_IN_FIVE * belief.speeds.error_sd), source, "profile")
    if ratio is not None:
        source = f"{_runs(ratio.count)} of {job.model} at other sizes"
        return _spread(seconds, max(GIVEN_SPREAD, exp(FOUR_IN_FIVE * ratio.sd)), source, "history")
    return _spread(seconds, GIVEN_SPREAD, "the duration that was given", "time") if given else _default(seconds)


def slowdown(belief: "Belief", job: Job, accumulation: int, mate: Job, mate_accumulation: int) -> Estimate:
    """ξ of a job beside one mate."""
    own = kind_of(job.model, sub_batch(job.batch, accumulation))
    cell = (own, kind_of(mate.model, sub_batch(mate.batch, mate_accumulation)))
    value = belief.pairs.xi(cell)
    factor = exp(FOUR_IN_FIVE * sqrt(belief.pairs.variance(cell)))
    if cell in belief.pairs.rows:
        source, kind = "the two seen together", "measured"
    elif belief.pairs.has_seen(cell):
        source, kind = "their like seen together", "relatives"
    elif belief.pairs.prior(cell) is not None:
        source, kind = "how busy each keeps a GPU alone", "profile"
    else:
        source, kind = "nothing known of the two", "default"
    return Estimate(value, max(1.0, value / factor), value * factor, source, kind)


def _spread(value: float, factor: float, source: str, kind: str) -> Estimate:
    return Estimate(value, value / factor, value * factor, source, kind)


def _default(seconds: float) -> Estimate:
    return _spread(seconds, DEFAULT_SPREAD, f"nothing known of it: {seconds:g} s are assumed", "default")


def _runs(count: int) -> str:
    return f"{count} earlier run{'s' if count > 1 else ''}"
