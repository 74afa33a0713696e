"""Three or more jobs on one GPU: the formula of the performance model against measured groups."""

import re
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.perf import FittedModel, MeasuredPair, TableInterference, group_slowdown
from carpool.profile.build import FitRequest, build
from carpool.profile.demand import fit_demands
from carpool.profile.interference import read_interference
from carpool.profile.rows import Run
from carpool.profile.schema import load
from carpool.profile.values import Pair
from tests.support.world import job

DOCS = Path(__file__).parents[2] / "docs"
xis = st.lists(st.floats(1.0, 5.0), min_size=1, max_size=4)
demands = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5)


def rms(values):
    return fmean(value**2 for value in values) ** 0.5


def errors(interference, groups):
    """Return the RMS errors of each job's ξ and of each group's total speed. A measured ξ below 1 counts as 1."""
    perf = FittedModel(load("h200").core_tasks(), interference, 1)
    of_jobs, of_groups = [], []
    for group in groups:
        jobs = [(job(str(n), model=task, batch=batch), 1) for n, (task, batch) in enumerate(group["jobs"])]
        predicted = [perf.slowdown(j, 1, jobs[:n] + jobs[n + 1 :]) for n, (j, _) in enumerate(jobs)]
        measured = [max(1.0, xi) for xi in group["xi"]]
        of_jobs += [p / m - 1.0 for p, m in zip(predicted, measured, strict=True)]
        of_groups.append(sum(1 / p for p in predicted) / sum(1 / m for m in measured) - 1.0)
    return rms(of_jobs), rms(of_groups)


@pytest.fixture
def measured():
    groups = load("h200").groups
    return [{"jobs": [(one.task, one.batch) for one in group.jobs], "xi": group.xi} for group in groups]


def test_the_formula_predicts_the_measured_groups(measured):
    assert len(measured) == 20
    of_jobs, of_groups = errors(read_interference("h200:mps"), measured)
    assert of_jobs <= 0.24
    assert of_groups <= 0.125


def test_without_demands_the_error_of_a_groups_speed_is_larger(measured):
    table = read_interference("h200:mps")
    _, plain_groups = errors(TableInterference(table.cells), measured)
    _, of_groups = errors(table, measured)
    assert plain_groups > 1.3 * of_groups


def test_the_demands_do_not_change_the_slow_down_of_a_pair():
    table = TableInterference({("plain", "plain"): [MeasuredPair(1.1)]}, {"plain": [(8, 0.9)]})
    perf = FittedModel(load("h200").core_tasks() | {"plain": load("h200").core_tasks()["bert"]}, table, 1)
    assert perf.slowdown(job("a"), 1, [(job("b"), 1)]) == 1.1
    assert perf.slowdown(job("a"), 1, [(job("b"), 1), (job("c"), 1)]) == pytest.approx(2.7)


@given(xis, demands)
def test_a_group_is_never_faster_than_its_worst_pair_or_than_the_gpu(pairs, shares):
    xi = group_slowdown(pairs, shares)
    assert xi >= max(pairs) - 1e-12
    assert xi >= sum(shares) - 1e-12
    assert xi == pytest.approx(max(1 + sum(p - 1 for p in pairs), sum(shares)))


@given(xis, demands)
def test_the_documented_formula_is_the_one_that_runs(pairs, demands):
    pages = {page: page.read_text() for page in DOCS.glob("**/*.md") if "decisions" not in page.parts}
    assert [page.name for page, text in pages.items() if "1 + Σ" in text] == ["interference.md"], "one page has it"
    formula = re.search(r"^    (max\(1 \+ Σ .*\))$", pages[DOCS / "explanation" / "interference.md"], re.MULTILINE)
    assert formula, "the page gives the formula on a line of its own"
    python = formula[1].replace("Σ (ξ_pair − 1)", "sum(xi - 1 for xi in pairs)").replace("Σ u", "sum(demands)")
    documented = eval(python, {"__builtins__": {}, "max": max, "sum": sum, "pairs": pairs, "demands": demands})
    assert group_slowdown(pairs, demands) == pytest.approx(documented)


class TestDemand:
    TABLE = TableInterference({}, {"a": [(8, 0.2), (128, 0.8)], "any": [(0, 0.5)], "none": []})

    def test_a_measured_demand_is_returned_as_it_is(self):
        assert self.TABLE.demand("a", 8) == 0.2
        assert self.TABLE.demand("a", 128) == 0.8

    def test_between_two_batches_it_is_a_line_in_logarithms(self):
        assert self.TABLE.demand("a", 32) == pytest.approx(0.4)

    def test_below_it_is_proportional_and_above_constant(self):
        assert self.TABLE.demand("a", 4) == pytest.approx(0.1)
        assert self.TABLE.demand("a", 4096) == 0.8

    def test_a_demand_may_hold_for_any_batch_or_be_unknown(self):
        assert self.TABLE.demand("any", 7) == 0.5
        assert self.TABLE.demand("none", 7) == self.TABLE.demand("other", 7) == 0.0


def test_the_fit_recovers_the_demands_behind_the_pairs():
    pytest.importorskip("scipy")
    true = {"a": 0.9, "b": 0.7, "c": 0.6}
    xi = {(x, y): max(1.0, true[x] + true[y]) for x in true for y in true}
    pairs = [Pair(x, 64, y, 64, "mps", xi[x, y], xi[y, x]) for x in true for y in true if x <= y]
    runs = [Run(name, batch, 1, 1, 1, seconds) for name in true for batch, seconds in ((16, 1.0), (64, 2.0))]
    fitted = fit_demands(pairs, runs)
    for name, u in true.items():
        assert [d.batch for d in fitted[name]] == [16, 64]
        assert fitted[name][1].demand == pytest.approx(u, rel=1e-3)
        assert fitted[name][0].demand == pytest.approx(u / 2, rel=1e-3), "a quarter of the work in half the time"


def test_pairs_without_batches_give_no_demand():
    pytest.importorskip("scipy")
    assert fit_demands([Pair("a", 0, "b", 0, "mps", 1.5, 1.5)], []) == {}


def test_a_table_at_one_set_of_batches_holds_for_every_batch():
    small, large = read_interference("h200:mps:small"), read_interference("h200:mps:large")
    assert small.pair("bert", 64, "bert", 64) == small.pair("bert", 1, "bert", 1) < 1.1
    assert large.pair("bert", 12, "bert", 12) == pytest.approx(1.84, abs=0.01)
    assert small.demand("bert", 64) < 0.4 < 0.8 < large.demand("bert", 1)


def test_the_formula_predicts_the_groups_of_an_earlier_series(data):
    """Nothing was fitted to these groups: tasks, pairs and demands come from the other files of that series."""
    pytest.importorskip("scipy")
    files = tuple(str(data / "h200" / name) for name in ("mps.json", "mps_big.json", "mps_groups.json"))
    profile = build(FitRequest(name="earlier", throughput=files[:2], pairs=files, mechanism=("mps",)))
    assert len(profile.groups) == 12
    groups = [{"jobs": [(one.task, one.batch) for one in group.jobs], "xi": group.xi} for group in profile.groups]
    of_jobs, of_groups = errors(profile.interference("mps"), groups)
    assert of_jobs <= 0.09
    assert of_groups <= 0.06
    plain_jobs, plain_groups = errors(TableInterference(profile.interference("mps").cells), groups)
    assert plain_jobs > 1.3 * of_jobs
    assert plain_groups > 2 * of_groups
