"""Every rule that a plan must obey, broken once."""

import pytest

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Limits
from carpool.core.rules import IllegalPlan, check
from carpool.core.scheduler import Scheduler
from tests.support.world import cluster, job, model, nodes, pending, running
from tests.support.world import given as situation


class Rogue:
    """A policy that proposes the decisions it was given."""

    restart_s = 0.0

    def __init__(self, *decisions):
        self.decisions = decisions

    def key(self, record, now):
        return (record.job.submitted,)

    def decide(self, view):
        return self.decisions

    def wake(self, view):
        return None


def put(name, *gpus, accumulation=1, why="because"):
    return Decision(name, Allocation(tuple(gpus), accumulation), why)


FOUR = cluster("1x4")
A_RUNS = (running("a", on=[0, 1]), pending("b", gpus=2, left=10))


class TestRules:
    @pytest.mark.parametrize(
        ("parts", "plan", "problem"),
        [
            (A_RUNS, [put("z", 2)], "job z does not exist"),
            (A_RUNS, [put("b", 2, 3), put("b", 2, 3)], "two decisions"),
            (A_RUNS, [put("b", 2, 3, why="")], "no reason"),
            (A_RUNS, [put("b", 2)], "gang of 2 GPUs and got 1"),
            (A_RUNS, [put("b", 2, 2)], "twice"),
            (A_RUNS, [put("b", 2, 9)], "does not exist"),
            (A_RUNS, [put("b", 2, 3, accumulation=0)], "cannot split"),
            (A_RUNS, [put("b", 2, 3, accumulation=9)], "cannot split"),
            (A_RUNS, [Decision("b", None, "because")], "does not run"),
            ((pending("b", can_shrink=False),), [put("b", 0, accumulation=2)], "may not be split"),
            ((*A_RUNS, running("c", on=[0])), [put("b", 0, 2)], "the limit is 2"),
            ((pending("b"), pending("c"), pending("d")), [put("b", 0), put("c", 0), put("d", 0)], "the limit is 2"),
            ((running("a", model="fat", batch=64), pending("b", model="fat")), [put("b", 0)], "do not fit"),
            ((running("a", exclusive=True), pending("b")), [put("b", 0)], "a asked not to share"),
            ((running("a"), pending("b", exclusive=True)), [put("b", 0)], "b asked not to share"),
            ((running("a", max_slowdown=1.2), pending("b")), [put("b", 0)], "its limit is 1.20"),
            ((running("a"), pending("b", max_slowdown=1.2)), [put("b", 0)], "its limit is 1.20"),
            ((running("a"), pending("b", after=("a",))), [put("b", 1)], "b is blocked"),
            ((running("a", max_slowdown=1.7), pending("b"), pending("c")), [put("b", 0), put("c", 0)], "limit"),
        ],
    )
    def test_an_illegal_plan_is_refused_and_changes_nothing(self, parts, plan, problem):
        state = situation(FOUR, *parts).state(lambda record, now: (record.job.submitted,))
        with pytest.raises(IllegalPlan, match=problem):
            check(state, plan)

    @pytest.mark.parametrize(("limits", "problem"), [(Limits(jobs=1), "1 jobs"), (Limits(gpus=3), "3 GPUs")])
    def test_users_are_kept_within_their_limits(self, limits, problem):
        limited = cluster("1x4", limits={"eve": limits})
        parts = (running("a", gpus=2, user="eve"), pending("b", gpus=2, user="eve"))
        state = situation(limited, *parts).state(lambda record, now: (0.0,))
        with pytest.raises(IllegalPlan, match=problem):
            check(state, [put("b", 2, 3)])
        check(state, [Decision("a", None, "make room"), put("b", 2, 3)])

    def test_a_preemption_makes_room_within_the_same_plan(self):
        state = situation(FOUR, running("a", gpus=4, exclusive=True), pending("b", gpus=4)).state(lambda r, n: (0.0,))
        with pytest.raises(IllegalPlan):
            check(state, [put("b", 0, 1, 2, 3)])
        check(state, [Decision("a", None, "make room"), put("b", 0, 1, 2, 3)])

    def test_a_retuned_job_keeps_its_memory_until_the_workers_confirm(self):
        host = running("a", model="fat", batch=64)  # 12.4 GiB; split into 8 it needs 6.8
        state = situation(FOUR, host, pending("b", batch=64)).state(lambda r, n: (0.0,))  # 7.4 GiB
        retune = put("a", 0, accumulation=8)
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [retune, put("b", 0)])
        check(state, [retune])
        state.apply(ev.Planned(0.0, (retune,)))
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [put("b", 0)])
        state.apply(ev.Retuned(0.0, "a", 1, 8))
        check(state, [put("b", 0)])
        assert state.jobs["a"].iteration_s == pytest.approx(state.perf.iteration_time(host.job, 8, (1, 1)))

    def test_simulation_raises_and_live_refuses(self):
        for strict in (True, False):
            scheduler = Scheduler(Rogue(put("a", 7)), model(), strict=strict)
            events = [ev.NodeJoined(0.0, node) for node in nodes("1x4")] + [ev.Submitted(0.0, job("a"))]
            if strict:
                with pytest.raises(IllegalPlan):
                    scheduler.step(0.0, events)
            else:
                assert scheduler.step(0.0, events) is None
                assert "does not exist" in str(scheduler.refused[0])
            assert scheduler.state.free.count == 4

    def test_a_job_that_can_never_run_is_refused_with_a_reason(self):
        state = situation(cluster("2x2", limits={"eve": Limits(gpus=1)})).state(lambda r, n: (0.0,))
        assert "cluster has 4" in state.refusal(job("a", gpus=5))
        assert "which may not be split" in state.refusal(job("a", model="fat", batch=200, can_shrink=False))
        assert "may hold 1" in state.refusal(job("a", gpus=2, user="eve"))
        assert state.refusal(job("a", model="fat", batch=200)) is None
        small = situation(cluster("1x4", memory_gib=4.0)).state(lambda r, n: (0.0,))
        assert "6.1 GiB per GPU even at sub-batch 1" in small.refusal(job("a", model="fat", batch=200))
