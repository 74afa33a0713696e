"""The claims on the physical experiment (Section VI-B), and on how well the simulator matches it."""

from collections.abc import Callable, Iterator

from carpool.report.paper import plan
from carpool.report.paper.cells import percent
from carpool.report.paper.claim import FIRST_FIT, OURS, TIRESIAS, Claim, found_less, hours, ordered
from carpool.report.paper.measured import Measured
from carpool.report.paper.plan import Setting
from carpool.report.paper.results import Results, jct_h, model_queue_s, queue_h, share_within
from carpool.report.paper.verdicts import Verdict, every

NOT_RUN = (
    "These jobs have not been run on real GPUs. How far the simulator is off on one real GPU, with other jobs, stands "
    "in docs/experiments/h200.md."
)


def physical(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    setting = plan.physical(config)
    why = "Simulated on other GPUs than the paper's; only ratios compare."
    jobs = f"{setting.jobs} jobs"
    shown, verdict = found_less(results, setting, TIRESIAS, jct_h(), said["tiresias_physical"])
    yield Claim(
        "Section VI-B", f"{jobs}: mean JCT lower than Tiresias", f"{said['tiresias_physical']:g} %", shown, verdict, why
    )
    shown, verdict = found_less(results, setting, [FIRST_FIT], jct_h(), said["ffs_physical"])
    yield Claim(
        "Section VI-B", f"{jobs}: mean JCT lower than SJF-FFS", f"{said['ffs_physical']:g} %", shown, verdict, why
    )
    shown, verdict = found_less(results, setting, TIRESIAS, model_queue_s("bert"), said["bert_queue_physical"])
    yield Claim(
        "Section VI-B",
        f"{jobs}: BERT queues less than under Tiresias",
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
        "Its mean against that of every other policy.",
    )


def _within(results: Results, setting: Setting) -> Claim:
    """The paper's hours exceed its makespan, so the test is on ours: is SJF-BSBF ahead of all others?"""
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
        f"The paper's longest makespan is {longest:.2f} h, so its {limit:g} h must be a slip. Here only the order "
        "is tested.",
    )


def fidelity(results: Results, measured: Measured | None) -> Claim:
    config = results.config
    limit = config.paper.claims["fidelity"]
    setting = plan.physical(config)
    values: tuple[Callable[..., float], ...] = (lambda o: o.summary.makespan_s, lambda o: o.summary.mean_jct_s)
    offs = []
    for name, row in (measured.rows if measured else {}).items():
        for number, value in enumerate(values):
            found = results.mean(setting, name, value)
            if found:
                offs.append(100 * abs(found.value / row[number] - 1))
    return Claim(
        "Section VI-C",
        f"The simulator is within {limit:g} % of the physical run, makespan and mean JCT",
        f"{limit:g} %",
        f"at most {max(offs):.0f} % off" if offs else "–",
        every([off <= limit for off in offs]) if offs else Verdict.UNTESTED,
        "Against the measured values." if offs else NOT_RUN,
    )
