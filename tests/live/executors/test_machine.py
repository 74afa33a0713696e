"""The live machine under MPS: who runs outside it is noticed, and a fence is built only where it was seen to hold."""

import asyncio
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
from carpool.live.executors.machine import Ours, ServerFault, discover, gang_of
from carpool.live.home import Home
from carpool.live.journal.store import Store, StoreError
from carpool.live.service import recovery
from carpool.live.service.service import Service
from tests.support import SUPPORT

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
    return discover(None, None, Home(tmp_path / "home"))


def test_a_fence_stands_only_where_it_was_seen_to_hold(control, tmp_path, monkeypatch):
    for limited in (True, False):
        machine = found(tmp_path, monkeypatch, limited)
        try:
            assert machine.mechanism == "mps"
            limits = [machine.environment(memory, 2).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") for memory in (0, 2**32)]
            assert limits == [None, "0=7168M,1=7168M" if limited else None]
            assert "CUDA_MPS_PIPE_DIRECTORY" in machine.environment()
        finally:
            machine.stop()
    assert machine.environment(2**32) == {}, "the daemon is gone"


def test_a_worker_outside_mps_is_named_once(control, tmp_path, monkeypatch):
    machine = found(tmp_path, monkeypatch, True)
    home = Home(tmp_path / "home")
    env = {**os.environ, ENV_DIRECTORY: f"{home.jobs}/7/attempt-1/rank-0", "CARPOOL_JOB": "7", "CARPOOL_ATTEMPT": "2"}
    env |= machine.environment()
    worker = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env=env)
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    server = subprocess.Popen(  # it has the daemon's environment
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **machine.mps.env()}
    )
    alone = subprocess.Popen(  # of a job that was not told of MPS
        [sys.executable, "-S", "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, ENV_DIRECTORY: env[ENV_DIRECTORY]},
    )
    everybody = (worker, stranger, server, alone)
    try:
        uses = [nvml.Use(process.pid, 2**30, False) for process in everybody]
        monkeypatch.setattr(nvml, "processes", lambda uuid: uses)
        ours = Ours(home, machine.mps)
        served = machine.mps.pipe / "servers.json"
        served.write_text(json.dumps({"5": {"clients": [worker.pid]}}))
        assert machine.outside_mps(ours) == []
        served.write_text(json.dumps({"5": {"clients": []}}))
        assert machine.outside_mps(ours) == [], "perhaps it is just ending"
        served.write_text(json.dumps({"5": {"clients": [worker.pid]}}))
        assert machine.outside_mps(ours) == []
        served.write_text(json.dumps({"5": {"clients": []}}))
        assert machine.outside_mps(ours) == []
        assert machine.outside_mps(ours) == [worker.pid]
        assert gang_of(worker.pid) == ("7", 2)
        assert machine.outside_mps(ours) == [], "told once"
        assert machine.taken_by_strangers(ours) == [(0, 2**30)], "only the stranger's memory is taken from us"
    finally:
        for process in everybody:
            process.stdin.close()
            process.wait()
        machine.stop()


@pytest.mark.parametrize("busy", [False, True])
def test_where_no_trial_client_is_served_jobs_share_by_time_slicing(control, tmp_path, monkeypatch, busy):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(False, False, "cuInit gave 999"))
    clients = {42} if busy else set()
    monkeypatch.setattr(mps.Daemon, "clients", lambda self: clients)
    machine = discover(None, None, Home(tmp_path / "home"))
    daemon = mps.Daemon(tmp_path / "home" / "mps", [DEVICE.uuid])
    try:
        if busy:
            assert machine.mechanism == "mps", "it serves jobs of an earlier service"
            machine.leave()
            assert machine.mps.alive()
        else:
            assert (machine.mechanism, machine.mps) == ("time-slicing", None)
            assert machine.why == "MPS does not work here: cuInit gave 999"
            assert not (daemon.directory / "daemon.json").exists(), "no daemon is left"
    finally:
        machine.stop()


def test_a_service_that_cannot_start_leaves_no_daemon(control, tmp_path, monkeypatch):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, True, ""))
    home = Home(tmp_path / "home")

    async def refused(store, make):
        assert (home.mps / "daemon.json").exists()
        raise StoreError("it is from a newer release")

    monkeypatch.setattr(recovery, "load", refused)
    with pytest.raises(InputError, match="newer release"):
        asyncio.run(Service(home).start())
    assert not (home.mps / "daemon.json").exists()


