"""The joint rule pauses and resumes jobs: in named situations, and what it must never do."""

import json
from dataclasses import replace

import pytest

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import Allocation, Decision, Node, Status
from carpool.core.rules import check
from carpool.core.validate import validate
from carpool.policies.joint.policy import Carpool
from carpool.sim.engine import Costs, Engine
from tests.support.world import GIB, cluster, given, job, model, nodes, pending, running

ONE = cluster("1x1")
LONG = {"left": 100_000}


def outcome(where, *parts, policy=None, xi=3.0):
    """Return for each job of the plan whether it computes afterwards; a suspended job counts as None."""
    policy = policy or Carpool()
    state = given(where, *parts, xi=xi).state(policy.key)
    plan = policy.decide(state)
    check(state, plan)
    return {decision.job: decision.allocation and decision.allocation.active for decision in plan}


class TestPause:
    def test_a_long_job_is_paused_for_a_short_one(self):
        assert outcome(ONE, running("long", **LONG), pending("short", left=100)) == {"long": False, "short": True}

    def test_two_that_hardly_slow_each_other_down_share(self):
        plan = outcome(ONE, running("long", **LONG), pending("short", left=100), xi=1.05)
        assert plan == {"short": True}

    def test_with_two_active_jobs_both_make_room(self):
        pair = (running("a", on=[0], **LONG), running("b", on=[0], left=90_000))
        assert outcome(ONE, *pair, pending("c", left=10), xi=1.9)["c"] is True

    def test_without_the_option_no_job_is_paused(self):
        plan = outcome(ONE, running("long", **LONG), pending("short", left=100), policy=Carpool(pause=False))
        assert False not in plan.values()

    def test_no_job_is_paused_for_one_that_has_more_left(self):
        assert outcome(ONE, running("host", left=100), pending("guest", left=200)) == {}

    @pytest.mark.parametrize("limit", [{"can_pause": False}, {"priority": 1}])
    def test_some_jobs_must_not_be_paused(self, limit):
        assert outcome(ONE, running("long", **LONG, **limit), pending("short", left=100), xi=30.0) == {}

    @pytest.mark.parametrize("alone", ["host", "guest"])
    def test_no_job_is_paused_in_place_of_another_if_one_is_exclusive(self, alone):
        host = running("long", **LONG, exclusive=alone == "host")
        guest = pending("short", left=100, exclusive=alone == "guest")
        assert outcome(ONE, host, guest, xi=30.0) == {}

    @pytest.mark.parametrize("alone", ["a", "b"])
    def test_jobs_of_an_old_journal_of_which_one_is_exclusive_end(self, alone):
        """Before, a job could be paused in place of another although one of the two was exclusive."""
        policy = Carpool()
        parts = [running("a", on=[0], left=500, exclusive=alone == "a"), pending("b", left=50, exclusive=alone == "b")]
        state = given(ONE, *parts, pending("c", left=60), xi=1.2).state(policy.key)
        swap = (Decision("a", Allocation((0,), active=False), "old"), Decision("b", Allocation((0,)), "old"))
        for event in (ev.Planned(0.0, swap), ev.Paused(0.0, "a", 1), ev.Started(0.0, "b", 1)):
            state.apply(event)
        state = snapshot.restore(json.loads(json.dumps(snapshot.encode(state))), state.perf, policy.key)
        validate(state)
        ended = []
        while state.jobs:
            plan = tuple(policy.decide(state))
            check(state, plan)
            state.apply(ev.Planned(state.now, plan))
            for decision in plan:
                record, attempt = state.jobs[decision.job], state.jobs[decision.job].attempt
                happens = {Status.STARTING: ev.Started, Status.RESUMING: ev.Resumed, Status.PAUSING: ev.Paused}
                state.apply(happens[record.status](state.now, record.job.id, attempt))
            validate(state)
            there = [record for record in state.jobs_on(0) if record.job.id not in {"a", "b"}]
            assert not there or len(state.jobs_on(0)) == 1 or alone in ended, "nobody else joins them"
            first = min((record for record in state.running if record.computing), key=lambda record: record.end())
            state.advance(first.end())
            state.apply(ev.Finished(state.now, first.job.id, first.attempt))
            ended.append(first.job.id)
        assert sorted(ended) == ["a", "b", "c"]

    def test_the_memory_of_both_must_fit(self):
        small = cluster("1x1", memory_gib=2.0)
        host, guest = running("long", **LONG), pending("short", left=100, can_shrink=False)
        assert outcome(small, host, guest) == {}


