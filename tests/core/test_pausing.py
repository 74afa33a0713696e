"""Pausing: every transition from one status to the next, what a paused job keeps, and what survives a snapshot."""

import json

import pytest

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import Allocation, Decision, Limits, Status
from carpool.core.state import State
from carpool.core.validate import validate
from tests.support.situations import facts
from tests.support.world import cluster, model, pending, running, starting
from tests.support.world import given as situation

FOUR = cluster("1x4")


def first_come(record, now):
    return (record.job.submitted,)


def state_of(*parts, where=FOUR) -> State:
    return situation(where, *parts).state(first_come)


def happen(state: State, *events: ev.Event) -> None:
    """Apply events; after each of them the state must agree with itself."""
    for event in events:
        state.apply(event)
        validate(state)


def turn(record, active: bool) -> Decision:
    return Decision(record.job.id, Allocation(record.gpus, record.accumulation, record.batch, active), "turn")


def pause(state: State, name: str, at: float, confirmed: bool = True) -> None:
    record = state.jobs[name]
    happen(state, ev.Planned(at, (turn(record, False),)))
    if confirmed:
        happen(state, ev.Paused(at, name, record.attempt))


def resume(state: State, name: str, at: float, confirmed: bool = True) -> None:
    record = state.jobs[name]
    happen(state, ev.Planned(at, (turn(record, True),)))
    if confirmed:
        happen(state, ev.Resumed(at, name, record.attempt))


def listed(state: State) -> tuple[list[str], list[str]]:
    """The jobs listed as paused, and those whose workers have not confirmed."""
    return [r.job.id for r in state.paused.values()], [r.job.id for r in state.switching.values()]


