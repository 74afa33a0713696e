"""Moving the device memory of another process to main memory and back, by the checkpoint calls of the CUDA driver.

`python -m carpool.gpu.swap out PID…` locks the processes and moves their memory; `in` moves it back and lets them go
on. Both may be repeated: a process that is where it should be is left alone. `check` only says whether the driver has
the calls. The local executor runs it as a process of its own, because a call can take seconds or hang. Works on Linux
with CUDA 12.8 or later, for processes of one GPU without NCCL, as root or as the user of the processes; not under MPS
(docs/experiments/swap.md).
"""

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

LOCK_MS = 10_000
"""Milliseconds that a process gets to reach a state in which it can be locked."""
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
"""States of a process, as `cuCheckpointProcessGetState` numbers them."""
FIRST_VERSION = 12080
"""Version of the driver API that has the calls."""


class SwapError(Exception):
    """The driver refused or cannot do it."""


class LockArguments(ctypes.Structure):
    """What `cuCheckpointProcessLock` takes."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class CheckpointDriver:
    """The checkpoint calls of libcuda."""

    def __init__(self, cuda: Any = None) -> None:
        if cuda is None:
            try:
                cuda = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise SwapError(f"there is no CUDA driver: {error}") from None
        self.cuda = cuda
        self._check("cuInit", cuda.cuInit(0))
        if self.version() < FIRST_VERSION:
            raise SwapError(f"the CUDA driver is too old ({self.version()}; {FIRST_VERSION} has the calls)")

    def version(self) -> int:
        """Return the version of the driver API, such as 13000."""
        found = ctypes.c_int()
        self.cuda.cuDriverGetVersion(ctypes.byref(found))
        return found.value

    def state(self, pid: int) -> int:
        """Return `RUNNING`, `LOCKED`, `CHECKPOINTED` or `FAILED`."""
        found = ctypes.c_uint()
        self._check("GetState", self.cuda.cuCheckpointProcessGetState(pid, ctypes.byref(found)))
        return found.value

    def lock(self, pid: int) -> None:
        """Block all CUDA calls of a process, after those under way are done."""
        arguments = LockArguments(timeout_ms=LOCK_MS)
        self._check("Lock", self.cuda.cuCheckpointProcessLock(pid, ctypes.byref(arguments)))

    def checkpoint(self, pid: int) -> None:
        """Move the device memory of a locked process to main memory."""
        self._check("Checkpoint", self.cuda.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> None:
        """Move it back."""
        self._check("Restore", self.cuda.cuCheckpointProcessRestore(pid, None))

    def unlock(self, pid: int) -> None:
        """Let a locked process go on."""
        self._check("Unlock", self.cuda.cuCheckpointProcessUnlock(pid, None))

    def _check(self, call: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(name))
            raise SwapError(f"{call}: {name.value.decode() if name.value else f'error {code}'}")


def swap_out(driver: CheckpointDriver, pids: Sequence[int]) -> None:
    """Move the memory of all processes out; if one fails, all are as before."""
    done: list[int] = []
    try:
        for pid in pids:
            done.append(pid)
            state = driver.state(pid)
            if state == RUNNING:
                driver.lock(pid)
                state = LOCKED
            if state == LOCKED:
                driver.checkpoint(pid)
    except SwapError:
        for pid in reversed(done):
            with contextlib.suppress(SwapError):
                swap_in(driver, [pid])
        raise


def swap_in(driver: CheckpointDriver, pids: Sequence[int]) -> None:
    """Move the memory of all processes back and let them go on."""
    for pid in pids:
        state = driver.state(pid)
        if state == CHECKPOINTED:
            driver.restore(pid)
            state = LOCKED
        if state == LOCKED:
            driver.unlock(pid)


def main(arguments: Sequence[str]) -> int:
    """Swap the given processes out or in; print why where that fails."""
    direction, *pids = arguments
    try:
        driver = CheckpointDriver()
        if direction != "check":
            move = {"out": swap_out, "in": swap_in}[direction]
            move(driver, [int(pid) for pid in pids])
    except SwapError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
