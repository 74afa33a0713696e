"""Turns against an executor that only remembers: who is launched, when, and what reports become."""

import asyncio

from carpool.channel import Report, Shrinking
from carpool.core import events as ev
from carpool.core.model import Allocation, Decision
from carpool.live.executors.base import Ended, How, Outcome
from tests.support.fakes import FakeClock, FakeExecutor
from tests.support.services import one, serving, shell, told


def test_nobody_is_launched_where_somebody_is_still_leaving(quick_home):
    executor, clock = FakeExecutor(), FakeClock(1.0)
    options = {"gpus": 1, "jobs_per_gpu": 1, "executor": executor, "clock": clock}

    async def play():
        async with serving(quick_home, "tiresias:threshold_gpu_s=10", **options) as service:
            first = await one(service, shell("true"))
            await settle(service)
            executor.listener.gang_up(first, 1)
            await settle(service)
            clock.time = 100.0
            second = await one(service, shell("true"))
            await settle(service)
            assert executor.stopped == [((first, 1), How.SAVE)]
            assert [launch.job for launch in executor.launched] == [first]
            assert service.queries.show(second)["status"] == "starting"
            del executor.gangs[first, 1]
            executor.listener.gang_ended(Ended(first, 1, Outcome.STOPPED, done=40.0))
            await settle(service)
            assert [launch.job for launch in executor.launched] == [first, second]
            assert service._state.jobs[first].checkpoint == 40.0

    asyncio.run(play())


def test_a_job_that_is_cancelled_before_its_launch_never_runs(quick_home):
    executor = FakeExecutor()
    options = {"gpus": 1, "jobs_per_gpu": 1, "executor": executor, "clock": FakeClock(1.0)}

    async def play():
        async with serving(quick_home, **options) as service:
            executor.gangs["99", 1] = (0,)  # somebody from another life is on the GPU
            job = await one(service, shell("true"))
            await settle(service)
            assert service.queries.show(job)["status"] == "starting"
            await service.requests.cancel(job)
            assert await asyncio.wait_for(service.queries.wait(job), 5) == "cancelled"
            assert executor.launched == []

    asyncio.run(play())


def test_reports_are_thinned_and_tell_what_matters(quick_home):
    executor, clock = FakeExecutor(), FakeClock(1.0)

    async def play():
        async with serving(quick_home, gpus=1, executor=executor, clock=clock) as service:
            job = await one(service, shell("true", iterations=10_000, duration_s=1000, name="n", batch=8))
            await settle(service)
            executor.listener.gang_up(job, 1)
            await settle(service)
            for second in range(60):
                clock.time = 10.0 + second
                executor.reports[job, 1] = Report(
                    attempt=1, iteration=2 * second, seconds=0.5, shrinking=Shrinking.CERTIFIED, checkpoint=second // 30
                )
                reports = service._watch.read(service._state)
                service._driver.put(lambda now, batch, r=reports: service._watch.events(service._state, r, now))
                await settle(service)
            observed = told(service, "Observed")
            assert 5 <= len(observed) <= 7
            assert {event["iteration_s"] for event in observed} == {0.5}
            assert [event["done"] for event in told(service, "Checkpointed")] == [1.0]
            assert [event["can_shrink"] for event in told(service, "ConstraintsChanged")] == [True]
            assert service.queries.show(job)["progress"] == 118 / 10_000
            assert service._state.jobs[job].iteration_s == 0.5
            # memory ran out, and the library split the batch by itself
            clock.time += 1.0
            executor.reports[job, 1] = Report(attempt=1, iteration=120, seconds=0.6, accumulation=4, out_of_memory=2)
            reports = service._watch.read(service._state)
            service._driver.put(lambda now, batch: service._watch.events(service._state, reports, now))
            await settle(service)
            assert service._state.jobs[job].accumulation == 4
            # and a policy asks for another split, which is confirmed once it is in force
            decision = Decision(job, Allocation((0,), 8), "room for a guest")
            service._driver.tell(ev.Planned(clock.time, (decision,)))
            for accumulation in (4, 8, 8):
                clock.time += 1.0
                executor.reports[job, 1] = Report(attempt=1, iteration=121, seconds=0.6, accumulation=accumulation)
                await settle(service)
                reports = service._watch.read(service._state)
                service._driver.put(lambda now, batch, r=reports: service._watch.events(service._state, r, now))
                await settle(service)
            assert [(event["accumulation"], event["unasked"]) for event in told(service, "Retuned")] == [
                (4, True),
                (8, False),
            ]

    asyncio.run(play())


def test_a_job_whose_iterations_nobody_counted_keeps_its_estimate(quick_home):
    executor, clock = FakeExecutor(), FakeClock(1.0)

    async def play():
        async with serving(quick_home, gpus=1, executor=executor, clock=clock) as service:
            job = await one(service, shell("true", duration_s=100))
            await settle(service)
            executor.listener.gang_up(job, 1)
            await settle(service)
            executor.reports[job, 1] = Report(attempt=1, iteration=5000, seconds=0.01, checkpoint=4000)
            reports = service._watch.read(service._state)
            clock.time = 51.0
            service._driver.put(lambda now, batch: service._watch.events(service._state, reports, now))
            await settle(service)
            assert told(service, "Observed") == told(service, "Checkpointed") == []
            assert service._state.jobs[job].alone_left(51.0) == 50.0
            del executor.gangs[job, 1]
            service._driver.tell(ev.Finished(60.0, job, 1))
            assert await service.queries.wait(job) == "finished"

    asyncio.run(play())


async def settle(service) -> None:
    """Let the service take its turns until nothing more happens."""
    for _ in range(6):
        await service._driver.turn()
