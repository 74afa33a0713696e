"""Metrics: runs small enough to work out by hand, and percentiles against the standard library and numpy."""

from statistics import fmean, quantiles

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Job, Node
from carpool.core.perf import AllReduce, ConstantInterference, FittedModel, Task
from carpool.core.state import State
from carpool.errors import InputError
from carpool.sim import Costs, Setup, simulate
from carpool.sim.estimation_error import MisestimatedTimes
from carpool.sim.fairness import own_jcts
from carpool.sim.metrics import SubsetTimes, percentile, summarise, summarise_subset
from carpool.sim.run import cluster_nodes
from carpool.sim.sweep import SweepCase, mean, run_all
from carpool.sim.workload import Workload
from tests.support.turns import TakeTurns

ONE = Setup(cluster="1x1", truth="1.5", memory_limit=False)
FOUR = Setup(cluster="1x4", truth="1.5", memory_limit=False)


def job(name: str, submitted: float, gpus: int, seconds: float, **more) -> Job:
    """A job of which only the duration matters."""
    return Job(name, submitted, "generic", gpus, 1, round(seconds), duration_s=seconds, **more)


def ends(result) -> dict[str, float]:
    return {record.job.id: pytest.approx(record.ended) for record in result.jobs}


# ---- by hand -------------------------------------------------------------------------------------------------------


def test_fifo_on_one_gpu():
    """a runs 10–110, b waits from 20 to 110 and runs to 160, c waits from 30 to 160 and runs to 170."""
    summary = simulate([job("a", 10, 1, 100), job("b", 20, 1, 50), job("c", 30, 1, 10)], "fifo", ONE).summary
    assert summary.jobs == 3
    assert summary.mean_jct_s == pytest.approx((100 + 140 + 140) / 3)
    assert summary.p50_jct_s == pytest.approx(140)
    assert summary.p95_jct_s == pytest.approx(140)
    assert summary.mean_queue_s == pytest.approx((0 + 90 + 130) / 3)
    assert summary.makespan_s == pytest.approx(160)
    assert summary.gpu_utilisation == pytest.approx(1.0)
    assert (summary.shares, summary.preemptions, summary.hosts) == (0, 0, 0)
    assert (summary.pauses, summary.paused_s, summary.mean_paused_s) == (0, 0.0, 0.0)
    assert (summary.residents_mean, summary.residents_max) == (pytest.approx(1.0), 1)
    assert (summary.host_slowdown_mean, summary.host_slowdown_max) == (1.0, 1.0)
    assert summary.policy == "fifo"


def test_sjf_lets_the_shortest_pass():
    result = simulate([job("a", 10, 1, 100), job("b", 20, 1, 50), job("c", 30, 1, 10)], "sjf", ONE)
    assert ends(result) == {"a": 110, "c": 120, "b": 170}
    assert result.summary.mean_jct_s == pytest.approx((100 + 90 + 150) / 3)
    assert result.summary.mean_queue_s == pytest.approx((0 + 80 + 100) / 3)


def test_utilisation_counts_busy_gpus_over_the_makespan():
    """a holds 1 of 4 GPUs for 100 s, b 2 of them for 50 s, from 100 to 300 s: 200 of 4 × 200 GPU-seconds."""
    summary = simulate([job("a", 100, 1, 100), job("b", 250, 2, 50)], "fifo", FOUR).summary
    assert summary.makespan_s == pytest.approx(200)
    assert summary.gpu_utilisation == pytest.approx(200 / 800)


def test_a_guest_slows_its_host():
    """a runs alone for 40 s, then b joins: both 1.5 times slower. a has 60 s left, b 20: b ends at 70 after 30 s
    in which a did 20 s of work; a runs its last 40 s alone and ends at 110, having run 110 s for 100 s of work."""
    result = simulate([job("a", 0, 1, 100), job("b", 40, 1, 20)], "sjf-ffs", ONE)
    assert ends(result) == {"b": 70, "a": 110}
    summary = result.summary
    assert (summary.shares, summary.hosts) == (1, 1)
    assert summary.host_slowdown_mean == pytest.approx(1.1)
    assert summary.host_slowdown_max == pytest.approx(1.1)
    assert summary.mean_queue_s == 0.0
    assert summary.gpu_utilisation == pytest.approx(1.0), "a shared GPU is one busy GPU"
    assert (summary.residents_mean, summary.residents_max) == (pytest.approx((110 + 30) / 110), 2)


