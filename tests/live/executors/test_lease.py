"""The wrapper and the node's lease: a worker saves when half of it is left, and is killed when it is over."""

import sys
from dataclasses import replace
from pathlib import Path

import carpool
from carpool.live.agent.lease import NodeLease
from carpool.live.clock import since_boot
from carpool.live.executors.base import ExecutorOptions, GangOutcome, Launch
from carpool.live.executors.contract import RecordingListener, eventually
from carpool.live.executors.local import LocalExecutor
from tests.support.executing import KEY, executing

OBEDIENT = """
import os, time
from carpool.channel import ControlReader, Report, ReportWriter
folder = os.environ["CARPOOL_WORKER_DIR"]
reader, writer = ControlReader(folder), ReportWriter(folder)
while True:
    control = reader.read()
    writer.write(Report(attempt=1, checkpoints_taken=control.checkpoint, checkpoint=7 * control.checkpoint or -1))
    time.sleep(0.01)
"""
ESCAPING = ("sh", "-c", "setsid sh -c 'while true; do sleep 0.1; done' & echo $!; wait")


def leased(home, seconds, command, **options):
    home.create()
    lease = NodeLease(home.path / "lease")
    lease.extend(since_boot(), seconds)
    return lease, executing(home, command, lease=home.path / "lease", **options)


async def test_a_worker_whose_lease_is_over_is_killed_with_all_that_it_started(quick_home):
    began = since_boot()
    _, running = leased(quick_home, 1.5, ESCAPING)
    async with running as (executor, listener):
        ended = await listener.wait_for_end(KEY)
        assert (ended.outcome, ended.exit_code) == (GangOutcome.LOST, 137)
        assert "cut off from the service" in ended.reason
        assert 1.4 < ended.ended_at - began < 2.5
        escaped = int((await executor.read_log(KEY, 0, "stdout", limit=99)).data)
        assert not Path(f"/proc/{escaped}").exists()


async def test_a_lease_that_is_extended_lets_the_worker_run(quick_home):
    lease, running = leased(quick_home, 1.0, ("sh", "-c", "sleep 2"))
    async with running as (_, listener):
        lease.extend(since_boot(), 30.0)
        lease.extend(since_boot() - 100.0, 30.0)  # an answer that came late takes nothing away
        assert (await listener.wait_for_end(KEY)).outcome is GangOutcome.FINISHED


async def test_a_worker_is_asked_to_save_when_half_of_the_lease_is_left(quick_home):
    env = {"PYTHONPATH": str(Path(carpool.__file__).parents[1])}
    quick_home.create()
    lease = NodeLease(quick_home.path / "lease")
    lease.extend(since_boot(), 6.0)
    executor = LocalExecutor(ExecutorOptions(quick_home, gpus=1, lease=quick_home.path / "lease"))
    listener = RecordingListener(executor=executor)
    await executor.open()
    await executor.recover([], listener)
    try:
        executor.launch(Launch(*KEY, (0,), (sys.executable, "-c", OBEDIENT), "/", env, grace_s=1.0))
        await eventually(lambda: (report := executor.report(KEY)) is not None and report.checkpoints_taken == 0)
        await eventually(lambda: executor.report(KEY).checkpoints_taken == 1)
        assert since_boot() < lease.until
        executor.retune(KEY, 4)  # what the executor writes keeps the wrapper's request
        await eventually(lambda: executor._gangs[KEY].control.checkpoint == 1)
        ended = await listener.wait_for_end(KEY)
        assert (ended.outcome, ended.checkpoint) == (GangOutcome.LOST, 7.0)
    finally:
        await executor.close()


async def test_no_worker_starts_after_its_lease(quick_home):
    quick_home.create()
    NodeLease(quick_home.path / "lease").extend(since_boot() - 10.0, 5.0)
    executor = LocalExecutor(ExecutorOptions(quick_home, gpus=1, lease=quick_home.path / "lease"))
    listener = RecordingListener(executor=executor)
    await executor.open()
    await executor.recover([], listener)
    try:
        launch = Launch(*KEY, (0,), ("sh", "-c", "echo ran"), "/", {})
        executor.launch(replace(launch, grace_s=1.0))
        assert (await listener.wait_for_end(KEY)).outcome is GangOutcome.LOST
        assert (await executor.read_log(KEY, 0, "stdout", limit=99)).data == b""
    finally:
        await executor.close()
