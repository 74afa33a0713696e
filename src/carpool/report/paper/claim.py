"""A claim of the paper with our verdict, and the comparisons that most claims make."""

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.report.paper import plan
from carpool.report.paper.cells import lower
from carpool.report.paper.plan import RunSetting
from carpool.report.paper.results import Results, Value
from carpool.report.paper.verdicts import ClaimVerdict, combined, less
from carpool.sim.sweep import Mean

OURS = "sjf-bsbf"
FIRST_FIT = "sjf-ffs"
EXCLUSIVE = ("fifo", "sjf", "tiresias", "tiresias-16")
SHARING = (FIRST_FIT, OURS)
TIRESIAS = ("tiresias", "tiresias-16")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim: where the paper makes it, its text, the paper's figure, ours, the verdict and its reason."""

    where: str
    text: str
    paper: str
    ours: str
    verdict: ClaimVerdict
    reason: str


def found_less(
    results: Results,
    setting: RunSetting,
    than: Sequence[str],
    value: Value,
    printed: float,
) -> tuple[str, ClaimVerdict]:
    """Return our result and verdict for "SJF-BSBF is lower by `printed` per cent" than each of some policies."""
    config = results.config
    found = [results.lower(setting, OURS, name, value) for name in than]
    verdicts = [less(one, printed, config.points) for one in found]
    if len(than) == 1:
        return lower(found[0]), verdicts[0]
    shown = "; ".join(f"{lower(one)} ({config.policy(name).label})" for name, one in zip(than, found, strict=True))
    return shown, combined(verdicts)


def on_other_workloads(results: Results, jobs: int, than: Sequence[str], value: Value) -> str:
    """Return the same comparison on the other workloads, as a part of the reason."""
    parts = []
    for row in results.config.workloads[1:]:
        setting = plan.main(results.config, row.name, jobs)
        shown = ", ".join(lower(results.lower(setting, OURS, name, value)) for name in than)
        parts.append(f"On {row.title} workload: {shown}.")
    return " ".join(parts)


def headline(results: Results, jobs: int) -> RunSetting:
    return plan.main(results.config, results.config.headline.name, jobs)


def hours(found: Mean | None) -> str:
    return "–" if found is None else f"{found.value:.2f} h"


def ordered(less_one: Mean | None, more_one: Mean | None) -> bool | None:
    return None if less_one is None or more_one is None else less_one.value < more_one.value
