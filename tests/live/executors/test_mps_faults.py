"""Faults of MPS: which gangs start again, which are stopped for it, and which failures remain their own.

Most tests run a service on an executor in memory whose ends pass through the real `MpsFaultWatch`.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from carpool.gpu import mps, nvml
from carpool.live.executors import mps_faults
from carpool.live.executors.base import ExecutorOptions, GangEnded, GangOutcome, GpuSlot, Launch, StopMode
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.executors.mps_faults import MpsFaultWatch
from carpool.live.executors.node import LIMIT_FACTOR, LIMIT_MARGIN, LocalNode, MpsServerFault
from carpool.live.service.executor_events import MAX_FAULTS
from tests.support import SUPPORT
from tests.support.fakes import FakeClock
from tests.support.services import journalled, notes, one, pid_of, serving, settle, shell, status, until

pytestmark = pytest.mark.slow

BAD = "worker 0 ended with exit code 1"


class FakeMps:
    """Serves the clients that the test names."""

    pipe = "/nowhere"
    recovering = False

    def alive(self):
        return True

    def env(self, limit, gpus):
        return {"CUDA_MPS_PIPE_DIRECTORY": self.pipe, "limit": str(limit)}

    def stop(self):
        return


class MpsExecutor(MemoryExecutor):
    """Gangs in memory on a node with a fake MPS, whose ends are judged by the real watch."""

    def __init__(self, gpus, clock):
        super().__init__(gpus=gpus)
        self.clock = clock
        slots = tuple(GpuSlot(number, "node0", number, f"GPU-{number}") for number in range(gpus))
        self.node = LocalNode(slots, 2**40, "mps", mps=FakeMps())
        self.watching = None

    async def recover(self, known, listener):
        found = await super().recover(known, listener)
        self.watch = MpsFaultWatch(self.node, self.gangs, listener, self.clock.now)
        self.watching = asyncio.create_task(self.watch.run())
        return found

    def end(self, key, outcome, reason="", *, exit_code=None, checkpoint=None):
        gang = self.gangs.pop(key)
        ended = GangEnded(*key, outcome, reason, exit_code=exit_code, checkpoint=checkpoint)
        self.watch.gang_ended(ended, gang)

    async def close(self):
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)


class World:
    """A service under MPS in which gangs end and servers fail when the test says so."""

    def __init__(self, service, executor, clock):
        self.service, self.executor, self.clock = service, executor, clock
        self.node, self.faults = executor.node, []
        self.node.faults = self._take_faults

    def _take_faults(self):
        taken, self.faults = self.faults, []
        return taken

    async def run(self, *names, **fields):
        jobs = [await one(self.service, shell("true", name=name, **fields)) for name in names]
        await self.start(*jobs)
        self.node.seen |= set(self.executor.gangs)
        return jobs

    async def start(self, *jobs):
        await self.settle()
        for job in jobs:
            self.executor.start((job, self.record(job).attempt))
        await self.settle()

    def fault(self, *jobs, reason="a client's fatal fault"):
        gangs = frozenset((job, self.record(job).attempt) for job in jobs)
        self.faults.append(MpsServerFault(gangs, reason))

    def end(self, job, outcome=GangOutcome.FAILED, reason=BAD, done=None):
        attempt = max(attempt for name, attempt in self.executor.gangs if name == job)
        self.executor.end((job, attempt), outcome, reason, exit_code=1, checkpoint=done)

    async def look(self):
        await self.executor.watch.look()
        await self.settle()

    async def settle(self):
        await settle(self.service)

    def record(self, job):
        return self.service.state.jobs[job]

    def status(self, job):
        return status(self.service, job)


@pytest.fixture
def opened(quick_home, monkeypatch):
    """Opens a service under MPS."""
    monkeypatch.setattr(mps_faults, "LOOK_S", 1e6)  # the test looks itself

    @asynccontextmanager
    async def open_world(gpus=1, **options):
        clock = FakeClock(1.0)
        executor = MpsExecutor(gpus, clock)
        async with serving(quick_home, "sjf-ffs", executor=executor, clock=clock, **options) as service:
            async with asyncio.timeout(20):
                yield World(service, executor, clock)

    return open_world


async def test_a_fault_costs_no_retry_and_a_mate_that_hangs_is_requeued(opened):
    async with opened() as world:
        failed, hanging = await world.run("a", "b")
        world.end(failed)
        await world.settle()
        assert world.status(failed) == "running", "it is not judged before the next look at MPS"
        world.fault(failed, hanging)
        await world.look()
        assert [event["job"] for event in journalled(world.service, "Requeued")] == [hanging]
        assert [key for key, _ in world.executor.stopped] == [(hanging, 1)]
        (event,) = journalled(world.service, "Failed")
        assert (event["job"], event["again"]) == (failed, True)
        assert "a fault under MPS hit it" in event["reason"]
        world.end(hanging, GangOutcome.STOPPED, "", done=30.0)
        await world.settle()
        assert world.record(hanging).checkpoint == 30.0
        assert [(launch.job, launch.attempt) for launch in world.executor.launched[2:]] == [(failed, 2), (hanging, 2)]
        assert any(f"jobs that start again: {failed}, {hanging}" in note for note in notes(world.service))


async def test_a_failure_of_a_gang_that_is_being_stopped_costs_no_retry(opened):
    async with opened() as world:
        (job,) = await world.run("a")
        world.fault(job)
        await world.look()
        assert world.status(job) == "stopping"
        world.end(job)
        await world.look()
        assert world.record(job).attempt == 2
        assert journalled(world.service, "Failed") == []


@pytest.mark.parametrize(("gpus", "later"), [(2, 0.0), (1, 10.0)])
async def test_a_gang_that_was_not_on_the_failed_server_fails_by_itself(opened, gpus, later):
    """On another GPU at once, or on the same one some time later."""

    async with opened(gpus=gpus) as world:
        hit, other = await world.run("a", "b")
        assert (world.record(hit).gpus == world.record(other).gpus) == (gpus == 1)
        world.node.seen.clear()
        world.fault(hit)
        await world.look()
        world.clock.time += later
        world.end(other)
        await world.look()
        assert world.status(other) == "failed"
        assert world.service.queries.show(other)["reason"] == BAD


@pytest.mark.parametrize("seen", [True, False])
async def test_a_gang_not_yet_seen_on_a_server_counts_as_hit_just_after_a_fault(opened, seen):
    async with opened() as world:
        (job,) = await world.run("a")
        if not seen:
            world.node.seen.clear()
        world.fault()  # without the gangs that were on it
        world.end(job)
        await world.look()
        assert [event["again"] for event in journalled(world.service, "Failed")] == [not seen]
        assert any("none seen" in note for note in notes(world.service))


async def test_a_failure_under_mps_without_a_fault_is_the_jobs_own(opened):
    async with opened() as world:
        (job,) = await world.run("a")
        world.end(job)
        await world.look()
        assert world.status(job) == "failed"
        assert world.service.queries.show(job)["reason"] == BAD


@pytest.mark.parametrize("apart", [0.0, 2.0])
async def test_gangs_that_fail_together_count_as_hit_even_if_the_server_reports_no_fault(opened, apart):
    async with opened() as world:
        jobs = await world.run("a", "b")
        world.end(jobs[0])
        await world.look()
        world.clock.time += apart
        assert world.status(jobs[0]) == "running", "its mate may fail by the same fault"
        world.end(jobs[1])
        await world.look()
        assert [(event["job"], event["again"]) for event in journalled(world.service, "Failed")] == [
            (j, True) for j in jobs
        ]
        assert [world.record(job).attempt for job in jobs] == [2, 2]
        assert any(
            f"failed together on one GPU; jobs that start again: {jobs[0]}, {jobs[1]}" in note
            for note in notes(world.service)
        )


async def test_a_third_gang_that_fails_a_little_later_counts_as_hit_too(opened):
    async with opened(jobs_per_gpu=3) as world:
        jobs = await world.run("a", "b", "c")
        for job in jobs[:2]:
            world.end(job)
        await world.look()
        world.clock.time += 2.0
        world.end(jobs[2])
        await world.look()
        assert [event["again"] for event in journalled(world.service, "Failed")] == [True, True, True]


@pytest.mark.parametrize(("gpus", "apart", "seen"), [(1, 3.5, True), (2, 0.0, True), (1, 0.0, False)])
async def test_unrelated_failures_are_the_jobs_own(opened, gpus, apart, seen):
    """Some time apart, on different GPUs, or before they came to a GPU at all."""

    async with opened(gpus=gpus) as world:
        jobs = await world.run("a", "b")
        if not seen:
            world.node.seen.clear()
        for job in jobs:
            world.end(job)
            await world.look()
            world.clock.time += apart
            await world.look()
        assert [world.status(job) for job in jobs] == ["failed", "failed"]


async def test_a_cancelled_job_does_not_keep_other_failures_from_being_reported(opened, monkeypatch):
    """They fail during a look, so that they are judged at the next one."""
    monkeypatch.setattr(mps_faults, "LOOK_S", 0.2)

    async with opened(jobs_per_gpu=3) as world:
        cancelled, mate, later = await world.run("a", "b", "c")
        looks = []

        def faults_now():
            looks.append(1)
            for job in (cancelled, mate) if len(looks) == 1 else ():
                world.end(job)
            return []

        world.node.faults = faults_now
        await until(lambda: looks)
        await world.service.requests.cancel(cancelled)
        await until(lambda: world.record(mate).attempt == 2)
        assert world.status(cancelled) == "cancelled"
        world.clock.time += 60.0
        world.end(later)
        await until(lambda: len(looks) > 3)
        world.clock.time += 60.0
        assert await world.service.queries.wait(later) == "failed"


async def test_the_mate_of_a_failed_and_cancelled_job_counts_as_hit(opened):
    async with opened() as world:
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
        assert world.executor.watch._failed == []


async def test_looks_continue_after_one_that_failed(opened, monkeypatch):
    monkeypatch.setattr(mps_faults, "LOOK_S", 0.05)

    async with opened() as world:
        (job,) = await world.run("a")
        whole = world.executor.watch._find_together
        breaks = iter([True, True, False])
        world.executor.watch._find_together = lambda: 1 / 0 if next(breaks, False) else whole()
        world.end(job)
        assert await world.service.queries.wait(job) == "failed"


async def test_a_server_that_fails_and_then_goes_counts_as_one_fault(opened):
    async with opened() as world:
        (job,) = await world.run("a")
        world.fault(job)
        await world.look()
        world.fault(job, reason="the server is gone")
        await world.look()
        world.end(job)
        await world.look()
        assert world.service.book.faults == {job: 1}


async def test_a_failure_is_reported_as_soon_as_no_mate_is_left(opened):
    async with opened() as world:
        job, mate = await world.run("a", "b")
        world.end(job)
        await world.look()
        assert world.status(job) == "running"
        world.end(mate, GangOutcome.FINISHED, "")
        await world.look()
        assert world.status(job) == "failed"


async def test_a_failure_is_reported_even_if_mps_cannot_be_asked(opened):
    async with opened() as world:
        (job,) = await world.run("a")
        world.node.faults = lambda: 1 / 0
        world.end(job)
        await world.look()
        assert world.status(job) == "failed"


@pytest.mark.parametrize("outcome", [GangOutcome.FAILED, GangOutcome.STOPPED])
async def test_a_job_that_faults_hit_again_and_again_restarts_alone_outside_mps(opened, outcome):
    async with opened() as world:
        (job,) = await world.run("a")
        for attempt in range(1, MAX_FAULTS + 2):
            assert world.record(job).attempt == attempt
            assert not world.executor.launched[-1].exclusive
            assert not world.record(job).job.exclusive
            world.fault(job)
            if outcome is GangOutcome.FAILED:
                world.end(job)
                await world.look()
            else:
                await world.look()
                world.end(job, outcome, "")
            await world.start(job)
        assert world.record(job).job.exclusive
        assert world.executor.launched[-1].exclusive
        if outcome is GangOutcome.FAILED:
            assert "so it restarts alone on its GPUs" in journalled(world.service, "Failed")[-1]["reason"]
        world.fault()
        world.end(job)
        await world.look()
        assert world.status(job) == "failed", "no fault of others hits a job outside MPS"


class Reported:
    """A listener that remembers every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *values: self.calls.append((name, *values))

    @property
    def notes(self):
        return [values[0] for name, *values in self.calls if name == "note"]


