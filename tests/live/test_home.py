"""The home directory: who may read it, what is pruned, and what the machine's GPUs look like from it."""

import ast
import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.errors import InputError
from carpool.gpu import nvml
from carpool.live import rank
from carpool.live.executors import machine
from carpool.live.executors.base import Slot
from carpool.live.home import Home, default_home, write_private
from carpool.live.service.prune import Keep, prune, size_of
from tests.support.services import notes, one, serving, shell, started, until


def test_nobody_else_can_read_what_is_kept(home):
    async def play():
        async with serving(home) as service:
            job = await one(service, shell("echo secret", env={"TOKEN": "x"}))
            await service.queries.wait(job)
            return job

    job = asyncio.run(play())
    open_to = stat.S_IRWXG | stat.S_IRWXO
    allowed = stat.S_IXGRP | stat.S_IXOTH if os.getuid() == 0 else 0
    files = 0
    for folder, _, names in os.walk(home.path):
        assert os.stat(folder).st_mode & open_to & ~allowed == 0, folder
        for name in names:
            files += 1
            if name != "control.json":  # says nothing that the job does not know
                assert os.stat(os.path.join(folder, name)).st_mode & open_to == 0, name
    assert files > 5
    assert (home.rank(job, 1, 0) / "stdout.log").exists()


def test_a_job_id_never_becomes_another_path(home):
    for bad in ("../x", "1/2", "", "1 ", "１", "x", "1" * 19):
        with pytest.raises(InputError):
            home.job(bad)


def test_where_the_home_is(monkeypatch, tmp_path):
    monkeypatch.setenv("CARPOOL_HOME", str(tmp_path / "mine"))
    assert default_home() == tmp_path / "mine"
    monkeypatch.delenv("CARPOOL_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_home() == tmp_path / "carpool"


def test_old_files_go_and_then_the_oldest_while_there_are_too_many(home):
    home.create()
    for job in range(1, 6):
        (home.job(str(job)) / "attempt-1").mkdir(parents=True)
        write_private(home.job(str(job)) / "attempt-1" / "stdout.log", "x" * 100_000, sync=False)
    each = size_of(home.job("1"))
    ended = [("1", 10.0), ("2", 950.0), ("3", 900.0), ("4", 990.0)]  # and 5 still runs
    assert prune(home, ended, 1000.0, Keep(seconds=500.0, size=10**9)) == ["1"]
    assert prune(home, ended, 1000.0, Keep(seconds=500.0, size=2 * each)) == ["3"]
    assert sorted(os.listdir(home.jobs)) == ["2", "4", "5"]


def test_a_smaller_machine_stops_what_it_cannot_hold_and_runs_it_again(home, tmp_path):
    script = f"echo $CARPOOL_GPUS >> {tmp_path}/ran; test $CARPOOL_ATTEMPT = 2 || sleep 30"

    async def play():
        async with serving(home, "fifo", gpus=2, jobs_per_gpu=1) as service:
            jobs = [await one(service, shell(script)) for _ in range(2)]
            for job in jobs:
                await started(service, job)
            written = tmp_path / "ran"  # a job runs before its script has written anything
            await until(lambda: written.exists() and len(written.read_text().split()) == 2)
        async with serving(home, "fifo", gpus=1, jobs_per_gpu=1) as service:
            assert any("the GPUs have changed" in text for text in notes(service))
            for job in jobs:
                assert await service.queries.wait(job) == "finished"
            assert len(service.queries.gpus()["nodes"][0]["gpus"]) == 1
        ran = (tmp_path / "ran").read_text().split()
        assert (sorted(ran[:2]), ran[2:]) == (["node0:0", "node0:1"], ["node0:0", "node0:0"])

    asyncio.run(play())


def test_memory_of_strangers_is_noticed_and_ours_is_not_counted(home, monkeypatch):
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = {"CARPOOL_WORKER_DIR": f"{home.jobs}/1/attempt-1/rank-0"}
    mine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=mark)
    uses = [nvml.Use(stranger.pid, 3 * 2**30, False), nvml.Use(mine.pid, 5 * 2**30, False)]
    monkeypatch.setattr(nvml, "processes", lambda uuid: list(uses))
    found = machine.Machine((Slot(0, "node0", 0, "GPU-x"),), 16 * 2**30, "time-slicing")
    ours = machine.Ours(home)
    try:
        deadline = time.monotonic() + 10  # until both have become what they will be
        while time.monotonic() < deadline and not (ours(mine.pid) and not ours(stranger.pid)):
            time.sleep(0.02)
        assert found.taken_by_strangers(ours) == [(0, 3 * 2**30)]
        assert found.taken_by_strangers(ours) == [], "only changes are worth an event"
        uses[0] = nvml.Use(stranger.pid, 3 * 2**30 + 2**20, False)
        assert found.taken_by_strangers(ours) == []
        uses.pop(0)
        assert found.taken_by_strangers(ours) == [(0, 0)]
        stranger.kill()
        os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)
        uses.append(nvml.Use(stranger.pid, 3 * 2**30, False))
        assert found.taken_by_strangers(ours) == [], "one that is ending holds nothing for long"
    finally:
        for process in (stranger, mine):
            process.communicate(b"\n")


def test_without_a_gpu_and_without_slots_the_service_says_what_to_do(home, monkeypatch):
    monkeypatch.setattr(nvml, "devices", list)

    async def play():
        async with serving(home, gpus=None):
            pass

    with pytest.raises(InputError, match="give --gpus N"):
        asyncio.run(play())
    Home(home.path).acquire()  # and lets the home go


def test_the_wrapper_needs_nothing_of_ours_and_starts_quickly():
    tree = ast.parse(Path(rank.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("carpool") for name in names)
    assert names <= set(sys.stdlib_module_names) | {"collections.abc"}
