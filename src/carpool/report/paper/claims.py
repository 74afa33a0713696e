"""The claims of the paper's abstract and text, each with the paper's figure, ours, a verdict and its reason.

A verdict is computed from the measured numbers by the rules in `verdicts.py`, never typed. It is given on the
headline workload;
what the other workload says stands beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from statistics import linear_regression

from carpool.profile.schema import load as load_profile
from carpool.report.paper import plan
from carpool.report.paper.cells import lower, percent
from carpool.report.paper.measured import Measured
from carpool.report.paper.plan import Setting
from carpool.report.paper.results import Results, Value, jct_h, model_queue_s, queue_h, share_within, shortest_mean_s
from carpool.report.paper.tables import gpus_of
from carpool.report.paper.verdicts import Verdict, combined, equal, every, less
from carpool.sim.sweep import Mean

OURS = "sjf-bsbf"
FIRST_FIT = "sjf-ffs"
EXCLUSIVE = ("fifo", "sjf", "tiresias", "tiresias-16")
SHARING = (FIRST_FIT, OURS)
TIRESIAS = ("tiresias", "tiresias-16")


@dataclass(frozen=True, slots=True)
class Claim:
    where: str
    text: str
    paper: str
    ours: str
    verdict: Verdict
    reason: str


def claims(results: Results, measured: Measured | None) -> list[Claim]:
    found: list[Claim] = []
    for part in (_against_preemptive, _against_first_fit, _physical, _shape, _load_and_interference, _cost):
        found += part(results)
    return [*found, _fidelity(results, measured), _accumulation(results)]


# ---- how claims are put ----------------------------------------------------------------------------------------------


def _less(
    results: Results,
    setting: Setting,
    than: Sequence[str],
    value: Value,
    printed: float,
) -> tuple[str, Verdict]:
    """What we find for "SJF-BSBF is lower by so many per cent", against one policy or several that stand for it."""
    config = results.config
    found = [results.lower(setting, OURS, name, value) for name in than]
    verdicts = [less(one, printed, config.points) for one in found]
    if len(than) == 1:
        return lower(found[0]), verdicts[0]
    shown = "; ".join(f"{lower(one)} ({config.policy(name).label})" for name, one in zip(than, found, strict=True))
    return shown, combined(verdicts)


def _other(results: Results, jobs: int, than: Sequence[str], value: Value) -> str:
    """The same on the other workloads, for the reason."""
    parts = []
    for row in results.config.workloads[1:]:
        setting = plan.main(results.config, row.name, jobs)
        shown = ", ".join(lower(results.lower(setting, OURS, name, value)) for name in than)
        parts.append(f"On {row.title} workload: {shown}.")
    return " ".join(parts)


def _headline(results: Results, jobs: int) -> Setting:
    return plan.main(results.config, results.config.headline.name, jobs)


def _hours(found: Mean | None) -> str:
    return "–" if found is None else f"{found.value:.2f} h"


# ---- the claims ----------------------------------------------------------------------------------------------------


def _against_preemptive(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    low, high = config.tables["III"], config.tables["IV"]
    shown, verdict = _less(results, _headline(results, low), TIRESIAS, jct_h(), said["tiresias_simulated"])
    yield Claim(
        "abstract",
        f"Mean JCT 27–33 % lower than preemptive schedulers: Tiresias, {low} jobs",
        f"{said['tiresias_simulated']:g} %",
        shown,
        verdict,
        "The threshold decides, and the paper does not name it; both must agree. "
        f"{_other(results, low, TIRESIAS, jct_h())}",
    )
    for jobs, table in ((low, "III"), (high, "IV")):
        printed = config.paper.jct[table]
        stated = 100 * (1 - printed[OURS][0] / printed["pollux"][0])
        shown, verdict = _less(results, _headline(results, jobs), ["pollux"], jct_h(), stated)
        yield Claim(
            "abstract",
            f"Mean JCT 27–33 % lower than preemptive schedulers: Pollux, {jobs} jobs",
            f"{stated:.0f} % by Table {table}",
            shown,
            verdict,
            f"The paper's own tables contradict its abstract. {_other(results, jobs, ['pollux'], jct_h())}",
        )
    yield from _pollux_details(results)


def _pollux_details(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    low, high = (_headline(results, config.tables[table]) for table in ("III", "IV"))
    times = [results.mean(high, name, jct_h()) for name in ("pollux", OURS)]
    ratio = times[0].value / times[1].value if times[0] and times[1] else None
    wanted = 100 * (1 - 1 / said["pollux_times_480"])
    _, verdict = _less(results, high, ["pollux"], jct_h(), wanted)
    yield Claim(
        "Section VI-C",
        f"{high.jobs} jobs: nearly {said['pollux_times_480']:g} times better than Pollux",
        f"{said['pollux_times_480']:g} ×",
        "–" if ratio is None else f"{ratio:.1f} ×",
        verdict,
        f"Pollux {_hours(times[0])}, SJF-BSBF {_hours(times[1])}.",
    )
    share = said["shortest_share"]
    value = shortest_mean_s(share / 100)
    shown, verdict = _less(results, _headline(results, config.figure5), ["pollux"], value, said["shortest_pollux"])
    yield Claim(
        "Section VI-C, Fig. 5a",
        f"JCT of the shortest {share:g} % of jobs lower than under Pollux",
        f"{said['shortest_pollux']:g} %",
        shown,
        verdict,
        "Pollux decides once a minute and charges every start 30 s; a short job feels both.",
    )
    large = [results.mean(low, name, jct_h("large")) for name in (OURS, "pollux")]
    small = [results.mean(low, name, jct_h("small")) for name in (OURS, "pollux")]
    tests = [_ordered(large[1], large[0]), _ordered(small[0], small[1])]
    printed = config.paper.jct["III"]
    (_, large_ours, small_ours), (_, large_pollux, small_pollux) = printed[OURS], printed["pollux"]
    yield Claim(
        "Section VI-C",
        f"{low.jobs} jobs: large jobs take longer than under Pollux, small ones less long",
        f"large {large_ours:g} against {large_pollux:g} h, small {small_ours:g} against {small_pollux:g} h",
        f"large {_hours(large[0])} against {_hours(large[1])}, small {_hours(small[0])} against {_hours(small[1])}",
        every(tests),
        "Two comparisons of means.",
    )


def _ordered(less_one: Mean | None, more_one: Mean | None) -> bool | None:
    return None if less_one is None or more_one is None else less_one.value < more_one.value


def _against_first_fit(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    high = _headline(results, config.tables["IV"])
    for what, value, key in (("JCT", jct_h(), "ffs_jct_480"), ("queuing time", queue_h(), "ffs_queue_480")):
        shown, verdict = _less(results, high, [FIRST_FIT], value, said[key])
        yield Claim(
            "abstract" if what == "JCT" else "Section VI-C",
            f"Mean {what} lower than SJF-FFS, {high.jobs} jobs",
            f"{said[key]:g} %",
            shown,
            verdict,
            f"{_first_fit_reason(what)} {_other(results, high.jobs, [FIRST_FIT], value)}".strip(),
        )


def _first_fit_reason(what: str) -> str:
    if what == "JCT":
        return "SJF-FFS shares whatever it costs."
    return (
        "SJF-FFS never refuses to share, so its queue is short by construction; SJF-BSBF waits where waiting is better."
    )


def _physical(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    setting = plan.physical(config)
    why = "Simulated on other GPUs than the paper's; only ratios compare."
    shown, verdict = _less(results, setting, TIRESIAS, jct_h(), said["tiresias_physical"])
    yield Claim(
        "Section VI-B", "30 jobs: mean JCT lower than Tiresias", f"{said['tiresias_physical']:g} %", shown, verdict, why
    )
    shown, verdict = _less(results, setting, [FIRST_FIT], jct_h(), said["ffs_physical"])
    yield Claim(
        "Section VI-B", "30 jobs: mean JCT lower than SJF-FFS", f"{said['ffs_physical']:g} %", shown, verdict, why
    )
    shown, verdict = _less(results, setting, TIRESIAS, model_queue_s("bert"), said["bert_queue_physical"])
    yield Claim(
        "Section VI-B",
        "30 jobs: BERT queues less than under Tiresias",
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
        "30 jobs: SJF-FFS generally has the lowest queuing time",
        "lowest",
        ", ".join(f"{config.policy(name).label} {_hours(found)}" for name, found in queues.items()),
        every([_ordered(queues[FIRST_FIT], queues[name]) for name in others]),
        "Its mean against that of every other policy.",
    )


def _within(results: Results, setting: Setting) -> Claim:
    """The paper's hours exceed its makespan, so the test is on ours: is SJF-BSBF ahead of all others?"""
    config = results.config
    said = config.paper.claims
    hours = said["within_hours"]
    shares = {name: results.mean(setting, name, share_within(hours * 3600)) for name in config.physical.policies}
    longest = max(makespan for makespan, _ in config.paper.physical.values()) / 3600
    others = [_ordered(found, shares[OURS]) for name, found in shares.items() if name != OURS]
    return Claim(
        "Section VI-B, Fig. 4a",
        f"30 jobs: more jobs done within {hours:g} h than under any other policy",
        f"nearly {said['within_share']:g} %, others below {said['others_share']:g} %",
        ", ".join(f"{config.policy(name).label} {percent(found)}" for name, found in shares.items()),
        every(others),
        f"The paper's longest makespan is {longest:.2f} h, so its {hours:g} h must be a slip. Here only the order "
        "is tested.",
    )


