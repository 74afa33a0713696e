"""What events do to jobs: failures, reports, re-tunes, preemption, holds and changed constraints."""

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.draft import Draft
from carpool.core.model import Allocation, Decision, Limits, Node, Status
from carpool.core.perf import MeasuredPair, TableInterference
from carpool.core.rules import IllegalPlan, check
from carpool.core.scheduler import Scheduler
from carpool.policies.preemptive.tiresias import Tiresias
from carpool.sim.engine import Costs, Engine
from tests.support.world import GIB, cluster, job, model, nodes, pending, running
from tests.support.world import given as situation

FOUR = cluster("1x4")


def first_come(record, now):
    return (record.job.submitted,)


def state_of(*parts, where=FOUR, xi=1.5):
    return situation(where, *parts, xi=xi).state(first_come)


def plan(state, *decisions):
    state.apply(ev.Planned(state.now, tuple(decisions)))


def put(name, *gpus, accumulation=1):
    return Decision(name, Allocation(gpus, accumulation), "because")


class TestFailure:
    def test_a_retry_resumes_at_the_last_checkpoint_and_the_last_failure_is_final(self):
        state = state_of(running("a", left=100.0, retries=1))
        state.apply(ev.Checkpointed(30.0, "a", 1, 25.0))
        state.apply(ev.Failed(40.0, "a", 1, "out of memory"))
        record = state.jobs["a"]
        assert (record.status, record.done, record.waited_s) == (Status.PENDING, 25.0, 0.0)
        assert state.free.count == 4
        plan(state, put("a", 3))
        state.apply(ev.Started(50.0, "a", 2))
        assert record.first_start == 0.0, "the first start stays the first"
        assert record.end() == pytest.approx(50.0 + 75.0)
        state.apply(ev.Failed(60.0, "a", 2, "out of memory"))
        assert state.ended["a"].status is Status.FAILED
        assert state.ended["a"].reason == "out of memory"

    def test_jobs_that_wait_for_a_failed_job_are_cancelled_transitively(self):
        parts = (running("a"), pending("b", after=("a",)), pending("c", after=("b",)), pending("d"))
        state = state_of(*parts)
        state.apply(ev.Failed(5.0, "a", 1, "bug"))
        assert {name: record.status for name, record in state.ended.items()} == {
            "a": Status.FAILED,
            "b": Status.CANCELLED,
            "c": Status.CANCELLED,
        }
        assert "a, which it waits for, failed" in state.ended["b"].reason
        late = job("e", after=("a",))
        state.apply(ev.Submitted(6.0, late))
        assert state.ended["e"].status is Status.CANCELLED

    def test_a_lost_node_sends_its_jobs_back_to_the_queue_and_spends_no_retry(self):
        state = state_of(running("a", on=[0, 4], left=100.0), running("b", on=[1]), where=cluster("2x4"))
        state.apply(ev.Checkpointed(10.0, "a", 1, 9.0))
        state.apply(ev.NodeLost(20.0, "n1"))
        record = state.jobs["a"]
        assert (record.status, record.leaving) == (Status.STOPPING, (0,)), "its other worker must go first"
        assert state.leaving([0, 1]) == [record]
        assert state.jobs["b"].status is Status.RUNNING
        assert state.free.count == 3
        state.apply(ev.Stopped(21.0, "a", 1, 9.0))
        assert (record.status, record.done, record.retries_left) == (Status.PENDING, 9.0, 0)
        state.apply(ev.NodeLost(22.0, "n1"))
        state.apply(ev.NodeLost(22.0, "unknown"))
        assert state.free.count == 3, "a repeated event changes nothing"

    def test_a_node_that_takes_the_whole_gang_requeues_at_once(self):
        state = state_of(running("a", on=[4, 5]), running("b", on=[6]), where=cluster("2x4"))
        plan(state, Decision("b", None, "make room"))
        state.apply(ev.NodeLost(20.0, "n1"))
        assert {name: record.status for name, record in state.jobs.items()} == {
            "a": Status.PENDING,
            "b": Status.PENDING,
        }

    def test_a_long_chain_of_dependent_jobs_is_cancelled_together(self):
        state = state_of(running("j0"))
        for number in range(1, 3000):
            state.apply(ev.Submitted(0.0, job(f"j{number}", after=(f"j{number - 1}",))))
        state.apply(ev.Failed(1.0, "j0", 1, "bug"))
        assert not state.jobs
        assert len(state.ended) == 3000

    def test_a_job_that_finishes_while_it_is_stopped_has_finished(self):
        for cancelled in (False, True):
            state = state_of(running("a", left=100.0))
            plan(state, Decision("a", None, "make room"))
            if cancelled:
                state.apply(ev.Cancelled(1.0, "a"))
            state.apply(ev.Finished(2.0, "a", 1))
            assert (state.ended["a"].status, state.ended["a"].done) == (Status.FINISHED, 100.0)

    def test_a_job_that_dies_while_it_is_being_stopped_goes_back_to_its_checkpoint(self):
        state = state_of(running("a", left=100.0))
        plan(state, Decision("a", None, "make room"))
        state.apply(ev.Failed(10.0, "a", 1, "killed"))
        assert (state.jobs["a"].status, state.jobs["a"].done) == (Status.PENDING, 0.0)