class TestResume:
    def paused(self, *more, by_owner=False):
        policy = Carpool()
        state = given(ONE, running("a", on=[0], **LONG), *more, xi=3.0).state(policy.key)
        if by_owner:
            state.apply(ev.PausedByOwner(0.0, "a"))
        else:
            state.apply(ev.Planned(0.0, (Decision("a", Allocation((0,), active=False), "test"),)))
        state.apply(ev.Paused(0.0, "a", 1))
        return state, policy

    def test_a_paused_job_goes_on_once_its_gpu_is_idle(self):
        state, policy = self.paused()
        (decision,) = policy.decide(state)
        assert (decision.job, decision.allocation.active) == ("a", True)

    def test_a_shorter_job_goes_first(self):
        state, policy = self.paused(pending("b", left=10))
        assert [decision.job for decision in policy.decide(state)] == ["b"]

    def test_what_its_owner_paused_stays_paused(self):
        state, policy = self.paused(by_owner=True)
        assert policy.decide(state) == []


def run(jobs, policy, **options):
    engine = Engine(jobs, nodes("1x1"), policy, belief=model(9.0, 1), costs=Costs(pause_s=0.05), **options)
    return engine.run()


def test_no_job_is_paused_for_longer_than_its_patience_allows():
    """Short jobs come without end, each of which would go first; the long one still gets its turn.

    At one stretch it is paused for at most `patience` times the mean JCT or its own time left, whichever is more, and
    a job; in all for at most twice that.
    """
    patience = 3.0
    jobs = [job("long", left=200.0)]
    jobs += [job(f"s{n}", left=50.0, submitted=1.0 + 50.0 * n) for n in range(200)]

    def longest_pause(policy):
        state = run(jobs, policy)
        return state.ended["long"].paused_s, state.mean_jct_s

    paused, _ = longest_pause(Carpool(patience=0.0))
    assert paused > 5000.0, "without the guard the long job waits until all short ones are done"
    paused, mean_jct = longest_pause(Carpool(patience=patience))
    assert 0.0 < paused <= 2.0 * patience * max(mean_jct, 200.0) + 120.0


def test_jobs_do_not_displace_each_other_in_turn():
    """A job is paused only for one that has less left, so that there are at most as many pauses as arrivals."""
    jobs = [job(f"j{n}", left=100.0 + 7.0 * (n % 5), submitted=float(n)) for n in range(40)]
    state = run(jobs, Carpool())
    assert all(record.status is Status.FINISHED for record in state.ended.values())
    assert state.pauses <= len(jobs)


class TestSwap:
    """Two jobs of 14 GiB and one GPU of 16 GiB: they cannot both be resident."""

    JOBS = (
        job("long", left=5000.0, model="fat", batch=80, can_shrink=False),
        job("short", left=50.0, submitted=100.0, model="fat", batch=80, can_shrink=False),
    )

    @pytest.mark.parametrize("can_swap", [True, False])
    def test_a_short_job_runs_where_the_memory_of_a_long_one_can_be_moved(self, can_swap):
        node = Node("n", (0,), 16 * GIB, can_swap)
        ended = dict(Engine(self.JOBS, [node], Carpool(), belief=model()).run().ended)
        away, back = 14 * 0.54, 14 * 0.21
        if can_swap:
            assert ended["short"].ended == pytest.approx(100.0 + 0.05 + away + 50.0)
            assert ended["long"].ended == pytest.approx(5000.0 + 0.05 + away + 50.0 + 0.05 + back)
        else:
            assert ended["short"].ended == pytest.approx(5050.0)

    def test_it_does_not_pay_for_a_job_that_is_hardly_shorter(self):
        node = Node("n", (0,), 16 * GIB, True)
        jobs = (self.JOBS[0], replace(self.JOBS[1], duration_s=4890.0))
        assert dict(Engine(jobs, [node], Carpool(), belief=model()).run().ended)["long"].ended == 5000.0
