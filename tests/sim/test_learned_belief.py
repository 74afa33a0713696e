"""`--belief learned` in the simulator: what it costs not to know, and what is refused."""

from dataclasses import replace
from statistics import fmean

import pytest

from carpool.sim import Setup, simulate
from tests.sim.test_calibrated import workloads
from tests.support.command_line import call
from tests.support.effort import thorough_only

SETUP = Setup(cluster="16x4", truth="gavel", ignore_placement=True, memory_limit=False)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [240, pytest.param(480, marks=thorough_only)])
def test_a_learned_belief_costs_little_compared_with_perfect_knowledge(data, jobs):
    def mean(setup):
        return fmean(simulate(workload, "sjf-bsbf", setup).summary.mean_jct_s for workload in workloads(data, jobs))

    perfect, learned = mean(SETUP), mean(replace(SETUP, belief="learned"))
    assert learned <= 1.06 * perfect
    assert learned < 0.98 * mean(replace(SETUP, belief="2.0"))


def test_the_same_command_gives_the_same_result():
    arguments = ("simulate", "--truth", "gavel", "--belief", "learned", "--jobs", 60, "--cluster", "4x4", "--json")
    noisy = (*arguments, "--report-error", 0.1)
    runs = [call(*given).out.partition('"decision_mean_cpu_s"')[0] for given in (arguments, arguments, noisy, noisy)]
    assert runs[0] == runs[1] != runs[2] == runs[3]


def test_wrong_reports_change_results_even_if_slow_downs_are_known():
    arguments = ("simulate", "--interference", "gavel", "--jobs", 120, "--load", 3, "--cluster", "4x4", "--json")
    exact, noisy = call(*arguments).out, call(*arguments, "--report-error", 0.5).out
    assert exact.partition('"decision_mean_cpu_s"')[0] != noisy.partition('"decision_mean_cpu_s"')[0]


@pytest.mark.parametrize(
    "belief", ["learned:probe=0.9", "learned:probe=", "learned:probe=nan", "learned:speed=2", "learned:"]
)
def test_an_unknown_belief_is_refused(belief):
    said = call("simulate", "--belief", belief, "--jobs", 10)
    assert said.code == 2
    assert "write learned" in said.err


def test_only_a_belief_can_be_learned():
    assert call("simulate", "--truth", "learned", "--jobs", 10).code == 2
    assert call("simulate", "--interference", "learned", "--jobs", 10).code == 2


def test_compare_prints_the_belief():
    world = ("--truth", "h200:mps", "--profile", "h200", "--belief", "learned", "--cluster", "4x4")
    said = call("compare", "--policy", "sjf-bsbf", *world, "--jobs", 30, "--seeds", "1-2", "--workers", 1)
    assert said.code == 0
    assert "believed learned" in said.out
