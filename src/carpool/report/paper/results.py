"""Statistics of results: means over seeds with their standard errors, and how much lower one is than another."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import fmean

from carpool.report.paper.config import PaperConfig
from carpool.report.paper.plan import PlannedRun, RunSetting
from carpool.sim.metrics import SubsetSummary, Summary
from carpool.sim.sweep import CaseResult, Mean, mean

Value = Callable[[CaseResult], float | None]
"""Function that returns a number of one run, or None if the run had no such jobs."""
HOUR = 3600.0


def jct_h(part: str = "all") -> Value:
    """Return the value "mean completion time of all, large or small jobs, in hours"."""

    def value(outcome: CaseResult) -> float | None:
        found = _part(outcome.summary, part)
        return found.mean_jct_s / HOUR if found.jobs else None

    return value


def queue_h(part: str = "all") -> Value:
    """Return the value "mean queuing time of all, large or small jobs, in hours"."""

    def value(outcome: CaseResult) -> float | None:
        found = _part(outcome.summary, part)
        return found.mean_queue_s / HOUR if found.jobs else None

    return value


def _part(summary: Summary, part: str) -> Summary | SubsetSummary:
    parts: dict[str, Summary | SubsetSummary] = {"all": summary, "large": summary.large, "small": summary.small}
    return parts[part]


def model_queue_s(model: str) -> Value:
    """Return the value "mean queuing time of the jobs of a model, in seconds"."""

    def value(outcome: CaseResult) -> float | None:
        found = outcome.summary.models.get(model)
        return found.mean_queue_s if found else None

    return value


def shortest_mean_s(share: float) -> Value:
    """Return the value "mean completion time of the shortest share of the jobs"."""

    def value(outcome: CaseResult) -> float:
        kept = outcome.jcts_s[: max(1, round(share * len(outcome.jcts_s)))]
        return fmean(kept)

    return value


def share_within(seconds: float) -> Value:
    """Return the value "share of jobs done within a time, in per cent"."""
    return lambda outcome: 100.0 * fmean(jct <= seconds for jct in outcome.jcts_s)


class Results:
    """All results of a plan."""

    def __init__(self, config: PaperConfig, outcomes: Mapping[PlannedRun, CaseResult]) -> None:
        self.config = config
        self.outcomes = outcomes
        self._by_seed: dict[tuple[RunSetting, str], dict[int, CaseResult]] = {}
        for run in sorted(outcomes, key=lambda run: run.seed):
            self._by_seed.setdefault((run.setting, run.policy), {})[run.seed] = outcomes[run]

    def of(self, setting: RunSetting, policy: str) -> Mapping[int, CaseResult]:
        """Return the results of a policy in a setting, by seed."""
        return self._by_seed.get((setting, policy), {})

    def mean(self, setting: RunSetting, policy: str, value: Value) -> Mean | None:
        """Return the mean over the seeds that had such jobs; None if there are none, or if the policy was not run."""
        found = [one for outcome in self.of(setting, policy).values() if (one := value(outcome)) is not None]
        return mean(found) if found else None

    def lower(self, setting: RunSetting, policy: str, than: str, value: Value) -> Mean | None:
        """Return by how many per cent the mean of `policy` is below that of `than`, over the seeds of both.

        The standard error comes from the jackknife: the results with each seed left out.
        """
        ours, theirs = self.of(setting, policy), self.of(setting, than)
        both = ((value(ours[seed]), value(theirs[seed])) for seed in sorted(ours.keys() & theirs.keys()))
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        return ratio_lower(pairs) if pairs else None


def ratio_lower(pairs: Sequence[tuple[float, float]]) -> Mean:
    """Return 100·(1 − Σa/Σb) of the pairs (a, b), with the jackknife's standard error."""

    def estimate(some: Sequence[tuple[float, float]]) -> float:
        below = sum(b for _, b in some)
        return 100.0 * (1.0 - sum(a for a, _ in some) / below) if below else 0.0

    if len(pairs) == 1:
        return Mean(estimate(pairs), None)
    without = [estimate([*pairs[:n], *pairs[n + 1 :]]) for n in range(len(pairs))]
    middle = fmean(without)
    spread = sum((one - middle) ** 2 for one in without) * (len(pairs) - 1) / len(pairs)
    return Mean(estimate(pairs), sqrt(spread))
