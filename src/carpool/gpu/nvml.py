"""What NVML tells about this machine's GPUs: the devices, who runs on them, and how much memory is left.

The live executor asks it for GPUs and for foreign processes, the profiler for a process's true memory. Nothing here
raises: without the package, the driver or a GPU the answers are empty, which is what a machine without GPUs looks like.
It only reads; clocks, compute mode and MIG layout are left alone. Inside a container whose process ids are its own,
the driver may report other numbers than the container knows: then no process of ours is found; callers allow for it.
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
    """A process on a GPU: its bytes, context included (None: the driver does not say); whether it is an MPS client."""

    pid: int
    memory: int | None
    mps: bool


_lock = threading.Lock()
_library: ModuleType | None = None


def devices() -> list[Device]:
    """Every GPU of this machine, in the driver's order; empty where there is none."""
    return _ask(_devices, [])


def processes(uuid: str) -> list[Use]:
    """Who computes on a GPU, MPS clients marked. The MPS server itself is listed as an ordinary process."""
    return _ask(lambda nvml: _processes(nvml, uuid), [])


def memory_of(uuid: str, pid: int) -> int | None:
    """Bytes that a process holds on a GPU, its context included; None if it holds none that the driver tells."""
    return next((use.memory for use in processes(uuid) if use.pid == pid), None)


def free_memory(uuid: str) -> int | None:
    """Bytes that nobody holds; None where NVML cannot tell."""
    return _ask(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).free), None)


def utilisation(uuid: str) -> float | None:
    """The share of the last moments (up to a second) in which some kernel ran; None where NVML cannot tell."""

    def share(library: Any) -> float | None:
        return float(library.nvmlDeviceGetUtilizationRates(library.nvmlDeviceGetHandleByUUID(uuid)).gpu) / 100

    return _ask(share, None)


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
    except nvml.NVMLError:  # an older driver: nobody can be told apart
        clients = []
    for p in clients:
        known = found.get(p.pid)
        found[p.pid] = Use(p.pid, p.usedGpuMemory if known is None or known.memory is None else known.memory, True)
    return sorted(found.values(), key=lambda use: use.pid)


def _ask(question: Callable[[Any], Answer], otherwise: Answer) -> Answer:
    with _lock:
        nvml = _loaded()
        if nvml is None:
            return otherwise
        try:
            return question(nvml)
        except (nvml.NVMLError, OSError):
            return otherwise


def _loaded() -> ModuleType | None:
    """The library, initialised once. A failure is tried again: a driver may come up later."""
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