def test_two_hosts_of_one_guest():
    """b takes both GPUs beside a1 and a2 at 1.25: b runs 50 s for its 40; a1 (100 s) and a2 (20 s) lose a quarter."""
    jobs = [job("a1", 0, 1, 100), job("a2", 0, 1, 20), job("b", 10, 2, 40)]
    setup = Setup(cluster="1x2", truth="1.25", memory_limit=False)
    result = simulate(jobs, "sjf-ffs", setup)
    # a2: 10 s alone, 10 s of work at 1.25 → 22.5; b still beside a1 → 10 + 50 = 60; a1: 10 + 40 done, 50 left → 110
    assert ends(result) == {"a2": 22.5, "b": 60, "a1": 110}
    summary = result.summary
    assert (summary.shares, summary.hosts) == (1, 2)
    assert summary.host_slowdown_mean == pytest.approx(fmean([22.5 / 20, 1.1]))
    assert summary.host_slowdown_max == pytest.approx(22.5 / 20)


def test_a_preempted_job_pays_for_its_restart():
    """Tiresias, first queue up to 10 GPU-seconds: a is pushed out by b at 20 and waits 5 s; its restart costs 7 s."""
    result = simulate([job("a", 0, 1, 30), job("b", 20, 1, 5)], "tiresias:threshold_gpu_s=10,restart_s=7", ONE)
    assert ends(result) == {"b": 25, "a": 42}
    summary = result.summary
    assert summary.preemptions == 1
    assert summary.mean_queue_s == pytest.approx((5 + 0) / 2), "the restart itself is not queueing"
    assert summary.mean_jct_s == pytest.approx((42 + 5) / 2)


def test_pauses_and_residents():
    """One job at a time computes on each of two GPUs, in turns of 10 s; a pause and a resume take 1 s each.

    a holds GPU 0 from 0 to 54 and is paused 10–12 and 30–52; b holds GPU 1 from 10 to 27 and is paused 20–22; c holds
    both from 30 to 56, starts when a is still at 31, and is paused 50–55."""
    setup = Setup(cluster="1x2", memory_limit=False, jobs_per_gpu=1, costs=Costs(pause_s=1.0))
    result = simulate([job("a", 0, 1, 30), job("b", 0, 1, 15), job("c", 0, 2, 20)], TakeTurns(10.0), setup)
    assert ends(result) == {"b": 27, "a": 54, "c": 56}
    assert {r.job.id: (r.pauses, r.paused_s) for r in result.jobs} == {"a": (2, 24.0), "b": (1, 2.0), "c": (1, 5.0)}
    summary = result.summary
    assert (summary.pauses, summary.paused_s, summary.mean_paused_s) == (4, 31.0, pytest.approx(31 / 3))
    # GPU 0 is in use from 0 to 56, GPU 1 from 10 to 27 and from 30 to 56
    assert (summary.residents_mean, summary.residents_max) == (pytest.approx((54 + 17 + 2 * 26) / (56 + 43)), 2)
    assert (summary.preemptions, summary.shares, summary.mean_queue_s) == (0, 0, pytest.approx((0 + 10 + 30) / 3))


def test_launch_costs_are_part_of_the_completion_time_and_not_of_the_queue():
    setup = Setup(cluster="1x1", memory_limit=False, costs=Costs(launch_s=5.0))
    summary = simulate([job("a", 0, 1, 10), job("b", 0, 1, 10)], "fifo", setup).summary
    assert summary.mean_jct_s == pytest.approx((15 + 30) / 2)
    assert summary.mean_queue_s == pytest.approx((0 + 15) / 2)


def test_waiting_for_a_dependency_is_not_queuing():
    result = simulate([job("a", 0, 1, 50), job("b", 0, 1, 10, after=("a",))], "sjf", FOUR)
    assert ends(result) == {"a": 50, "b": 60}
    assert result.summary.mean_queue_s == 0.0
    assert result.summary.mean_jct_s == pytest.approx(55)