class TestReports:
    def test_an_iteration_time_measured_alone_replaces_the_predicted_one(self):
        state = state_of(running("a", left=100.0))
        state.apply(ev.Observed(10.0, "a", 1, 5.0, 2.0))
        record = state.jobs["a"]
        assert record.alone_left(10.0) == pytest.approx(95 * 2.0)
        assert (record.end(), record.slowdown) == (pytest.approx(10.0 + 190.0), 1.0)

    def test_an_iteration_time_measured_beside_a_mate_gives_the_slow_down(self):
        state = state_of(running("a", on=[0], left=100.0), running("b", on=[0], left=100.0))
        state.apply(ev.Observed(10.0, "a", 1, 5.0, 2.5))
        record = state.jobs["a"]
        assert record.alone_left(10.0) == pytest.approx(95.0)
        assert (record.end(), record.slowdown) == (pytest.approx(10.0 + 95 * 2.5), 2.5)

    def test_reported_progress_keeps_the_iteration_time(self):
        state = state_of(running("a", left=100.0))
        state.apply(ev.Progressed(10.0, "a", 1, 50.0))
        assert state.jobs["a"].end() == pytest.approx(60.0)


class TestRetune:
    def test_a_larger_sub_batch_reserves_its_memory_at_once(self):
        state = state_of(running("a", model="fat", batch=64, accumulation=8))
        small = state.memory_used(0)
        plan(state, put("a", 0, accumulation=1))
        assert state.memory_used(0) == round(12.4 * GIB) > small

    def test_a_smaller_sub_batch_keeps_the_larger_memory_until_confirmed(self):
        state = state_of(running("a", model="fat", batch=64))
        plan(state, put("a", 0, accumulation=8))
        assert state.memory_used(0) == round(12.4 * GIB)
        state.apply(ev.Retuned(1.0, "a", 1, 8))
        assert state.memory_used(0) == round(6.8 * GIB)

    def test_hosts_are_judged_by_the_larger_memory(self):
        policy = policies.make("sjf-bsbf")
        parts = (
            running("a", gpus=4, model="fat", batch=64, accumulation=8),
            pending("b", left=10.0, batch=64, can_shrink=False),
        )
        state = situation(FOUR, *parts).state(policy.key)
        assert [decision.job for decision in policy.decide(state)] == ["b"]
        plan(state, put("a", 0, 1, 2, 3, accumulation=1))
        assert policy.decide(state) == []

    def test_a_confirmation_of_an_earlier_retune_releases_nothing(self):
        state = state_of(running("a", model="fat", batch=64))
        plan(state, put("a", 0, accumulation=64))
        plan(state, put("a", 0, accumulation=2))
        state.apply(ev.Retuned(1.0, "a", 1, 64))
        assert state.memory_used(0) == round(12.4 * GIB)
        state.apply(ev.Retuned(2.0, "a", 1, 2))
        assert state.memory_used(0) == round(9.2 * GIB)

    def test_a_retune_changes_the_slow_down_of_mates(self):
        table = TableInterference({("plain", "plain"): [MeasuredPair(2.0, 8, 64), MeasuredPair(1.1, 8, 4)]})
        state = state_of(running("a", on=[0]), running("b", on=[0], batch=64), xi=table)
        assert state.jobs["a"].slowdown == 2.0
        plan(state, put("b", 0, accumulation=16))
        state.apply(ev.Retuned(1.0, "b", 1, 16))
        assert state.jobs["a"].slowdown == 1.1


