"""Doors of workers through real agents: what they say arrives whole, and a lost road ends commands, not jobs."""

import asyncio
import base64
import json

import pytest

from carpool.live.agent import door_relay
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors.base import ExecutorOptions, Launch, OnlyService
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.executors.contract import RecordingListener, eventually
from tests.support.agents import LEASE, agent_world

KEY = ("1", 1)


async def launched(world, command=("sleep", "60"), **more):
    executor = world.make_executor()
    listener = RecordingListener(executor=executor)
    await executor.open()
    await executor.recover([], listener)
    executor.launch(Launch(*KEY, (0,), command, "/", {}, grace_s=1.0, **more))
    await listener.wait_for_start(KEY)
    await eventually(lambda: executor.ranks(KEY))
    return executor, listener


async def said(door):
    """Return what a command printed, and its exit code."""
    printed = b""
    while True:
        line = json.loads(await asyncio.wait_for(door.readline(), 30))
        if "exit_code" in line:
            return printed, line["exit_code"]
        printed += base64.b64decode(line.get("data", ""))


async def test_a_command_beside_a_worker_on_a_node(tmp_path):
    async with agent_world(tmp_path) as world:
        executor, _ = await launched(world)
        door = await executor.open_door(KEY, 0, {"do": "run", "command": ["sh", "-c", "seq 100000; exit 3"]})
        printed, code = await said(door)
        assert (printed.split(), code) == ([b"%d" % number for number in range(1, 100_001)], 3)
        door.close()
        with pytest.raises(WrongStatus, match="worker 1 does not run"):
            await executor.open_door(KEY, 1, {"do": "watch"})
        refused = await executor.open_door(KEY, 0, {"do": "watch"})
        assert b"there is no such terminal" in await asyncio.wait_for(refused.readline(), 30)
        await executor.close()


async def test_the_service_has_the_output_of_a_terminal_when_it_hears_of_it(tmp_path):
    async with agent_world(tmp_path) as world:
        executor, listener = await launched(world, ("sh", "-c", "stty -echo; echo ready; cat; exit 4"), idle_s=60.0)
        watched = await executor.open_door(KEY, 0, {"do": "watch"})
        for number in range(1, 4):
            keys = {"typist": "x", "number": number, "data": base64.b64encode(b"typed %d\r" % number).decode()}
            typed = await executor.open_door(KEY, 0, {"do": "type", **keys})
            assert json.loads(await asyncio.wait_for(typed.readline(), 30)) == {"taken": True}
            typed.close()
            while True:
                size = json.loads(await asyncio.wait_for(watched.readline(), 30))["size"]
                log = (await executor.read_log(KEY, 0, "stdout", limit=10_000)).data
                assert len(log) >= size, "what is announced is there"
                if b"typed %d" % number in log:
                    break
        end = await executor.open_door(KEY, 0, {"do": "type", "typist": "y", "number": 1, "data": "BA=="})
        assert json.loads(await asyncio.wait_for(end.readline(), 30)) == {"taken": True}
        await eventually(lambda: listener.ended)
        assert listener.ended[0].exit_code == 4
        while await asyncio.wait_for(watched.readline(), 30):
            pass
        await executor.close()


async def test_a_service_that_has_not_heard_of_a_worker_says_to_try_again(tmp_path):
    """A client that typed while no service was there sends its keys again; it gives up where the worker has ended."""
    async with agent_world(tmp_path) as world:
        executor, _ = await launched(world)
        await executor.close()
        options = ExecutorOptions(world.home, settings=LEASE, leadership=OnlyService(2))
        following = ClusterExecutor(options)
        await following.open()
        await following.recover([KEY], RecordingListener(executor=following))
        with pytest.raises(Unavailable, match="have not reported its workers yet; try again"):
            await following.open_door(KEY, 0, {"do": "watch"})
        world.executor = following
        await eventually(lambda: following.ranks(KEY))
        door = await following.open_door(KEY, 0, {"do": "run", "command": ["echo", "here"]})
        assert await said(door) == (b"here\n", 0)
        await following.close()


async def test_a_road_that_is_cut_ends_the_command_and_not_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(door_relay, "LOST_S", 0.3)
    async with agent_world(tmp_path) as world:
        executor, _ = await launched(world)
        marker = tmp_path / "running"
        script = f"touch {marker}; trap 'rm {marker}; exit' HUP; echo up; while true; do sleep 0.05; done"
        door = await executor.open_door(KEY, 0, {"do": "run", "command": ["sh", "-c", script]})
        await eventually(marker.exists)
        world.roads["a"].cut = True
        await eventually(lambda: not marker.exists())
        world.roads["a"].cut = False
        with pytest.raises(Unavailable, match="node a: its agent"):
            await said(door)
        again = await executor.open_door(KEY, 0, {"do": "run", "command": ["echo", "again"]})
        assert await said(again) == (b"again\n", 0)
        assert KEY in executor.present()
        await executor.close()
