"""Which processes belong to a worker, whatever else is in their environment."""

import os
import signal
import subprocess
import sys
import tracemalloc

import pytest

from carpool.channel import ENV_DIRECTORY
from carpool.live.executors.processes import WORD_BYTES, strays, worker_processes


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


def test_little_memory_is_needed_for_a_large_environment(tmp_path):
    filler = {f"V{n}": "x" * 120_000 for n in range(16)}
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, env=filler, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            assert os.path.exists(f"/proc/{process.pid}/environ")
            tracemalloc.start()
            assert list(strays(str(tmp_path))) == []
            assert tracemalloc.get_traced_memory()[1] < 700_000
        finally:
            tracemalloc.stop()
            os.kill(process.pid, signal.SIGKILL)
