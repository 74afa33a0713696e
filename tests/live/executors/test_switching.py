"""Pausing real processes: whatever they fork, no part of them runs while they are paused, and all of them go on."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from carpool.live.executors.base import GangOutcome
from carpool.live.executors.contract import eventually
from carpool.live.executors.launching import GangLauncher
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.processes import process_stat, strays
from carpool.live.freezer import cgroup_below, cgroup_of, make_cgroup, remove_cgroup, sweep_cgroups
from carpool.live.home import read_json
from tests.support.executing import KEY, executing

pytestmark = pytest.mark.slow

SPREADING = """
import os, subprocess, sys, threading, time
def spin():
    while True: pass
def fork(leave):
    if os.fork() == 0:
        if leave:
            os.setsid()
            if os.fork(): os._exit(0)
        os.environ.clear()
        threading.Thread(target=spin, daemon=True).start()
        spin()
fork(False)
fork(True)
def breed():  # always between two forks, in groups and sessions of their own
    while True:
        subprocess.run(["true"], start_new_session=True)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            end = time.monotonic() + 0.01
            while time.monotonic() < end: pass
            os._exit(0)
        os.waitpid(pid, 0)
for _ in range(2):
    if os.fork() == 0: breed()
print("ready", flush=True)
spin()
"""


def cpu_ticks(pids) -> dict[int, int]:
    """User and system time of each process, in ticks, with that of children that it waited for."""
    found = {}
    for pid in pids:
        stat = process_stat(pid)
        if stat is not None and stat[0] not in "ZX":
            found[pid] = sum(map(int, stat[11:15]))
    return found


def tree(executor: LocalExecutor) -> set[int]:
    """All processes below the wrapper, found in another way than the wrapper finds them."""
    root = read_json(executor.home.rank(*KEY, 0) / "process.json")["pid"]
    parents = {int(name): stat for name in os.listdir("/proc") if name.isdigit() and (stat := process_stat(int(name)))}
    found = {root}
    while True:
        more = {pid for pid, stat in parents.items() if int(stat[1]) in found and stat[0] not in "ZX"} - found
        if not more:
            return found - {root}
        found |= more


async def end(executor, listener) -> None:
    executor.stop(KEY, "kill")
    await listener.wait_for_end(KEY)


async def written(executor: LocalExecutor) -> int:
    return len((await executor.read_log(KEY, 0, "stdout", limit=1 << 20)).data)


@pytest.mark.parametrize("cgroups", [True, False], ids=["freezer", "signals"])
async def test_no_cpu_time_grows_while_a_spreading_job_is_paused(home, monkeypatch, cgroups):
    monkeypatch.setattr(GangLauncher, "cgroups", cgroups)
    async with executing(home, (sys.executable, "-I", "-c", SPREADING)) as (executor, listener):
        async with asyncio.timeout(30):
            while not await written(executor):
                await asyncio.sleep(0.02)
        for _ in range(3):
            executor.pause(KEY)
            began = time.monotonic()
            await listener.wait_for_switch(KEY, paused=True)
            assert time.monotonic() - began < 20.0
            before = cpu_ticks(tree(executor))
            assert len(before) >= 5
            await asyncio.sleep(0.2)
            assert cpu_ticks(tree(executor)) == before
            executor.resume(KEY)
            await listener.wait_for_switch(KEY, paused=False)
            lasting = [pid for pid in before if process_stat(pid)]
            async with asyncio.timeout(30):  # every process goes on, or has ended because it could
                while any(cpu_ticks([pid]).get(pid, -1) == before[pid] for pid in lasting):
                    await asyncio.sleep(0.02)
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        found = tree(executor)
        await end(executor, listener)
        assert not cpu_ticks(found)


@pytest.mark.slow  # it waits for the patience to pass
@pytest.mark.parametrize("cgroups", [True, False], ids=["freezer", "signals"])
async def test_a_paused_job_whose_service_stays_away_goes_on_and_is_paused_again(home, monkeypatch, cgroups):
    monkeypatch.setattr(GangLauncher, "cgroups", cgroups)
    async with executing(home, pause_patience_s=1.0) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        before = await written(executor)
        await asyncio.sleep(1.6)  # more than its patience, but the service lives
        assert await written(executor) == before
    async with asyncio.timeout(30):
        while await written(executor) == before:
            await asyncio.sleep(0.05)
    async with executing(home, pause_patience_s=1.0) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        before = await written(executor)
        await asyncio.sleep(0.2)
        assert await written(executor) == before
        await end(executor, listener)


STEPPING = """
import os, time
from carpool.channel import Report, ReportWriter
report = ReportWriter(os.environ["CARPOOL_WORKER_DIR"], {name!r})
time.sleep(0.2)
for step in range(1, 10**6):
    report.write(Report(attempt=1, iteration=step))
    print(step, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("name", ["report", "watch"])
async def test_a_job_that_starts_ahead_of_its_turn_stands_from_its_first_step_on_without_a_service(home, name):
    command = (sys.executable, "-c", STEPPING.format(name=name))
    async with executing(home, command, ahead=True):
        pass
    output = home.rank(*KEY, 0) / "stdout.log"
    async with asyncio.timeout(30):
        while not read_json(home.rank(*KEY, 0) / "paused.json"):
            await asyncio.sleep(0.02)
    before = output.read_text()
    await asyncio.sleep(0.2)
    assert output.read_text() == before
    assert 0 < len(before.split()) <= 10, "a step or two, on a busy machine a few"
    async with executing(home, command) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        assert output.read_text() == before
        executor.resume(KEY)
        await listener.wait_for_switch(KEY, paused=False)
        await eventually(lambda: output.read_text() != before)
        await end(executor, listener)


async def test_a_job_that_starts_ahead_and_gets_its_turn_meanwhile_never_stands(home):
    command = (sys.executable, "-c", STEPPING.format(name="report"))
    async with executing(home, command, ahead=True) as (executor, listener):
        executor.resume(KEY)
        await listener.wait_for_switch(KEY, paused=False)
        output = home.rank(*KEY, 0) / "stdout.log"
        await eventually(lambda: len(output.read_text().split()) > 20)
        await end(executor, listener)


async def test_a_service_that_stood_still_pauses_the_job_again(home):
    async with executing(home, pause_patience_s=0.4) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        before = await written(executor)
        output, give_up = home.rank(*KEY, 0) / "stdout.log", time.monotonic() + 30
        while output.stat().st_size == before:  # this blocks the service, which shows no sign of life
            assert time.monotonic() < give_up
            time.sleep(0.05)
        await eventually(lambda: any("paused again" in note for note in listener.notes))
        await listener.wait_for_switch(KEY, paused=True)
        await end(executor, listener)


@pytest.mark.parametrize("cgroups", [True, False], ids=["freezer", "signals"])
async def test_a_killed_wrapper_takes_its_paused_job_with_it(home, monkeypatch, cgroups):
    monkeypatch.setattr(GangLauncher, "cgroups", cgroups)
    async with executing(home, ("sh", "-c", "setsid sleep 600 & sleep 600")) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        record = read_json(home.rank(*KEY, 0) / "process.json")
        os.kill(record["pid"], signal.SIGKILL)
        assert (await listener.wait_for_end(KEY)).outcome is GangOutcome.FAILED
        assert list(strays(str(home.rank(*KEY, 0)))) == []
        assert not os.path.exists(record.get("cgroup", "/none"))


async def test_a_job_that_something_else_continues_is_stopped_again(home, monkeypatch):
    monkeypatch.setattr(GangLauncher, "cgroups", False)
    async with executing(home, pause_patience_s=1.0) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        worker = read_json(home.rank(*KEY, 0) / "process.json")["worker"]["pid"]
        for pid in tree(executor):
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(10):
            while (process_stat(worker) or "?")[0] != "T":
                await asyncio.sleep(0.02)
        await end(executor, listener)


async def test_a_worker_that_is_killed_while_it_is_paused_ends_its_gang(home):
    async with executing(home) as (executor, listener):
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)
        os.kill(read_json(home.rank(*KEY, 0) / "process.json")["worker"]["pid"], signal.SIGKILL)
        ended = await listener.wait_for_end(KEY)
        assert (ended.outcome, ended.exit_code) == (GangOutcome.FAILED, 137)


