"""The claims about the physical experiment (Section VI-B), and about how well the simulator matches it."""

from collections.abc import Callable, Iterator, Sequence

from carpool.report.paper import plan
from carpool.report.paper.cells import deviation, lower, percent, signed
from carpool.report.paper.claim import FIRST_FIT, OURS, TIRESIAS, Claim, found_less, hours, ordered
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.measured import FigureComparison, MeasuredCase, PhysicalExperiment
from carpool.report.paper.plan import RunSetting
from carpool.report.paper.results import Results, jct_h, model_queue_s, queue_h, share_within
from carpool.report.paper.verdicts import every
from carpool.sim.sweep import Mean

PAIRS = 2
"""Largest number of jobs on a GPU in the paper."""


def physical(results: Results, measured: PhysicalExperiment | None) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    setting = plan.physical(config)
    why = "Simulated on other GPUs than the paper's; only ratios can be compared."
    jobs = f"{setting.jobs} jobs"
    shown, verdict = found_less(results, setting, TIRESIAS, jct_h(), said["tiresias_physical"])
    yield Claim(
        "Section VI-B",
        f"{jobs}: mean JCT lower than Tiresias",
        f"{said['tiresias_physical']:g} %",
        shown,
        verdict,
        why + _beside(measured, "tiresias", lambda case: case.jct),
    )
    shown, verdict = found_less(results, setting, [FIRST_FIT], jct_h(), said["ffs_physical"])
    yield Claim(
        "Section VI-B",
        f"{jobs}: mean JCT lower than SJF-FFS",
        f"{said['ffs_physical']:g} %",
        shown,
        verdict,
        why + _beside(measured, FIRST_FIT, lambda case: case.jct),
    )
    shown, verdict = found_less(results, setting, TIRESIAS, model_queue_s("bert"), said["bert_queue_physical"])
    yield Claim(
        "Section VI-B",
        f"{jobs}: BERT jobs queue less than under Tiresias",
        f"{said['bert_queue_physical']:g} %",
        shown,
        verdict,
        why,
    )
    yield _within(results, setting)
    others = [name for name in config.physical.policies if name != FIRST_FIT]
    queues = {name: results.mean(setting, name, queue_h()) for name in config.physical.policies}
    yield Claim(
        "Section VI-B, Fig. 4b",
        f"{jobs}: SJF-FFS generally has the lowest queuing time",
        "lowest",
        ", ".join(f"{config.policy(name).label} {hours(found)}" for name, found in queues.items()),
        every([ordered(queues[FIRST_FIT], queues[name]) for name in others]),
        f"Its mean compared with that of every other policy.{_beside(measured, FIRST_FIT, lambda case: case.queue)}",
    )


def _beside(measured: PhysicalExperiment | None, than: str, value: Callable[[MeasuredCase], FigureComparison]) -> str:
    """Return how SJF-BSBF compares with a policy in the real experiment, which has other jobs and gives no verdict."""
    cases = [case for case in measured.cases if case.jobs_per_gpu <= PAIRS] if measured else []
    found = []
    for one in (case for case in cases if case.policy == OURS):
        gains = [
            f"{lower(Mean(100 * (1 - value(one).measured / value(other).measured), None))} than {other.label}"
            for other in cases
            if other.family == than and value(other).measured
            if other.jobs_per_gpu == 1 or other.mechanism == one.mechanism
        ]
        found += [f"{one.label} ({one.sharing}) {' and '.join(gains)}"] if gains else []
    return f" Measured on {measured.where}, other jobs: {'; '.join(found)}." if measured and found else ""


def _within(results: Results, setting: RunSetting) -> Claim:
    """Test only the order of policies, because the time that the paper names exceeds its makespan."""
    config = results.config
    said = config.paper.claims
    limit = said["within_hours"]
    shares = {name: results.mean(setting, name, share_within(limit * 3600)) for name in config.physical.policies}
    longest = max(makespan for makespan, _ in config.paper.physical.values()) / 3600
    others = [ordered(found, shares[OURS]) for name, found in shares.items() if name != OURS]
    return Claim(
        "Section VI-B, Fig. 4a",
        f"{setting.jobs} jobs: more jobs done within {limit:g} h than under any other policy",
        f"nearly {said['within_share']:g} %, others below {said['others_share']:g} %",
        ", ".join(f"{config.policy(name).label} {percent(found)}" for name, found in shares.items()),
        every(others),
        f"The paper's longest makespan is {longest:.2f} h, so its {limit:g} h must be an error. Only the order of "
        "policies is tested.",
    )


def fidelity(config: PaperConfig, measured: PhysicalExperiment | None) -> Claim:
    """Compare the cases of the real experiment with the simulator, which ran the same jobs."""
    limit = config.paper.claims["fidelity"]
    cases = measured.cases if measured else ()
    offs = {
        "makespan": [deviation(case.makespan.simulated, case.makespan.measured) for case in cases],
        "mean JCT": [deviation(case.jct.simulated, case.jct.measured) for case in cases],
    }
    holds = [all(abs(off) <= limit for off in both) for both in zip(*offs.values(), strict=True)]
    blind = [max(abs(case.makespan.predicted_off or 0.0), abs(case.jct.predicted_off or 0.0)) for case in cases]
    ranges = ", ".join(f"{name} in {_within_bar(found, limit)}" for name, found in offs.items() if found)
    return Claim(
        "Section VI-C",
        f"The simulator is within {limit:g} % of the physical run, makespan and mean JCT",
        f"{limit:g} %",
        f"in {sum(holds)} of {len(holds)} cases: {ranges}" if holds else "–",
        every(holds),
        f"Measured on {measured.where} with other jobs than the paper's ({measured.file}). The simulator runs the same "
        "jobs and knows how long each process took to start. A case counts if both of its figures are within the "
        f"limit. Without known start times, {sum(off <= limit for off in blind)} cases count. {_repeated(cases)}"
        if measured
        else "No physical experiment is given; name one as [physical] measured.",
    )


def _within_bar(offs: Sequence[float], limit: float) -> str:
    kept = sum(abs(off) <= limit for off in offs)
    return f"{kept} ({signed(min(offs), 1)} to {signed(max(offs), 1)})"


def _repeated(cases: Sequence[MeasuredCase]) -> str:
    once = sum(case.runs == 1 for case in cases)
    return f"{once} of {len(cases)} cases ran only once." if once else "Every case ran more than once."