@asynccontextmanager
async def local_executor(home, listener, **node):
    """The local executor on a node with a fake MPS."""
    home.create()
    executor = LocalExecutor(ExecutorOptions(home, gpus=1))
    await executor.open()
    vars(executor.node).update(mps=FakeMps(), **node)
    await executor.recover((), listener)
    try:
        yield executor
    finally:
        await executor.close()


async def test_no_gang_is_started_while_a_server_recovers(home):
    listener = Reported()
    async with local_executor(home, listener) as executor:
        executor.node.mps.recovering = True
        executor.launch(Launch("1", 1, (0,), ("true",), "/", {}))
        await asyncio.sleep(0.4)
        assert listener.calls == []
        assert ("1", 1) in executor.present()
        executor.node.mps.recovering = False
        await until(lambda: ("gang_started", ("1", 1)) in listener.calls)
        await until(lambda: not executor.present())


async def test_a_stop_while_a_server_recovers_ends_the_gang_before_it_started(home):
    listener = Reported()
    async with local_executor(home, listener) as executor:
        executor.node.mps.recovering = True
        executor.launch(Launch("1", 1, (0,), ("true",), "/", {}))
        await asyncio.sleep(0.1)
        assert executor.stop(("1", 1), StopMode.SAVE)
        await until(lambda: listener.calls)
        assert listener.calls == [("gang_ended", GangEnded("1", 1, GangOutcome.NEVER_STARTED))]