class TestChangingClusters:
    def test_a_larger_gpu_also_changes_the_sub_batch_of_a_blocked_job(self):
        state = state_of(running("a"), pending("b", model="fat", batch=128, left=100.0, iterations=100, after=("a",)))
        state.apply(ev.NodeJoined(0.0, Node("big", (8, 9), 32 * GIB)))
        state.apply(ev.Finished(1.0, "a", 1))
        assert state.jobs["b"].alone_left(1.0) == pytest.approx(100.0)

    def test_a_clock_that_is_set_back_undoes_nothing(self):
        state = state_of(running("a", left=100.0))
        state.advance(50.0)
        state.apply(ev.Submitted(20.0, job("b", submitted=20.0)))
        assert (state.now, state.jobs["b"].pending_since) == (50.0, 50.0)
        assert state.jobs["a"].iterations_left(50.0) == pytest.approx(50.0)
        assert state.busy_gpu_s == pytest.approx(50.0)

    def test_a_larger_gpu_lets_waiting_jobs_run_at_a_larger_sub_batch(self):
        fat = pending("a", model="fat", batch=128, left=100.0, iterations=100)
        state = state_of(fat)
        split = state.jobs["a"].alone_left(0.0)
        state.apply(ev.NodeJoined(0.0, Node("big", (8, 9), 32 * GIB)))
        assert split > 101.0
        assert state.jobs["a"].alone_left(0.0) == pytest.approx(100.0)

    def test_a_larger_gpu_changes_the_decision_to_share(self):
        """Alone on the larger GPU the guest need not split its batch, so waiting is worth more."""
        host = running("a", gpus=4, left=132.0, model="thin")
        guest = pending("b", model="fat", batch=128, left=100.0, iterations=100)
        policy = policies.make("sjf-bsbf")
        state = situation(FOUR, host, guest, xi=1.6).state(policy.key)
        assert [decision.job for decision in policy.decide(state)] == ["b"]
        state.apply(ev.NodeJoined(0.0, Node("big", (8,), 32 * GIB)))
        blocker = job("c", left=5000.0, exclusive=True)
        state.apply(ev.Submitted(0.0, blocker))
        plan(state, put("c", 8))
        assert policy.decide(state) == [], "cached options do not outlive the old cluster"


class TestLimits:
    def test_a_stopped_job_no_longer_counts_for_its_user(self):
        limited = cluster("1x4", limits={"eve": Limits(jobs=1)})
        parts = (running("a", gpus=4, left=9999.0, user="eve"), pending("b", left=10.0, user="eve"))
        policy = Tiresias(threshold_gpu_s=10.0)
        state = situation(limited, *parts).state(policy.key)
        state.advance(100.0)
        stop, start = policy.decide(state)
        assert (stop.job, stop.allocation, start.job) == ("a", None, "b")


class TestPreemption:
    """A preempted job takes a while to stop."""

    def test_no_job_starts_on_gpus_whose_workers_still_run(self):
        jobs = [
            job("a", gpus=2, left=9000.0),
            job("b", gpus=1, left=10.0, submitted=4000.0),
            job("c", gpus=1, left=10.0, submitted=4003.0),
        ]
        ended = self.run(jobs, "1x2")
        assert ended["b"].first_start == 4010.0
        assert ended["c"].first_start == 4010.0

    def test_jobs_start_at_once_on_other_gpus(self):
        jobs = [
            job("a", gpus=2, left=9000.0),
            job("b", gpus=2, left=10.0, submitted=4000.0),
            job("c", gpus=1, left=10.0, submitted=4000.0),
        ]
        ended = self.run(jobs, "1x3")
        starts = sorted(record.first_start for name, record in ended.items() if name != "a")
        assert starts == [4000.0, 4010.0]

    def run(self, jobs, shape):
        policy, costs = Tiresias(threshold_gpu_s=100.0, restart_s=0.0), Costs(stop_s=10.0)
        return Engine(jobs, nodes(shape), policy, belief=model(node_gpus=3), costs=costs).run().ended

    @pytest.mark.parametrize("gpus", [1, 24, 48, 112])
    def test_demotions_happen_at_any_time_of_the_clock(self, gpus):
        for epoch in (0.0, 1_700_714_824.45, 1_763_200_000.123):
            jobs = [
                job("a", gpus=gpus, left=99_999.0, submitted=epoch),
                job("b", gpus=gpus, left=10.0, submitted=epoch + 1.0),
            ]
            policy = Tiresias(restart_s=0.0)
            ended = Engine(jobs, nodes(f"1x{gpus}", 999.0), policy, belief=model(node_gpus=gpus)).run().ended
            assert ended["b"].ended - epoch == pytest.approx(max(1.0, 3600.0 / gpus) + 10.0, abs=0.01)