def cgroup(name):
    """Make a cgroup, or skip the test where that is not possible."""
    path = cgroup_below(name)
    made = None if path is None else make_cgroup(path)
    if made is None:
        pytest.skip("no cgroup can be made here")
    return made


async def test_each_worker_of_a_gang_has_a_cgroup_of_its_own(home):
    remove_cgroup(cgroup("carpool-test-possible").path)
    async with executing(home, ("sleep", "60"), gpus=2) as (executor, listener):
        paths = []
        for rank in (0, 1):
            path = home.rank(*KEY, rank) / "process.json"
            await eventually(lambda path=path: "worker" in read_json(path))
            record = read_json(path)
            await eventually(lambda record=record: cgroup_of(record["worker"]["pid"]) == record["cgroup"])
            paths.append(record["cgroup"])
        assert len(set(paths)) == 2
        await end(executor, listener)
        assert not any(map(os.path.exists, paths))


def test_cgroups_that_no_process_uses_are_swept_away():
    """A wrapper and its service that are killed in one moment leave an empty cgroup."""
    left, used = (cgroup(f"carpool-test-{name}") for name in ("left", "used"))
    inside = subprocess.Popen(["sleep", "60"], preexec_fn=used.enter)
    try:
        sweep_cgroups("carpool-test-", 60.0)
        assert os.path.isdir(left.path), "a young one may be entered yet"
        sweep_cgroups("carpool-test-", 0.0)
        assert not os.path.exists(left.path)
        assert used.holds(inside.pid)
    finally:
        inside.kill()
        inside.wait()
        remove_cgroup(used.path)
