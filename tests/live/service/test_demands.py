"""Demands, start-ups and speeds of jobs of which nobody gave the number of iterations, as the service notices them."""

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from carpool.channel import Report
from carpool.core.guesses import expected_left
from carpool.core.model import Status
from carpool.core.trial import Side, Trial
from carpool.gpu.counters import GpuUse
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.service.warm_up import may_train
from tests.support.fakes import FakeClock
from tests.support.services import journalled, one, python, serving, settle, shell


@dataclass
class MeasuringExecutor(MemoryExecutor):
    """An executor whose GPUs have counters."""

    use: dict[int, GpuUse] = field(default_factory=dict)

    def gpu_use(self, gpu):
        return self.use.get(gpu)


def report(executor, key, iteration, at, seconds=0.1, **more):
    executor.gangs[key].report = Report(attempt=key[1], iteration=iteration, seconds=seconds, time=at, **more)


async def looks(service, number=1):
    for _ in range(number):
        service.demands.look()
        await settle(service)


async def start(service, executor, *jobs):
    await settle(service)
    for job in jobs:
        executor.start((job, service.state.jobs[job].attempt))
    await settle(service)


async def join(service, executor):
    """Let another job join, as `sjf-ffs` wants at once."""
    job = await one(service, shell("echo guest", duration_s=100.0))
    await start(service, executor, job)
    return job


FULL = GpuUse(sm=0.8, busy=0.8, dram=0.5, tensor=0.2, occupancy=None, gpm=True)
LIGHT = GpuUse(sm=0.1, busy=0.1, dram=0.0, tensor=0.0, occupancy=None, gpm=True)


class Steps:
    """A training on a GPU with counters: each look of the service comes after some more of its steps."""

    def __init__(self, service, executor, clock, job):
        self.service, self.executor, self.clock, self.job = service, executor, clock, job
        self.iteration, self.wall = 0, time.time() - 1000.0

    async def look(self, use, steps, seconds=0.1, number=1):
        """Let a quarter of a second pass, in which the job makes so many steps and the GPU is used like that."""
        for _ in range(number):
            self.clock.time += 0.25
            self.iteration += steps
            more = {"peak_memory": 2**30, "watched": True}
            report(self.executor, (self.job, 1), self.iteration, self.wall + self.clock.time, seconds, **more)
            self.executor.use[0] = use
            self.service.progress.look()
            await settle(self.service)
            await looks(self.service)

    @property
    def demands(self):
        return [event["demand"] for event in journalled(self.service, "DemandMeasured")]


@asynccontextmanager
async def stepping(home):
    executor, clock = MeasuringExecutor(gpus=1), FakeClock(1.0)
    async with serving(home, "sjf-ffs", executor=executor, clock=clock) as service:
        job = await one(service, shell("echo host", duration_s=100.0))
        await start(service, executor, job)
        yield Steps(service, executor, clock, job)


async def test_a_demand_is_measured_while_a_job_alone_computes(quick_home):
    async with stepping(quick_home) as training:
        service, executor = training.service, training.executor
        await training.look(LIGHT, 50)
        assert service.queries.show(training.job)["demand"] is None, (
            "it may have been alone for a part of the time only"
        )
        await training.look(FULL, 5)
        shown = service.queries.show(training.job)["demand"]
        assert (shown["sm"], shown["tensor"]) == (pytest.approx(0.8), pytest.approx(0.2))
        assert (shown["dram"], shown["memory"], shown["gpm"]) == (0.5, 2**30, True)
        assert any(
            "80% of a GPU's multiprocessors" in line for line in service.queries.explain(training.job)["sentences"]
        )
        await training.look(FULL, 5, number=5)
        assert service.queries.show(training.job)["demand"]["iteration_s"] == pytest.approx(0.05)
        told = len(training.demands)
        await training.look(FULL, 5, number=20)
        assert len(training.demands) == told, "it has not changed"
        guest = await join(service, executor)
        await training.look(LIGHT, 5, number=20)
        assert len(training.demands) == told, "the counters are those of both"
        executor.end((guest, 1))
        await settle(service)
        await training.look(LIGHT, 5)
        assert len(training.demands) == told
        await training.look(LIGHT, 5, number=8)
        assert training.demands[-1]["sm"] < 0.3, "it uses the GPU less now"


async def test_a_demand_is_that_of_steps_and_not_of_what_comes_before_and_after_them(quick_home):
    async with stepping(quick_home) as training:
        await training.look(LIGHT, 0)
        await training.look(LIGHT, 1, number=2)
        await training.look(LIGHT, 8)
        assert training.demands == [], "its first steps load kernels"
        await training.look(FULL, 10, number=3)
        await training.look(LIGHT, 2)
        await training.look(LIGHT, 0, number=20)
        assert training.demands, "it was measured"
        assert all(demand["sm"] == pytest.approx(0.8) for demand in training.demands), "its process ends, without steps"


async def test_long_steps_count_once_they_are_done(quick_home):
    async with stepping(quick_home) as training:
        await training.look(LIGHT, 9)
        await training.look(FULL, 0, number=9)
        assert training.demands == []
        await training.look(FULL, 1)
        assert training.demands[0]["sm"] == pytest.approx(0.8)


async def test_a_pause_is_no_part_of_the_time_of_a_step(quick_home):
    """After a pause, the worker's moving average is too long by far: the pause was in one of its steps."""
    async with stepping(quick_home) as training:
        await training.look(FULL, 5, seconds=2.0, number=8)
        assert training.demands, "it was measured"
        assert training.demands[-1]["iteration_s"] == pytest.approx(0.05)
        assert all(demand["iteration_s"] < 0.1 for demand in training.demands)


