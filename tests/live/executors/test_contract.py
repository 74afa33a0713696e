"""Every executor passes the same contract: the one for this machine, with real processes, and the one in memory."""

import pytest

from carpool.live.executors.base import ExecutorOptions
from carpool.live.executors.contract import ExecutorContract
from carpool.live.executors.launching import GangLauncher
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.memory import MemoryExecutor, program


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def make_executor(self, home):
        home.create()
        return lambda: LocalExecutor(ExecutorOptions(home, gpus=2))


class TestPausingBySignals(TestLocalExecutor):
    """The part of the contract that depends on how workers are paused, without cgroups."""

    @pytest.fixture(autouse=True)
    def without_cgroups(self, monkeypatch):
        monkeypatch.setattr(GangLauncher, "cgroups", False)


for _name in vars(ExecutorContract):
    if _name.startswith("test_") and "paus" not in _name:
        setattr(TestPausingBySignals, _name, None)


class TestMemoryExecutor(ExecutorContract):
    @pytest.fixture
    def make_executor(self):
        executor = MemoryExecutor(gpus=2, automatic=True)
        return lambda: executor

    computes = False

    def command(self, *, output="", exit_code=None):
        return program(output=output, exit_code=exit_code)

    def writing_command(self):
        return program(output="1\n")

    def saving_command(self, checkpoint, seconds=0.0):
        return program(checkpoint=checkpoint)

    def failing_rank_command(self, exit_code):
        return program(exit_code=exit_code)

    def missing_command(self):
        return program(exit_code=127)