@pytest.mark.parametrize(
    ("me", "uid", "mechanism"), [(0, 1234, "time-slicing"), (0, 0, "mps"), (0, None, "mps"), (9, 1234, "mps")]
)
def test_mps_is_for_jobs_of_one_user(control, tmp_path, monkeypatch, me, uid, mechanism):
    monkeypatch.setattr(mps.Daemon, "check", lambda self, uuid: mps.Check(True, True, ""))
    monkeypatch.setattr(Store, "users", lambda self: {"eve": {"uid": uid}})
    monkeypatch.setattr("carpool.live.service.service.own_uid", lambda: me)
    home = Home(tmp_path / "home")

    async def play():
        service = Service(home)
        await service.start()
        told = service.queries.gpus()
        await service.stop()
        return told["mechanism"], told["why"]

    why = "" if mechanism == "mps" else "jobs run under their users' ids, and MPS serves one user at a time"
    assert asyncio.run(play()) == (mechanism, why)
    assert not (home.mps / "daemon.json").exists()


@pytest.fixture
def worker(tmp_path):
    env = {**os.environ, "CARPOOL_JOB": "7", "CARPOOL_ATTEMPT": "2"}
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env=env)
    yield process
    process.kill()
    process.communicate()


def test_a_fault_names_the_gangs_on_the_server_also_those_whose_processes_are_gone(
    control, tmp_path, monkeypatch, worker
):
    machine = found(tmp_path, monkeypatch, True)
    try:
        served = machine.mps.pipe / "servers.json"
        served.write_text(json.dumps({"5": {"clients": [worker.pid]}}))
        assert machine.faults() == []
        assert machine.seen == {("7", 2)}
        worker.kill()
        worker.wait()
        served.write_text("{}")
        assert machine.faults() == [ServerFault(frozenset({("7", 2)}), "the server is gone")]
    finally:
        machine.stop()


def test_a_daemon_that_died_is_started_again_but_not_for_ever(control, tmp_path, monkeypatch, worker):
    monkeypatch.setattr("carpool.live.executors.machine.MOST_RESTARTS", 1)
    machine = found(tmp_path, monkeypatch, True)
    try:
        servers = {"5": {"clients": [worker.pid]}, "6": {"clients": []}}
        (machine.mps.pipe / "servers.json").write_text(json.dumps(servers))
        assert machine.ready
        assert machine.faults() == []
        kill_daemon(machine)
        assert not machine.ready, "whoever were launched now would run outside MPS"
        gangs = [frozenset({("7", 2)}), frozenset()]
        assert machine.faults() == [ServerFault(hit, "the daemon is gone and was started again") for hit in gangs]
        assert machine.ready
        assert "CUDA_MPS_PIPE_DIRECTORY" in machine.environment()
        kill_daemon(machine)
        (fault,) = machine.faults()
        assert "time-slicing" in fault.reason
        assert (machine.mechanism, machine.why) == ("time-slicing", "the MPS daemon died 2 times")
        assert machine.ready
        assert machine.environment() == {}
        assert machine.faults() == []
    finally:
        machine.stop()


def kill_daemon(machine):
    pid = machine.mps.pid
    os.kill(pid, 9)
    until = time.monotonic() + 5
    while machine.mps.alive() and time.monotonic() < until:
        time.sleep(0.01)


def test_a_service_takes_only_the_gpus_it_is_given(tmp_path, monkeypatch):
    several = [replace(DEVICE, index=number, uuid=f"GPU-{number}") for number in range(4)]
    monkeypatch.setattr(nvml, "devices", lambda: several)

    async def slots(**options):
        service = Service(Home(tmp_path / "home"), mps=False, **options)
        await service.start()
        await service.stop()
        return [slot.uuid for slot in service._machine.slots]

    assert asyncio.run(slots(only=("GPU-1", "GPU-3"))) == ["GPU-1", "GPU-3"]
    assert asyncio.run(slots()) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    with pytest.raises(InputError, match="no GPU was found"):
        asyncio.run(slots(only=("GPU-9",)))
