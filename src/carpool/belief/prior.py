"""What is believed of two jobs that nobody has seen together: the prior, from profiles.

How busy a job keeps its GPU says most: ξ = 1 + κ·u_a·u_b, with the busy share u of each at its sub-batch and κ of the
GPU model and sharing mechanism. Both come from a profile where it has them. The live service and the simulator call
`believe` to make a belief from a profile.
"""

from carpool.belief.model import Belief
from carpool.core.perf import FittedModel, PerformanceModel
from carpool.profile.values import Busy, Profile

KAPPA = {"time-slicing": 1.15, "mps": 0.46, "unknown": 1.0}
"""Where a profile has none of its own: fitted to pairs on one H200. With an unknown mechanism two jobs that keep the
GPU busy count as taking turns: ξ = 2."""


def believe(
    profile: Profile,
    fitted: FittedModel,
    mechanism: str = "unknown",
    *,
    times: PerformanceModel | None = None,
    with_pairs: bool = True,
    probe: float | None = None,
) -> Belief:
    """A belief that knows a profile. `fitted` predicts speeds from its tasks, and `times` may misjudge them on purpose;
    without `with_pairs` what the profile measured of jobs that share is kept from it."""
    belief = Belief(
        fitted,
        busy=busy_of(profile),
        kappa=kappa_of(profile, mechanism),
        times=times,
        probe=probe,
        demands=demands_of(profile, mechanism) if with_pairs else None,
    )
    if with_pairs:
        for pair in profile.pairs:
            if pair.mechanism == mechanism:
                belief.note(pair.a, pair.batch_a, pair.b, pair.batch_b, pair.xi_a)
                belief.note(pair.b, pair.batch_b, pair.a, pair.batch_a, pair.xi_b)
        belief.pairs.take_up()
    return belief


def busy_of(profile: Profile) -> dict[str, Busy]:
    """From the sweep over batches that the profile was fitted to; without one, from the straight line of eq. 3, which
    is a rough stand-in: it puts the knee too low where a GPU idles at small batches."""
    return {
        name: task.busy or Busy(task.alpha_s, task.beta_s)
        for name, task in profile.tasks.items()
        if task.busy or task.beta_s > 0.0
    }


def kappa_of(profile: Profile, mechanism: str) -> float:
    fitted = profile.kappa.get(mechanism)
    return fitted.kappa if fitted is not None else KAPPA.get(mechanism, KAPPA["unknown"])


def demands_of(profile: Profile, mechanism: str) -> dict[str, tuple[int, float]]:
    """By task: the largest batch at which its demand is known, and that demand."""
    found = {}
    for name, task in profile.tasks.items():
        known = [(demand.batch, demand.demand) for demand in task.demands if demand.mechanism == mechanism]
        if known:
            found[name] = max(known)
    return found
