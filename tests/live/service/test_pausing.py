"""Pauses through the service: when the executor is asked, what the journal knows, and what users see."""

import asyncio

import pytest

from carpool.channel import Report
from carpool.core.model import Allocation, Decision
from carpool.live.errors import WrongStatus
from carpool.live.executors.base import StopMode
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.spec import Spec
from tests.support.fakes import FakeClock
from tests.support.processes import is_paused
from tests.support.services import journalled, notes, one, output, serving, settle, shell, started, status, until

WRITING = "while true; do echo x; sleep 0.02; done"


async def running(service, executor, **fields) -> str:
    job = await one(service, shell("true", duration_s=1000, **fields))
    await settle(service)
    executor.start((job, 1))
    await settle(service)
    assert status(service, job) == "running"
    return job


class Scripted:
    """A policy that decides one plan when it is asked, and nothing before and after."""

    pauses, in_rounds, restart_s = True, False, 0.0

    def __init__(self, *plan: tuple[str, Allocation]) -> None:
        self.plans = [[Decision(job, allocation, "a test") for job, allocation in plan]]

    def key(self, job, now):
        return (0.0,)

    def decide(self, view):
        return self.plans.pop() if self.plans else ()

    def wake(self, view):
        return None


async def test_a_job_that_started_ahead_computes_once_its_gpus_are_clear_whatever_restarts(quick_home, tmp_path):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    options = {"jobs_per_gpu": 1, "resident_per_gpu": 3, "executor": executor, "clock": clock}
    stands = Allocation((0,), active=False)
    async with serving(quick_home, **options) as service:
        host = await running(service, executor)
        guest = str(int(host) + 1)
        service.driver.scheduler.policy = Scripted((guest, stands))
        (tmp_path / "train.py").write_text("import torch\noptimizer.step()\n")
        await one(service, Spec(command=("python", "train.py"), directory=str(tmp_path), duration_s=1000.0))
        await settle(service)
        assert [(launch.job, launch.ahead) for launch in executor.launched] == [(host, False), (guest, True)]
        executor.start((guest, 1))
        await settle(service)
    async with serving(quick_home, **options) as service:
        await settle(service)
        assert executor.switched == [], "it starts up, and nothing lets it compute"
        service.driver.scheduler.policy = Scripted((host, stands))
        await one(service, shell("true", duration_s=1000))
        await settle(service)
        executor.gangs[guest, 1].report = Report(attempt=1, iteration=1)
        service.warm_up.look()
        await settle(service)
        assert [status(service, job) for job in (host, guest)] == ["pausing", "running"]
        assert executor.switched == [((host, 1), True)], "its host may still compute"
    async with serving(quick_home, **options) as service:
        await settle(service)
        assert executor.switched == [((host, 1), True)]
        executor.switch((host, 1))
        await settle(service)
        assert executor.switched == [((host, 1), True), ((guest, 1), False)]


async def test_a_launch_and_a_resume_wait_for_the_pause_on_their_gpus(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=clock) as service:
        first = await running(service, executor)
        stands, runs = Allocation((0,), active=False), Allocation((0,))
        service.driver.scheduler.policy = Scripted((first, stands), (str(int(first) + 1), runs))
        second = await one(service, shell("true", duration_s=1000))
        await settle(service)
        assert executor.switched == [((first, 1), True)]
        assert [launch.job for launch in executor.launched] == [first], "it starts beside a job that may still compute"
        executor.switch((first, 1))
        await settle(service)
        assert [launch.job for launch in executor.launched] == [first, second]
        executor.start((second, 1))
        await settle(service)
        service.driver.scheduler.policy = Scripted((second, stands), (first, runs))
        await one(service, shell("true", duration_s=1000))
        await settle(service)
        assert executor.switched[1:] == [((second, 1), True)]
        assert [status(service, job) for job in (first, second)] == ["resuming", "pausing"]
        executor.switch((second, 1))
        await settle(service)
        assert executor.switched[2:] == [((first, 1), False)]
        executor.switch((first, 1))
        await settle(service)
        assert [status(service, job) for job in (first, second)] == ["running", "paused"]
        said = service.queries.explain(second)
        assert (said["reason"], said["resume"]["value"]) == ("a test", pytest.approx(1001.0, abs=1.0))
        assert any(line.startswith("It should go on at") for line in said["sentences"])


async def test_the_executor_is_not_asked_before_the_journal_has_the_plan(quick_home, monkeypatch):
    executor, clock = MemoryExecutor(gpus=1, automatic=True), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await one(service, shell("true", duration_s=1000))
        await until(lambda: status(service, job) == "running")
        known = []
        monkeypatch.setattr(executor, "resume", lambda key: known.append(journalled(service, "Planned")[-1]))
        await service.requests.pause(job)
        await until(lambda: status(service, job) == "paused")
        await service.requests.resume(job)  # the scheduler itself plans the resume
        await until(lambda: known)
        assert all(plan["decisions"][0]["why"] == "nothing keeps it paused any more" for plan in known)


