"""Slow-downs from demands: unequal sides, what follows when a demand is measured, and what a snapshot keeps."""

import json
from dataclasses import replace

import pytest

from carpool.belief.demand import DEMAND_SD, Demands, slowdown
from carpool.belief.pairs import JobClass
from carpool.belief.prior import believe
from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, GpuDemand, Job, Node
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.state import State
from carpool.profile.schema import load

HEAVY, LIGHT = GpuDemand(0.85, 1.0, 0.4, 0.4, 2**34, 0.05), GpuDemand(0.06, 0.16, 0.02, 0.0, 2**31, 0.002)


def belief(mechanism="mps"):
    return believe(load("h200"), FittedModel({}, ConstantInterference(1.5), 1), mechanism)


def script(name, family, **more):
    return Job(name, 0.0, f"script:00:{family}", 1, 1, 1000, duration_s=100.0, **more)


@pytest.mark.parametrize("mechanism", DEMAND_SD)
def test_light_jobs_slow_each_other_less_than_heavy_ones(mechanism):
    both_light, both_heavy = slowdown(LIGHT, LIGHT, mechanism), slowdown(HEAVY, HEAVY, mechanism)
    assert 1.0 <= both_light < both_heavy
    assert slowdown(HEAVY, LIGHT, mechanism) < both_heavy


def test_unknown_pairs_are_expected_to_be_as_pairs_under_the_mechanism_are():
    a, b = script("a", "x"), script("b", "y")
    mps, slices = (belief(one).slowdown_range(a, 1, [(b, 1)]) for one in ("mps", "time-slicing"))
    assert 1.2 < mps.mean < 1.4 < slices.mean < 1.8
    assert mps.low == pytest.approx(1.0, abs=0.1)
    assert mps.high < 1.9
    assert not belief().is_observed(a, 1, b, 1)


def test_a_measured_demand_changes_what_is_expected_of_pairs_and_survives_a_snapshot():
    model = belief()
    state = State(model, lambda job, now: ())
    state.apply(ev.NodeJoined(0.0, Node("n", (0, 1), 2**37)))
    jobs = [script("a", "x"), script("b", "y"), script("c", "y/long")]
    for one in jobs:
        state.apply(ev.Submitted(0.0, one))
    plan = ev.Planned(0.0, (Decision("a", Allocation((0,), 1), ""), Decision("b", Allocation((1,), 1), "")))
    for event in (plan, ev.Started(1.0, "a", 1), ev.Started(1.0, "b", 1)):
        state.apply(event)
    before, version = model.slowdown(jobs[0], 1, [(jobs[1], 1)]), state.belief_version
    state.apply(ev.DemandMeasured(2.0, "a", 1, LIGHT))
    assert model.slowdown(jobs[0], 1, [(jobs[1], 1)]) == before, "one demand says nothing about a pair"
    state.apply(ev.DemandMeasured(3.0, "b", 1, HEAVY))
    after = model.slowdown(jobs[0], 1, [(jobs[1], 1)])
    assert after == pytest.approx(1.1 * slowdown(LIGHT, HEAVY, "mps"), rel=1e-6)
    assert after != before
    assert state.belief_version > version
    assert model.slowdown(jobs[0], 1, [(jobs[2], 1)]) == after, "another length is the same family"
    state.apply(ev.DemandMeasured(3.0, "b", 9, LIGHT))
    assert model.demand_of(jobs[1], 1) == HEAVY, "an earlier attempt"
    again = belief()
    again.restore(json.loads(json.dumps(model.dump())))
    assert again.demand_of(jobs[1], 1) == HEAVY
    assert again.slowdown(jobs[0], 1, [(jobs[1], 1)]) == after


def test_a_family_that_changes_its_demand_is_followed():
    model, job = belief(), script("a", "x")
    model.learn_demand(job, 1, LIGHT)
    assert not model.learn_demand(job, 1, LIGHT)
    for _ in range(6):
        model.learn_demand(job, 1, HEAVY)
    assert model.demand_of(job, 1).sm == pytest.approx(HEAVY.sm, abs=0.02)


def test_a_time_that_was_not_known_is_replaced_and_not_mixed():
    demands, kind = Demands("mps"), JobClass("script:00:x", 0)
    for seconds, kept in ((0.0, 0.0), (0.2, 0.2), (0.0, 0.2), (0.1, 0.15)):
        demands.add(kind, replace(HEAVY, iteration_s=seconds))
        assert demands.known[kind].iteration_s == pytest.approx(kept)
