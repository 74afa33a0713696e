"""This node as a node: its GPUs, MPS with its memory limits and faults, and memory that other processes hold."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from carpool.channel import ENV_DIRECTORY
from carpool.errors import InputError
from carpool.gpu import mps, nvml
from carpool.live.executors.base import ExecutorOptions, GpuSlot
from carpool.live.executors.node import LocalNode, MpsServerFault, OwnProcesses, gang_of, open_node
from carpool.live.home import Home
from carpool.live.journal.store import Store, StoreError
from carpool.live.service import recovery
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import open_service
from tests.support import SUPPORT
from tests.support.services import serving

pytestmark = pytest.mark.slow

DEVICE = nvml.Device(0, "GPU-1", "NVIDIA Test", 80 * 2**30, "1.0")


@pytest.fixture
def control(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-cuda-mps-control"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {SUPPORT / "fake_mps.py"} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvml, "devices", lambda: [DEVICE])


def found(tmp_path, monkeypatch, limited):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, limited, ""))
    return open_node(ExecutorOptions(Home(tmp_path / "home")))


def test_memory_is_limited_only_where_a_trial_showed_that_limits_hold(control, tmp_path, monkeypatch):
    for limited in (True, False):
        node = found(tmp_path, monkeypatch, limited)
        try:
            assert node.mechanism == "mps"
            limits = [node.environment(memory, 2).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") for memory in (0, 2**32)]
            assert limits == [None, "0=7168M,1=7168M" if limited else None]
            assert "CUDA_MPS_PIPE_DIRECTORY" in node.environment()
        finally:
            node.stop_mps()
    assert node.environment(2**32) == {}, "the daemon is gone"


def test_a_worker_outside_mps_is_named_once(control, tmp_path, monkeypatch):
    node = found(tmp_path, monkeypatch, True)
    home = Home(tmp_path / "home")
    env = {**os.environ, ENV_DIRECTORY: f"{home.jobs}/7/attempt-1/rank-0", "CARPOOL_JOB": "7", "CARPOOL_ATTEMPT": "2"}
    env |= node.environment()
    worker = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env=env)
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    server = subprocess.Popen(  # it has the daemon's environment
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **node.mps.env()}
    )
    alone = subprocess.Popen(  # of a job that did not get the MPS variables
        [sys.executable, "-S", "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, ENV_DIRECTORY: env[ENV_DIRECTORY]},
    )
    processes = (worker, other, server, alone)
    try:
        uses = [nvml.Use(process.pid, 2**30, False) for process in processes]
        monkeypatch.setattr(nvml, "processes", lambda uuid: uses)
        ours = OwnProcesses(home, node.mps)
        served = node.mps.pipe / "servers.json"
        served.write_text(json.dumps({"5": {"clients": [worker.pid]}}))
        assert node.outside_mps(ours) == []
        served.write_text(json.dumps({"5": {"clients": []}}))
        assert node.outside_mps(ours) == [], "it may just be ending"
        served.write_text(json.dumps({"5": {"clients": [worker.pid]}}))
        assert node.outside_mps(ours) == []
        served.write_text(json.dumps({"5": {"clients": []}}))
        assert node.outside_mps(ours) == []
        assert node.outside_mps(ours) == [worker.pid]
        assert gang_of(worker.pid) == ("7", 2)
        assert node.outside_mps(ours) == [], "named once"
        assert node.foreign_memory(ours) == [(0, 2**30)], "only the other process's memory is foreign"
    finally:
        for process in processes:
            process.stdin.close()
            process.wait()
        node.stop_mps()


@pytest.mark.parametrize("busy", [False, True])
def test_where_no_trial_client_is_served_jobs_share_by_time_slicing(control, tmp_path, monkeypatch, busy):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(False, False, "cuInit gave 999"))
    clients = {42} if busy else set()
    monkeypatch.setattr(mps.Daemon, "clients", lambda self: clients)
    node = open_node(ExecutorOptions(Home(tmp_path / "home")))
    daemon = mps.Daemon(tmp_path / "home" / "mps", [DEVICE.uuid])
    try:
        if busy:
            assert node.mechanism == "mps", "it serves jobs of an earlier service"
            node.stop_mps_if_unused()
            assert node.mps.alive()
        else:
            assert (node.mechanism, node.mps) == ("time-slicing", None)
            assert node.why == "MPS does not work here: cuInit gave 999"
            assert not (daemon.directory / "daemon.json").exists(), "no daemon is left"
    finally:
        node.stop_mps()


@pytest.mark.parametrize("busy", [False, True])
def test_a_node_leaves_mps_and_its_daemon_stays_only_for_jobs_that_run(control, tmp_path, monkeypatch, busy):
    node = found(tmp_path, monkeypatch, True)
    daemon = node.mps
    monkeypatch.setattr(mps.Daemon, "clients", lambda self: {42} if busy else set())
    try:
        node.leave_mps("one user")
        assert (node.mechanism, node.why, node.environment(2**30)) == ("time-slicing", "one user", {})
        assert daemon.alive() is busy
    finally:
        daemon.stop()


async def test_a_service_that_cannot_start_leaves_no_daemon(control, tmp_path, monkeypatch):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, True, ""))
    home = Home(tmp_path / "home")

    async def refused(store, make):
        assert (home.mps / "daemon.json").exists()
        raise StoreError("it is from a newer release")

    monkeypatch.setattr(recovery, "load", refused)
    with pytest.raises(InputError, match="newer release"):
        await open_service(ServiceConfig(home))
    assert not (home.mps / "daemon.json").exists()


@pytest.mark.parametrize(
    ("me", "uid", "mechanism"), [(0, 1234, "time-slicing"), (0, 0, "mps"), (0, None, "mps"), (9, 1234, "mps")]
)
async def test_mps_is_for_jobs_of_one_user(control, tmp_path, monkeypatch, me, uid, mechanism):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, True, ""))
    monkeypatch.setattr(Store, "users", lambda self: {"eve": {"uid": uid}})
    monkeypatch.setattr("carpool.live.service.users.own_uid", lambda: me)
    home = Home(tmp_path / "home")

    async def play():
        service = await open_service(ServiceConfig(home))
        shown = service.queries.gpus()
        await service.close()
        return shown["mechanism"], shown["why"]

    why = "" if mechanism == "mps" else "jobs run under their users' ids, and MPS serves one user at a time"
    assert await play() == (mechanism, why)
    assert not (home.mps / "daemon.json").exists()


@pytest.fixture
def worker(tmp_path):
    env = {**os.environ, "CARPOOL_JOB": "7", "CARPOOL_ATTEMPT": "2"}
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env=env)
    yield process
    process.kill()
    process.communicate()


def test_a_fault_names_the_gangs_of_the_server_even_if_their_processes_are_gone(control, tmp_path, monkeypatch, worker):
    node = found(tmp_path, monkeypatch, True)
    try:
        served = node.mps.pipe / "servers.json"
        served.write_text(json.dumps({"5": {"clients": [worker.pid]}}))
        assert node.faults() == []
        assert node.seen == {("7", 2)}
        worker.kill()
        worker.wait()
        served.write_text("{}")
        assert node.faults() == [MpsServerFault(frozenset({("7", 2)}), "the server is gone")]
    finally:
        node.stop_mps()


def test_a_dead_daemon_is_restarted_a_limited_number_of_times(control, tmp_path, monkeypatch, worker):
    monkeypatch.setattr("carpool.live.executors.node.MAX_RESTARTS", 1)
    node = found(tmp_path, monkeypatch, True)
    try:
        servers = {"5": {"clients": [worker.pid]}, "6": {"clients": []}}
        (node.mps.pipe / "servers.json").write_text(json.dumps(servers))
        assert node.ready
        assert node.faults() == []
        kill_daemon(node)
        assert not node.ready, "a gang that starts now would run outside MPS"
        gangs = [frozenset({("7", 2)}), frozenset()]
        assert node.faults() == [MpsServerFault(hit, "the daemon is gone and was restarted") for hit in gangs]
        assert node.ready
        assert "CUDA_MPS_PIPE_DIRECTORY" in node.environment()
        kill_daemon(node)
        (fault,) = node.faults()
        assert "time-slicing" in fault.reason
        assert (node.mechanism, node.why) == ("time-slicing", "the MPS daemon died 2 times")
        assert node.ready
        assert node.environment() == {}
        assert node.faults() == []
    finally:
        node.stop_mps()


def kill_daemon(node):
    pid = node.mps.pid
    os.kill(pid, 9)
    until = time.monotonic() + 5
    while node.mps.alive() and time.monotonic() < until:
        time.sleep(0.01)


async def test_a_service_takes_only_the_gpus_it_is_given(tmp_path, monkeypatch):
    several = [replace(DEVICE, index=number, uuid=f"GPU-{number}") for number in range(4)]
    monkeypatch.setattr(nvml, "devices", lambda: several)

    async def slots(**options):
        service = await open_service(ServiceConfig(Home(tmp_path / "home"), mps=False, **options))
        await service.close()
        return [slot.uuid for slot in service.executor.node.slots]

    assert await slots(only=("GPU-1", "GPU-3")) == ["GPU-1", "GPU-3"]
    assert await slots() == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    with pytest.raises(InputError, match="no GPU was found"):
        await slots(only=("GPU-9",))


def test_memory_of_other_processes_is_reported_and_that_of_workers_is_not(home, monkeypatch):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = {"CARPOOL_WORKER_DIR": f"{home.jobs}/1/attempt-1/rank-0"}
    mine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=mark)
    uses = [nvml.Use(other.pid, 3 * 2**30, False), nvml.Use(mine.pid, 5 * 2**30, False)]
    monkeypatch.setattr(nvml, "processes", lambda uuid: list(uses))
    node = LocalNode((GpuSlot(0, "node0", 0, "GPU-x"),), 16 * 2**30, "time-slicing")
    own = OwnProcesses(home)
    try:
        deadline = time.monotonic() + 10  # until both run their own program
        while time.monotonic() < deadline and not (own.includes(mine.pid) and not own.includes(other.pid)):
            time.sleep(0.02)
        assert node.foreign_memory(own) == [(0, 3 * 2**30)]
        assert node.foreign_memory(own) == [], "only changes are reported"
        uses[0] = nvml.Use(other.pid, 3 * 2**30 + 2**20, False)
        assert node.foreign_memory(own) == []
        uses.pop(0)
        assert node.foreign_memory(own) == [(0, 0)]
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        uses.append(nvml.Use(other.pid, 3 * 2**30, False))
        assert node.foreign_memory(own) == [], "a process that is ending does not count"
    finally:
        for process in (other, mine):
            process.communicate(b"\n")


async def test_without_a_gpu_the_error_says_how_to_use_logical_slots(home, monkeypatch):
    monkeypatch.setattr(nvml, "devices", list)

    with pytest.raises(InputError, match="give --gpus N"):
        async with serving(home, gpus=None):
            pass
    Home(home.path).acquire()  # the home was released
