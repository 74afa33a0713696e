"""Reads this machine's GPUs through NVML: devices, processes on them, and free memory.

The live executor calls it for GPUs and foreign processes, the profiler for the memory of a process. No function raises:
without the package, the driver or a GPU the results are empty, as on a machine without GPUs. Nothing is changed:
clocks, compute mode and MIG layout stay as they are. In a container with its own process ids the driver may report
other ids than the container uses; then none of our processes is found, and callers must allow for that.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `memory` is its total in bytes."""

    index: int
    uuid: str
    name: str
    memory: int
    driver: str


@dataclass(frozen=True, slots=True)
class Use:
    """A process on a GPU: its bytes with the context (None: unknown to the driver), and whether it is an MPS client."""

    pid: int
    memory: int | None
    mps: bool


_lock = threading.Lock()
_library: ModuleType | None = None


def devices() -> list[Device]:
    """Return every GPU of this machine in the driver's order."""
    return ask(_devices, [])


def processes(uuid: str) -> list[Use]:
    """Return the processes on a GPU, MPS clients marked. The MPS server is listed as an ordinary process."""
    return ask(lambda nvml: _processes(nvml, uuid), [])


def memory_of(uuid: str, pid: int) -> int | None:
    """Return the bytes that a process holds on a GPU, with its context, or None if the driver reports none."""
    return next((use.memory for use in processes(uuid) if use.pid == pid), None)


def free_memory(uuid: str) -> int | None:
    """Return the free bytes on a GPU, or None if NVML cannot tell."""
    return ask(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).free), None)


def utilisation(uuid: str) -> float | None:
    """Return the share of the last second or less in which a kernel ran, or None if NVML cannot tell."""

    def share(library: Any) -> float | None:
        return float(library.nvmlDeviceGetUtilizationRates(library.nvmlDeviceGetHandleByUUID(uuid)).gpu) / 100

    return ask(share, None)


def _devices(nvml: Any) -> list[Device]:
    driver = str(nvml.nvmlSystemGetDriverVersion())
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        uuid, name = str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))
        found.append(Device(index, uuid, name, memory, driver))
    return found


def _processes(nvml: Any, uuid: str) -> list[Use]:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    found = {p.pid: Use(p.pid, p.usedGpuMemory, False) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    try:
        clients = nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    except nvml.NVMLError:  # an older driver does not list MPS clients
        clients = []
    for p in clients:
        known = found.get(p.pid)
        found[p.pid] = Use(p.pid, p.usedGpuMemory if known is None or known.memory is None else known.memory, True)
    return sorted(found.values(), key=lambda use: use.pid)


def ask(question: Callable[[Any], Answer], otherwise: Answer) -> Answer:
    """Return what a question to the library gives, or `otherwise` where there is no library or it raises."""
    with _lock:
        nvml = _loaded()
        if nvml is None:
            return otherwise
        try:
            return question(nvml)
        except (nvml.NVMLError, OSError):
            return otherwise


def _loaded() -> ModuleType | None:
    """Return the library, initialised once. After a failure the next call tries again, as a driver may load later."""
    global _library
    if _library is None:
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError, OSError):
            return None
        _library = pynvml
    return _library
