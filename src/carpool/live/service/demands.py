"""Measures what jobs use of a GPU: reads, four times a second, the counters of GPUs on which one job alone computes.

The counters are those of a whole GPU, so they are a job's own only while its mates are paused or start up. They tell
what its steps use: readings from before the job is warm, or from after its last step, do not count. The first reading
that does becomes an event with the job's demand, and another event follows when the mean of later readings differs. The
belief keeps it with the job's family.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from carpool.channel import Report
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

EVERY_S = 0.25
"""Seconds between two looks at the counters: a job in a trial is alone for about a second."""
MOST_SAMPLES = 40
"""Number of the latest looks that count."""
WARM_ITERATIONS = 3
"""Iterations of an attempt after which readings count: the first ones load kernels and keep the GPU waiting."""
CHANGED = 0.1
"""Change of a share after which a demand is reported again."""


@dataclass(slots=True)
class GangDemand:
    """What was seen of a gang while it alone computed on its GPUs."""

    pauses: int
    """Number of its pauses at the last look: after another one, the counters since then are not only its own."""
    first: int
    """Iteration at which its attempt was first seen; 0 for the first attempt."""
    iteration: int
    """Iteration at the last look."""
    samples: list[GpuUse] = field(default_factory=list)
    newest: GpuUse | None = None
    """The last reading, which counts from the next one on: the job may have made its last step in the middle of it."""
    told: GpuDemand | None = None

    def add(self, use: GpuUse, report: Report | None) -> bool:
        """Add a reading that ends now. Return whether there is anything new to tell."""
        if report is None or not (report.iteration or report.time):  # the job does not tell its steps
            self.samples = [*self.samples, use][-MOST_SAMPLES:]
            return True
        if self.newest is not None:
            self.samples = [*self.samples, self.newest][-MOST_SAMPLES:]
        warm = self.iteration - self.first >= WARM_ITERATIONS
        self.newest = use if warm else None
        goes_on = report.iteration > self.iteration
        self.iteration = report.iteration
        return warm and goes_on

    @property
    def use(self) -> GpuUse:
        """The mean of the readings that count. The very first one counts at once, because a trial waits for it."""
        newest = [] if self.newest is None else [self.newest]
        return _mean(self.samples or newest)


@dataclass(frozen=True, slots=True)
class Look:
    """What was read at one time."""

    uses: Mapping[GpuId, GpuUse | None]
    reports: Mapping[GangKey, Report | None]


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
                alone = self._alone()
                if alone or self.gangs:
                    self._take(await asyncio.to_thread(_read, executor, executor, alone) if alone else Look({}, {}))
            except Exception:  # the next look must happen
                log.exception("the counters of GPUs could not be read")

    def look(self) -> None:
        """Read the counters and put what is new into the inbox."""
        executor = self.executor
        if isinstance(executor, MeasuresUse):
            self._take(_read(executor, executor, self._alone()))

    def _alone(self) -> dict[GangKey, tuple[GpuId, ...]]:
        """Return the gangs that alone compute on their GPUs, with these GPUs."""
        return {(r.job.id, r.attempt): r.gpus for r in self.state.running if self._computes_alone(r)}

    def _take(self, look: Look) -> None:
        alone = self._alone()
        found: list[tuple[GangKey, GpuDemand]] = []
        for key in look.reports.keys() & alone.keys():
            record, report = self.state.jobs[key[0]], look.reports[key]
            gang = self.gangs.get(key)
            if gang is None or gang.pauses != record.pauses:  # it came to be alone since the last look
                self.gangs[key] = _begin(record, report, gang)
                continue
            seen = [use for gpu in record.gpus if (use := look.uses.get(gpu)) is not None]
            if len(seen) == len(record.gpus) and gang.add(_mean(seen), report):
                demand = self._news(record, gang, report)
                found += [(key, demand)] if demand is not None else []
        self.gangs = {key: gang for key, gang in self.gangs.items() if self._is_current(key)}
        for key in self.gangs.keys() - alone.keys():
            gang = self.gangs[key]
            gang.samples, gang.newest, gang.pauses = [], None, -1
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

    def _news(self, record: JobRecord, gang: GangDemand, report: Report | None) -> GpuDemand | None:
        use = gang.use
        demand = GpuDemand(
            sm=use.sm,
            busy=use.busy,
            dram=use.dram or 0.0,
            tensor=use.tensor or 0.0,
            memory=max(report.peak_memory, report.reserved_memory) if report is not None else 0,
            iteration_s=self.progress.seconds(record) or 0.0,
            gpm=use.gpm,
        )
        if gang.told is not None and not _differs(gang.told, demand):
            return None
        gang.told = demand
        return demand


def _begin(record: JobRecord, report: Report | None, before: GangDemand | None) -> GangDemand:
    """Return what is known of a gang that just came to be alone."""
    iteration = report.iteration if report is not None else 0
    first = before.first if before is not None else iteration if record.attempt > 1 else 0
    return GangDemand(record.pauses, first, iteration, told=before.told if before is not None else None)


def _read(executor: Executor, counters: MeasuresUse, alone: Mapping[GangKey, Sequence[GpuId]]) -> Look:
    uses = {gpu: counters.gpu_use(gpu) for gpus in alone.values() for gpu in gpus}
    return Look(uses, {key: executor.report(key) for key in alone})


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
