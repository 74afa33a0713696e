"""A client's fatal fault under the real MPS: what it does to its mate, and that we hear of it."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from carpool.gpu import mps, nvml
from carpool.live.home import Home
from carpool.live.spec import parse
from tests.support import SUPPORT

pytestmark = pytest.mark.skipif(mps.available() is not None, reason=f"no MPS here: {mps.available()}")
CLIENT = SUPPORT / "cuda_client.py"
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


def test_the_service_starts_the_mates_of_a_fault_again_and_loses_no_job(tmp_path):
    pytest.importorskip("sqlalchemy")
    asyncio.run(a_fault_among_jobs(Home(tmp_path / "h")))


async def a_fault_among_jobs(home):
    from carpool.live.service.config import ServiceConfig
    from carpool.live.service.service import open_service

    service = await open_service(ServiceConfig(home, "sjf-ffs", jobs_per_gpu=2, mps=True))
    running = asyncio.create_task(service.run())
    try:
        mate, culprit = await service.requests.submit([job("worker", 12), job("culprit", 5)], "eve")
        states = [await asyncio.wait_for(service.queries.wait(name), 60) for name in (mate, culprit)]
        (later,) = await service.requests.submit([job("worker", 1)], "eve")
        states.append(await asyncio.wait_for(service.queries.wait(later), 60))
        attempts = [service.queries.show(name)["attempt"] for name in (mate, culprit, later)]
    finally:
        await service.close()
        await running
    print("attempts:", attempts)
    assert states == ["finished"] * 3, "nobody has a retry to lose"
    assert attempts == [2, 2, 1]


def job(role, seconds):
    return parse({"command": [sys.executable, str(CLIENT), role, str(seconds)], "directory": str(CLIENT.parent)})
