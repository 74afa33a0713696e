"""The claims of the paper's abstract and text, each with the paper's figure, ours, a verdict and its reason.

Verdicts are computed from our numbers by the rules in `verdicts.py`, never typed. They are given on the headline
workload, and the reason names the result on the other workload.
"""

from collections.abc import Iterator, Sequence

from carpool.report.paper import plan
from carpool.report.paper.cells import lower, percent
from carpool.report.paper.claim import (
    EXCLUSIVE,
    FIRST_FIT,
    OURS,
    SHARING,
    TIRESIAS,
    Claim,
    found_less,
    headline,
    hours,
    on_other_workloads,
    ordered,
)
from carpool.report.paper.claims_model import accumulation, cost
from carpool.report.paper.claims_physical import fidelity, physical
from carpool.report.paper.measured import PhysicalExperiment
from carpool.report.paper.results import Results, jct_h, model_queue_s, queue_h, share_within, shortest_mean_s
from carpool.report.paper.verdicts import combined, equal, every, less
from carpool.sim.sweep import Mean


def claims(results: Results, measured: PhysicalExperiment | None) -> list[Claim]:
    """Return all claims with their verdicts."""
    return [
        *_against_preemptive(results),
        *_against_first_fit(results),
        *physical(results, measured),
        *_shape(results),
        *_load_and_interference(results),
        *cost(results),
        fidelity(results.config, measured),
        accumulation(results),
    ]