async def test_paused_time_is_neither_run_time_nor_waiting(quick_home):
    executor, clock = MemoryExecutor(gpus=1, automatic=True), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await running(service, executor)
        clock.time = 101.0
        await service.requests.pause(job)
        await until(lambda: status(service, job) == "paused")
        clock.time = 601.0
        row = service.queries.show(job)
        assert (row["status"], row["progress"]) == ("paused", 0.1)
        assert (row["ran_s"], row["waited_s"], row["paused_s"], row["pauses"]) == (100.0, 0.0, 500.0, 1)
        said = service.queries.explain(job)
        assert "its owner paused it" in said["reason"]
        assert said["end"] is None
        assert "paused" in service.queries.jobs()[0]["reason"]
        await service.requests.resume(job)
        await until(lambda: status(service, job) == "running")
        clock.time = 606.0  # an explanation may use a forecast that is a moment old
        assert service.queries.explain(job)["end"]["value"] == pytest.approx(1501.0, abs=1.0)
        clock.time = 1501.0
        executor.end((job, 1))
        assert await service.queries.wait(job) == "finished"
        receipt = service.queries.show(job)["receipt"]
        assert (receipt["ran_s"], receipt["waited_s"], receipt["pauses"], receipt["paused_s"]) == (1000, 0, 1, 500)
        assert "was paused once for" in receipt["sentences"][0]
        await settle(service)
        (judged,) = [row for row in service.store.estimates() if row["kind"] == "duration"]
        assert judged["actual"] == 1000.0


async def test_a_measurement_across_a_pause_is_not_taken(quick_home):
    executor, clock = MemoryExecutor(gpus=1, automatic=True), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        job = await running(service, executor, iterations=10_000, name="n")
        gang = executor.gangs[job, 1]

        async def report(at: float, iteration: int, seconds: float) -> None:
            clock.time = at
            gang.report = Report(attempt=1, iteration=iteration, seconds=seconds)
            service.progress.look()
            await settle(service)

        await report(10.0, 100, 0.1)
        await report(25.0, 250, 0.1)
        await service.requests.pause(job)
        await until(lambda: status(service, job) == "paused")
        await report(400.0, 251, 0.1)
        assert service.queries.show(job)["progress"] == 0.025
        await service.requests.resume(job)
        await until(lambda: status(service, job) == "running")
        await report(401.0, 252, 300.0)
        await report(402.0, 253, 250.0)
        assert {event["iteration_s"] for event in journalled(service, "Observed")} == {0.1}
        await report(415.0, 380, 0.1)
        await report(430.0, 530, 0.2)
        assert journalled(service, "Observed")[-1]["iteration_s"] == 0.2


async def test_a_plain_gang_goes_on_after_a_while_and_one_with_the_library_does_not(quick_home):
    executor, clock = MemoryExecutor(gpus=4, automatic=True), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock, gang_pause_s=240.0) as service:
        plain, agreed = [await running(service, executor, gpus=2) for _ in range(2)]
        assert not service.state.jobs[plain].job.can_pause
        executor.gangs[agreed, 1].report = Report(attempt=1, can_stand=True)
        service.progress.look()
        await settle(service)
        assert service.state.jobs[agreed].job.can_pause
        for job in (plain, agreed):
            await service.requests.pause(job)
        await until(lambda: status(service, job) == "paused")
        for time, expected in ((200.0, "paused"), (242.0, "running")):
            clock.time = time
            service.pause_limit.look()
            await until(lambda expected=expected: status(service, plain) == expected)
            await settle(service)
            assert (status(service, plain), status(service, agreed)) == (expected, "paused")
        assert any("goes on after 4 min" in note for note in notes(service))


async def test_only_running_jobs_are_paused_and_only_paused_ones_resumed(quick_home):
    executor, clock = MemoryExecutor(gpus=1, automatic=True), FakeClock(1.0)
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=clock) as service:
        job, waiting = await running(service, executor), await one(service, shell("true", duration_s=1000))
        with pytest.raises(WrongStatus, match="is not paused"):
            await service.requests.resume(job)
        with pytest.raises(WrongStatus, match="only a running job can be paused"):
            await service.requests.pause(waiting)
        await service.requests.pause(job)
        await service.requests.pause(job)
        await service.requests.requeue(job)
        await until(lambda: status(service, job) == "pending")
        assert executor.stopped == [((job, 1), StopMode.SAVE)]
        assert service.queries.show(job)["held"], "it has no place left to be paused in"


async def test_real_jobs_are_paused_and_found_paused_by_the_next_service(home):
    async with serving(home, gpus=1) as service:
        job = await one(service, shell(WRITING))
        await started(service, job)
        await until(lambda: output(service, job))
        await service.requests.pause(job)
        await until(lambda: status(service, job) == "paused")
        before = output(service, job)
    async with serving(home, gpus=1) as service:
        assert status(service, job) == "paused"
        await asyncio.sleep(0.3)
        assert output(service, job) == before
        await service.requests.resume(job)
        await until(lambda: len(output(service, job)) > len(before))
        await service.requests.pause(job)
        await until(lambda: status(service, job) == "paused")
        await service.requests.cancel(job)
        assert await asyncio.wait_for(service.queries.wait(job), 20) == "cancelled"


async def test_a_pause_that_the_journal_knows_is_carried_out_by_the_next_service(home, monkeypatch):
    """The service is gone after it wrote the pause, and again after it wrote the resume."""
    async with serving(home, gpus=1) as service:
        job = await one(service, shell(WRITING))
        await started(service, job)
        pid = await until(lambda: service.queries.show(job)["attempts"][0]["ranks"][0]["pid"])
        monkeypatch.setattr(service.executor, "pause", lambda key, **_: None)
        await service.requests.pause(job)
        assert status(service, job) == "pausing"
    async with serving(home, gpus=1) as service:
        await until(lambda: status(service, job) == "paused")
        assert is_paused(pid)
        monkeypatch.setattr(service.executor, "resume", lambda key: None)
        await service.requests.resume(job)
        await until(lambda: status(service, job) == "resuming")
        assert is_paused(pid)
    async with serving(home, gpus=1) as service:
        await until(lambda: status(service, job) == "running")
        assert not is_paused(pid)
        await service.requests.cancel(job)
        await asyncio.wait_for(service.queries.wait(job), 20)
