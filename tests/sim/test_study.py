"""The robustness study: its design, its statistics, its cache and its command."""

import csv
import json
from dataclasses import asdict, replace
from math import exp, log, sqrt

import pytest

from carpool import policies
from carpool.profile.interference import read_interference
from carpool.report.study import digest, group_rows, jobs_per_gpu_rows, picture, verdict
from carpool.sim import study
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
    def test_every_scenario_has_a_unique_name_and_valid_policies(self):
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
            ("duration_error", {0.0, 0.35, 0.5, 1.0}),
            ("interference_error", {0.0, 0.1, 0.3, 0.5}),
            ("belief", {None, "1.5", "2", "learned", "unknown", "unknown:unique"}),
            ("memory_limit", {False, True}),
            ("ignore_placement", {False, True}),
            ("jobs_per_gpu", {1, 2, 3, 4}),
        ],
    )
    def test_the_scenarios_cover_all_values_of_each_factor(self, field, values):
        assert {getattr(scenario.setup, field) for scenario in scenarios()} == values

    def test_each_scenario_changes_one_factor_of_the_base_world(self):
        for scenario in scenarios():
            changed = {k for k, v in asdict(scenario.setup).items() if v != asdict(study.BASE)[k]}
            if (
                scenario.group not in ("crossed", "base", "load", "unknown jobs")
                and scenario.name != "memory and placement"
            ):
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

    def test_worse_means_worse_than_the_tolerance_and_than_chance(self):
        for ratios, worse in (((1.03, 1.04), True), ((1.01, 1.02), False), ((0.9, 1.5), False)):
            runs = [run(REFERENCE, seed, 1.0) for seed in (1, 2)]
            runs += [run("carpool", seed, ratio) for seed, ratio in enumerate(ratios, start=1)]
            rows = digest(runs)
            assert (verdict(rows) == "carpool") is worse

    def test_the_largest_host_slow_down_is_that_of_all_seeds(self):
        runs = [run(REFERENCE, 1, 1.0, host_slowdown_max=1.2), run(REFERENCE, 2, 1.0, host_slowdown_max=3.4)]
        assert digest(runs)[0].host_slowdown_max == 3.4

    def test_a_row_has_the_multiple_of_the_bound_if_it_is_known(self):
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
    def test_completed_runs_are_not_run_again(self, small, tmp_path, monkeypatch):
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

    def test_a_study_resumes_after_an_interruption(self, small, tmp_path):
        path = tmp_path / "runs.jsonl"
        jobs = plan([scenario for scenario in scenarios() if scenario.name == "C = 1"][:1], [1], ["sjf"])
        whole = run_study(jobs, RunCache(path), workers=1)
        text = path.read_text()
        path.write_text(text[:-20])
        assert run_study(jobs, RunCache(path), workers=1) == whole
        assert len(path.read_text().splitlines()) == len(text.splitlines())

    def test_a_file_that_is_not_a_cache_is_refused(self, tmp_path):
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
