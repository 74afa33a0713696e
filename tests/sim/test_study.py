"""The robustness study: its design, its statistics, its cache and its command."""

import csv
import json
from dataclasses import asdict, replace
from math import exp, log, sqrt

import pytest

from carpool import policies
from carpool.core.perf import ConstantInterference
from carpool.profile.interference import read_interference
from carpool.report import plots
from carpool.report.study import digest, group_rows, jobs_per_gpu_rows, picture, verdict
from carpool.sim import Setup, philly_like, simulate, study
from carpool.sim.estimation_error import MisestimatedSlowdowns
from carpool.sim.study import OURS, REFERENCE, RunCache, StudyRun, plan, run_study, scenarios
from tests.support.command_line import call, everything_in


@pytest.fixture
def small(monkeypatch):
    """The same scenarios with few jobs."""
    monkeypatch.setattr(study, "JOBS", 16)
    study._workload.cache_clear()
    yield
    study._workload.cache_clear()


def run(policy: str, seed: int, hours: float, **more: object) -> StudyRun:
    plain = StudyRun("a scenario", "a group", 1.0, policy, seed, hours * 3600, 2.0, 3.0, 4.0, 5.0, 1.5, 0.25)
    return replace(plain, **more)


class TestDesign:
    def test_every_cell_has_a_name_of_its_own_and_can_be_played(self):
        names = [(scenario.name, scenario.load) for scenario in scenarios()]
        assert len(set(names)) == len(names)
        for scenario in scenarios():
            assert REFERENCE in scenario.policies
            assert set(OURS) <= set(scenario.policies)
            read_interference(scenario.setup.truth)
        for name in {name for scenario in scenarios() for name in scenario.policies}:
            policies.make(name)

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("duration_error", {0.0, 0.5, 1.0}),
            ("interference_error", {0.0, 0.1, 0.3, 0.5}),
            ("belief", {None, "1.5", "2", "learned"}),
            ("memory_limit", {False, True}),
            ("ignore_placement", {False, True}),
            ("jobs_per_gpu", {1, 2, 3, 4}),
        ],
    )
    def test_it_varies_what_it_promises(self, field, values):
        assert {getattr(scenario.setup, field) for scenario in scenarios()} == values

    def test_around_the_base_one_thing_changes_at_a_time(self):
        for scenario in scenarios():
            changed = {k for k, v in asdict(scenario.setup).items() if v != asdict(study.BASE)[k]}
            if scenario.group not in ("crossed", "base", "load") and scenario.name != "memory and placement":
                assert len(changed) == 1, scenario.name
        assert {scenario.load for scenario in scenarios()} == {0.5, 1.0, 1.5, 2.0}


class TestStatistics:
    def test_ratios_are_paired_by_seed(self):
        runs = [run(REFERENCE, 1, 1.0), run(REFERENCE, 2, 10.0), run("carpool", 1, 0.8), run("carpool", 2, 9.0)]
        row = next(row for row in digest(runs) if row.policy == "carpool")
        centre = (log(0.8) + log(0.9)) / 2
        error = abs(log(0.9) - log(0.8)) / 2  # the standard deviation of two values over the root of two
        assert row.ratio == pytest.approx(exp(centre))
        assert row.ratio_low == pytest.approx(exp(centre - 2 * error))
        assert row.ratio_high == pytest.approx(exp(centre + 2 * error))
        assert row.mean_jct_h == pytest.approx(4.9)
        assert row.mean_jct_error_h == pytest.approx(8.2 / sqrt(2) / sqrt(2))

    def test_worse_is_who_is_worse_beyond_chance_and_tolerance(self):
        for ratios, worse in (((1.03, 1.04), True), ((1.01, 1.02), False), ((0.9, 1.5), False)):
            runs = [run(REFERENCE, seed, 1.0) for seed in (1, 2)]
            runs += [run("carpool", seed, ratio) for seed, ratio in enumerate(ratios, start=1)]
            rows = digest(runs)
            assert (verdict(rows) == "carpool") is worse

    def test_the_worst_host_is_the_worst_of_all_seeds(self):
        runs = [run(REFERENCE, 1, 1.0, host_slowdown_max=1.2), run(REFERENCE, 2, 1.0, host_slowdown_max=3.4)]
        assert digest(runs)[0].host_slowdown_max == 3.4

    def test_the_bound_is_told_where_it_is_known(self):
        runs = [run(REFERENCE, 1, 2.0, bound_s=3600.0), run(REFERENCE, 2, 4.0, bound_s=7200.0)]
        assert digest(runs)[0].mean_jct_over_bound == pytest.approx(2.0)

    def test_one_seed_has_no_interval_and_no_verdict(self):
        rows = digest([run(REFERENCE, 1, 1.0), run("carpool", 1, 5.0)])
        assert verdict(rows) == "none"

    def test_more_jobs_per_gpu_are_compared_with_two(self):
        runs = [
            run("carpool", 1, hours, scenario=scenario)
            for scenario, hours in (("h200:mps", 2.0), ("h200:mps, C = 4", 1.5))
        ]
        runs += [replace(one, policy=REFERENCE) for one in runs]
        assert ["h200:mps", "1", "carpool", "4", "0.750"] in jobs_per_gpu_rows(digest(runs))

    def test_a_group_is_summarised_by_its_geometric_mean_and_its_largest_ratio(self):
        runs = [run(REFERENCE, 1, 1.0, scenario=scenario) for scenario in ("one", "two")]
        runs += [run("carpool", 1, hours, scenario=scenario) for scenario, hours in (("one", 0.5), ("two", 0.98))]
        found = group_rows(digest(runs))
        assert found[0] == [runs[0].group, "carpool", "2", "0.700", "0.980", "two, load 1", "0"]
        assert found[-1][0] == "all"


