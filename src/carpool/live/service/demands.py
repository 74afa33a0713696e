"""Measures what jobs use of a GPU: reads, twice a second, the counters of GPUs on which one job alone computes.

The counters are those of a whole GPU, so they are a job's own only while its mates are paused or start up. The first
reading becomes an event with the job's demand, and another event follows when the mean of later readings differs. The
belief keeps it with the job's family.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from carpool.core import events as ev
from carpool.core.model import GpuDemand, GpuId
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.gpu.counters import GpuUse
from carpool.live.executors.base import Executor, GangKey, MeasuresUse
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox
from carpool.live.service.progress import ProgressWatch

log = logging.getLogger("carpool.live")

EVERY_S = 0.5
"""Seconds between two looks at the counters: a job in a trial is alone for about a second."""
MOST_SAMPLES = 20
"""Number of the latest looks that count."""
CHANGED = 0.1
"""Change of a share after which a demand is reported again."""


@dataclass(slots=True)
class GangDemand:
    """What was seen of a gang while it alone computed on its GPUs."""

    pauses: int
    """Number of its pauses at the last look: after another one, the counters since then are not only its own."""
    samples: list[GpuUse] = field(default_factory=list)
    told: GpuDemand | None = None


@dataclass
class DemandWatch:
    """Reads the counters and turns them into events."""

    state: State
    executor: Executor
    progress: ProgressWatch
    inbox: Inbox
    gangs: dict[GangKey, GangDemand] = field(default_factory=dict)

    async def run(self) -> None:
        executor = self.executor
        while isinstance(executor, MeasuresUse):
            await asyncio.sleep(EVERY_S)
            try:
                gpus = sorted({gpu for record in self.state.running for gpu in record.gpus})
                if gpus:
                    self._take(await asyncio.to_thread(_read, executor, gpus))
            except Exception:  # the next look must happen
                log.exception("the counters of GPUs could not be read")

    def look(self) -> None:
        """Read the counters and put what is new into the inbox."""
        if isinstance(self.executor, MeasuresUse):
            self._take(_read(self.executor, sorted({gpu for record in self.state.running for gpu in record.gpus})))

    def _take(self, uses: dict[GpuId, GpuUse | None]) -> None:
        alone = {(r.job.id, r.attempt): r for r in self.state.running if self._computes_alone(r)}
        self.gangs = {key: gang for key, gang in self.gangs.items() if key in alone or gang.told is not None}
        found: list[tuple[GangKey, GpuDemand]] = []
        for key, record in alone.items():
            gang = self.gangs.get(key)
            if gang is None or gang.pauses != record.pauses:  # it came to be alone since the last look
                self.gangs[key] = GangDemand(record.pauses, told=gang.told if gang else None)
                continue
            seen = [use for gpu in record.gpus if (use := uses.get(gpu)) is not None]
            if len(seen) == len(record.gpus):
                gang.samples = [*gang.samples, _mean(seen)][-MOST_SAMPLES:]
                demand = self._news(record, gang)
                found += [(key, demand)] if demand is not None else []
        for key, gang in self.gangs.items():
            if key not in alone:
                gang.samples, gang.pauses = [], -1
        self.gangs = {key: gang for key, gang in self.gangs.items() if self._is_current(key)}
        if found:

            def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
                return [ev.DemandMeasured(now, *key, demand) for key, demand in found]

            self.inbox.add(prepare)

    def _computes_alone(self, record: JobRecord) -> bool:
        mates, taken = self.state.cluster.mates(record), self.state.topology.taken
        if any(taken.get(gpu, 0) for gpu in record.gpus):  # processes that are not jobs compute there
            return False
        return record.computing and not any(mate.active and not mate.starts_up for mate in mates)

    def _is_current(self, key: GangKey) -> bool:
        record = self.state.jobs.get(key[0])
        return record is not None and record.attempt == key[1] and bool(record.gpus)

    def _news(self, record: JobRecord, gang: GangDemand) -> GpuDemand | None:
        use, report = _mean(gang.samples), self.progress.latest(record)
        demand = GpuDemand(
            sm=use.sm,
            busy=use.busy,
            dram=use.dram or 0.0,
            tensor=use.tensor or 0.0,
            memory=max(report.peak_memory, report.reserved_memory) if report is not None else 0,
            iteration_s=report.seconds if report is not None else 0.0,
            gpm=use.gpm,
        )
        if gang.told is not None and not _differs(gang.told, demand):
            return None
        gang.told = demand
        return demand


def _read(executor: MeasuresUse, gpus: Sequence[GpuId]) -> dict[GpuId, GpuUse | None]:
    return {gpu: executor.gpu_use(gpu) for gpu in gpus}


def _mean(uses: Sequence[GpuUse]) -> GpuUse:
    """Return the mean of several readings; of what some of them lack, the mean of the others."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    return GpuUse(
        sm=fmean(use.sm for use in uses),
        busy=fmean(use.busy for use in uses),
        dram=mean([use.dram for use in uses]),
        tensor=mean([use.tensor for use in uses]),
        occupancy=mean([use.occupancy for use in uses]),
        gpm=all(use.gpm for use in uses),
    )


def _differs(told: GpuDemand, now: GpuDemand) -> bool:
    shares = ((told.sm, now.sm), (told.busy, now.busy), (told.dram, now.dram), (told.tensor, now.tensor))
    slower = now.iteration_s > 0.0 and not 0.8 <= told.iteration_s / now.iteration_s <= 1.25
    return slower or any(abs(a - b) > CHANGED for a, b in shares)