async def test_an_executor_without_counters_measures_nothing(quick_home):
    async with serving(quick_home, executor=MemoryExecutor(gpus=1), clock=FakeClock(1.0)) as service:
        await start(service, service.executor, await one(service, shell("true")))
        await looks(service, 4)
        assert journalled(service, "DemandMeasured") == []


async def test_a_training_warms_up_until_its_first_step(quick_home):
    executor, clock = MemoryExecutor(gpus=4), FakeClock(1.0)
    async with serving(quick_home, executor=executor, clock=clock) as service:
        jobs = [await one(service, python("pass", str(n), iterations=100, duration_s=50)) for n in range(3)]
        plain = await one(service, shell("sleep 3"))
        await start(service, executor, *jobs, plain)
        steps, imports, silent = jobs
        warming = lambda: {job for job in (*jobs, plain) if service.state.jobs[job].warming_up}  # noqa: E731
        assert warming() == {steps, imports, silent}, "a program that is no training computes at once"
        assert "starts up" in " ".join(service.queries.explain(steps)["sentences"])
        for at, job, iteration in ((3.0, imports, 0), (4.0, steps, 1)):
            clock.time = at
            report(executor, (job, 1), iteration, at, watched=True)
            service.warm_up.look()
            service.progress.look()
            await settle(service)
        assert warming() == {imports, silent}
        assert service.state.jobs[steps].startup_s == pytest.approx(3.0)
        clock.time = 14.0
        service.warm_up.look()
        await settle(service)
        assert warming() == {imports}, "no sign of a training"
        clock.time = 130.0
        service.warm_up.look()
        await settle(service)
        assert warming() == set()
        assert service.state.jobs[imports].status is Status.RUNNING


def test_commands_that_may_be_trainings():
    assert may_train(python("pass"))
    assert not may_train(python("pass", watch=False))
    assert may_train(shell("cd x && python3 train.py"))
    assert may_train(shell("exec torchrun --standalone t"))
    assert not may_train(shell("sleep 3; echo pythonic"))


@pytest.mark.parametrize("step_s", [0.1, 0.02])
async def test_slowdowns_are_learned_from_a_job_whose_iterations_nobody_gave(quick_home, step_s):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    wall = time.time() - 1000.0
    async with serving(quick_home, "sjf-ffs", executor=executor, clock=clock) as service:
        host = await one(service, shell("echo host", duration_s=100.0))
        await start(service, executor, host)
        record, iteration = service.state.jobs[host], 0

        async def runs(seconds, number, step_s):
            nonlocal iteration
            for _ in range(number):
                clock.time += seconds
                iteration += round(seconds / step_s)
                report(executor, (host, 1), iteration, wall + clock.time, 1.2 * step_s, watched=True)
                service.progress.look()
                await settle(service)

        await runs(1.0, 6, step_s)
        assert record.alone_seen
        assert record.alone_iteration_s == pytest.approx(0.1), "the guess of 100 s stays, in thousandths"
        assert not record.reported
        assert record.alone_left(clock.time) == pytest.approx(108.2 - 6.0, rel=0.05), "a guess may be too short"
        guest = await join(service, executor)
        await runs(1.0, 4, 2.0 * step_s)
        assert record.slowdown == pytest.approx(2.0, rel=0.05), "not what the moving average says, which lags behind"
        assert service.state.perf.is_observed(record.job, 1, service.state.jobs[guest].job, 1)
        seen = journalled(service, "Observed")
        assert all(event["relative"] for event in seen)
        executor.end((guest, 1))
        await settle(service)
        await runs(5.0, 30, step_s)
        assert 0.0 < record.alone_left(clock.time) < 70.0, "it has outlived the guess, and is not about to end at once"
        executor.end((host, 1))
        assert await service.queries.wait(host) == "finished"
        again = await one(service, shell("echo host", duration_s=100.0))
        assert service.queries.show(again)["source"]["alone_s"] == pytest.approx(158.0, rel=0.05), "its end taught it"


def test_what_is_left_of_a_guess():
    assert expected_left(0.0, 100.0, 2.0) == pytest.approx(108.2, abs=0.1)
    left = [expected_left(t, 100.0, 2.0) for t in range(0, 400, 5)]
    assert all(one > 0.0 for one in left[1:])
    assert left[20] == pytest.approx(44.3, abs=0.1)
    assert left[:35] == sorted(left[:35], reverse=True)
    assert expected_left(300.0, 100.0, 2.0) == pytest.approx(47.6, abs=0.1), "the guess is doubled beyond its range"
    assert expected_left(90.0, 100.0, 1.0) < 20.0


async def test_trials_are_counted_and_explained(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, "sjf-ffs", executor=executor, clock=clock) as service:
        assert service.queries.accuracy()["trials"] == {"begun": 0, "running": 0, "kept": 0, "cost_s": 0.0}
        host = await one(service, shell("echo host", duration_s=100.0))
        await start(service, executor, host)
        guest = await join(service, executor)
        sides = [Side(job, service.state.jobs[job].seq, 1, budget_s=3.0) for job in (guest, host)]
        service.state.trials.running[sides[0].seq] = Trial(sides[0], tuple(sides[1:]), began=1.0)
        for job, other in ((guest, host), (host, guest)):
            said = " ".join(service.queries.explain(job)["sentences"])
            assert f"It is tried beside job {other}" in said
            assert "may cost this job 3.0 s" in said
        assert service.queries.accuracy()["trials"]["running"] == 1
