"""Turns of the driver with an executor in memory: which gangs start and when, and which events reports become."""

import asyncio
import time

import pytest

from carpool.channel import Report, Shrinking
from carpool.core import events as ev
from carpool.core.model import Allocation, Closure, Decision, Limits, UserGroup
from carpool.live.executors.base import GangOutcome, StopMode
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.service import gang_outcomes
from tests.support.fakes import FakeClock
from tests.support.services import journalled, notes, one, serving, settle, shell, status, until


async def test_a_gang_is_launched_only_when_the_gang_before_it_has_left(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    options = {"jobs_per_gpu": 1, "executor": executor, "clock": clock}
    async with serving(quick_home, "tiresias:threshold_gpu_s=10", **options) as service:
        first = await one(service, shell("true"))
        await settle(service)
        executor.start((first, 1))
        await settle(service)
        clock.time = 100.0
        second = await one(service, shell("true"))
        await settle(service)
        assert executor.stopped == [((first, 1), StopMode.SAVE)]
        assert [launch.job for launch in executor.launched] == [first]
        assert status(service, second) == "starting"
        executor.end((first, 1), GangOutcome.STOPPED, checkpoint=40.0)
        await settle(service)
        assert [launch.job for launch in executor.launched] == [first, second]
        assert service.state.jobs[first].checkpoint == 40.0


@pytest.mark.parametrize("limited", ["the group's GPUs", "the user's GPUs", "the user's jobs"])
async def test_a_gang_waits_for_those_that_leave_other_gpus_if_both_are_more_than_allowed(
    quick_home, limited, monkeypatch
):
    monkeypatch.setattr("carpool.live.service.users.own_uid", lambda: 1000)
    executor = MemoryExecutor(gpus=3)
    async with serving(quick_home, "fifo", jobs_per_gpu=1, executor=executor, clock=FakeClock(1.0)) as service:
        row = {"uid": 1000, "role": "user", "token_hash": "", "revoked": False, "group": "red"}
        await service.requests.put_user("ann", row)
        if limited == "the group's GPUs":
            await service.requests.set_group(UserGroup("red", cap=1))
        else:
            await service.requests.set_limits("ann", Limits(gpus=1) if limited == "the user's GPUs" else Limits(jobs=1))
        first, second = [await one(service, shell("true"), "ann") for _ in range(2)]
        other = await one(service, shell("true"))
        await settle(service)
        executor.start((first, 1))
        executor.gangs[first, 1].report = Report(attempt=1, iteration=1, seconds=0.1)  # so it can be saved
        service.progress.look()
        await settle(service)
        await service.requests.hold(first)
        await service.requests.set_closure(Closure("node0:0", (0,), 1.0))  # its GPU
        await until(lambda: executor.stopped == [((first, 1), StopMode.SAVE)])
        assert service.state.jobs[second].gpus == (2,), "the plan gives it a free GPU"
        assert [launch.job for launch in executor.launched] == [first, other]
        executor.end((first, 1), GangOutcome.STOPPED)
        await settle(service)
        assert [launch.job for launch in executor.launched] == [first, other, second]


async def test_a_job_that_is_cancelled_before_its_launch_never_runs(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=clock) as service:
        first = await one(service, shell("true"))
        await settle(service)
        executor.start((first, 1))
        await settle(service)
        service.inbox.add_events(ev.Finished(2.0, first, 1))  # its gang is still there
        job = await one(service, shell("true"))
        await settle(service)
        assert status(service, job) == "starting"
        await service.requests.cancel(job)
        assert await asyncio.wait_for(service.queries.wait(job), 20) == "cancelled"
        assert [launch.job for launch in executor.launched] == [first]


async def test_a_policy_that_wants_to_be_asked_at_a_time_that_is_over_leaves_the_processor_alone(quick_home):
    async with serving(quick_home, executor=MemoryExecutor(gpus=1)) as service:
        asked = []
        service.driver.scheduler.policy.inner.wake = lambda view: asked.append(view.now) or view.now - 5.0
        await one(service, shell("true"))
        await asyncio.sleep(1.0)
        assert 3 <= len(asked) <= 25, "about ten times a second"


async def test_a_turn_tells_how_long_it_took_to_decide_and_counts_no_turn_in_which_the_policy_was_not_asked(quick_home):
    class Watcher:
        def __init__(self):
            self.turns = []

        def turned(self, turn):
            self.turns.append((service.driver.scheduler.policy_calls, turn.decision_s))

    def slow(view):
        time.sleep(0.2)
        return decide(view)

    def counted(le):
        return service.metrics.registry.get_sample_value("carpool_decision_seconds_bucket", {"le": le})

    async with serving(quick_home, executor=MemoryExecutor(gpus=1), clock=FakeClock(1.0)) as service:
        policy, watcher = service.driver.scheduler.policy.inner, Watcher()
        decide, policy.decide = policy.decide, slow
        await settle(service)
        service.driver.observers.append(watcher)
        calls, quick, before = service.driver.scheduler.policy_calls, counted("0.2"), counted("+Inf")
        await one(service, shell("true"))
        await settle(service)
        service.inbox.note("nothing to decide")
        await settle(service)
        asked = 0
        for after, decision_s in watcher.turns:
            assert (decision_s is not None) == (after > calls)
            if decision_s is not None:
                asked += 1
                assert 0.2 <= decision_s < 5.0
            calls = after
        assert 0 < asked < len(watcher.turns)
        assert (counted("0.2"), counted("+Inf")) == (quick, before + asked)


async def test_an_input_that_cannot_be_understood_stops_nothing_else(quick_home):
    def broken(now, commit):
        commit.meta["half"] = "written"
        raise ZeroDivisionError("of a report")

    async with serving(quick_home, executor=MemoryExecutor(gpus=1), clock=FakeClock(1.0)) as service:
        service.inbox.add(broken)
        job = await one(service, shell("true"))
        with pytest.raises(ZeroDivisionError):
            await service.inbox.request(broken)
        await settle(service)
        assert status(service, job) == "starting"
        assert "half" not in service.store.meta(), "what fails adds nothing"
        assert [text for text in notes(service) if "ZeroDivisionError: of a report" in text]


async def test_a_job_whose_end_cannot_be_understood_fails(quick_home, monkeypatch):
    executor = MemoryExecutor(gpus=1)
    async with serving(quick_home, executor=executor, clock=FakeClock(1.0)) as service:
        job = await one(service, shell("true"))
        await settle(service)
        executor.start((job, 1))
        await settle(service)
        executor.end((job, 1), "no outcome", checkpoint="nowhere")
        monkeypatch.setattr(gang_outcomes, "RESTARTED", None)
        assert await service.queries.wait(job) == "failed"
        assert "its end was not understood" in service.queries.show(job)["reason"]


async def test_reports_become_few_events_that_say_what_changed(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await one(service, shell("true", iterations=10_000, duration_s=1000, name="n", batch=8))
        await settle(service)
        executor.start((job, 1))
        await settle(service)
        gang = executor.gangs[job, 1]
        for second in range(60):
            clock.time = 10.0 + second
            gang.report = Report(
                attempt=1, iteration=2 * second, seconds=0.5, shrinking=Shrinking.CERTIFIED, checkpoint=second // 30
            )
            service.progress.look()
            await settle(service)
        observed = journalled(service, "Observed")
        assert 5 <= len(observed) <= 7
        assert {event["iteration_s"] for event in observed} == {0.5}
        assert [event["done"] for event in journalled(service, "Checkpointed")] == [1.0]
        assert [event["can_shrink"] for event in journalled(service, "ConstraintsChanged")] == [True]
        assert service.queries.show(job)["progress"] == 118 / 10_000
        assert service.state.jobs[job].iteration_s == 0.5
        # memory ran out, and the training library split the batch by itself
        clock.time += 1.0
        gang.report = Report(attempt=1, iteration=120, seconds=0.6, accumulation=4, out_of_memory=2)
        service.progress.look()
        await settle(service)
        assert service.state.jobs[job].accumulation == 4
        # a policy asks for another accumulation, which is confirmed once it is in force
        decision = Decision(job, Allocation((0,), 8), "room for a guest")
        service.inbox.add_events(ev.Planned(clock.time, (decision,)))
        for accumulation in (4, 8, 8):
            clock.time += 1.0
            gang.report = Report(attempt=1, iteration=121, seconds=0.6, accumulation=accumulation)
            await settle(service)
            service.progress.look()
            await settle(service)
        retuned = journalled(service, "Retuned")
        assert [(event["accumulation"], event["unasked"]) for event in retuned] == [(4, True), (8, False)]


async def test_a_job_without_a_number_of_iterations_keeps_its_estimate(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await one(service, shell("true", duration_s=100))
        await settle(service)
        executor.start((job, 1))
        await settle(service)
        executor.gangs[job, 1].report = Report(attempt=1, iteration=5000, seconds=0.01, checkpoint=4000)
        clock.time = 51.0
        service.progress.look()
        await settle(service)
        assert journalled(service, "Observed") == journalled(service, "Checkpointed") == []
        assert service.state.jobs[job].alone_left(51.0) == 50.0
        executor.end((job, 1))
        assert await service.queries.wait(job) == "finished"


async def test_a_job_that_node_faults_hit_too_often_restarts_alone(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await one(service, shell("true"))
        for attempt in (1, 2, 3, 4):
            await settle(service)
            executor.start((job, attempt))
            await settle(service)
            assert not executor.launched[-1].exclusive
            executor.end((job, attempt), GangOutcome.LOST, "the node failed", node_fault=True)
        await settle(service)
        assert executor.launched[-1].exclusive
        reasons = [event["reason"] for event in journalled(service, "Failed")]
        assert reasons[:3] == ["the node failed"] * 3
        assert "node faults hit it 4 times, so it restarts alone" in reasons[3]


async def test_jobs_of_a_lost_node_start_again_on_another_one(quick_home):
    executor = MemoryExecutor(gpus=1, node_names=["node0", "node1"])
    clock = FakeClock(1.0)
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=clock) as service:
        jobs = [await one(service, shell("true")) for _ in range(2)]
        await settle(service)
        for job in jobs:
            executor.start((job, 1))
        await settle(service)
        on = {job: service.queries.show(job)["on"] for job in jobs}
        assert sorted(on.values()) == [["node0:0"], ["node1:0"]]
        moved = next(job for job in jobs if on[job] == ["node1:0"])
        executor.node_names = ["node0"]
        executor.listener.nodes_changed()
        await settle(service)
        assert status(service, moved) == "pending"
        assert ((moved, 1), StopMode.SAVE) in executor.stopped
        assert [node["node"] for node in service.queries.gpus()["nodes"]] == ["node0"]
        executor.end((moved, 1), GangOutcome.STOPPED)
        (other,) = set(jobs) - {moved}
        executor.end((other, 1))
        await settle(service)
        assert executor.launched[-1].key == (moved, 2)
        assert service.queries.show(moved)["on"] == ["node0:0"]
