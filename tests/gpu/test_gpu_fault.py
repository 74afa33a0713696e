"""A client's fatal fault under the real MPS: what it does to its mate, and that we hear of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.gpu import mps, nvml

pytestmark = pytest.mark.skipif(mps.available() is not None, reason=f"no MPS here: {mps.available()}")
CLIENT = Path(__file__).parent / "cuda_client.py"


def client(kind, daemon, uuid):
    env = {**os.environ, **daemon.env(), "CUDA_VISIBLE_DEVICES": uuid}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, str(CLIENT), kind], env=env, text=True, **pipes)
    assert process.stdout.readline() == "0\n"
    return process


def test_who_is_hurt_by_a_fault_is_named_and_new_clients_start(tmp_path):
    uuid = nvml.devices()[0].uuid
    with mps.Daemon(tmp_path / "mps", [uuid]) as daemon:
        mate, culprit = client("healthy", daemon, uuid), client("faulty", daemon, uuid)
        assert daemon.faults() == []
        assert {mate.pid, culprit.pid} <= daemon.clients()
        culprit.stdin.write("go\n")
        culprit.stdin.flush()
        assert int(culprit.stdout.readline()) != 0
        faults, until = [], time.monotonic() + 5
        while time.monotonic() < until and not faults:
            faults = daemon.faults()
            time.sleep(0.05)
        mate.stdin.close()
        codes = [int(line) for line in mate.stdout]
        print("mate:", codes[-3:], "faults:", faults, (daemon.log / "control.log").read_text()[-1500:])
        if any(codes):
            assert any(mate.pid in fault.clients for fault in faults)
        culprit.stdin.close()
        mate.wait()
        culprit.wait()
        again = client("healthy", daemon, uuid)
        assert daemon.verify(again.pid)
        again.stdin.close()
        again.wait()
