"""The calls that move a process's device memory, against a driver that plays the real one's states."""
# ruff: noqa: N802  (the driver's own names)

import ctypes

import pytest

from carpool.gpu import swap

NOT_SUPPORTED = 801


class FakeCuda:
    """Plays libcuda: keeps the state of each process and refuses calls that do not fit it."""

    def __init__(self, *, version=13000, fails=()):
        self.version = version
        self.fails = set(fails)
        """Calls that fail, as (name, pid)."""
        self.states = {}

    def cuInit(self, flags):
        return 0

    def cuDriverGetVersion(self, found):
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0

    def cuGetErrorName(self, code, found):
        ctypes.cast(found, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0

    def cuCheckpointProcessGetState(self, pid, found):
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = self.states.get(pid, swap.RUNNING)
        return 0

    def _move(self, name, pid, before, after):
        if (name, pid) in self.fails:
            return NOT_SUPPORTED
        assert self.states.get(pid, swap.RUNNING) == before, f"{name} of {pid}"
        self.states[pid] = after
        return 0

    def cuCheckpointProcessLock(self, pid, arguments):
        given = ctypes.cast(arguments, ctypes.POINTER(swap.LockArguments))[0]
        assert given.timeout_ms == swap.LOCK_MS
        return self._move("lock", pid, swap.RUNNING, swap.LOCKED)

    def cuCheckpointProcessCheckpoint(self, pid, arguments):
        return self._move("checkpoint", pid, swap.LOCKED, swap.CHECKPOINTED)

    def cuCheckpointProcessRestore(self, pid, arguments):
        return self._move("restore", pid, swap.CHECKPOINTED, swap.LOCKED)

    def cuCheckpointProcessUnlock(self, pid, arguments):
        return self._move("unlock", pid, swap.LOCKED, swap.RUNNING)


def test_out_and_in_may_be_repeated():
    cuda = FakeCuda()
    driver = swap.CheckpointDriver(cuda)
    for _ in range(2):
        swap.swap_out(driver, [1, 2])
        assert cuda.states == {1: swap.CHECKPOINTED, 2: swap.CHECKPOINTED}
    for _ in range(2):
        swap.swap_in(driver, [1, 2])
        assert cuda.states == {1: swap.RUNNING, 2: swap.RUNNING}


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_where_one_process_cannot_be_moved_all_go_on(call):
    cuda = FakeCuda(fails={(call, 2)})
    with pytest.raises(swap.SwapError, match="CUDA_ERROR_NOT_SUPPORTED"):
        swap.swap_out(swap.CheckpointDriver(cuda), [1, 2])
    assert set(cuda.states.values()) == {swap.RUNNING}


def test_an_old_driver_is_refused():
    with pytest.raises(swap.SwapError, match="too old"):
        swap.CheckpointDriver(FakeCuda(version=12040))


def test_without_a_driver_the_command_says_so(monkeypatch, capsys):
    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert swap.main(["out", "1"]) == 1
    assert capsys.readouterr().err.startswith("there is no CUDA driver")
