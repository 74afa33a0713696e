"""The MPS daemon's life, against a fake control program here and against the real one where there is a GPU."""

import json
import os
import subprocess
import sys
import time

import pytest

from carpool.gpu import mps, nvml
from tests.support import SUPPORT

pytestmark = pytest.mark.slow

NOBODY = 2**22 + 1
"""No process has this number."""


@pytest.fixture
def control(tmp_path):
    script = tmp_path / "fake-control"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {SUPPORT / "fake_mps.py"} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def daemon(tmp_path, control):
    daemon = mps.Daemon(tmp_path / "mps", ["GPU-1", "GPU-2"], control)
    yield daemon
    daemon.stop()


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.wait()


def serve(daemon, **servers):
    (daemon.pipe / "servers.json").write_text(json.dumps({name.strip("s"): told for name, told in servers.items()}))


def test_a_daemon_starts_with_its_own_directories_and_ends_by_its_pid(daemon):
    daemon.start()
    assert daemon.alive()
    told = json.loads((daemon.pipe / "environment.json").read_text())
    assert told["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert told["CUDA_MPS_PIPE_DIRECTORY"] == str(daemon.pipe)
    assert told["CUDA_MPS_LOG_DIRECTORY"] == str(daemon.log)
    assert daemon.pipe.stat().st_mode & 0o777 == 0o700
    pid = daemon.pid
    daemon.stop()
    assert not daemon.alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("how", ["quit", "deaf"])
def test_a_daemon_that_ignores_quit_or_sigterm_is_killed(daemon, monkeypatch, how):
    monkeypatch.setenv("FAKE_MPS_STUBBORN", how)
    monkeypatch.setattr(mps, "STOP_S", 0.2)
    daemon.start()
    pid = daemon.pid
    daemon.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_daemon_without_a_record_is_stopped_if_it_has_no_clients(tmp_path, control, daemon):
    daemon.start()
    (daemon.directory / "daemon.json").unlink()
    later = mps.Daemon(tmp_path / "mps", ["GPU-1", "GPU-2"], control)
    serve(daemon, s7={"clients": [11]})
    with pytest.raises(mps.MpsError, match="an unknown MPS daemon serves jobs"):
        later.start()
    assert daemon.alive()
    serve(daemon)
    later.start()
    assert later.alive()
    assert not daemon.alive()
    later.stop()


def test_an_unknown_daemon_that_does_not_stop_gives_one_clear_line(daemon, tmp_path, control, monkeypatch):
    monkeypatch.setenv("FAKE_MPS_STUBBORN", "quit")
    monkeypatch.setattr(mps, "STOP_S", 0.2)
    daemon.start()
    (daemon.directory / "daemon.json").unlink()
    with pytest.raises(mps.MpsError, match="answers there; stop it and start again"):
        mps.Daemon(tmp_path / "mps", ["GPU-1", "GPU-2"], control).start()
    daemon.stop()  # while it is not waited for


def test_a_directory_of_another_user_is_refused(daemon, monkeypatch):
    daemon.directory.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(mps.MpsError, match="belongs to another user"):
        daemon.start()
    assert not daemon.alive()


@pytest.mark.parametrize(
    ("says", "served", "expected", "detail"),
    [
        ({"much": 2, "little": 0}, True, (True, True), "much"),
        ({"much": 0, "little": 0}, True, (True, False), "much"),
        ({"much": 2, "little": 2}, True, (True, False), "much"),
        ({"much": 2, "little": 0}, False, (False, True), "outside MPS"),
        ({"error": "cuInit gave 999"}, True, (False, False), "cuInit gave 999"),
        (None, True, (False, False), "without an answer"),
    ],
)
def test_a_trial_client_shows_what_works(daemon, tmp_path, says, served, expected, detail):
    daemon.start()
    probe = tmp_path / "probe"
    lines = [f"echo '{json.dumps(says)}'", "read forever"] if says else []
    serving = f'printf \'{{"7": {{"clients": [%d]}}}}\' $$ > {daemon.pipe}/servers.json'
    probe.write_text("\n".join(["#!/bin/sh", *([serving] if served else []), *lines]))
    probe.chmod(0o755)
    found = daemon.check("GPU-1", str(probe))
    assert (found.served, found.limited) == expected
    assert detail in found.detail


def test_a_trial_client_that_hangs_is_not_waited_for(daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "CHECK_S", 0.2)
    monkeypatch.setattr(mps, "STOP_S", 0.2)
    daemon.start()
    probe = tmp_path / "probe"
    probe.write_text("#!/bin/sh\nexec sleep 60")
    probe.chmod(0o755)
    before = time.monotonic()
    found = daemon.check("GPU-1", str(probe))
    assert (found.served, found.limited) == (False, False)
    assert "no answer in 0.2 s" in found.detail
    assert time.monotonic() - before < 30


def test_the_next_service_adopts_the_daemon_and_keeps_its_clients(tmp_path, control, daemon):
    daemon.start()
    serve(daemon, s7={"clients": [os.getpid()]})
    later = mps.Daemon(tmp_path / "mps", ["GPU-1", "GPU-2"], control)
    later.start()
    assert later.pid == daemon.pid
    assert later.clients() == {os.getpid()}
    with pytest.raises(mps.MpsError, match="other GPUs"):
        mps.Daemon(tmp_path / "mps", ["GPU-3"], control).start()
    assert daemon.alive()


def test_a_record_of_a_dead_process_is_ignored(tmp_path, control, daemon):
    daemon.start()
    note = daemon.directory / "daemon.json"
    told = json.loads(note.read_text())
    first = daemon.pid
    daemon.stop()
    note.write_text(json.dumps({**told, "pid": os.getpid()}))  # the number belongs to another user now
    daemon.start()
    assert daemon.pid not in (first, os.getpid())


def test_a_daemon_that_cannot_start_gives_one_clear_line(daemon, monkeypatch):
    monkeypatch.setenv("FAKE_MPS_FAILS", "1")
    with pytest.raises(mps.MpsError, match=r"does not answer; see .*log"):
        daemon.start()
    assert not daemon.alive()


def test_clients_are_distinguished_from_processes_outside_mps(daemon, sleeper, monkeypatch):
    daemon.start()
    serve(daemon, s7={"clients": [sleeper.pid]}, s8={"clients": []})
    uses = [nvml.Use(sleeper.pid, 5, False), nvml.Use(99, 5, False)]
    monkeypatch.setattr(nvml, "processes", lambda uuid: uses)
    assert daemon.verify(sleeper.pid)
    assert daemon.verify(os.getpid()), "a client that we started verifies us"
    assert not daemon.verify(99)
    assert daemon.fell_back([sleeper.pid, 99, 100]) == [99]


def test_a_fault_lists_all_clients_of_the_server_once(daemon, sleeper):
    daemon.start()
    serve(daemon, s7={"clients": [11, sleeper.pid]}, s8={"clients": [12]})
    assert daemon.faults() == []
    serve(daemon, s7={"clients": [sleeper.pid], "status": "FAULT"}, s8={"clients": [12]})
    assert [(fault.server, fault.clients) for fault in daemon.faults()] == [(7, {11, sleeper.pid})]
    assert daemon.faults() == []


def test_a_server_that_is_gone_with_all_its_clients_is_a_fault(daemon):
    daemon.start()
    serve(daemon, s7={"clients": [NOBODY, NOBODY + 1]}, s8={"clients": []})
    assert daemon.faults() == []
    serve(daemon, s8={"clients": []})
    assert [(fault.server, fault.clients) for fault in daemon.faults()] == [(7, {NOBODY, NOBODY + 1})]
    assert daemon.faults() == []


def test_a_server_that_started_and_ended_between_two_calls_is_a_fault(daemon, sleeper):
    daemon.start()
    assert daemon.faults() == []
    begun = "[2026-01-01 10:00:00.000 Control {0}] Starting new server {0} for user 1000\n"
    with (daemon.log / "control.log").open("a") as log:
        log.write(begun.format(NOBODY) + begun.format(sleeper.pid))
    assert [(fault.server, fault.clients) for fault in daemon.faults()] == [(NOBODY, set())], (
        "the other one is coming up"
    )
    assert daemon.faults() == []
    serve(daemon, **{f"s{sleeper.pid}": {"clients": []}})
    assert daemon.faults() == []
    later = mps.Daemon(daemon.directory, daemon.uuids, daemon._control)
    later.start()
    assert later.faults() == [], "what is in the log is an earlier service's"


def test_a_server_recovers_once_the_clients_of_its_fault_have_left(daemon, monkeypatch):
    daemon.start()
    serve(daemon, s7={"clients": [11], "status": "FAULT"})
    assert len(daemon.faults()) == 1
    assert daemon.recovering
    serve(daemon, s7={"clients": []})
    assert daemon.faults() == []
    assert not daemon.recovering
    serve(daemon, s7={"clients": [12], "status": "FAULT"})
    assert [fault.clients for fault in daemon.faults()] == [{12}], "each fault is told"
    serve(daemon)
    assert [fault.reason for fault in daemon.faults()] == ["the server is gone"]
    assert not daemon.recovering
    serve(daemon, s8={"clients": [12], "status": "FAULT"})
    daemon.faults()
    assert daemon.recovering
    monkeypatch.setattr(mps, "RECOVERY_S", 0.0)
    assert not daemon.recovering, "one that does not recover is not waited for"


@pytest.mark.parametrize("looked", [True, False])
def test_a_dead_daemon_is_a_fault_of_all_it_served(daemon, sleeper, looked):
    daemon.start()
    serve(daemon, s7={"clients": [sleeper.pid]})
    if looked:
        daemon.faults()
    os.kill(daemon.pid, 9)
    until = time.monotonic() + 5
    while daemon.alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert [fault.clients for fault in daemon.faults()] == [{sleeper.pid} if looked else set()]
    assert not daemon.alive()


def test_the_memory_limit_is_given_for_each_gpu(daemon):
    limit = daemon.env(3 * 2**30, gpus=2)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
    assert limit == "0=3072M,1=3072M"
    assert set(daemon.env()) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}, "no share of threads is set"