async def test_only_gangs_that_share_get_the_mps_variables(home):
    listener = Reported()
    async with local_executor(home, listener, limits_hold=True) as executor:

        def variables(**fields):
            return executor._sharing_environment(Launch("1", 1, (0,), ("true",), "/", {}, **fields))

        assert variables()["limit"] == "None"
        assert variables(gpu_memory=2**32)["limit"] == str(round(LIMIT_FACTOR * 2**32) + LIMIT_MARGIN)
        assert variables(exclusive=True) == {}
        assert listener.notes == []
        assert variables(uid=1234) == {}
        assert any("shares by time-slicing" in note for note in listener.notes)


async def test_a_process_that_runs_outside_mps_is_noted(home):
    listener, node = Reported(), {"mechanism": "mps"}
    node |= {"foreign_memory": lambda own: [(0, 5)], "outside_mps": lambda own: [os.getpid()]}
    async with local_executor(home, listener, **node):
        await until(lambda: any(f"process {os.getpid()} runs outside MPS" in note for note in listener.notes))
        assert ("memory_taken", 0, 5) in listener.calls


async def test_a_guest_gets_a_memory_limit_and_a_job_alone_does_not(opened):
    async with opened() as world:
        await world.run("a", "b", model="bert", batch=12, iterations=1000)
        first, second = world.executor.launched
        assert first.gpu_memory == 0
        assert second.gpu_memory == world.service.state.perf.memory(world.record(second.job).job, 1) > 0


