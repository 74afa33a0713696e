"""How much of a GPU is in use: GPM counters on Hopper and later, the plain utilisation elsewhere.

A `Meter` belongs to one GPU and gives the means between two readings. The counters are those of the whole GPU; they are
those of one job only while no other job is active there. The service's `DemandWatch` and `bench/demands.py` read them.
As in `carpool.gpu.nvml`, no function raises: without a driver a reading is None.
"""

import math
from dataclasses import dataclass
from typing import Any

from carpool.gpu import nvml

GRAPHICS, SM_UTILISATION, SM_OCCUPANCY, ANY_TENSOR, DRAM_BANDWIDTH = 1, 2, 3, 5, 10
"""Numbers of the GPM metrics, as NVML defines them."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Shares of a GPU in use, from 0 to 1, as means over a stretch of time; None: the driver does not report it."""

    sm: float
    """Multiprocessors in use. Without GPM, the share of time in which a kernel ran, which is larger."""
    busy: float
    """Time in which a kernel ran."""
    dram: float | None
    """Memory bandwidth. Without GPM, the share of time in which memory was read or written."""
    tensor: float | None
    occupancy: float | None
    gpm: bool
    """Whether these are GPM's counters."""


class Meter:
    """The counters of one GPU. `read` answers for the time since the last `read` or `restart`."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._handle: Any = None
        self._samples: tuple[Any, Any] | None = None  # the older one is read already
        self._begun = False
        self.gpm = nvml.ask(self._open, False)

    def restart(self) -> None:
        """Begin the stretch that the next reading covers."""
        self._begun = nvml.ask(self._take_first, False)

    def read(self) -> GpuUse | None:
        """Return the counters since the last call, or None if the driver does not report them. Begins a new stretch."""
        if not self.gpm:
            return nvml.ask(self._utilisation, None)
        if not self._begun:
            self.restart()
            return None
        answer = nvml.ask(self._metrics, None)
        self._begun = answer is not None
        return answer

    def close(self) -> None:
        """Free the samples."""
        if self._samples is not None:
            nvml.ask(self._free, None)
        self._samples, self.gpm = None, False

    def _open(self, library: Any) -> bool:
        self._handle = library.nvmlDeviceGetHandleByUUID(self.uuid)
        try:
            if not library.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return False
            self._samples = library.nvmlGpmSampleAlloc(), library.nvmlGpmSampleAlloc()
        except (AttributeError, library.NVMLError):  # an older library, an older driver or an older GPU
            return False
        return True

    def _take_first(self, library: Any) -> bool:
        if self._samples is None:
            return False
        library.nvmlGpmSampleGet(self._handle, self._samples[0])
        return True

    def _metrics(self, library: Any) -> GpuUse | None:
        assert self._samples is not None
        before, after = self._samples
        library.nvmlGpmSampleGet(self._handle, after)
        question = library.c_nvmlGpmMetricsGet_t()
        wanted = (GRAPHICS, SM_UTILISATION, SM_OCCUPANCY, ANY_TENSOR, DRAM_BANDWIDTH)
        question.version, question.numMetrics = library.NVML_GPM_METRICS_GET_VERSION, len(wanted)
        question.sample1, question.sample2 = before, after
        for number, metric in enumerate(wanted):
            question.metrics[number].metricId = metric
        answer = library.nvmlGpmMetricsGet(question)
        self._samples = after, before
        busy, sm, occupancy, tensor, dram = (_share(answer.metrics[number]) for number in range(len(wanted)))
        return None if sm is None else GpuUse(sm, sm if busy is None else busy, dram, tensor, occupancy, True)

    def _utilisation(self, library: Any) -> GpuUse | None:
        if self._handle is None:
            self._handle = library.nvmlDeviceGetHandleByUUID(self.uuid)
        rates = library.nvmlDeviceGetUtilizationRates(self._handle)
        busy = float(rates.gpu) / 100
        return GpuUse(busy, busy, float(rates.memory) / 100, None, None, False)

    def _free(self, library: Any) -> None:
        for sample in self._samples or ():
            library.nvmlGpmSampleFree(sample)


def _share(metric: Any) -> float | None:
    """Return a metric, which is given in percent, as a share."""
    value = float(metric.value)
    return None if metric.nvmlReturn != 0 or not math.isfinite(value) else min(1.0, max(0.0, value / 100))
