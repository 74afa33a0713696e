"""NVML with a fake library: what is listed, and that no function raises."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from carpool.gpu import nvml


class Library(ModuleType):
    """One GPU with a plain process, an MPS client that both lists name, and one whose memory is not told."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.broken = ()

    def __getattr__(self, name):
        answers = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, free=40),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=25),
            "nvmlDeviceGetComputeRunningProcesses": [_process(5, 10), _process(6, 20)],
            "nvmlDeviceGetMPSComputeRunningProcesses": [_process(6, None), _process(7, None)],
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*arguments):
            if name in self.broken:
                raise self.NVMLError(name)
            return answers[name]

        return call


def _process(pid, memory):
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(nvml, "_library", None)
    return library


def test_devices_processes_and_memory(library):
    assert nvml.devices() == [nvml.Device(0, "GPU-1", "NVIDIA H200", 100, "580.1")]
    assert nvml.processes("GPU-1") == [nvml.Use(5, 10, False), nvml.Use(6, 20, True), nvml.Use(7, None, True)]
    assert nvml.memory_of("GPU-1", 5) == 10
    assert nvml.memory_of("GPU-1", 8) is None
    assert nvml.free_memory("GPU-1") == 40
    assert nvml.utilisation("GPU-1") == 0.25


def test_a_driver_that_cannot_tell_mps_clients_apart_still_lists_processes(library):
    library.broken = ("nvmlDeviceGetMPSComputeRunningProcesses",)
    assert nvml.processes("GPU-1") == [nvml.Use(5, 10, False), nvml.Use(6, 20, False)]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByIndex"])
def test_any_failure_gives_an_empty_result(library, broken):
    library.broken = (broken,)
    if broken != "nvmlDeviceGetHandleByUUID":
        assert nvml.devices() == []
    if broken != "nvmlDeviceGetHandleByIndex":
        assert nvml.processes("GPU-1") == []
        assert nvml.free_memory("GPU-1") is None
        assert nvml.utilisation("GPU-1") is None


def test_a_driver_that_comes_up_later_is_found(library):
    library.broken = ("nvmlInit",)
    assert nvml.devices() == []
    library.broken = ()
    assert len(nvml.devices()) == 1


def test_without_the_package_there_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "_library", None)
    assert nvml.devices() == []
    assert nvml.processes("GPU-1") == []