def test_a_long_home_gets_short_sockets(tmp_path):
    deep = tmp_path / ("long" * 30)
    pipe = mps.Daemon(deep).pipe
    assert len(str(pipe / "control_privileged")) <= 107
    assert pipe == mps.Daemon(deep).pipe
    assert pipe != mps.Daemon(deep / "other").pipe


def test_the_missing_part_is_named(monkeypatch):
    assert "not installed" in mps.available("no-such-control-program")
    monkeypatch.setattr(nvml, "devices", list)
    assert mps.available(sys.executable) == "no GPU was found"


@pytest.mark.skipif(mps.available() is not None, reason=f"no MPS here: {mps.available()}")
def test_the_real_daemon_serves_a_client_limits_its_memory_and_notices_one_outside_mps(tmp_path):
    device = nvml.devices()[0]
    with mps.Daemon(tmp_path / "mps", [device.uuid]) as daemon:
        found = daemon.check(device.uuid)
        assert found.served, found.detail
        assert found.limited, found.detail
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "nobody")}
        command = [sys.executable, "-m", "carpool.gpu.probe", str(2**20)]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outside:
            assert json.loads(outside.stdout.readline()) == {"much": 0, "little": 0}
            assert not daemon.verify(outside.pid)
            assert daemon.fell_back([outside.pid]) == [outside.pid]
            outside.stdin.close()
        pid = daemon.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
