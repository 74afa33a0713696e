"""Which processes belong to a worker, whatever else is in their environment."""

import os
import signal
import subprocess
import sys
import tracemalloc

import pytest

from carpool.channel import ENV_DIRECTORY
from carpool.live.executors.node import OwnProcesses, gang_of
from carpool.live.executors.processes import strays, worker_processes
from carpool.live.freezer import WORD_BYTES, SignalFreezer
from carpool.live.home import Home


@pytest.mark.parametrize("size", [0, WORD_BYTES - 20, WORD_BYTES, 5 * WORD_BYTES + 3])
def test_a_worker_is_found_behind_a_large_environment(tmp_path, size):
    """The kernel limits a single word to 128 KiB."""
    directory = str(tmp_path / "jobs" / "1" / "attempt-1" / "rank-0")
    filler = {f"V{n}": "x" * min(size, 100_000) for n in range(1 + size // 100_000)}
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, env={**filler, ENV_DIRECTORY: directory}, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        try:
            assert list(strays(directory)) == [worker.pid]
            assert worker_processes(str(tmp_path / "jobs")) == {directory: {worker.pid}}
            assert list(strays(directory[:-1])) == []
        finally:
            os.kill(worker.pid, signal.SIGKILL)


READERS = {
    "strays": lambda path, pid: list(strays(path)),
    "worker_processes": lambda path, pid: worker_processes(path).get(path, []),
    "freezer": lambda path, pid: SignalFreezer(os.getppid(), f"{ENV_DIRECTORY}={path}")._is_marked(pid) or [],
    "own processes": lambda path, pid: OwnProcesses(Home(path)).includes(pid) or [],
    "gang": lambda path, pid: gang_of(pid) or [],
}
"""All code that reads the environments of processes, each of which finds nothing here."""


@pytest.mark.parametrize("reader", READERS)
def test_little_memory_is_needed_for_a_large_environment(tmp_path, reader):
    filler = {f"V{n}": "x" * 120_000 for n in range(16)} | {"CARPOOL_JOB": "1", "CARPOOL_ATTEMPT": "9" * 9999}
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, env=filler, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            assert os.path.exists(f"/proc/{process.pid}/environ")
            tracemalloc.start()
            assert READERS[reader](str(tmp_path), process.pid) == []
            assert tracemalloc.get_traced_memory()[1] < 700_000
        finally:
            tracemalloc.stop()
            os.kill(process.pid, signal.SIGKILL)
