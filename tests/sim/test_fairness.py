"""Finish-time fairness: what a tenant has with others, over what it would have with its share to itself."""

import json

import pytest

from carpool.core.model import Job, UserGroup
from carpool.sim.fairness import jain_index, least_worst_rho, own_jcts
from carpool.sim.run import Setup, simulate
from carpool.sim.sources import load_workload
from tests.support.command_line import call

TWO_GPUS = Setup(cluster="1x2", fairness=True, jobs_per_gpu=1)


def generic(name: str, at: float, seconds: float, group: str, gpus: int = 1) -> Job:
    return Job(name, at, "generic", gpus, 1, round(seconds), duration_s=seconds, group=group)


def test_rho_compares_with_the_share_of_the_cluster():
    jobs = [generic("a1", 0, 100, "a"), generic("a2", 0, 100, "a"), generic("b", 0, 100, "b")]
    fairness = simulate(jobs, "fifo", TWO_GPUS).summary.fairness
    assert fairness is not None
    found = {result.tenant: (result.mean_jct_s, result.own_jct_s, result.rho) for result in fairness.tenants}
    assert found == {"b": (200.0, 100.0, 2.0), "a": (100.0, 150.0, pytest.approx(2 / 3))}
    assert (fairness.worst_rho, fairness.spread_rho) == (2.0, 3.0)
    assert fairness.jain == pytest.approx(300**2 / (2 * (200**2 + 100**2)))


def test_a_weight_makes_the_own_share_larger():
    jobs = [generic("a1", 0, 100, "a"), generic("a2", 0, 100, "a"), generic("b", 0, 100, "b")]
    alone = own_jcts(jobs, Setup(cluster="1x4", groups=(UserGroup("a", 3.0),)))
    assert alone == {"a": 100.0, "b": 100.0}, "three GPUs and one"


def test_a_share_has_room_for_the_largest_gang():
    assert own_jcts([generic("a", 0, 50, "a", gpus=4), generic("b", 0, 1, "b")], Setup(cluster="1x4"))["a"] == 50.0


def test_no_schedule_has_a_worst_rho_below_that_of_jobs_that_never_wait():
    jobs = [generic("a1", 0, 100, "a"), generic("a2", 0, 100, "a"), generic("b", 0, 90, "b")]
    alone = own_jcts(jobs, TWO_GPUS)
    assert least_worst_rho(jobs, alone, TWO_GPUS) == 1.0, "b never waits with its share to itself"
    assert least_worst_rho(jobs[:2], alone, TWO_GPUS) == pytest.approx(100 / 150), "a waits for itself there"


@pytest.mark.parametrize("policy", ["srtf", "sjf-bsbf", "carpool"])
def test_the_least_worst_rho_holds_for_runs_of_a_flood(policy):
    workload, setup = load_workload("three-tenants", {}, 60, 2.0, 2, "t4"), Setup(fairness=True, fair_share=1.0)
    least = least_worst_rho(workload.jobs, own_jcts(workload.jobs, setup), setup)
    assert 0.5 < least <= simulate(workload, policy, setup).summary.fairness.worst_rho + 1e-9


def test_one_tenant_is_compared_with_nobody():
    assert simulate([generic("a", 0, 5, "a")], "fifo", TWO_GPUS).summary.fairness is None


def test_jains_index_is_one_for_equals_and_a_part_for_one_of_many():
    assert jain_index([3.0, 3.0, 3.0]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25


@pytest.mark.parametrize(
    ("policy", "load"),
    [("fifo", 1.0), ("backfill", 1.0), ("tiresias", 1.0), ("tiresias", 2.0), ("las", 2.0), ("pollux", 2.0)],
)
def test_half_strength_halves_the_worst_rho_of_a_flood(policy, load):
    """Measured for every policy in docs/experiments/fairness.md."""
    workload = load_workload("three-tenants", {}, 240, load, 1, "t4")
    plain, fair = (
        simulate(workload, policy, Setup(fairness=True, fair_share=strength)).summary for strength in (0.0, 0.5)
    )
    assert fair.fairness.worst_rho <= 0.5 * plain.fairness.worst_rho
    assert fair.mean_jct_s <= 1.05 * plain.mean_jct_s


def test_simulate_shows_tenants_worst_first(tmp_path):
    arguments = ("--workload", "three-tenants", "--jobs", "60", "--policy", "fifo", "--fairness")
    text = call("simulate", *arguments).out
    assert text.index("trickle") < text.index("flood")
    assert "worst ρ" in text
    summary = json.loads(call("simulate", *arguments, "--fair-share", "0.5", "--half-life", "12h", "--json").out)
    assert {tenant["tenant"] for tenant in summary["fairness"]["tenants"]} == {"flood", "trickle", "gangs"}


def test_compare_has_the_worst_rho_of_each_policy():
    said = call(
        "compare", "--workload", "three-tenants", "--jobs", "40", "--policy", "sjf", "--seeds", "1", "--fairness"
    )
    assert "worst ρ" in said.out


def test_a_wrong_group_is_named():
    assert "weight" in call("simulate", "--group", "a:wight=2").err
    assert "--group a:cap=x" in call("simulate", "--group", "a:cap=x").err
    assert "has a cap of 1, below its guarantee of 2" in call("simulate", "--group", "a:cap=1,guarantee=2").err
    assert "default above its maximum" in call("simulate", "--group", "a:default_limit_s=7200,max_limit_s=3600").err


def test_a_user_whose_guesses_are_given_twice_is_named():
    assert "a is given twice" in call("simulate", "--guess", "a=0.1", "--guess", "a=0.5").err
