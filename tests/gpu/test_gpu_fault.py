"""A client's fatal fault under the real MPS: what it does to its mate, and that we hear of it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from carpool.gpu import mps, nvml

pytestmark = pytest.mark.skipif(mps.available() is not None, reason=f"no MPS here: {mps.available()}")
CLIENT = Path(__file__).parent / "cuda_client.py"
HEARD_S = 5.0


@contextmanager
def client(kind, daemon, uuid):
    """A client that has done its first round."""
    env = {**os.environ, **daemon.env(), "CUDA_VISIBLE_DEVICES": uuid}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(CLIENT), kind], env=env, text=True, **pipes) as process:
        assert process.stdout.readline() == "0\n"
        yield process


def finish(process):
    """Let it end, and return the codes of its rounds."""
    process.stdin.close()
    return [int(line) for line in process.stdout]


def faults_within(daemon, seconds):
    until = time.monotonic() + seconds
    while not (found := daemon.faults()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def test_who_is_hurt_by_a_fault_is_named_and_new_clients_start(tmp_path):
    uuid = nvml.devices()[0].uuid
    with mps.Daemon(tmp_path / "mps", [uuid]) as daemon:
        with client("healthy", daemon, uuid) as mate, client("faulty", daemon, uuid) as culprit:
            assert daemon.faults() == []
            assert {mate.pid, culprit.pid} <= daemon.clients()
            culprit.stdin.write("go\n")
            culprit.stdin.flush()
            assert int(culprit.stdout.readline()) != 0
            found = faults_within(daemon, HEARD_S)
            codes = finish(mate)
            print("the mate's codes:", codes[-3:], "faults:", found)
            if any(codes):
                assert any(mate.pid in fault.clients for fault in found)
            finish(culprit)
        with client("healthy", daemon, uuid) as again:
            assert daemon.verify(again.pid)
            finish(again)