def test_metrics_by_size_and_by_model():
    jobs = [job("s1", 0, 1, 10), job("s2", 0, 4, 20), Job("l", 0, "bert", 5, 8, 100, duration_s=60.0)]
    setup = Setup(cluster="4x4", memory_limit=False)
    summary = simulate(jobs, "fifo", setup).summary
    assert (summary.large.jobs, summary.small.jobs) == (1, 2), "4 GPUs are small"
    assert summary.large.mean_jct_s == pytest.approx(60)
    assert summary.small.mean_jct_s == pytest.approx(15)
    assert summary.small.makespan_s == pytest.approx(20)
    assert set(summary.models) == {"bert", "generic"}
    assert summary.models["bert"] == summary.large
    larger = simulate(jobs, "fifo", Setup(cluster="4x4", memory_limit=False, large_above=1)).summary
    assert (larger.large.jobs, larger.small.jobs) == (2, 1)
    no_jobs = simulate(jobs, "fifo", Setup(cluster="4x4", memory_limit=False, large_above=9)).summary.large
    assert (no_jobs.jobs, no_jobs.mean_jct_s, no_jobs.p99_jct_s) == (0, 0.0, 0.0)


def test_only_finished_jobs_are_measured():
    """From a history with a failure, a cancellation and a job that still runs."""
    task = Task(1.0, 0.0, AllReduce(0.0, 0.0), AllReduce(0.0, 0.0), 1.0)
    state = State(FittedModel({"m": task}, ConstantInterference(1.5), 4), lambda j, now: (j.job.submitted,))
    state.apply(ev.NodeJoined(0.0, Node("n", (0, 1, 2, 3), 10**9)))
    for number, name in enumerate(("ok", "bad", "gone", "runs")):
        state.apply(ev.Submitted(float(number), Job(name, float(number), "m", 1, 1, 10)))
        state.apply(ev.Planned(float(number), (Decision(name, Allocation((number,)), "why"),)))
        state.apply(ev.Started(float(number), name, 1))
    state.apply(ev.Failed(5.0, "bad", 1, "broke"))
    state.apply(ev.Cancelled(6.0, "gone"))
    state.apply(ev.Stopped(6.0, "gone", 1, 3.0))
    state.apply(ev.Finished(10.0, "ok", 1))
    summary = summarise(state, policy="p", workload="w")
    assert (summary.jobs, summary.mean_jct_s, summary.makespan_s) == (1, 10.0, 10.0)


def test_decision_times_are_summarised():
    state = simulate([job("a", 0, 1, 1)], "fifo", ONE).state
    summary = summarise(state, policy="p", workload="w", decision_cpu_s=[0.3, 0.1, 0.2], cpu_s=7.0)
    assert (summary.decisions, summary.cpu_s) == (3, 7.0)
    assert summary.decision_mean_cpu_s == pytest.approx(0.2)
    assert summary.decision_p99_cpu_s == pytest.approx(np.percentile([0.1, 0.2, 0.3], 99))


# ---- percentiles and groups ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_agree_with_numpy(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, 100 * share), rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values):
    expected = quantiles(values, n=100, method="inclusive")
    for percent in (50, 95, 99):
        assert percentile(sorted(values), percent / 100) == pytest.approx(expected[percent - 1], rel=1e-9, abs=1e-6)


def test_the_percentile_of_nothing_is_zero():
    assert percentile([], 0.5) == 0.0


times = st.tuples(st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e4))


@given(st.lists(st.lists(times, min_size=1, max_size=12), min_size=1, max_size=4))
def test_the_summary_of_a_subset_agrees_with_numpy(drawn):
    parts = [[(wait + run, wait, start, start + wait + run) for start, wait, run in part] for part in drawn]
    columns = [list(zip(*part, strict=True)) for part in parts]
    made = summarise_subset(
        [SubsetTimes(sorted(jct), [*wait], min(start), max(end)) for jct, wait, start, end in columns]
    )
    rows = [row for part in parts for row in part]
    jcts, waits, starts, stops = np.array(rows).T
    assert made.jobs == len(rows)
    assert made.mean_jct_s == pytest.approx(jcts.mean())
    assert made.mean_queue_s == pytest.approx(waits.mean())
    assert made.p50_jct_s == pytest.approx(np.median(jcts))
    assert made.p95_jct_s == pytest.approx(np.percentile(jcts, 95))
    assert made.p99_jct_s == pytest.approx(np.percentile(jcts, 99))
    assert made.makespan_s == pytest.approx(stops.max() - starts.min())


