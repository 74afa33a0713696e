"""Swapping a gang out when it is paused and in when it resumes: real workers, and a program that plays the driver."""

import asyncio
import sys

import pytest

from carpool.live.executors import swapping, switching
from carpool.live.executors.base import StopMode
from carpool.live.executors.processes import process_stat
from carpool.live.home import read_json
from tests.support.executing import KEY, executing

pytestmark = pytest.mark.slow

DRIVER = """
import sys
log, fails, direction, pid = sys.argv[1:]
state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
if fails == direction:
    sys.exit("Checkpoint: CUDA_ERROR_OUT_OF_MEMORY")
open(log, "a").write(f"{direction} {'stopped' if state == 'T' else 'going'}\\n")
"""


class FakeDriver:
    """Writes down what is moved, and whether the worker was stopped at that time."""

    def __init__(self, log):
        self.log = log
        self.fails = ""

    def command(self, direction, pids):
        return [sys.executable, "-I", "-c", DRIVER, str(self.log), self.fails, direction, *map(str, pids)]

    @property
    def moved(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def driver(tmp_path, monkeypatch):
    driver = FakeDriver(tmp_path / "moved")

    def held(gang):
        return {read_json(gang.ranks[0].directory / "process.json")["worker"]["pid"]: 2**20}

    monkeypatch.setattr(swapping, "_held", held)
    monkeypatch.setattr(swapping, "command", driver.command)
    monkeypatch.setattr(switching, "command", driver.command)
    monkeypatch.setattr(swapping, "RETRY_S", 0.05)
    return driver


async def end(executor, listener):
    executor.stop(KEY, StopMode.TERMINATE)
    await listener.wait_for_end(KEY)


async def test_the_memory_leaves_before_the_workers_stop_and_returns_after_they_go_on(home, driver):
    async with executing(home) as (executor, listener):
        executor.pause(KEY, swap=True)
        await listener.wait_for_switch(KEY, paused=True)
        assert (driver.moved, listener.swapped[KEY]) == (["out going"], True)
        executor.resume(KEY)
        await listener.wait_for_switch(KEY, paused=False)
        assert driver.moved == ["out going", "in going"]
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        assert (len(driver.moved), listener.swapped[KEY]) == (2, False), "a plain pause moves nothing"
        await end(executor, listener)


async def test_a_paused_gang_runs_while_its_memory_leaves(home, driver):
    """The driver waits for ever for a process that is stopped."""
    async with executing(home) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        executor.pause(KEY, swap=True)
        await listener.wait_for_switch(KEY, paused=True)
        assert (driver.moved, listener.swapped[KEY]) == (["out going"], True)
        worker = read_json(home.rank(*KEY, 0) / "process.json")["worker"]["pid"]
        before = process_stat(worker)[11:13]
        await asyncio.sleep(0.1)
        assert process_stat(worker)[11:13] == before
        await end(executor, listener)


async def test_a_gang_that_cannot_be_moved_is_paused_and_says_so(home, driver):
    driver.fails = "out"
    async with executing(home) as (executor, listener):
        executor.pause(KEY, swap=True)
        await listener.wait_for_switch(KEY, paused=True)
        assert listener.swapped[KEY] is False
        assert any("CUDA_ERROR_OUT_OF_MEMORY" in note for note in listener.notes)
        executor.resume(KEY)
        await listener.wait_for_switch(KEY, paused=False)
        assert not driver.moved
        await end(executor, listener)


async def test_a_gang_resumes_only_once_its_memory_is_back(home, driver):
    async with executing(home) as (executor, listener):
        executor.pause(KEY, swap=True)
        await listener.wait_for_switch(KEY, paused=True)
        driver.fails = "in"
        executor.resume(KEY)
        await asyncio.sleep(0.4)
        assert not listener.switched
        driver.fails = ""
        await listener.wait_for_switch(KEY, paused=False)
        assert driver.moved[-1] == "in going"
        await end(executor, listener)


async def test_the_next_service_brings_back_what_the_last_one_swapped_out(home, driver):
    async with executing(home) as (executor, listener):
        executor.pause(KEY, swap=True)
        await listener.wait_for_switch(KEY, paused=True)
    async with executing(home) as (executor, listener):
        executor.resume(KEY)
        await listener.wait_for_switch(KEY, paused=False)
        assert driver.moved == ["out going", "in going"]
        await end(executor, listener)


@pytest.mark.parametrize("how", ["the service stays away", "the gang is stopped"])
async def test_the_wrapper_brings_the_memory_back_where_the_service_does_not(home, driver, how):
    async with executing(home, pause_patience_s=0.5) as (executor, listener):
        executor.pause(KEY, swap=True)
        await listener.wait_for_switch(KEY, paused=True)
        if how == "the gang is stopped":
            await end(executor, listener)
    async with asyncio.timeout(30):
        while len(driver.moved) < 2 and how == "the service stays away":
            await asyncio.sleep(0.05)
    if how == "the service stays away":
        assert driver.moved == ["out going", "in going"]
        async with executing(home) as (executor, listener):
            await end(executor, listener)
    worker = read_json(home.rank(*KEY, 0) / "process.json")["worker"]["pid"]
    assert process_stat(worker) is None