class TestTheWayThroughAPause:
    def test_each_step_changes_the_status_and_the_lists(self):
        state = state_of(running("a", on=[0, 1], left=100.0))
        record = state.jobs["a"]
        pause(state, "a", 10.0, confirmed=False)
        assert (record.status, record.active, listed(state)) == (Status.PAUSING, False, (["a"], ["a"]))
        assert state.leaving([1]) == [record], "its workers may still compute"
        happen(state, ev.Paused(11.0, "a", 1))
        assert (record.status, record.active, listed(state)) == (Status.PAUSED, False, (["a"], []))
        assert state.leaving([1]) == []
        resume(state, "a", 20.0, confirmed=False)
        assert (record.status, record.active, listed(state)) == (Status.RESUMING, True, ([], ["a"]))
        assert state.leaving([1]) == [], "what begins to compute leaves nothing"
        happen(state, ev.Resumed(22.0, "a", 1))
        assert (record.status, record.active, listed(state)) == (Status.RUNNING, True, ([], []))

    def test_a_paused_job_makes_no_progress_and_continues_where_it_was(self):
        state = state_of(running("a", left=100.0))
        record = state.jobs["a"]
        pause(state, "a", 10.0)
        assert record.iterations_left(10.0) == record.iterations_left(1000.0) == 90.0
        resume(state, "a", 1000.0, confirmed=False)
        happen(state, ev.Resumed(1002.0, "a", 1))
        assert record.end() == pytest.approx(1092.0)
        assert (record.ran_s, record.alone_s) == (10.0, 10.0)

    def test_the_time_paused_lasts_from_the_decision_until_it_computes_again(self):
        state = state_of(running("a", left=100.0))
        record = state.jobs["a"]
        pause(state, "a", 10.0)
        assert (record.paused_since, record.paused_s, record.paused(15.0)) == (10.0, 0.0, 5.0)
        resume(state, "a", 20.0, confirmed=False)
        assert record.paused(21.0) == 11.0, "it does not compute while it is being resumed"
        happen(state, ev.Resumed(22.0, "a", 1))
        pause(state, "a", 30.0)
        assert (record.paused(31.0), record.pauses, state.pauses) == (13.0, 2, 2)

    def test_it_keeps_its_gpus_its_memory_and_its_attempt(self):
        state = state_of(running("a", on=[0, 2]))
        record, used = state.jobs["a"], state.memory_used(2)
        pause(state, "a", 10.0)
        assert (record.gpus, state.memory_used(2), record.attempt) == ((0, 2), used, 1)
        assert (state.free.count, list(state.running)) == (2, [record])
        assert (state.preemptions, record.waited(50.0)) == (0, 0.0), "a pause is neither a preemption nor a wait"

    def test_a_paused_job_slows_no_mate_down(self):
        state = state_of(running("a", on=[0], left=100.0), running("b", on=[0, 1], left=100.0))
        a, b = state.jobs["a"], state.jobs["b"]
        assert (a.slowdown, b.slowdown) == (1.5, 1.5)
        pause(state, "a", 30.0, confirmed=False)
        assert (a.slowdown, b.slowdown) == (1.0, 1.0)
        assert b.end() == pytest.approx(30.0 + 80.0)
        happen(state, ev.Paused(31.0, "a", 1))
        resume(state, "a", 40.0, confirmed=False)
        assert b.slowdown == 1.0, "it computes only when its workers say so"
        happen(state, ev.Resumed(41.0, "a", 1))
        assert (a.slowdown, b.slowdown) == (1.5, 1.5)

    def test_a_guest_of_paused_jobs_alone_has_joined_none(self):
        state = state_of(running("a", on=[0]), pending("b"))
        pause(state, "a", 5.0)
        happen(state, ev.Planned(6.0, (Decision("b", Allocation((0,)), "room"),)))
        assert (state.shares, state.jobs["a"].hosted, state.jobs["b"].shares) == (0, 0, 0)
        assert state.most_residents == 2

    def test_two_jobs_that_a_resume_brings_together_share(self):
        state = state_of(running("a", on=[0], left=100.0), pending("b", left=40.0))
        pause(state, "a", 10.0)
        happen(state, ev.Planned(11.0, (Decision("b", Allocation((0,)), "room"),)), ev.Started(11.0, "b", 1))
        resume(state, "a", 21.0)
        a, b = state.jobs["a"], state.jobs["b"]
        assert (state.shares, a.shares, b.hosted, a.hosted, b.shares) == (1, 1, 1, 0, 0)
        assert (a.saved_s, b.saved_s) == (30.0, 0.0), "it would have waited for the rest of b"

    def test_a_pair_counts_once_however_often_it_is_paused_and_resumed(self):
        state = state_of(running("a", on=[0]), running("b", on=[0]))
        for at, name in enumerate("abba", start=1):
            pause(state, name, 10.0 * at)
            resume(state, name, 10.0 * at + 1.0)
        assert (state.shares, state.jobs["a"].hosted, state.jobs["b"].shares) == (1, 1, 1)

    def test_a_pair_counts_again_when_one_of_the_two_was_away(self):
        state = state_of(running("a", on=[0]), running("b", on=[0]))
        happen(state, ev.Planned(5.0, (Decision("b", None, "out"),)), ev.Stopped(5.0, "b", 1, 0.0))
        happen(state, ev.Planned(6.0, (Decision("b", Allocation((0,)), "in"),)))
        assert (state.shares, state.jobs["a"].hosted, state.jobs["b"].shares) == (2, 2, 2)

    def test_of_a_plan_that_swaps_two_jobs_neither_shares(self):
        state = state_of(running("a", on=[0]), pending("b"))
        pause(state, "a", 5.0)
        happen(state, ev.Planned(6.0, (Decision("b", Allocation((0,)), "room"),)), ev.Started(6.0, "b", 1))
        happen(state, ev.Planned(7.0, (turn(state.jobs["a"], True), turn(state.jobs["b"], False))))
        assert (state.shares, state.jobs["a"].shares, state.jobs["b"].hosted) == (0, 0, 0)

    def test_a_guest_of_a_paused_job_is_known_to_every_index(self):
        state = state_of(running("a", on=[0, 1]), running("b", on=[0]), pending("c"))
        _ = state.hosts, state.end_times  # kept from here on, and so validated
        pause(state, "a", 5.0)
        happen(state, ev.Planned(6.0, (Decision("c", Allocation((1,)), "room"),)))
        resume(state, "a", 7.0)

    def test_a_pause_frees_the_place_of_the_plan_that_makes_it(self):
        state = state_of(running("a", on=[0]), pending("b"), where=cluster("1x1", jobs_per_gpu=1))
        swap = (turn(state.jobs["a"], False), Decision("b", Allocation((0,)), "its turn"))
        happen(state, ev.Planned(5.0, swap))
        assert {name: r.status for name, r in state.jobs.items()} == {"a": Status.PAUSING, "b": Status.STARTING}
        assert [r.job.id for r in state.leaving([0])] == ["a"], "b is launched when a is still"

    def test_messages_that_fit_no_pause_change_nothing(self):
        state = state_of(running("a"), starting("b"))
        for name in ("a", "b"):
            before = facts(state)
            happen(state, ev.Paused(0.0, name, 1), ev.Resumed(0.0, name, 1))
            assert facts(state) == before
        pause(state, "a", 0.0, confirmed=False)
        before = facts(state)
        happen(state, ev.Resumed(0.0, "a", 1), ev.Paused(0.0, "a", 2), ev.Paused(0.0, "gone", 1))
        assert facts(state) == before