class TestHold:
    def test_a_job_behind_one_that_is_held_starts_at_once(self):
        made = Scheduler(policies.make("fifo"), model(1.5))
        made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x2")])
        made.step(1.0, [ev.Submitted(1.0, job("runs", 1, 100))])
        made.step(2.0, [ev.Submitted(2.0, job("wide", 2, 9)), ev.Submitted(2.0, job("small", 1, 9))])
        assert made.state.jobs["small"].status is Status.PENDING
        made.step(3.0, [ev.Held(3.0, "wide")])
        assert made.state.jobs["small"].status is Status.STARTING

    def test_time_on_hold_does_not_count_as_waiting(self):
        state = state_of(pending("a"), pending("b"))
        state.apply(ev.Held(10.0, "a"))
        assert (state.jobs["a"].status, [r.job.id for r in state.queue]) == (Status.HELD, ["b"])
        state.apply(ev.Released(25.0, "a"))
        assert state.jobs["a"].status is Status.PENDING
        plan(state, put("a", 0))
        assert state.jobs["a"].waited_s == pytest.approx(10.0)

    def test_a_running_job_on_hold_runs_on_and_is_held_when_it_fails(self):
        state = state_of(running("a", left=100.0, retries=1), pending("b", after=("a",)))
        state.apply(ev.Held(1.0, "a"))
        state.apply(ev.Held(1.0, "b"))
        assert state.jobs["a"].status is Status.RUNNING
        state.apply(ev.Failed(5.0, "a", 1, "bug"))
        assert state.jobs["a"].status is Status.HELD
        state.apply(ev.Released(6.0, "a"))
        plan(state, put("a", 0))
        state.apply(ev.Started(7.0, "a", 2))
        state.apply(ev.Finished(9.0, "a", 2))
        assert state.jobs["b"].status is Status.HELD, "a blocked job that is held stays so when it could start"

    def test_a_job_that_is_held_for_good_is_not_released(self):
        state = state_of(pending("a"), pending("b"))
        state.apply(ev.Held(1.0, "a"))
        state.apply(ev.Held(1.0, "b", "no node lasts long enough"))
        state.apply(ev.Held(2.0, "a", "its owner is not certain", for_good=True))
        state.apply(ev.Held(2.0, "a"))
        for name in ("a", "b"):
            state.apply(ev.Released(3.0, name))
        assert [state.jobs[name].status for name in ("a", "b")] == [Status.HELD, Status.PENDING]
        assert [state.jobs[name].hold_why for name in ("a", "b")] == ["its owner is not certain", ""]

    def test_a_failure_that_is_not_the_jobs_fault_costs_no_retry(self):
        state = state_of(running("a"))
        state.apply(ev.Failed(5.0, "a", 1, "the machine restarted", again=True))
        assert (state.jobs["a"].status, state.jobs["a"].retries_left) == (Status.PENDING, 0)

    def test_a_requeued_job_stops_and_waits_again(self):
        state = state_of(running("a", left=100.0))
        state.apply(ev.Requeued(10.0, "a", 1))
        assert (state.jobs["a"].status, state.free.count) == (Status.STOPPING, 4)
        state.apply(ev.Requeued(11.0, "a", 1))
        state.apply(ev.Stopped(12.0, "a", 1, 8.0))
        assert (state.jobs["a"].status, state.jobs["a"].done) == (Status.PENDING, 8.0)


class TestConstraints:
    def test_a_job_that_ran_out_of_memory_must_split_its_batch_or_be_alone(self):
        state = state_of(pending("a", model="fat", batch=8, duration_s=None))
        whole = [size.accumulation for size in state.jobs["a"].shape.sizes]
        state.apply(ev.ConstraintsChanged(1.0, "a", min_accumulation=4))
        assert [size.accumulation for size in state.jobs["a"].shape.sizes] == [s for s in whole if s >= 4]
        with pytest.raises(IllegalPlan, match="must split its batch into at least 4"):
            check(state, [put("a", 0, accumulation=2)])
        state.apply(ev.ConstraintsChanged(2.0, "a", exclusive=True))
        assert state.jobs["a"].shape.exclusive

    def test_a_job_that_holds_gpus_keeps_its_constraints(self):
        state = state_of(running("a", on=[0]), running("b", on=[0]))
        state.apply(ev.ConstraintsChanged(1.0, "a", exclusive=True, min_accumulation=2, can_shrink=True))
        assert (state.jobs["a"].job.exclusive, state.jobs["a"].job.min_accumulation) == (False, 1)

    def test_memory_held_by_other_processes_is_not_given_to_jobs(self):
        state = state_of(pending("a", model="fat", batch=8), where=cluster("1x2", memory_gib=8))  # needs 6.8 GiB
        state.apply(ev.MemoryTaken(1.0, 0, 2 * GIB))
        draft = Draft(state)
        assert draft.start(state.jobs["a"], "it fits there")
        assert draft.decisions[0].allocation == Allocation((1,), 1)
        with pytest.raises(IllegalPlan, match=r"do not fit in 6\.00 GiB"):
            check(state, [put("a", 0)])
        state.apply(ev.MemoryTaken(2.0, 1, 7 * GIB))
        assert not Draft(state).start(state.jobs["a"], "nowhere")
        state.apply(ev.MemoryTaken(3.0, 0, 0))
        assert Draft(state).start(state.jobs["a"], "they left")
        check(state, [put("a", 0)])
