"""The prior belief about two jobs that were never observed together, made from profiles.

The best predictor is how busy each job keeps its GPU: ξ = 1 + κ·u_a·u_b, where u is a job's busy share at its sub-batch
and κ belongs to the GPU model and the sharing mechanism. Both come from the profile if it contains them. The live
service and the simulator call `believe` to make a belief from a profile.
"""

from math import log
from statistics import fmean, pstdev

from carpool.belief.model import Belief
from carpool.belief.pairs import UnknownPairs
from carpool.core.perf import FittedModel, PerformanceModel
from carpool.profile.schema import load
from carpool.profile.values import Busy, Profile

FALLBACK = "h200"
"""Profile that says what to expect of pairs where the profile in use measured none."""
LEAST_PAIRS = 8
"""Smallest number of measured slow-downs from which a mean and a spread are taken."""

KAPPA = {"time-slicing": 1.15, "mps": 0.46, "unknown": 1.0}
"""κ by mechanism for profiles without their own, fitted to pairs on one H200.

With an unknown mechanism two jobs that keep the GPU busy are assumed to take turns: ξ = 2.
"""


def believe(
    profile: Profile,
    fitted: FittedModel,
    mechanism: str = "unknown",
    *,
    times: PerformanceModel | None = None,
    with_pairs: bool = True,
    probe: float | None = None,
) -> Belief:
    """Make a belief from a profile.

    `fitted` predicts speeds from the profile's tasks; `times` replaces it where an experiment needs wrong speeds.
    With `with_pairs=False` the belief does not use the profile's measurements of jobs that share.
    """
    belief = Belief(
        fitted,
        busy=busy_of(profile),
        kappa=kappa_of(profile, mechanism),
        times=times,
        probe=probe,
        demands=demands_of(profile, mechanism) if with_pairs else None,
        mechanism=mechanism,
        unknown=unknown_pairs(profile, mechanism),
    )
    if with_pairs:
        for pair in profile.pairs:
            if pair.mechanism == mechanism:
                belief.note(pair.a, pair.batch_a, pair.b, pair.batch_b, pair.xi_a)
                belief.note(pair.b, pair.batch_b, pair.a, pair.batch_a, pair.xi_b)
        belief.pairs.take_up()
    return belief


def unknown_pairs(profile: Profile, mechanism: str) -> UnknownPairs:
    """Return mean and spread of log ξ over the pairs of a profile under this mechanism.

    A profile without such pairs is replaced by the one of the H200, which has pairs under MPS and time-slicing. An
    unknown mechanism has a cautious default.
    """
    if mechanism not in KAPPA or mechanism == "unknown":
        return UnknownPairs()
    own = _logs(profile, mechanism)
    logs = own if len(own) >= LEAST_PAIRS else _logs(load(FALLBACK), mechanism)
    return UnknownPairs(fmean(logs), pstdev(logs))


def _logs(profile: Profile, mechanism: str) -> list[float]:
    found = [pair for pair in profile.pairs if pair.mechanism == mechanism]
    return [log(max(1.0, xi)) for pair in found for xi in (pair.xi_a, pair.xi_b)]


def busy_of(profile: Profile) -> dict[str, Busy]:
    """Return each task's busy share.

    It comes from the profile's sweep over batches. Without a sweep it comes from the straight line of eq. 3, a rough
    substitute that puts the knee too low where a GPU idles at small batches.
    """
    return {
        name: task.busy or Busy(task.alpha_s, task.beta_s)
        for name, task in profile.tasks.items()
        if task.busy or task.beta_s > 0.0
    }


def kappa_of(profile: Profile, mechanism: str) -> float:
    """Return the profile's κ for the mechanism, or the default one."""
    fitted = profile.kappa.get(mechanism)
    return fitted.kappa if fitted is not None else KAPPA.get(mechanism, KAPPA["unknown"])


def demands_of(profile: Profile, mechanism: str) -> dict[str, tuple[int, float]]:
    """Return, by task, the largest batch at which its demand is known, and that demand."""
    found = {}
    for name, task in profile.tasks.items():
        known = [(demand.batch, demand.demand) for demand in task.demands if demand.mechanism == mechanism]
        if known:
            found[name] = max(known)
    return found
