"""Eq. 3–7, memory and slow-down."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import accumulations
from carpool.core.perf import (
    AllReduce,
    ConstantInterference,
    FittedModel,
    MeasuredPair,
    Placement,
    TableInterference,
    Task,
    UnknownPair,
)
from tests.support.world import job, model

TASK = Task(0.1, 0.02, AllReduce(0.3, 0.05), AllReduce(0.9, 0.01), 2.0, 1000, 10.0)
seconds = st.floats(0.0, 10.0)
tasks = st.builds(
    Task,
    st.floats(1e-4, 1.0),
    st.floats(1e-6, 1.0),
    st.builds(AllReduce, seconds, seconds),
    st.builds(AllReduce, seconds, seconds),
    st.floats(1.0, 10.0),
)


def test_one_gpu_computes_and_does_not_communicate():
    assert TASK.iteration(10, 1, Placement(1, 1)) == pytest.approx(0.1 + 0.2)


def test_all_reduce_overlaps_by_delta():
    compute, comm = 0.3, 0.3 + 2 * 0.05
    assert TASK.iteration(10, 1, Placement(4, 1)) == pytest.approx((compute**2 + comm**2) ** 0.5)


def test_communication_across_nodes_has_its_own_constants():
    assert TASK.communicate(Placement(4, 2)) == pytest.approx(0.9 + 2 * 0.01)
    assert TASK.communicate(Placement(4, 1)) == pytest.approx(0.3 + 2 * 0.05)


def test_accumulation_repeats_the_computation_and_overlaps_only_the_last():
    # 10 samples in 4 micro-batches: 3 + 3 + 2 + 2
    micro = [0.1 + 0.02 * n for n in (3, 3, 2, 2)]
    comm = 0.4
    expected = sum(micro[:-1]) + (micro[-1] ** 2 + comm**2) ** 0.5
    assert TASK.iteration(10, 4, Placement(4, 1)) == pytest.approx(expected)


@given(tasks, st.integers(1, 4096), st.sampled_from([Placement(1, 1), Placement(4, 1), Placement(8, 2)]))
def test_more_accumulation_is_never_faster(task, batch, placement):
    times = [task.iteration(batch, accumulation, placement) for accumulation in accumulations(batch)]
    for faster, slower in itertools.pairwise(times):
        assert slower >= faster * (1 - 1e-12)


@given(tasks, st.integers(1, 512))
def test_overlap_lies_between_the_larger_part_and_the_sum(task, batch):
    placement = Placement(4, 1)
    compute, comm = task.compute(batch), task.communicate(placement)
    assert max(compute, comm) * (1 - 1e-9) <= task.iteration(batch, 1, placement) <= (compute + comm) * (1 + 1e-9)


def test_memory_is_a_line_in_the_sub_batch():
    perf = FittedModel({"t": TASK}, ConstantInterference(1.0), 4)
    assert perf.memory(job("a", model="t", batch=10), 1) == 1100
    assert perf.memory(job("a", model="t", batch=10), 4) == 1000 + 10 * 3
    assert (
        FittedModel({"t": TASK}, ConstantInterference(1.0), 4, ignore_memory=True).memory(job("a", model="t"), 1) == 0
    )


def test_a_given_duration_sets_the_speed_and_the_fit_only_the_ratios():
    perf = FittedModel({"t": TASK}, ConstantInterference(1.0), 4)
    given_job = job("a", model="t", gpus=8, batch=10, left=50.0, iterations=100)
    best = TASK.iteration(10, 1, Placement(8, 2))
    assert perf.iteration_time(given_job, 1, Placement(8, 2)) == pytest.approx(0.5)
    assert perf.iteration_time(given_job, 4, Placement(8, 3)) == pytest.approx(
        0.5 * TASK.iteration(10, 4, Placement(8, 3)) / best
    )
    fitted = job("b", model="t", gpus=8, batch=10, duration_s=None)
    assert perf.iteration_time(fitted, 1, Placement(8, 2)) == pytest.approx(best)


def test_placement_can_be_ignored():
    perf = FittedModel({"t": TASK}, ConstantInterference(1.0), 4, ignore_placement=True)
    spread = job("a", model="t", gpus=4, batch=10, duration_s=None)
    assert perf.iteration_time(spread, 1, Placement(4, 4)) == perf.iteration_time(spread, 1, Placement(4, 1))


class TestSlowdown:
    def test_one_mate(self):
        assert model(1.4).slowdown(job("a"), 1, [(job("b"), 1)]) == 1.4

    def test_several_mates_add_up(self):
        assert model(1.4).slowdown(job("a"), 1, [(job("b"), 1), (job("c"), 1)]) == pytest.approx(1.8)

    def test_a_table_gives_the_slow_down_of_the_row_beside_the_column(self):
        table = TableInterference({("plain", "fat"): [MeasuredPair(1.2)], ("fat", "plain"): [MeasuredPair(3.0)]})
        perf = model(table)
        assert perf.slowdown(job("a"), 1, [(job("b", model="fat"), 1)]) == 1.2
        assert perf.slowdown(job("b", model="fat"), 1, [(job("a"), 1)]) == 3.0

    def test_the_nearest_measured_sub_batch_counts(self):
        table = TableInterference({("plain", "plain"): [MeasuredPair(1.1, 8, 8), MeasuredPair(2.0, 64, 8)]})
        perf = model(table)
        large = job("a", batch=64)
        assert perf.slowdown(large, 1, [(job("b", batch=8), 1)]) == 2.0
        assert perf.slowdown(large, 8, [(job("b", batch=8), 1)]) == 1.1

    def test_a_measured_slow_down_below_one_counts_as_one(self):
        assert TableInterference({("a", "a"): [MeasuredPair(0.93)]}).pair("a", 1, "a", 1) == 1.0

    def test_an_unknown_pair_is_an_error(self):
        with pytest.raises(UnknownPair, match="a beside b"):
            TableInterference({("a", "a"): [MeasuredPair(1.0)]}).pair("a", 1, "b", 1)
