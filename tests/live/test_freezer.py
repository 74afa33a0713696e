"""Stopping the processes of a worker by signals, and letting them go on."""

import os
import subprocess
import sys
import time

import pytest

from carpool.live.freezer import SignalFreezer, process_stat

SPAWNING = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)])
print("went on", flush=True)
"""
"""A program that waits uninterruptibly until the child that it spawns has opened a pipe."""


def state(pid):
    stat = process_stat(pid)
    return stat[0] if stat else "gone"


def until(condition):
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_process_that_was_asked_to_stop_in_an_uninterruptible_wait_goes_on(pipe):
    program = subprocess.Popen([sys.executable, "-c", SPAWNING, str(pipe)], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: state(program.pid) == "D")
        freezer = SignalFreezer(os.getpid(), f"CARPOOL_TEST_MARK={pipe}")
        until(freezer.stop)
        assert state(program.pid) == "D", "the stop is still before it"
        freezer.go_on()
        os.close(os.open(pipe, os.O_WRONLY))
        assert program.communicate(timeout=30)[0] == "went on\n"
    finally:
        program.kill()
        program.wait()