async def test_waiting_failures_are_reported_when_mps_is_given_up(opened, monkeypatch):
    monkeypatch.setattr(mps_faults, "LOOK_S", 0.05)

    async with opened() as world:
        job, mate = await world.run("a", "b")

        def gives_up():
            world.end(job)  # during the look
            world.node.mps = None
            return [MpsServerFault(frozenset({(mate, 1)}), "the daemon is gone")]

        world.node.faults = gives_up
        assert await world.service.queries.wait(job) == "failed"
        await world.settle()
        assert world.status(mate) == "stopping"
        world.end(mate)
        await world.settle()
        assert world.record(mate).attempt == 2, "it is reported at once now, and still counts as hit"


async def test_real_processes_restart_when_their_server_is_gone(home, tmp_path, monkeypatch):
    """One gang dies with the server, another one hangs, and a third one fails by itself."""
    control = tmp_path / "nvidia-cuda-mps-control"
    fake = SUPPORT / "fake_mps.py"
    control.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake} "$@"\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvml, "devices", lambda: [nvml.Device(n, f"GPU-{n}", "Test", 2**40, "1") for n in range(2)])
    monkeypatch.setattr(nvml, "processes", lambda uuid: [])
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, False, ""))
    monkeypatch.setattr(mps_faults, "LOOK_S", 0.1)

    async with serving(home, "sjf-ffs", gpus=None) as service:
        first = [await one(service, shell("test $CARPOOL_ATTEMPT = 2 || sleep 60")) for _ in range(2)]
        own = await one(service, shell("sleep 60"))
        pids = [await until(lambda job=job: pid_of(service, job)) for job in (*first, own)]
        servers = service.executor.node.mps.pipe / "servers.json"
        servers.write_text(json.dumps({"5": {"clients": pids[:2]}, "6": {"clients": pids[2:]}}))
        await until(lambda: len(service.executor.node.seen) == 3)
        servers.write_text(json.dumps({"6": {"clients": pids[2:]}}))
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[2], signal.SIGKILL)
        assert [await service.queries.wait(job) for job in (*first, own)] == ["finished", "finished", "failed"]
        assert [service.queries.show(job)["attempt"] for job in (*first, own)] == [2, 2, 1]
        assert service.queries.show(own)["reason"] == "worker 0 was killed by SIGKILL"
    assert not (home.mps / "daemon.json").exists(), "the daemon ended with the service"
