"""Theorem 1 and Algorithm 2 against brute force."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.model import accumulations, sub_batch
from carpool.core.perf import MeasuredPair, TableInterference
from carpool.core.record import JobRecord
from carpool.core.shapes import Size
from carpool.core.state import State
from carpool.policies.sharing.pair import (
    PAYS_BELOW,
    SharingOption,
    apart,
    best,
    host_delay,
    host_needs,
    least_cost,
    least_together,
    option_at,
    options,
    pair_ends,
    pays,
    together,
)
from tests.support.effort import cases
from tests.support.world import job, model

xis = st.floats(1.0, 4.0)
lefts = st.floats(1.0, 1e6)


def completion_sum(kappa: float, host: float, guest: float, host_xi: float, guest_xi: float) -> float:
    """Simulate a pair whose guest joins after `kappa` seconds, and return the sum of both completion times."""
    host -= kappa
    both = min(host * host_xi, guest * guest_xi)
    host_end = kappa + both + max(0.0, host - both / host_xi)
    guest_end = kappa + both + max(0.0, guest - both / guest_xi)
    return host_end + guest_end


@pytest.mark.slow
@given(lefts, lefts, xis, xis)
@settings(max_examples=cases(500))
def test_joining_now_or_after_the_host_is_optimal_and_the_formulas_agree(host, guest, host_xi, guest_xi):
    sweep = [completion_sum(host * k / 200, host, guest, host_xi, guest_xi) for k in range(201)]
    assert together(host, guest, host_xi, guest_xi) == pytest.approx(sweep[0], rel=1e-9)
    assert apart(host, guest) == pytest.approx(sweep[-1], rel=1e-9)
    assert min(sweep) >= min(sweep[0], sweep[-1]) * (1 - 1e-9), "no interior optimum"


@given(lefts, lefts, xis, xis)
@settings(max_examples=cases(500))
def test_the_ends_of_a_pair_add_up_to_the_sum(host, guest, host_xi, guest_xi):
    guest_end, host_end = pair_ends(host, guest, host_xi, guest_xi)
    assert guest_end + host_end == pytest.approx(together(host, guest, host_xi, guest_xi))
    assert (guest_end >= guest * (1 - 1e-12), host_end >= host * (1 - 1e-12)) == (True, True)


@pytest.mark.slow
@given(lefts, lefts, xis, xis)
@settings(max_examples=cases(500))
def test_the_delay_of_the_host_is_its_end_less_its_time_left(host, guest, host_xi, guest_xi):
    _, host_end = pair_ends(host, guest, host_xi, guest_xi)
    cost = together(host, guest, host_xi, guest_xi) - host
    assert host_delay(cost, host, host_xi) == pytest.approx(host_end - host, rel=1e-6, abs=1e-6 * host)


@pytest.mark.slow
@given(lefts, lefts, xis, xis, st.floats(1.0, 5.0))
@settings(max_examples=cases(1000))
def test_the_threshold_says_what_the_comparison_says(host, guest, host_xi, guest_xi, relative_time):
    share_s = together(host, guest * relative_time, host_xi, guest_xi)
    edge_s = apart(host, guest) * PAYS_BELOW
    threshold = host_needs(host_xi, guest_xi, relative_time) * guest
    if abs(edge_s - share_s) > 1e-6 * edge_s:
        assert pays(share_s, host, guest) == (host > threshold)


@given(lefts, st.floats(1.0, 100.0), lefts, xis, xis)
def test_a_host_with_more_left_costs_more(host, factor, guest, host_xi, guest_xi):
    assert together(host * factor, guest, host_xi, guest_xi) >= together(host, guest, host_xi, guest_xi) * (1 - 1e-12)


@given(lefts, xis, xis, st.floats(1.0, 5.0))
@settings(max_examples=cases(500))
def test_a_host_at_the_threshold_costs_what_its_kind_costs_at_least(guest, host_xi, guest_xi, relative_time):
    needs = host_needs(host_xi, guest_xi, relative_time)
    option = SharingOption(Size(1, 0, relative_time), host_xi, guest_xi, relative_time, needs)
    cost = together(needs * guest, relative_time * guest, host_xi, guest_xi) - needs * guest
    assert cost == pytest.approx(least_cost([option], needs) * guest, rel=1e-6)
    quick = replace(option, host_xi=0.9)
    assert least_cost([option, quick], needs) == 0.0, "no bound is known where a job gains speed"


def test_equal_slow_downs_follow_the_rule_of_thumb():
    for xi in (1.0, 1.2, 1.49):
        assert together(100.0, 1e5, xi, xi) < apart(100.0, 1e5), "below 1.5 always share"
    assert together(100.0, 200.0, 1.5, 1.5) == pytest.approx(apart(100.0, 200.0)), "a tie at 1.5"
    for xi in (1.6, 2.0, 3.0):
        edge = 100.0 / (2 * (xi - 1))
        assert together(100.0, edge * 0.999, xi, xi) < apart(100.0, edge * 0.999)
        assert together(100.0, edge * 1.001, xi, xi) > apart(100.0, edge * 1.001)


def test_the_printed_slope_test_alone_would_be_wrong():
    # ξ_A = ξ_B = 2, guest 40 of host 100: 2ξ_B + ξ_A = 6 < 8 = 2ξ_Aξ_B says wait, although sharing is better.
    assert together(100.0, 40.0, 2.0, 2.0) < apart(100.0, 40.0)


class TestAlgorithm2:
    """The pruned search against one over all sub-batches."""

    @pytest.mark.parametrize("seed", range(300))
    def test_pruning_loses_nothing(self, seed):
        random = Random(seed)
        names = ("plain", "thin", "fat")
        batches = (1, 4, 16, 64)
        table = TableInterference(
            {
                (a, b): [MeasuredPair(random.uniform(1, 3), m, n) for m in batches for n in batches]
                for a in names
                for b in names
            }
        )
        perf = model(table)
        guest_job = job(
            "g", model=random.choice(names), batch=random.choice([1, 5, 64, 100]), left=random.uniform(1, 500)
        )
        host_job = job("h", model=random.choice(names), batch=64, left=random.uniform(1, 500))
        state = State(perf, lambda record, now: (0.0,))
        guest = JobRecord(guest_job, state.shape_of(guest_job, 0), 0, perf.iteration_time(guest_job, 1, (1, 1)))
        memory = round(random.uniform(0.5, 12) * 2**30)
        host_left, guest_left = host_job.duration_s, guest.alone_left(0.0)
        choices = options(perf, guest, host_job, 4, memory)
        found = best(choices, host_left, guest_left)
        least = least_together(choices, host_left, guest_left)
        assert (found is not None) == (least is not None and pays(least.together, host_left, guest_left))
        wanted = None
        for size in guest.shape.sizes:
            if size.memory <= memory:
                option = option_at(perf, guest, size, host_job, 4)
                time = together(host_left, guest_left * option.relative_time, option.host_xi, option.guest_xi)
                if wanted is None or time < wanted[0]:
                    wanted = (time, size.accumulation)
        if wanted is None or not pays(wanted[0], host_left, guest_left):
            assert found is None
        else:
            assert (found.together, found.option.size.accumulation) == wanted
            bound = least_cost(choices, min(option.needs for option in choices))
            assert found.together - host_left >= bound * guest_left * (1 - 1e-9), "no host costs less than its kind"


@given(st.integers(1, 100_000))
def test_halving_reaches_sub_batch_one(batch):
    counts = accumulations(batch)
    assert counts[0] == 1
    assert sub_batch(batch, counts[-1]) == 1
    assert list(counts) == sorted(set(counts))
    assert len(counts) <= 2 + batch.bit_length()
    size = batch
    for count in counts:
        assert count == -(-batch // size)
        size = -(-size // 2)
