"""Stopping a gang more than once: the strongest request counts, and a worker that saves is not disturbed."""

import asyncio
import sys
from pathlib import Path

import carpool
from carpool import channel
from carpool.live.executors.base import ExecutorOptions, GangOutcome, Launch, StopMode
from carpool.live.executors.contract import SAVING_WORKER, eventually, opened
from carpool.live.executors.local import LocalExecutor
from carpool.live.home import read_json

KEY = ("1", 1)


def saving(seconds):
    env = {"PYTHONPATH": str(Path(carpool.__file__).parents[1])}
    command = (sys.executable, "-c", SAVING_WORKER, "42", str(seconds))
    return Launch(*KEY, (0,), command, "/", env, grace_s=20.0)


def maker(home):
    home.create()
    return lambda: LocalExecutor(ExecutorOptions(home, gpus=1))


async def test_a_gang_goes_on_saving_when_the_next_service_asks_it_again(home):
    make_executor = maker(home)
    async with opened(make_executor, leave_gangs=True) as (executor, _):
        executor.launch(saving(2.0))
        await eventually(lambda: executor.report(KEY) is not None)
        executor.stop(KEY, StopMode.SAVE)
        await asyncio.sleep(0.3)
    async with opened(make_executor, [KEY]) as (executor, listener):
        executor.stop(KEY, StopMode.SAVE)  # as a service does that finds a job which is stopping
        ended = await listener.wait_for_end(KEY)
        assert (ended.outcome, ended.checkpoint) == (GangOutcome.STOPPED, 42.0)


async def test_a_weaker_request_does_not_replace_a_stronger_one(home):
    async with opened(maker(home)) as (executor, listener):
        executor.launch(saving(0.0))
        await eventually(lambda: executor.report(KEY) is not None)
        executor.stop(KEY, StopMode.TERMINATE)
        executor.stop(KEY, StopMode.SAVE)
        assert read_json(home.rank(*KEY, 0) / "stop.json") == {"how": "end"}
        assert not channel.read_control(home.rank(*KEY, 0)).stop
        ended = await listener.wait_for_end(KEY)
        assert (ended.outcome, ended.checkpoint) == (GangOutcome.STOPPED, None)