small_jobs = st.lists(
    st.tuples(st.floats(0, 100), st.sampled_from([1, 2, 4]), st.floats(1, 100)), min_size=1, max_size=8
)


@given(small_jobs, st.sampled_from(["fifo", "sjf", "tiresias:threshold_gpu_s=50,restart_s=0", "sjf-ffs", "sjf-bsbf"]))
def test_metrics_are_consistent_for_every_run(drawn, policy):
    jobs = [job(str(n), submitted, gpus, seconds) for n, (submitted, gpus, seconds) in enumerate(drawn)]
    result = simulate(jobs, policy, FOUR)
    summary = result.summary
    assert summary.jobs == summary.small.jobs == len(jobs)
    assert 0 < summary.gpu_utilisation <= 1 + 1e-9
    assert summary.p50_jct_s <= summary.p95_jct_s <= summary.p99_jct_s
    assert summary.mean_jct_s <= summary.makespan_s + 1e-6
    assert 0 <= summary.mean_queue_s <= summary.mean_jct_s + 1e-9
    assert sum(record.shares for record in result.jobs) == summary.shares
    assert sum(record.preemptions for record in result.jobs) == summary.preemptions
    assert 1 - 1e-9 <= summary.host_slowdown_mean <= summary.host_slowdown_max + 1e-9 <= 1.5 + 1e-6
    for record in result.jobs:
        jct = record.ended - record.job.submitted
        assert jct == pytest.approx(record.waited_s + record.ran_s, abs=1e-6), "it waits or runs, nothing else"
        assert record.alone_s == pytest.approx(record.job.duration_s, rel=1e-6)


# ---- simulate() for scripts ----------------------------------------------------------------------------------------


def test_unsorted_jobs_are_sorted_and_checked():
    result = simulate([job("b", 20, 1, 5), job("a", 0, 1, 5)], "fifo", ONE)
    assert ends(result) == {"a": 5, "b": 25}
    with pytest.raises(InputError, match="job 'a' exists twice"):
        simulate([job("a", 0, 1, 5), job("a", 1, 1, 5)], "fifo", ONE)
    with pytest.raises(InputError, match="there is no job 'z'"):
        simulate([job("a", 0, 1, 5, after=("z",))], "fifo", ONE)


def test_no_jobs_make_an_empty_summary():
    summary = simulate([], "fifo", ONE).summary
    assert (summary.jobs, summary.mean_jct_s, summary.gpu_utilisation, summary.models) == (0, 0.0, 0.0, {})


def test_belief_differs_from_truth():
    """BSBF believes that sharing is free and shares; the truth is 3. With the truth known it waits."""
    jobs = [job("a", 0, 1, 100), job("b", 10, 1, 80)]
    fooled = simulate(jobs, "sjf-bsbf", Setup(cluster="1x1", memory_limit=False, truth="3", belief="1.0"))
    knowing = simulate(jobs, "sjf-bsbf", Setup(cluster="1x1", memory_limit=False, truth="3"))
    assert (fooled.summary.shares, knowing.summary.shares) == (1, 0)
    # fooled: from 10 on at a third; b needs 240 s, in which a does 80 of its 90 s; a's last 10 s are its own
    assert ends(fooled) == {"b": 250, "a": 260}
    assert ends(knowing) == {"a": 100, "b": 180}