@pytest.mark.parametrize("status", [Status.PAUSING, Status.PAUSED, Status.RESUMING])
class TestWhatEndsAPause:
    def paused(self, status: Status) -> State:
        state = state_of(running("a", on=[0, 1], left=100.0, retries=1), running("b", on=[1], left=500.0))
        happen(state, ev.Checkpointed(5.0, "a", 1, 3.0))
        pause(state, "a", 10.0, confirmed=status is not Status.PAUSING)
        if status is Status.RESUMING:
            resume(state, "a", 12.0, confirmed=False)
        assert state.jobs["a"].status is status
        return state

    def left_no_trace(self, state: State) -> None:
        assert listed(state) == ([], [])
        assert [r.job.id for gpu in (0, 1) for r in state.jobs_on(gpu)] == ["b"]

    def test_a_stop(self, status):
        state = self.paused(status)
        record = state.jobs["a"]
        happen(state, ev.Planned(20.0, (Decision("a", None, "make room"),)))
        assert (record.status, record.paused_s, record.leaving) == (Status.STOPPING, 10.0, (0, 1))
        self.left_no_trace(state)
        happen(state, ev.Stopped(21.0, "a", 1, 6.0))
        assert (record.status, record.done, record.paused(99.0)) == (Status.PENDING, 6.0, 10.0)

    def test_a_move(self, status):
        state = self.paused(status)
        record = state.jobs["a"]
        happen(state, ev.Planned(20.0, (Decision("a", Allocation((2, 3)), "elsewhere"),)))
        assert (record.status, record.attempt, record.active) == (Status.STARTING, 2, True)
        self.left_no_trace(state)

    def test_a_cancellation(self, status):
        state = self.paused(status)
        record = state.jobs["a"]
        happen(state, ev.Cancelled(20.0, "a"))
        assert (record.status, record.paused_s) == (Status.CANCELLING, 10.0)
        happen(state, ev.Stopped(21.0, "a", 1, 0.0))
        assert state.ended["a"].status is Status.CANCELLED
        self.left_no_trace(state)

    def test_an_end(self, status):
        state = self.paused(status)
        happen(state, ev.Finished(20.0, "a", 1))
        assert (state.ended["a"].status, state.ended["a"].paused_s) == (Status.FINISHED, 10.0)
        self.left_no_trace(state)

    def test_a_failure_spends_a_retry(self, status):
        state = self.paused(status)
        happen(state, ev.Failed(20.0, "a", 1, "out of memory"))
        record = state.jobs["a"]
        assert (record.status, record.done, record.retries_left) == (Status.PENDING, 3.0, 0)
        self.left_no_trace(state)

    def test_a_requeue(self, status):
        state = self.paused(status)
        happen(state, ev.Requeued(20.0, "a", 1))
        assert state.jobs["a"].status is Status.STOPPING
        self.left_no_trace(state)

    def test_a_lost_node(self, status):
        state = self.paused(status)
        happen(state, ev.NodeLost(20.0, "n0"))
        assert (state.jobs["a"].status, listed(state)) == (Status.PENDING, ([], []))


class TestOwners:
    def test_a_running_job_is_paused_at_once_and_needs_its_owner_to_go_on(self):
        state = state_of(running("a", on=[0]))
        happen(state, ev.PausedByOwner(5.0, "a"))
        record = state.jobs["a"]
        assert (record.status, record.paused_by_owner, listed(state)) == (Status.PAUSING, True, (["a"], ["a"]))
        state.needs_decision = False
        happen(state, ev.Paused(6.0, "a", 1), ev.ResumedByOwner(7.0, "a"))
        assert (record.status, record.paused_by_owner, state.needs_decision) == (Status.PAUSED, False, True)

    def test_a_job_that_starts_is_paused_as_soon_as_it_runs(self):
        state = state_of(starting("a"))
        happen(state, ev.PausedByOwner(5.0, "a"))
        assert state.jobs["a"].status is Status.STARTING
        happen(state, ev.Started(8.0, "a", 1))
        assert (state.jobs["a"].status, state.jobs["a"].paused_since) == (Status.PAUSING, 8.0)

    def test_a_job_that_resumes_is_paused_as_soon_as_it_runs(self):
        state = state_of(running("a"))
        pause(state, "a", 5.0)
        resume(state, "a", 6.0, confirmed=False)
        happen(state, ev.PausedByOwner(7.0, "a"))
        assert state.jobs["a"].status is Status.RESUMING
        happen(state, ev.Resumed(8.0, "a", 1))
        assert (state.jobs["a"].status, state.jobs["a"].pauses) == (Status.PAUSING, 2)

    def test_a_job_that_loses_its_place_waits_on_hold(self):
        state = state_of(running("a"))
        happen(state, ev.PausedByOwner(5.0, "a"), ev.Paused(5.0, "a", 1), ev.NodeLost(9.0, "n0"))
        record = state.jobs["a"]
        assert (record.status, record.on_hold, record.paused_by_owner) == (Status.HELD, True, False)
        happen(state, ev.Released(10.0, "a"))
        assert record.status is Status.PENDING

    def test_jobs_without_gpus_and_unknown_jobs_cannot_be_paused(self):
        state = state_of(pending("a"))
        before = facts(state)
        happen(state, ev.PausedByOwner(0.0, "a"), ev.ResumedByOwner(0.0, "a"), ev.PausedByOwner(0.0, "z"))
        assert facts(state) == before

    def test_reports_of_a_paused_job_count(self):
        state = state_of(running("a", left=100.0))
        happen(state, ev.PausedByOwner(5.0, "a"), ev.Progressed(6.0, "a", 1, 7.0))
        assert state.jobs["a"].iterations_left(50.0) == 93.0