class TestCache:
    def test_what_was_run_is_not_run_again(self, small, tmp_path, monkeypatch):
        jobs = plan([scenario for scenario in scenarios() if scenario.name == "base"][:1], [1], ["sjf"])
        first = run_study(jobs, RunCache(tmp_path / "runs.jsonl"), workers=1)
        assert [one.policy for one in first] == [REFERENCE, "sjf"]
        assert first[0].bound_s <= first[0].mean_jct_s

        def refuse(tasks, workers=None):
            assert not tasks
            yield from ()

        monkeypatch.setattr(study, "run_each", refuse)
        assert run_study(jobs, RunCache(tmp_path / "runs.jsonl"), workers=1) == first
        monkeypatch.setattr(study, "code_digest", lambda: "other code")
        with pytest.raises(AssertionError):
            run_study(jobs, RunCache(tmp_path / "runs.jsonl"), workers=1)

    def test_it_goes_on_after_an_interruption(self, small, tmp_path):
        path = tmp_path / "runs.jsonl"
        jobs = plan([scenario for scenario in scenarios() if scenario.name == "C = 1"][:1], [1], ["sjf"])
        whole = run_study(jobs, RunCache(path), workers=1)
        text = path.read_text()
        path.write_text(text[:-20])
        assert run_study(jobs, RunCache(path), workers=1) == whole
        assert len(path.read_text().splitlines()) == len(text.splitlines())

    def test_another_file_is_not_taken_for_a_cache(self, tmp_path):
        (tmp_path / "x").write_text("hello\n")
        said = call("study", "--cache", tmp_path / "x", "--only", "C = 1", "--seeds", "1")
        assert (said.code, "--cache" in said.err) == (2, True)


class TestCommand:
    def test_writes_tables_and_a_picture(self, small, tmp_path):
        options = ("--only", "base", "--seeds", "1-2", "--policy", "carpool", "--workers", 1)
        said = call("study", *options, "--out", tmp_path / "out", "--cache", tmp_path / "runs.jsonl")
        assert said.code == 0
        assert "nowhere" in said.out or "carpool" in said.out
        assert everything_in(tmp_path / "out") == {
            "robustness.csv",
            "robustness.png",
            "robustness_groups.csv",
            "robustness_jobs_per_gpu.csv",
        }
        with open(tmp_path / "out" / "robustness.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["load"], row["policy"]) for row in rows] == [
            (load, policy) for load in ("1.0", "2.0") for policy in (REFERENCE, "carpool")
        ]
        again = call("study", *options, "--cache", tmp_path / "runs.jsonl", "--json")
        facts = json.loads(again.out)["scenarios"]
        assert [f"{fact['ratio']:.9f}" for fact in facts] == [f"{float(row['ratio']):.9f}" for row in rows]

    @pytest.mark.parametrize(
        ("options", "hint"),
        [
            (("--only", "nothing of that"), "groups are base"),
            (("--policy", "carpol"), "did you mean carpool"),
            (("--seeds", "x"), "whole numbers"),
        ],
    )
    def test_says_what_is_wrong(self, options, hint):
        said = call("study", *options)
        assert said.code == 2
        assert hint in said.err

    def test_the_picture_has_a_panel_for_each_load(self, tmp_path):
        runs = [run(p, s, 1.0 + s / 9, load=load) for p in (REFERENCE, *OURS) for s in (1, 2) for load in (1.0, 2.0)]
        picture(tmp_path / "picture.png", digest(runs))
        assert (tmp_path / "picture.png").stat().st_size > 10_000


class TestMisjudgedPairs:
    def test_errors_are_of_the_seed_and_of_the_pair(self):
        table = ConstantInterference(2.0)
        one, same, other = (
            MisestimatedSlowdowns(table, 0.3, 1),
            MisestimatedSlowdowns(table, 0.3, 1),
            MisestimatedSlowdowns(table, 0.3, 2),
        )
        assert one.pair("a", 1, "b", 1) == same.pair("a", 9, "b", 9)
        assert len({one.pair("a", 1, "b", 1), one.pair("b", 1, "a", 1), other.pair("a", 1, "b", 1)}) == 3

    def test_they_have_the_spread_that_was_asked_for(self):
        table = MisestimatedSlowdowns(ConstantInterference(50.0), 0.3, 1)
        errors = [log(table.pair(f"m{n}", 1, "b", 1) / 50.0) for n in range(400)]
        assert sum(errors) / 400 == pytest.approx(0.0, abs=0.05)
        assert sqrt(sum(e * e for e in errors) / 400) == pytest.approx(0.3, rel=0.1)

    def test_nobody_is_believed_to_run_faster_beside_others(self):
        table = MisestimatedSlowdowns(ConstantInterference(1.0), 0.5, 1)
        assert min(table.pair(f"m{n}", 1, "b", 1) for n in range(50)) == 1.0

    def test_the_policy_is_misled_and_the_world_is_not(self):
        from carpool.profile.schema import load

        jobs = philly_like(load("t4").core_tasks(), jobs=120, load=2.0, seed=1)
        right, wrong = (simulate(jobs, "sjf-bsbf", Setup(truth="gavel", interference_error=e)) for e in (0.0, 1.5))
        assert right.summary.mean_jct_s < wrong.summary.mean_jct_s
        alone = [simulate(jobs, "sjf", Setup(interference_error=e)).summary.mean_jct_s for e in (0.0, 1.5)]
        assert alone[0] == pytest.approx(alone[1])


def test_every_built_in_policy_has_a_colour_of_its_own():
    palette = [plots.POLICY_COLOURS[name] for name in policies.BUILT_IN]
    assert len(set(palette)) == len(palette)
