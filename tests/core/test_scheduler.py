"""When the scheduler asks its policy, and what it does with the plan."""

import pytest

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision
from carpool.core.scheduler import Scheduler
from carpool.policies.preemptive.tiresias import Tiresias
from carpool.sim.engine import CannotFinish, Engine
from tests.support.world import cluster, job, model, nodes, pending, running
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


def test_a_simulation_in_rounds_ends_with_its_last_job():
    class Rounds(Tiresias):
        def wake(self, view):
            return (view.now // 60 + 1) * 60

    jobs = [job("a", left=100.0), job("b", left=500.0)]
    assert Engine(jobs, nodes("1x1"), Rounds(), belief=model()).run().now == 600.0


@pytest.mark.parametrize("time", [0.0, -5.0, float("nan"), float("inf")])
def test_wake_must_return_a_later_time(time):
    class Confused(Tiresias):
        def wake(self, view):
            return time

    with pytest.raises(CannotFinish, match="must name a later time"):
        Engine([job("a")], nodes("1x1"), Confused(), belief=model()).run()


def test_a_policy_that_never_decides_anything_is_given_up(monkeypatch):
    class Sleepy(Tiresias):
        def decide(self, view):
            return []

        def wake(self, view):
            return view.now + 1.0

    monkeypatch.setattr("carpool.sim.engine.MOST_IDLE_CALLS", 50)
    with pytest.raises(CannotFinish, match="waiting for ever"):
        Engine([job("a")], nodes("1x1"), Sleepy(), belief=model()).run()


def test_one_illegal_decision_does_not_block_the_others():
    class Rogue(Tiresias):
        def decide(self, view):
            return [put("a", 99), put("b", 1)] if len(view.queue) == 2 else []

    scheduler = Scheduler(Rogue(), model(), strict=False)
    scheduler.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x4")])
    planned = scheduler.step(0.0, [ev.Submitted(0.0, job("a")), ev.Submitted(0.0, job("b"))])
    assert [decision.job for decision in planned.decisions] == ["b"]
    assert len(scheduler.refused) == 1


def test_a_policy_is_not_asked_again_because_of_its_own_plan():
    scheduler = Scheduler(Tiresias(threshold_gpu_s=10.0), model())
    scheduler.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x4")])
    scheduler.step(0.0, [ev.Submitted(0.0, job("a", gpus=4, left=999.0))])
    scheduler.step(0.0, [ev.Started(0.0, "a", 1)])
    scheduler.step(50.0, [ev.Submitted(50.0, job("b", gpus=4, left=5.0, submitted=50.0))])
    asked = scheduler.policy_calls
    scheduler.step(50.0, [ev.Started(50.0, "b", 1)])
    scheduler.step(51.0, [ev.Progressed(51.0, "b", 1, 1.0)])
    assert scheduler.policy_calls == asked
    scheduler.step(52.0, [ev.Stopped(52.0, "a", 1, 50.0)])
    assert scheduler.policy_calls == asked + 1


def test_tiresias_does_not_wake_while_the_queue_is_empty():
    policy = Tiresias()
    assert policy.wake(situation(FOUR, running("a")).state(policy.key)) is None
    assert policy.wake(situation(FOUR, running("a", gpus=4), pending("b")).state(policy.key)) == 900.0


def test_a_superseded_wake_time_is_ignored():
    class Fickle:
        restart_s = 0.0

        def __init__(self):
            self.asked = []

        def key(self, record, now):
            return (0.0,)

        def decide(self, view):
            self.asked.append(view.now)
            return [put(r.job.id, 0) for r in view.queue][:1] if view.free.count else []

        def wake(self, view):
            return 10.0 if view.now < 5.0 else 20.0 if view.now < 20.0 else None

    policy = Fickle()
    jobs = [job("a", left=50.0), job("b", left=50.0, submitted=5.0)]
    Engine(jobs, nodes("1x1"), policy, belief=model(node_gpus=1)).run()
    assert policy.asked == [0.0, 0.0, 5.0, 20.0, 50.0, 100.0]


class Idle:
    """A policy that starts nothing; with `pauses` it would pause and resume."""

    restart_s = 0.0

    def __init__(self, pauses=False, plan=()):
        self.pauses = pauses
        self.plan = plan

    def key(self, record, now):
        return (record.job.submitted,)

    def decide(self, view):
        return [decision for decision in self.plan if decision.job in {record.job.id for record in view.queue}]

    def wake(self, view):
        return None


class TestResumes:
    """A policy that does not pause need not know of pauses: the scheduler resumes what an owner lets go on."""

    def paused(self, policy, jobs=("a",), jobs_per_gpu=1):
        """Jobs on one GPU, each paused by its owner before the next came."""
        scheduler = Scheduler(policy, model(node_gpus=1), jobs_per_gpu)
        scheduler.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x1")])
        for name in jobs:
            scheduler.step(0.0, [ev.Submitted(0.0, job(name))])
            scheduler.state.apply(ev.Planned(0.0, (put(name, 0),)))
            events = [ev.Started(0.0, name, 1), ev.PausedByOwner(0.0, name), ev.Paused(0.0, name, 1)]
            assert scheduler.step(0.0, events) is None, "its owner keeps it paused"
        return scheduler

    def test_a_job_is_resumed_when_its_owner_says_so(self):
        scheduler = self.paused(Idle())
        planned = scheduler.step(5.0, [ev.ResumedByOwner(5.0, "a")])
        assert [(d.job, d.allocation.active) for d in planned.decisions] == [("a", True)]
        assert scheduler.state.jobs["a"].status == "resuming"

    def test_a_policy_that_pauses_decides_by_itself(self):
        scheduler = self.paused(Idle(pauses=True))
        assert scheduler.step(5.0, [ev.ResumedByOwner(5.0, "a")]) is None
        assert scheduler.state.jobs["a"].status == "paused"

    def test_only_as_many_as_there_is_room_for(self):
        scheduler = self.paused(Idle(), ("a", "b", "c"), jobs_per_gpu=2)
        planned = scheduler.step(5.0, [ev.ResumedByOwner(5.0, name) for name in "abc"])
        assert [decision.job for decision in planned.decisions] == ["a", "b"]
        scheduler.step(6.0, [ev.Resumed(6.0, "a", 1), ev.Resumed(6.0, "b", 1)])
        planned = scheduler.step(9.0, [ev.Finished(9.0, "a", 1)])
        assert [decision.job for decision in planned.decisions] == ["c"], "when there is room, the next"

    def test_what_the_policy_starts_goes_first(self):
        scheduler = self.paused(Idle(plan=[put("b", 0)]))
        planned = scheduler.step(5.0, [ev.Submitted(5.0, job("b")), ev.ResumedByOwner(5.0, "a")])
        assert [decision.job for decision in planned.decisions] == ["b"]

    def test_a_confirmed_resume_lets_the_policy_decide_again(self):
        scheduler = self.paused(Idle(pauses=True))
        for event in (ev.ResumedByOwner(5.0, "a"), ev.Planned(5.0, (put("a", 0),))):
            scheduler.state.apply(event)
        scheduler.state.needs_decision = False
        asked = scheduler.policy_calls
        scheduler.step(6.0, [ev.Resumed(6.0, "a", 1)])
        assert scheduler.policy_calls == asked + 1


def test_what_an_event_changed_is_known_to_the_policy_a_moment_later():
    """Live, a job's end is dated when it happened, a little before the turn that takes it in."""

    class Watching(Tiresias):
        pauses = True

        def decide(self, view):
            self.awakened = [job.job.id for job in view.awakened.values()]
            names = list(view.jobs)
            if view.now == 1.0:
                return [Decision("b", Allocation((0,), 1, active=False), "later")]
            return [put(name, 0) for name in names if not view.jobs[name].gpus]

    scheduler = Scheduler(Watching(), model(), jobs_per_gpu=3)
    scheduler.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x1", 64.0)])
    scheduler.step(0.0, [ev.Submitted(0.0, job(name)) for name in "abc"])
    scheduler.step(1.0, [ev.Started(1.0, name, 1) for name in "abc"], wake=True)
    scheduler.step(2.0, [ev.Paused(2.0, "b", 1)])
    scheduler.step(9.0, [ev.Finished(8.9, "a", 1)])
    assert scheduler.policy.awakened == ["b"]
    scheduler.step(20.0, [ev.Submitted(20.0, job("d"))])
    assert scheduler.policy.awakened == []
