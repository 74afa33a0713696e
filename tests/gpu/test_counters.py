# ruff: noqa: N802
"""Counters of a GPU with a fake library: GPM, the plain utilisation, and that nothing raises."""

import math
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from carpool.gpu import nvml
from carpool.gpu.counters import GpuUse, Meter

METRICS = {1: 90.0, 2: 80.0, 3: 30.0, 5: 25.0, 10: 40.0}


class Library(ModuleType):
    """A GPU whose counters are known; samples are numbered, and `asked` tells which two were compared."""

    NVML_GPM_METRICS_GET_VERSION = 1

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.supported, self.broken, self.metrics = True, "", dict(METRICS)
        self.taken, self.asked, self.freed, self.allocated = 0, [], 0, 0

    def _check(self, name):
        if self.broken == name:
            raise self.NVMLError(name)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._check("handle")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._check("rates")
        return SimpleNamespace(gpu=95, memory=35)

    def nvmlGpmQueryDeviceSupport(self, handle):
        self._check("support")
        return SimpleNamespace(isSupportedDevice=int(self.supported))

    def nvmlGpmSampleAlloc(self):
        self.allocated += 1
        return SimpleNamespace(number=0)

    def nvmlGpmSampleFree(self, sample):
        self.freed += 1

    def nvmlGpmSampleGet(self, handle, sample):
        self._check("sample")
        self.taken += 1
        sample.number = self.taken

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(8)])

    def nvmlGpmMetricsGet(self, question):
        self._check("metrics")
        assert question.version == 1
        self.asked.append((question.sample1.number, question.sample2.number))
        for metric in question.metrics[: question.numMetrics]:
            metric.value = self.metrics[metric.metricId]
        return question


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(nvml, "_library", None)
    return library


def test_a_reading_covers_the_time_since_the_last_one(library):
    meter = Meter("GPU-1")
    assert meter.gpm
    assert meter.read() is None, "there is nothing to compare with"
    assert meter.read() == GpuUse(sm=0.8, busy=0.9, dram=0.4, tensor=0.25, occupancy=0.3, gpm=True)
    meter.read()
    meter.restart()
    meter.read()
    assert library.asked == [(1, 2), (2, 3), (4, 5)]
    meter.close()
    assert library.freed == library.allocated == 2


def test_what_is_not_a_number_is_not_told(library):
    meter = Meter("GPU-1")
    library.metrics[5] = math.nan
    meter.restart()
    assert meter.read().tensor is None
    library.metrics[2] = math.nan
    assert meter.read() is None


@pytest.mark.parametrize("lacks", ["old GPU", "old driver", "old library"])
def test_without_gpm_the_plain_utilisation_counts(library, monkeypatch, lacks):
    if lacks == "old GPU":
        library.supported = False
    elif lacks == "old driver":
        library.broken = "support"
    else:
        monkeypatch.delattr(Library, "nvmlGpmQueryDeviceSupport")
    meter = Meter("GPU-1")
    assert not meter.gpm
    assert meter.read() == GpuUse(sm=0.95, busy=0.95, dram=0.35, tensor=None, occupancy=None, gpm=False)


@pytest.mark.parametrize("broken", ["handle", "sample", "metrics", "rates"])
def test_nothing_raises_and_later_readings_work_again(library, broken):
    library.supported = broken != "rates"
    if broken == "handle":
        library.broken = broken
    meter = Meter("GPU-1")
    library.broken = broken
    assert meter.read() is meter.read() is None
    library.broken = ""
    assert [meter.read() for _ in range(2)][-1] is not None


def test_without_the_package_there_are_no_counters(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "_library", None)
    assert Meter("GPU-1").read() is None


def test_a_reading_costs_little_of_our_own_time(library):
    meter = Meter("GPU-1")
    begin = time.process_time()
    for _ in range(200):
        meter.read()
    assert (time.process_time() - begin) / 200 < 0.001