class TestSnapshots:
    def in_every_status(self) -> State:
        """One job on each GPU: pausing, paused, resuming and paused by its owner, each beside one that runs."""
        parts = [running(name, on=[gpu]) for gpu, name in enumerate("abcd")]
        mates = [running(f"{name}2", on=[gpu]) for gpu, name in enumerate("abcd")]
        state = state_of(*parts, *mates, where=cluster("1x4", limits={"": Limits(jobs=20)}))
        pause(state, "a", 10.0, confirmed=False)
        pause(state, "b", 10.0)
        pause(state, "c", 10.0)
        resume(state, "c", 12.0, confirmed=False)
        happen(state, ev.PausedByOwner(13.0, "d"), ev.Paused(14.0, "d", 1))
        return state

    def test_a_state_with_paused_jobs_survives(self):
        state = self.in_every_status()
        data = json.loads(json.dumps(snapshot.encode(state)))
        restored = snapshot.restore(data, state.perf, first_come)
        validate(restored)
        assert facts(restored) == facts(state)
        assert restored.most_residents == state.most_residents == 2
        for event in (ev.Paused(20.0, "a", 1), ev.Resumed(20.0, "c", 1), ev.ResumedByOwner(21.0, "d")):
            happen(state, event)
            happen(restored, event)
        assert facts(restored) == facts(state)

    def test_a_snapshot_from_before_there_were_pauses_loads(self):
        state = state_of(running("a", on=[0]), starting("b", gpus=2), pending("c"))
        state.advance(5.0)
        data = json.loads(json.dumps(snapshot.encode(state)))
        for name in ("pauses", "most_residents"):
            del data["counters"][name]
        for entry in data["jobs"]:
            for name in ("active", "pauses", "paused_since", "paused_s", "paused_by_owner"):
                del entry[name]
            del entry["job"]["can_pause"]
        restored = snapshot.restore(data, model(), first_come)
        validate(restored)
        assert facts(restored) == facts(state)
        assert [record.active for record in restored.jobs.values()] == [True, True, False]

    def test_a_snapshot_that_does_not_tell_who_joined_whom_loads(self):
        state = self.in_every_status()
        data = json.loads(json.dumps(snapshot.encode(state)))
        for entry in data["jobs"]:
            del entry["shared_with"]
        restored = snapshot.restore(data, model(), first_come)
        validate(restored)
        assert restored.jobs["c"].shared_with == (restored.jobs["c2"].seq,), "both compute, and have joined"
        pause(restored, "c2", 30.0)
        resume(restored, "c2", 31.0)
        assert restored.shares == state.shares

    def test_smaller_limits_refuse_what_does_not_keep_them(self):
        state = state_of(running("a", on=[0]), running("b", on=[0]), pending("c"))
        pause(state, "a", 1.0)
        happen(state, ev.Planned(2.0, (Decision("c", Allocation((0,)), "room"),)))
        data = snapshot.encode(state)
        with pytest.raises(ValueError, match="more than 1 jobs compute on GPU 0"):
            snapshot.restore(data, model(), first_come, jobs_per_gpu=1)
        with pytest.raises(ValueError, match="GPU 0 holds more than 2 jobs"):
            snapshot.restore(data, model(), first_come, jobs_per_gpu=2, resident_per_gpu=2)
        validate(snapshot.restore(data, model(), first_come, jobs_per_gpu=2, resident_per_gpu=3))