def test_each_job_has_one_error_factor_that_depends_on_the_seed():
    task = Task(2.0, 0.0, AllReduce(0.0, 0.0), AllReduce(0.0, 0.0), 1.0, 100, 1.0)
    right = FittedModel({"m": task}, ConstantInterference(1.5), 4)
    jobs = [Job(str(n), 0.0, "m", 1, 4, 10) for n in range(2000)]
    place = right.fewest_nodes(1)
    wrong = MisestimatedTimes(right, 0.5, seed=3)
    factors = [wrong.iteration_time(j, 1, (1, place)) / 2.0 for j in jobs]
    backwards = MisestimatedTimes(right, 0.5, seed=3)
    assert [backwards.iteration_time(j, 1, (1, place)) / 2.0 for j in reversed(jobs)] == factors[::-1]
    assert [MisestimatedTimes(right, 0.5, seed=4).iteration_time(jobs[0], 1, (1, 1)) / 2.0] != factors[:1]
    logs = np.log(factors)
    assert abs(logs.mean()) < 4.5 * 0.5 / np.sqrt(len(jobs))
    assert logs.std() == pytest.approx(0.5, rel=0.08)
    assert wrong.memory(jobs[0], 1) == right.memory(jobs[0], 1)
    assert wrong.slowdown(jobs[0], 1, [(jobs[1], 1)]) == 1.5


def test_errors_in_durations_change_decisions_and_not_run_times():
    jobs = [job(str(n), 0, 1, 10 + n) for n in range(12)]
    exact = simulate(jobs, "sjf", ONE)
    wrong = simulate(jobs, "sjf", Setup(cluster="1x1", memory_limit=False, duration_error=1.0, seed=1))
    assert wrong.summary.makespan_s == pytest.approx(exact.summary.makespan_s)
    assert wrong.summary.mean_jct_s > exact.summary.mean_jct_s
    again = simulate(jobs, "sjf", Setup(cluster="1x1", memory_limit=False, duration_error=1.0, seed=2))
    assert again.summary.mean_jct_s != wrong.summary.mean_jct_s


# ---- sweeps --------------------------------------------------------------------------------------------------------


def test_a_mean_and_its_standard_error():
    assert mean([2.0]).error is None
    several = mean([1.0, 2.0, 3.0, 6.0])
    assert several.value == 3.0
    assert several.error == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_runs_every_policy_on_every_case_in_order(workers):
    cases = [SweepCase(f"case{n}", "1", Workload((job("a", 0, 1, 10 * n), job("b", 0, 1, 5)))) for n in (1, 2)]
    steps = []
    outcomes = run_all(["fifo", "sjf"], cases, ONE, workers=workers, progress=lambda: steps.append(1))
    assert [(o.case, o.policy) for o in outcomes] == [(c, p) for c in ("case1", "case2") for p in ("fifo", "sjf")]
    assert len(steps) == 4
    assert outcomes[2].jcts_s == pytest.approx((20, 25))
    assert outcomes[3].jcts_s == pytest.approx((5, 25))


def test_a_case_uses_its_own_seed_for_errors():
    workload = Workload(tuple(job(str(n), 0, 1, 10 + n) for n in range(12)))
    setup = Setup(cluster="1x1", memory_limit=False, duration_error=1.0, seed=1)
    drawn = run_all(["sjf"], [SweepCase("c", str(s), workload, s) for s in (1, 2)], setup, workers=1)
    alone = [
        simulate(workload, "sjf", Setup(cluster="1x1", memory_limit=False, duration_error=1.0, seed=s)) for s in (1, 2)
    ]
    assert [o.summary.mean_jct_s for o in drawn] == [r.summary.mean_jct_s for r in alone]


def test_a_cluster_may_have_nodes_of_several_sizes():
    """Of six GPUs, a leaves two: c fits there at once, and b waits for a."""
    setup = Setup(cluster="1x4+2x1", truth="1.5", memory_limit=False)
    jobs = [job("a", 0, 4, 100), job("b", 10, 4, 50), job("c", 20, 2, 10)]
    assert [(node.id, node.gpus) for node in cluster_nodes(setup)] == [
        ("node0", (0, 1, 2, 3)),
        ("node1", (4,)),
        ("node2", (5,)),
    ]
    assert ends(simulate(jobs, "backfill", setup)) == {"a": 100, "b": 150, "c": 30}
    assert own_jcts(jobs, setup) == {"": pytest.approx(fmean([100, 50, 50]))}  # as on 2x4
