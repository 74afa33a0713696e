"""Time limits through the service: the warning, the request for a checkpoint, the end, and what a restart keeps."""

import pytest

from carpool.channel import Report
from carpool.core.model import UserGroup
from carpool.errors import InputError
from carpool.live.executors.base import GangOutcome, StopMode
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.service.notice_queue import DueNotice
from tests.support.fakes import FakeClock
from tests.support.services import journalled, one, output, serving, settle, shell, started, status, until


async def running(service, executor, **fields) -> str:
    job = await one(service, shell("true", duration_s=1000, **fields))
    await settle(service)
    executor.start((job, 1))
    await settle(service)
    return job


async def later(service, clock, seconds):
    clock.time += seconds
    service.due_events.look()
    await settle(service)


async def test_a_job_is_warned_saves_and_ends_at_its_limit_over_restarts(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    options = {"executor": executor, "clock": clock}
    async with serving(quick_home, **options) as service:
        job = await running(service, executor, limit_s=100, notify={"limit": "https://notices.example/x"})
        await later(service, clock, 80.0)
        assert executor.checkpoints == []
        assert service.queries.show(job)["limit_left_s"] == pytest.approx(20.0)
        said = service.queries.explain(job)
        assert "Its time limit: after 20 s of computing it saves and ends." in said["sentences"]
        assert said["end"]["value"] == pytest.approx(101.0), "at its limit"
    async with serving(quick_home, **options) as service:
        told: list[DueNotice] = []
        service.notifier._queue.add = told.append
        await later(service, clock, 10.0)
        assert executor.checkpoints == [(job, 1)], "a tenth of the limit is left"
        assert [row["left_s"] for row in journalled(service, "LimitNeared")] == [pytest.approx(10.0)]
        assert told[0].notice.title == f"Carpool: job {job} reaches its time limit in 10 s"
    async with serving(quick_home, **options) as service:
        await later(service, clock, 5.0)
        assert executor.checkpoints == [(job, 1)], "one warning is enough"
        await later(service, clock, 5.0)
        assert executor.stopped == [((job, 1), StopMode.SAVE)]
        assert service.queries.show(job)["reason"] == "ran to its limit of 1.67m"
    async with serving(quick_home, **options) as service:
        await settle(service)
        assert {mode for _, mode in executor.stopped} == {StopMode.SAVE}, "a restarted service lets it save, too"
        executor.end((job, 1), GangOutcome.STOPPED, checkpoint=5.0)
        await settle(service)
        row = service.queries.show(job)
        assert (row["status"], row["reason"]) == ("failed", "ran to its limit of 1.67m")


async def test_a_service_looks_at_limits_as_soon_as_it_is_up(quick_home, monkeypatch):
    """Else one that is killed again and again ends no job."""
    monkeypatch.setattr("carpool.live.service.due_events.EVERY_S", 3600.0)
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await running(service, executor, limit_s=100)
    clock.time += 101.0
    async with serving(quick_home, executor=executor, clock=clock):
        await until(lambda: executor.stopped)
        assert executor.stopped == [((job, 1), StopMode.SAVE)]


async def test_a_job_with_requeue_goes_on_from_its_checkpoint_as_the_next_attempt(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await running(service, executor, limit_s=100, requeue=True, iterations=1000)
        await later(service, clock, 101.0)
        assert executor.stopped == [((job, 1), StopMode.SAVE)]
        executor.end((job, 1), GangOutcome.STOPPED, checkpoint=90.0)
        await settle(service)
        assert (executor.launched[-1].job, executor.launched[-1].attempt) == (job, 2)
        executor.start((job, 2))
        await settle(service)
        record = service.state.jobs[job]
        assert record.done >= 90.0
        assert record.limit_left(clock.now()) == pytest.approx(100.0)


async def test_an_owner_may_cancel_a_job_that_saves_at_its_limit(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await running(service, executor, limit_s=100)
        await later(service, clock, 101.0)
        await service.requests.cancel(job)
        assert executor.stopped[-1] == ((job, 1), StopMode.TERMINATE)
        executor.end((job, 1), GangOutcome.STOPPED)
        await settle(service)
        assert status(service, job) == "cancelled"


async def test_a_pause_does_not_count(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await running(service, executor, limit_s=100)
        executor.gangs[job, 1].report = Report(attempt=1)
        await service.requests.pause(job)
        executor.switch((job, 1))
        await later(service, clock, 500.0)
        assert status(service, job) == "paused"
        assert not executor.stopped


async def test_a_group_gives_its_jobs_a_limit_and_refuses_a_longer_one(quick_home):
    async with serving(quick_home, executor=MemoryExecutor(gpus=1), clock=FakeClock(1.0)) as service:
        await service.requests.put_user("ann", {"role": "user", "group": "red", "uid": 1000, "token_hash": ""})
        await service.requests.set_group(UserGroup("red", default_limit_s=60.0, max_limit_s=120.0))
        job = await one(service, shell("true"), "ann")
        assert service.queries.show(job)["limit_s"] == 60.0
        with pytest.raises(InputError, match="limit: it asks for 3m and group red allows 2m; ask for at most that"):
            await one(service, shell("true", limit_s=180), "ann")


async def test_a_job_cannot_get_round_its_limit_by_a_long_time_to_leave(quick_home):
    async with serving(quick_home, executor=MemoryExecutor(gpus=1), clock=FakeClock(1.0)) as service:
        with pytest.raises(InputError, match=r"grace: 1 d is longer than this service allows \(1 h\)"):
            await one(service, shell("true", grace_s=86_400))
    async with serving(quick_home, executor=MemoryExecutor(gpus=1), clock=FakeClock(1.0), max_grace_s=9e4) as service:
        assert await one(service, shell("true", grace_s=86_400))


@pytest.mark.slow
async def test_a_real_job_ends_at_its_limit(home):
    async with serving(home) as service:
        job = await one(service, shell("trap 'echo asked; exit 0' TERM; while true; do sleep 0.05; done", limit_s=1))
        await started(service, job)
        await until(lambda: status(service, job) in ("failed", "finished"))
        assert service.queries.show(job)["reason"] == "ran to its limit of 1s"
        assert output(service, job) == "asked\n"
