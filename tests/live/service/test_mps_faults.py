"""Faults of MPS, told by hand: who starts again, who is stopped for it, who is not pardoned, and where it ends."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from carpool.gpu import mps, nvml
from carpool.live.executors.base import Ended, Outcome
from carpool.live.executors.machine import FENCE, FENCE_MORE, ServerFault
from carpool.live.service import faults
from tests.support import SUPPORT
from tests.support.fakes import FakeClock, FakeExecutor
from tests.support.services import notes, one, serving, shell, told, until

BAD = "worker 0 ended with exit code 1"


class FakeMps:
    """Serves whom the test says."""

    pipe = "/nowhere"
    recovering = False

    def alive(self):
        return True

    def env(self, limit, gpus):
        return {"CUDA_MPS_PIPE_DIRECTORY": self.pipe, "limit": str(limit)}

    def stop(self):
        return


class World:
    """A service under MPS in which gangs end and servers fail when the test says so."""

    def __init__(self, service, executor, clock):
        self.service, self.executor, self.clock = service, executor, clock
        self.machine = service._machine
        self.machine.mps, self.faults = FakeMps(), []
        self.machine.faults = self._told

    def _told(self):
        told, self.faults = self.faults, []
        return told

    async def run(self, *names, **wishes):
        jobs = [await one(self.service, shell("true", name=name, **wishes)) for name in names]
        await self.up(*jobs)
        self.machine.seen |= set(self.executor.gangs)
        return jobs

    async def up(self, *jobs):
        await self.settle()
        for job in jobs:
            self.executor.listener.gang_up(job, self.record(job).attempt)
        await self.settle()

    def fault(self, *jobs, reason="a client's fatal fault"):
        gangs = frozenset((job, self.record(job).attempt) for job in jobs)
        self.faults.append(ServerFault(gangs, reason))

    def end(self, job, outcome=Outcome.FAILED, reason=BAD, done=None):
        attempt = max(attempt for name, attempt in self.executor.gangs if name == job)
        del self.executor.gangs[job, attempt]
        self.executor.listener.gang_ended(Ended(job, attempt, outcome, reason, 1, done))

    async def look(self):
        await self.service._faults.look()
        await self.settle()

    async def settle(self):
        for _ in range(6):
            await self.service._driver.turn()

    def record(self, job):
        return self.service._state.jobs[job]

    def status(self, job):
        return self.service.queries.show(job)["status"]


@asynccontextmanager
async def world(home, **options):
    executor, clock = FakeExecutor(), FakeClock(1.0)
    async with serving(home, "sjf-ffs", executor=executor, clock=clock, **{"gpus": 1, **options}) as service:
        yield World(service, executor, clock)


@pytest.fixture
def play(quick_home, monkeypatch):
    monkeypatch.setattr(faults, "LOOK_S", 1e6)  # the test looks itself

    def run(story, **options):
        async def whole():
            async with world(quick_home, **options) as told_world:
                await asyncio.wait_for(story(told_world), 20)

        asyncio.run(whole())

    return run


def test_whoever_failed_by_a_fault_keeps_its_retries_and_a_mate_that_hangs_is_started_again(play):
    async def story(world):
        failed, hanging = await world.run("a", "b")
        world.end(failed)
        await world.settle()
        assert world.status(failed) == "running", "not judged before MPS was looked at"
        world.fault(failed, hanging)
        await world.look()
        assert [event["job"] for event in told(world.service, "Requeued")] == [hanging]
        assert [key for key, _ in world.executor.stopped] == [(hanging, 1)]
        (event,) = told(world.service, "Failed")
        assert (event["job"], event["again"]) == (failed, True)
        assert "a fault under MPS reached it" in event["reason"]
        world.end(hanging, Outcome.STOPPED, "", done=30.0)
        await world.settle()
        assert world.record(hanging).checkpoint == 30.0
        assert [(launch.job, launch.attempt) for launch in world.executor.launched[2:]] == [(failed, 2), (hanging, 2)]
        assert any(f"start again: {failed}, {hanging}" in note for note in notes(world.service))

    play(story)


def test_a_failure_that_comes_when_its_gang_is_being_stopped_costs_nothing(play):
    async def story(world):
        (job,) = await world.run("a")
        world.fault(job)
        await world.look()
        assert world.status(job) == "stopping"
        world.end(job)
        await world.look()
        assert world.record(job).attempt == 2
        assert told(world.service, "Failed") == []

    play(story)


@pytest.mark.parametrize(("gpus", "later"), [(2, 0.0), (1, 10.0)])
def test_who_had_nothing_to_do_with_the_server_is_not_pardoned(play, gpus, later):
    """On another GPU at once, or on the same one some time later."""

    async def story(world):
        hit, other = await world.run("a", "b")
        assert (world.record(hit).gpus == world.record(other).gpus) == (gpus == 1)
        world.machine.seen.clear()
        world.fault(hit)
        await world.look()
        world.clock.time += later
        world.end(other)
        await world.look()
        assert world.service.queries.show(other)["status"] == "failed"
        assert world.service.queries.show(other)["reason"] == BAD

    play(story, gpus=gpus)


@pytest.mark.parametrize("seen", [True, False])
def test_one_that_no_look_has_seen_is_pardoned_for_a_short_time_on_the_servers_gpus(play, seen):
    async def story(world):
        (job,) = await world.run("a")
        if not seen:
            world.machine.seen.clear()
        world.fault()  # nobody knows who was on it
        world.end(job)
        await world.look()
        assert [event["again"] for event in told(world.service, "Failed")] == [not seen]
        assert any("none seen" in note for note in notes(world.service))

    play(story)


def test_an_ordinary_failure_under_mps_is_one(play):
    async def story(world):
        (job,) = await world.run("a")
        world.end(job)
        await world.look()
        assert world.service.queries.show(job)["status"] == "failed"
        assert world.service.queries.show(job)["reason"] == BAD

    play(story)


@pytest.mark.parametrize("apart", [0.0, 2.0])
def test_two_that_fail_together_are_pardoned_though_the_server_has_forgotten_its_fault(play, apart):
    async def story(world):
        jobs = await world.run("a", "b")
        world.end(jobs[0])
        await world.look()
        world.clock.time += apart
        assert world.status(jobs[0]) == "running", "its mate may yet fail by the same fault"
        world.end(jobs[1])
        await world.look()
        assert [(event["job"], event["again"]) for event in told(world.service, "Failed")] == [(j, True) for j in jobs]
        assert [world.record(job).attempt for job in jobs] == [2, 2]
        assert any(f"jobs {jobs[0]} and {jobs[1]} failed together" in note for note in notes(world.service))

    play(story)


def test_a_third_one_that_fails_a_little_later_is_pardoned_too(play):
    async def story(world):
        jobs = await world.run("a", "b", "c")
        for job in jobs[:2]:
            world.end(job)
        await world.look()
        world.clock.time += 2.0
        world.end(jobs[2])
        await world.look()
        assert [event["again"] for event in told(world.service, "Failed")] == [True, True, True]

    play(story, jobs_per_gpu=3)


@pytest.mark.parametrize(("gpus", "apart", "seen"), [(1, 3.5, True), (2, 0.0, True), (1, 0.0, False)])
def test_two_failures_that_have_nothing_to_do_with_each_other_are_their_own(play, gpus, apart, seen):
    """Some time apart, on different GPUs, or before they came to a GPU at all."""

    async def story(world):
        jobs = await world.run("a", "b")
        if not seen:
            world.machine.seen.clear()
        for job in jobs:
            world.end(job)
            await world.look()
            world.clock.time += apart
            await world.look()
        assert [world.status(job) for job in jobs] == ["failed", "failed"]

    play(story, gpus=gpus)


def test_a_cancel_between_the_fault_and_the_verdict_stops_nobody_from_hearing(play, monkeypatch):
    """They fail while the look is under way, so that they are judged at the next one."""
    monkeypatch.setattr(faults, "LOOK_S", 0.2)

    async def story(world):
        cancelled, mate, later = await world.run("a", "b", "c")
        looks = []

        def faults_now():
            looks.append(1)
            for job in (cancelled, mate) if len(looks) == 1 else ():
                world.end(job)
            return []

        world.machine.faults = faults_now
        await until(lambda: looks)
        await world.service.requests.cancel(cancelled)
        await until(lambda: world.record(mate).attempt == 2)
        assert world.status(cancelled) == "cancelled"
        world.clock.time += 60.0
        world.end(later)
        await until(lambda: len(looks) > 3)
        world.clock.time += 60.0
        assert await world.service.queries.wait(later) == "failed"

    play(story, jobs_per_gpu=3)


def test_a_mate_of_one_that_is_cancelled_after_it_failed_is_pardoned_too(play):
    async def story(world):
        cancelled, mate = await world.run("a", "b")
        world.end(cancelled)
        await world.look()
        await world.service.requests.cancel(cancelled)
        await world.settle()
        assert world.status(cancelled) == "cancelled"
        world.end(mate)
        await world.look()
        await world.look()
        assert world.record(mate).attempt == 2
        assert world.service._faults._failed == []

    play(story)


def test_a_look_that_breaks_off_is_not_the_last(play, monkeypatch):
    monkeypatch.setattr(faults, "LOOK_S", 0.05)

    async def story(world):
        (job,) = await world.run("a")
        whole = world.service._faults._find_together
        breaks = iter([True, True, False])
        world.service._faults._find_together = lambda: 1 / 0 if next(breaks, False) else whole()
        world.end(job)
        assert await world.service.queries.wait(job) == "failed"

    play(story)


def test_a_server_that_fails_and_then_goes_counts_once(play):
    async def story(world):
        (job,) = await world.run("a")
        world.fault(job)
        await world.look()
        world.fault(job, reason="the server is gone")
        await world.look()
        assert world.service._faults.pardons == {job: 1}

    play(story)


def test_a_mate_that_ends_well_clears_the_way_for_the_verdict(play):
    async def story(world):
        job, mate = await world.run("a", "b")
        world.end(job)
        await world.look()
        assert world.status(job) == "running"
        world.end(mate, Outcome.FINISHED, "")
        await world.look()
        assert world.status(job) == "failed"

    play(story)


def test_an_end_that_no_look_could_judge_is_told_all_the_same(play):
    async def story(world):
        (job,) = await world.run("a")
        world.machine.faults = lambda: 1 / 0
        world.end(job)
        await world.look()
        assert world.service.queries.show(job)["status"] == "failed"

    play(story)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.STOPPED])
def test_one_that_faults_reach_again_and_again_comes_back_alone_outside_mps(play, outcome):
    async def story(world):
        (job,) = await world.run("a")
        for attempt in range(1, faults.MOST_PARDONS + 2):
            assert world.record(job).attempt == attempt
            assert world.executor.launched[-1].extra != {}
            assert not world.record(job).job.exclusive
            world.fault(job)
            if outcome is Outcome.FAILED:
                world.end(job)
                await world.look()
            else:
                await world.look()
                world.end(job, outcome, "")
            await world.up(job)
        assert world.record(job).job.exclusive
        assert world.executor.launched[-1].extra == {}
        if outcome is Outcome.FAILED:
            assert "it comes back alone, outside MPS" in told(world.service, "Failed")[-1]["reason"]
        world.fault()
        world.end(job)
        await world.look()
        assert world.service.queries.show(job)["status"] == "failed", "outside MPS no fault of others reaches it"

    play(story)


def test_nobody_is_launched_while_a_server_recovers(play):
    async def story(world):
        world.machine.mps.recovering = True
        job = await one(world.service, shell("true"))
        await world.settle()
        assert world.executor.launched == []
        world.machine.mps.recovering = False
        await world.service._faults.look()
        await asyncio.sleep(0.1)  # the service itself takes the turn
        assert [launch.job for launch in world.executor.launched] == [job]

    play(story)


def test_the_service_looks_by_itself_and_nobody_is_forgotten_when_mps_is_given_up(play, monkeypatch):
    monkeypatch.setattr(faults, "LOOK_S", 0.05)

    async def story(world):
        job, mate = await world.run("a", "b")

        def gives_up():
            world.end(job)  # while the look is under way
            world.machine.mps = None
            return [ServerFault(frozenset({(mate, 1)}), "the daemon is gone")]

        world.machine.faults = gives_up
        assert await world.service.queries.wait(job) == "failed"
        await world.settle()
        assert world.status(mate) == "stopping"
        world.end(mate)
        await world.settle()
        assert world.record(mate).attempt == 2, "it is told at once now, and still pardoned"

    play(story)


def test_a_job_that_joins_another_one_is_fenced(play):
    async def story(world):
        world.machine.fenced = True
        wishes = {"model": "bert", "batch": 12, "iterations": 1000}
        await world.run("a", "b", **wishes)
        first, second = world.executor.launched
        assert first.extra["limit"] == "None"
        needed = world.service._state.perf.memory(world.record(second.job).job, 1)
        assert second.extra["limit"] == str(round(FENCE * needed) + FENCE_MORE)

    play(story)


def test_a_job_of_another_user_is_not_sent_to_mps(play, monkeypatch):
    monkeypatch.setattr("carpool.live.service.service.own_uid", lambda: 0)

    async def story(world):
        world.service._users["eve"] = {"uid": 1234}
        await world.run("a")
        (launch,) = world.executor.launched
        assert (launch.uid, launch.extra) == (1234, {})
        assert any("shares by time-slicing" in note for note in notes(world.service))

    play(story)


def test_a_process_that_runs_outside_mps_is_noted(play, monkeypatch):
    async def story(world):
        world.machine.mechanism = "mps"
        world.machine.taken_by_strangers = lambda ours: []
        world.machine.outside_mps = lambda ours: [os.getpid()]
        looking = asyncio.create_task(world.service._look_for_strangers())
        await until(lambda: any(f"process {os.getpid()} runs outside MPS" in note for note in notes(world.service)))
        looking.cancel()

    play(story)


def test_real_processes_start_again_when_their_server_goes(home, tmp_path, monkeypatch):
    """One dies with the server, the other one hangs; a third one fails by itself."""
    control = tmp_path / "nvidia-cuda-mps-control"
    fake = SUPPORT / "fake_mps.py"
    control.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake} "$@"\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvml, "devices", lambda: [nvml.Device(n, f"GPU-{n}", "Test", 2**40, "1") for n in range(2)])
    monkeypatch.setattr(nvml, "processes", lambda uuid: [])
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, False, ""))
    monkeypatch.setattr(faults, "LOOK_S", 0.1)

    async def play():
        async with serving(home, "sjf-ffs", gpus=None) as service:
            first = [await one(service, shell("test $CARPOOL_ATTEMPT = 2 || sleep 60")) for _ in range(2)]
            own = await one(service, shell("sleep 60"))
            pids = [await until(lambda job=job: pid_of(service, job)) for job in (*first, own)]
            servers = service._machine.mps.pipe / "servers.json"
            servers.write_text(json.dumps({"5": {"clients": pids[:2]}, "6": {"clients": pids[2:]}}))
            await until(lambda: len(service._machine.seen) == 3)
            servers.write_text(json.dumps({"6": {"clients": pids[2:]}}))
            os.kill(pids[0], signal.SIGKILL)
            os.kill(pids[2], signal.SIGKILL)
            assert [await service.queries.wait(job) for job in (*first, own)] == ["finished", "finished", "failed"]
            assert [service.queries.show(job)["attempt"] for job in (*first, own)] == [2, 2, 1]
            assert service.queries.show(own)["reason"] == "worker 0 was killed by SIGKILL"

    asyncio.run(play())
    assert not (home.mps / "daemon.json").exists(), "the daemon went with the service"


def pid_of(service, job):
    attempts = service.queries.show(job)["attempts"]
    return attempts[-1]["ranks"][0]["pid"] if attempts and attempts[-1]["ranks"] else None
