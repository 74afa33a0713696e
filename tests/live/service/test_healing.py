"""Guesses that heal in the service: jobs that run too long, users whose guesses are wrong, and what is said of both."""

from carpool.core.guesses import DURATION
from carpool.live.executors.memory import MemoryExecutor
from tests.support.fakes import FakeClock
from tests.support.services import journalled, one, serving, settle, shell


async def runs(service, executor, clock, command, guess_s, took_s, **more):
    """Let a job run that reports nothing, and look at it every few seconds; return its id."""
    job = await one(service, shell(command, duration_s=guess_s, **more))
    await settle(service)
    executor.start((job, 1))
    await settle(service)
    end = clock.time + took_s
    while clock.time < end:
        clock.time = min(end, clock.time + took_s / 40)
        service.progress.look()
        await settle(service)
    return job


async def test_a_job_that_runs_too_long_loses_its_rank_and_says_so(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, "sjf", executor=executor, clock=clock) as service:
        job = await runs(service, executor, clock, "echo long", 100.0, 104.0)
        assert not journalled(service, "Outlived"), "it may be about to end"
        for _ in range(20):
            clock.time += 5.0
            service.progress.look()
            await settle(service)
        assert journalled(service, "Outlived")
        assert 10.0 < service.state.jobs[job].alone_left(clock.time) < 300.0
        assert any("outlived what was believed of it" in line for line in service.queries.explain(job)["sentences"])
        assert service.queries.show(job)["progress"] < 1.0


async def test_a_users_record_corrects_guesses_and_is_explained(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, "sjf", executor=executor, clock=clock) as service:
        for number in range(4):  # scripts of families that nobody has seen, so that only the guess is known
            job = await runs(service, executor, clock, f"echo {'x' * (number + 1)}", 100.0, 1000.0)
            executor.end((job, 1))
            assert await service.queries.wait(job) == "finished"
        (user,) = {user for user, _, _ in service.state.guesses}
        assert service.state.guesses.of(user, DURATION).jobs == 4
        job = await one(service, shell("echo another", duration_s=3600.0))
        await settle(service)
        answer = service.queries.explain(job)
        (said,) = [line for line in answer["sentences"] if "times their guesses" in line]
        assert said.startswith(f"{user}'s jobs took 10 times their guesses (4 jobs); guess 1 h, believed ")
        assert 5 * 3600.0 < answer["run"]["low"] < 8 * 3600.0 < answer["run"]["value"] < answer["run"]["high"]
        assert service.queries.show(job)["source"]["alone_s"] > 8 * 3600.0
        known = await one(service, shell("echo x", duration_s=100.0))
        await settle(service)
        assert service.state.jobs[known].stretch == 1.0, "its family is known, so its guess does not count"


async def test_a_job_without_a_guess_teaches_nothing_about_its_user(quick_home):
    executor, clock = MemoryExecutor(gpus=1), FakeClock(1.0)
    async with serving(quick_home, "sjf", executor=executor, clock=clock) as service:
        job = await runs(service, executor, clock, "echo whatever", None, 10.0, model="ncf")
        executor.end((job, 1))
        assert await service.queries.wait(job) == "finished"
        assert not list(service.state.guesses)
