"""Drained and reserved GPUs through the service: what starts there, what moves, and what a restart keeps."""

import pytest

from carpool.channel import Report
from carpool.core.model import Closure
from carpool.live.errors import WrongStatus
from carpool.live.executors.base import GangOutcome, StopMode
from carpool.live.executors.memory import MemoryExecutor
from tests.support.fakes import FakeClock
from tests.support.services import journalled, one, serving, settle, shell, status


async def begin(service, executor, **fields) -> str:
    job = await one(service, shell("true", **fields))
    await settle(service)
    if (job, 1) in executor.gangs:
        executor.start((job, 1))
        await settle(service)
    return job


async def show(service, executor, job, **report):
    """Let a job's worker report: with the training library, or watched."""
    executor.gangs[job, 1].report = Report(attempt=1, iteration=1, seconds=0.1, **report)
    service.progress.look()
    await settle(service)


async def later(service, clock, seconds):
    clock.time += seconds
    service.due_events.look()
    await settle(service)


async def test_jobs_save_and_move_or_are_paused_when_a_drain_begins_over_restarts(quick_home):
    executor, clock = MemoryExecutor(gpus=2), FakeClock(1000.0)
    options = {"executor": executor, "clock": clock, "policy": "sjf"}
    async with serving(quick_home, **options) as service:
        saved = await begin(service, executor, duration_s=5000)
        kept = await begin(service, executor, duration_s=5000, can_checkpoint=False)
        assert [service.state.jobs[job].gpus for job in (saved, kept)] == [(0,), (1,)]
        await show(service, executor, saved)
        await service.requests.set_closure(Closure("node0", (0, 1), 1100.0))
        await later(service, clock, 50.0)
        assert executor.stopped == []
        gpus = service.queries.gpus()["nodes"][0]["gpus"]
        assert all(row["closed"].startswith("drained from") for row in gpus)
    async with serving(quick_home, **options) as service:
        await later(service, clock, 49.0)
        assert executor.stopped == []
        await later(service, clock, 1.0)
        assert executor.stopped == [((saved, 1), StopMode.SAVE)]
        assert executor.switched == [((kept, 1), True)]
        executor.switch((kept, 1))
        executor.end((saved, 1), GangOutcome.STOPPED, checkpoint=5.0)
        await settle(service)
        assert [status(service, job) for job in (saved, kept)] == ["pending", "paused"]
        assert "2 GPUs are drained (node0), and it would run into that." in service.queries.explain(saved)["sentences"]
        with pytest.raises(WrongStatus, match="while its GPUs are drained or reserved"):
            await service.requests.resume(kept)
    async with serving(quick_home, **options) as service:
        await later(service, clock, 60.0)
        assert [status(service, job) for job in (saved, kept)] == ["pending", "paused"], "a restart opens nothing"
        await service.requests.remove_closure("node0")
        await settle(service)
        assert (executor.launched[-1].job, executor.launched[-1].attempt) == (saved, 2)
        assert executor.switched[-1] == ((kept, 1), False)


async def test_work_that_would_be_lost_is_paused_and_not_stopped_when_a_reservation_begins(quick_home):
    executor, clock = MemoryExecutor(gpus=3), FakeClock(1000.0)
    async with serving(quick_home, executor=executor, clock=clock, policy="sjf") as service:
        saves, watched, silent = [await begin(service, executor, duration_s=5000) for _ in range(3)]
        await show(service, executor, saves)
        await show(service, executor, watched, watched=True)
        assert [service.state.jobs[job].job.saves for job in (saves, watched, silent)] == [True, False, None]
        await service.requests.set_closure(Closure("r1", (0, 1, 2), 1100.0, 1200.0, "red"))
        await later(service, clock, 100.0)
        assert executor.stopped == [((saves, 1), StopMode.SAVE)]
        assert sorted(executor.switched) == [((watched, 1), True), ((silent, 1), True)]
        for job in (watched, silent):
            executor.switch((job, 1))
        await settle(service)
        assert [status(service, job) for job in (watched, silent)] == ["paused", "paused"]
        assert len(journalled(service, "SavingSeen")) == 2, "once for each job"


async def test_an_owner_cannot_resume_on_drained_gpus_what_was_paused_before(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1000.0)
    options = {"executor": executor, "clock": clock, "policy": "sjf"}
    async with serving(quick_home, **options) as service:
        job = await begin(service, executor, duration_s=5000, can_checkpoint=False)
        await service.requests.pause(job)
        executor.switch((job, 1))
        await service.requests.set_closure(Closure("node0", (0,), 1100.0))
        await later(service, clock, 100.0)
    async with serving(quick_home, **options) as service:
        with pytest.raises(WrongStatus, match="while its GPUs are drained or reserved"):
            await service.requests.resume(job)
        await service.requests.remove_closure("node0")
        await settle(service)
        assert status(service, job) == "paused", "its owner wants it so"
        await service.requests.resume(job)
        await settle(service)
        assert executor.switched[-1] == ((job, 1), False)


async def test_reserved_gpus_take_the_jobs_of_their_group_and_those_that_end_before(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1000.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        await service.requests.put_user("ann", {"role": "user", "group": "red", "uid": 1000, "token_hash": ""})
        await service.requests.set_closure(Closure("r1", (0,), 1100.0, 1200.0, "red"))
        long = await begin(service, executor, duration_s=90)
        assert status(service, long) == "pending", "its guess may be too short by more than 10 s"
        starts = service.queries.explain(long)["start"]
        assert starts["value"] == 1200.0, "when the reservation is over"
        short = await begin(service, executor, duration_s=20)
        assert status(service, short) == "running"
        executor.end((short, 1))
        await later(service, clock, 100.0)
        assert status(service, long) == "pending"
        (own,) = await service.requests.submit([shell("true", duration_s=500)], "ann")
        await settle(service)
        assert executor.launched[-1].job == own
        executor.start((own, 1))
        await settle(service)
        await later(service, clock, 100.0)
        assert service.queries.closures() == []
        assert status(service, own) == "running"