def _against_preemptive(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    low, high = config.tables["III"], config.tables["IV"]
    shown, verdict = found_less(results, headline(results, low), TIRESIAS, jct_h(), said["tiresias_simulated"])
    yield Claim(
        "abstract",
        f"Mean JCT 27–33 % lower than preemptive schedulers: Tiresias, {low} jobs",
        f"{said['tiresias_simulated']:g} %",
        shown,
        verdict,
        "The result depends on Tiresias's threshold, which the paper does not give; both values must agree. "
        f"{on_other_workloads(results, low, TIRESIAS, jct_h())}",
    )
    for jobs, table in ((low, "III"), (high, "IV")):
        printed = config.paper.jct[table]
        stated = 100 * (1 - printed[OURS][0] / printed["pollux"][0])
        shown, verdict = found_less(results, headline(results, jobs), ["pollux"], jct_h(), stated)
        yield Claim(
            "abstract",
            f"Mean JCT 27–33 % lower than preemptive schedulers: Pollux, {jobs} jobs",
            f"{stated:.0f} % by Table {table}",
            shown,
            verdict,
            f"The paper's own tables contradict its abstract. {on_other_workloads(results, jobs, ['pollux'], jct_h())}",
        )
    yield from _pollux_details(results)


def _pollux_details(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    low, high = (headline(results, config.tables[table]) for table in ("III", "IV"))
    times = [results.mean(high, name, jct_h()) for name in ("pollux", OURS)]
    ratio = times[0].value / times[1].value if times[0] and times[1] else None
    wanted = 100 * (1 - 1 / said["pollux_times_480"])
    _, verdict = found_less(results, high, ["pollux"], jct_h(), wanted)
    yield Claim(
        "Section VI-C",
        f"{high.jobs} jobs: nearly {said['pollux_times_480']:g} times better than Pollux",
        f"{said['pollux_times_480']:g} ×",
        "–" if ratio is None else f"{ratio:.1f} ×",
        verdict,
        f"Pollux {hours(times[0])}, SJF-BSBF {hours(times[1])}.",
    )
    share = said["shortest_share"]
    value = shortest_mean_s(share / 100)
    shown, verdict = found_less(results, headline(results, config.figure5), ["pollux"], value, said["shortest_pollux"])
    yield Claim(
        "Section VI-C, Fig. 5a",
        f"JCT of the shortest {share:g} % of jobs lower than under Pollux",
        f"{said['shortest_pollux']:g} %",
        shown,
        verdict,
        "Pollux decides once a minute, and every start costs a job 30 s; both affect short jobs most.",
    )
    large = [results.mean(low, name, jct_h("large")) for name in (OURS, "pollux")]
    small = [results.mean(low, name, jct_h("small")) for name in (OURS, "pollux")]
    tests = [ordered(large[1], large[0]), ordered(small[0], small[1])]
    printed = config.paper.jct["III"]
    (_, large_ours, small_ours), (_, large_pollux, small_pollux) = printed[OURS], printed["pollux"]
    yield Claim(
        "Section VI-C",
        f"{low.jobs} jobs: large jobs take longer than under Pollux, small ones take less time",
        f"large {large_ours:g} against {large_pollux:g} h, small {small_ours:g} against {small_pollux:g} h",
        f"large {hours(large[0])} against {hours(large[1])}, small {hours(small[0])} against {hours(small[1])}",
        every(tests),
        "Two comparisons of means.",
    )


def _against_first_fit(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    high = headline(results, config.tables["IV"])
    for what, value, key in (("JCT", jct_h(), "ffs_jct_480"), ("queuing time", queue_h(), "ffs_queue_480")):
        shown, verdict = found_less(results, high, [FIRST_FIT], value, said[key])
        yield Claim(
            "abstract" if what == "JCT" else "Section VI-C",
            f"Mean {what} lower than SJF-FFS, {high.jobs} jobs",
            f"{said[key]:g} %",
            shown,
            verdict,
            f"{_first_fit_reason(what)} {on_other_workloads(results, high.jobs, [FIRST_FIT], value)}".strip(),
        )


def _first_fit_reason(what: str) -> str:
    if what == "JCT":
        return "SJF-FFS always shares, whatever it costs."
    return "SJF-FFS shares at once and slows all jobs down, and when every GPU holds two jobs the next one must wait."


def _shape(results: Results) -> Iterator[Claim]:
    config = results.config
    said = config.paper.claims
    setting = headline(results, config.figure5)
    share = results.mean(setting, OURS, share_within(500.0))
    yield Claim(
        "Section VI-C, Fig. 5a",
        f"Share of SJF-BSBF's jobs done within 500 s, {config.figure5} jobs",
        f"nearly {said['under_500_share']:g} %",
        percent(share),
        equal(share, said["under_500_share"], config.points),
        f"Reproduced within {config.points:g} percentage points, partly within twice as many.",
    )
    for jobs in config.tables.values():
        setting = headline(results, jobs)
        tests = []
        models = sorted({model for found in results.of(setting, OURS).values() for model in found.summary.models})
        for model in models:
            for sharing in SHARING:
                mine = results.mean(setting, sharing, model_queue_s(model))
                tests += [ordered(mine, results.mean(setting, name, model_queue_s(model))) for name in EXCLUSIVE]
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
    at_low = {name: results.mean(headline(results, low), name, jct_h()) for name in (*others, "pollux")}
    yield Claim(
        "Section VI-C, Fig. 6a",
        f"Pollux is better than the others at low load ({low} jobs)",
        "best",
        f"Pollux {hours(at_low['pollux'])}, best of the others {_best(at_low, others)}",
        every([ordered(at_low["pollux"], at_low[name]) for name in others]),
        "Its mean compared with that of every other policy.",
    )
    gains = [results.lower(headline(results, jobs), OURS, "pollux", jct_h()) for jobs in (low, high)]
    yield Claim(
        "Section VI-C, Fig. 6a",
        "Pollux loses its advantage as the load grows",
        "yes",
        f"against Pollux SJF-BSBF is {lower(gains[0])} at {low} jobs, {lower(gains[1])} at {high}",
        every([ordered(gains[0], gains[1])]),
        "The gain of SJF-BSBF at the highest load compared with that at the lowest.",
    )
    rest = [name for name in others if name != OURS]
    tests = [
        ordered(
            results.mean(headline(results, jobs), OURS, jct_h()), results.mean(headline(results, jobs), name, jct_h())
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
    return hours(min((one for name in names if (one := means[name])), key=lambda one: one.value, default=None))


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
        f"ξ ≤ {equal_xi:g}: SJF-BSBF equals SJF-FFS, {jobs} jobs",
        "the same",
        ", ".join(f"{lower(gain, 1)} at {xi:g}" for xi, gain in mild.items()),
        combined([equal(gain, 0.0, config.equal) for gain in mild.values()]),
        f"Reproduced if they differ by at most {config.equal:g} %, partly by at most twice that.",
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
        "At ξ = 1.5 a pair whose host ends first gains nothing by sharing, and a tie waits.",
    )