def _shape(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    setting = _headline(results, config.figure5)
    share = results.mean(setting, OURS, share_within(500.0))
    yield Claim(
        "Section VI-C, Fig. 5a",
        "Share of SJF-BSBF's jobs done within 500 s",
        f"nearly {said['under_500_share']:g} %",
        percent(share),
        equal(share, said["under_500_share"], config.points),
        f"Reproduced within {config.points:g} percentage points.",
    )
    for jobs in config.tables.values():
        setting = _headline(results, jobs)
        tests = []
        models = sorted({model for found in results.of(setting, OURS).values() for model in found.summary.models})
        for model in models:
            for sharing in SHARING:
                mine = results.mean(setting, sharing, model_queue_s(model))
                tests += [_ordered(mine, results.mean(setting, name, model_queue_s(model))) for name in EXCLUSIVE]
        yield Claim(
            "Section VI-C, Fig. 5b",
            f"Sharing policies queue less than exclusive ones, model by model, {jobs} jobs",
            "consistently",
            f"{sum(map(bool, tests))} of {len(tests)} comparisons",
            every(tests),
            f"{len(models)} models × {len(SHARING)} sharing policies × {len(EXCLUSIVE)} exclusive ones.",
        )


def _load_and_interference(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    low, high = min(config.figure6a), max(config.figure6a)
    others = [row.name for row in config.policies if row.name != "pollux"]
    at_low = {name: results.mean(_headline(results, low), name, jct_h()) for name in (*others, "pollux")}
    yield Claim(
        "Section VI-C, Fig. 6a",
        f"Pollux is better than the others at low load ({low} jobs)",
        "best",
        f"Pollux {_hours(at_low['pollux'])}, best of the others {_best(at_low, others)}",
        every([_ordered(at_low["pollux"], at_low[name]) for name in others]),
        "Its mean against that of every other policy.",
    )
    gains = [results.lower(_headline(results, jobs), OURS, "pollux", jct_h()) for jobs in (low, high)]
    yield Claim(
        "Section VI-C, Fig. 6a",
        "Pollux loses its advantage as the load grows",
        "yes",
        f"against Pollux SJF-BSBF is {lower(gains[0])} at {low} jobs, {lower(gains[1])} at {high}",
        every([_ordered(gains[0], gains[1])]),
        "The gain of SJF-BSBF at the highest load against that at the lowest.",
    )
    rest = [name for name in others if name != OURS]
    tests = [
        _ordered(
            results.mean(_headline(results, jobs), OURS, jct_h()), results.mean(_headline(results, jobs), name, jct_h())
        )
        for jobs in config.figure6a
        for name in rest
    ]
    yield Claim(
        "Section VI-C, Fig. 6a",
        "SJF-BSBF is better than the other baselines at all loads",
        "at all loads",
        f"{sum(map(bool, tests))} of {len(tests)} comparisons",
        every(tests),
        f"{len(config.figure6a)} loads × {len(rest)} policies without Pollux, Tiresias with both thresholds.",
    )
    yield from _injected(results, said["equal_xi"])


def _best(means: dict[str, Mean | None], names: Sequence[str]) -> str:
    return _hours(min((one for name in names if (one := means[name])), key=lambda one: one.value, default=None))


def _injected(results: Results, equal_xi: float) -> Iterator[Claim]:
    config = results.config
    jobs = config.figure6b.jobs[0]
    gains = {
        xi: results.lower(plan.injected(config, jobs, text), OURS, FIRST_FIT, jct_h())
        for xi, text in zip(config.figure6b.xi, plan.constants(config), strict=True)
    }
    mild = {xi: gain for xi, gain in gains.items() if xi <= equal_xi}
    yield Claim(
        "Section VI-C, Fig. 6b",
        f"ξ ≤ {equal_xi:g}: SJF-BSBF as SJF-FFS, {jobs} jobs",
        "the same",
        ", ".join(f"{lower(gain, 1)} at {xi:g}" for xi, gain in mild.items()),
        combined([equal(gain, 0.0, config.equal) for gain in mild.values()]),
        f"The same up to {config.equal:g} %.",
    )
    (low, high), (least, most) = config.paper.wise_xi, config.paper.wise_gain
    wise = {xi: gain for xi, gain in gains.items() if low <= xi <= high}
    verdicts = [
        less(gain, min(max(gain.value, least), most) if gain else least, config.points) for gain in wise.values()
    ]
    yield Claim(
        "Section VI-C, Fig. 6b",
        f"ξ from {low:g} to {high:g}: mean JCT lower than SJF-FFS, {jobs} jobs",
        f"{least:g}–{most:g} %",
        ", ".join(f"{lower(gain, 1)} at {xi:g}" for xi, gain in wise.items()),
        combined(verdicts),
        "At ξ = 1.5 a pair whose host ends first gains nothing by sharing, and a tie waits. The worst of the three "
        "counts.",
    )


def _cost(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    sizes = {gpus_of(setting): setting for setting in (plan.overhead(config, nodes) for nodes in config.overhead.nodes)}
    means = {
        gpus: results.mean(setting, config.overhead.policy, lambda o: o.summary.decision_mean_s)
        for gpus, setting in sizes.items()
    }
    small = means.get(16)
    yield Claim(
        "Section V-B",
        "A scheduling operation on 16 GPUs takes less than 0.02 s",
        f"{said['overhead_s']:g} s",
        "–" if small is None else f"{small.value:.5f} s",
        every([None if small is None else small.value < said["overhead_s"]]),
        "Measured in the simulator, with the checks that the live service makes.",
    )
    known = [(log(gpus), log(found.value)) for gpus, found in means.items() if found]
    slope = linear_regression(*zip(*known, strict=True)).slope if len(known) > 1 else None
    yield Claim(
        "Section V-B",
        "The time of a decision grows about linearly with the GPUs (|G| log B + |J| log |J|)",
        "linear, times a logarithm",
        "–" if slope is None else f"GPUs to the power of {slope:.2f}, {min(sizes)}–{max(sizes)} GPUs",
        every([None if slope is None else slope <= 1.1]),
        "Reproduced if the power is at most 1.1. We judge each host once, not each GPU, and cut each kind of host "
        "at one point.",
    )
    pairs = [xi for pair in load_profile("gavel").pairs for xi in (pair.xi_a, pair.xi_b)]
    pairs += [xi for pair in load_profile("h200").pairs for xi in (pair.xi_a, pair.xi_b)]
    yield Claim(
        "Section IV-B, Fig. 3",
        "Interference ratios range widely, up to 6",
        f"up to {said['largest_xi']:g}",
        f"up to {max(pairs):.1f}",
        every([max(pairs) >= said["largest_xi"] / 2, max(pairs) >= said["largest_xi"] - 1]),
        "The pairs that we ship (Gavel's on a V100, ours on an H200), one GPU each; multi-GPU pairs are in no "
        "public data. "
        "Reproduced if the largest is at least 5, partly if at least 3.",
    )


def _fidelity(results: Results, measured: Measured | None) -> Claim:
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
        "The simulator is within 5 % of the physical run, makespan and mean JCT",
        f"{limit:g} %",
        f"at most {max(offs):.0f} % off" if offs else "–",
        every([off <= limit for off in offs]) if offs else Verdict.UNTESTED,
        "Against the measured values." if offs else "No physical run is at hand to compare with.",
    )


def _accumulation(results: Results) -> Claim:
    tasks = load_profile(results.config.setup.profile).tasks
    same = sorted(name for name, task in tasks.items() if not task.batch_norm)
    return Claim(
        "Section I",
        "Gradient accumulation is completely equivalent to training with the larger batch",
        "always",
        f"{len(same)} of {len(tasks)} models ({', '.join(same)})",
        every([not task.batch_norm for task in tasks.values()], least=1),
        "BatchNorm takes its statistics from each micro-batch: the other models train differently when split. "
        "Partly if it holds for at least one model.",
    )
