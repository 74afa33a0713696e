"""Slow-downs predicted from demands: what two jobs use of a GPU alone gives ξ of both before they have shared one.

The prediction differs for the two jobs: one that is bound by launches is slowed down differently than a saturating
mate. The coefficients belong to the mechanism and are fitted by `bench/demand_fit.py` to pairs measured with
`bench/demands.py`. `Belief` uses them as the prior of pairs whose demands are known.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from carpool.belief.pairs import Cell, JobClass
from carpool.core.model import GpuDemand

DEMAND_SD = {"mps": 0.13, "time-slicing": 0.10, "unknown": 0.25}
"""Standard deviation of log ξ around its prediction from demands, by mechanism."""
NEWEST = 0.5
"""Weight of the newest measurement in the demand of a family."""
NOTICEABLE_SHARE = 0.02
"""Smallest change of a share that takes effect: a smaller one is not worth recomputing all answers."""
FULL = 0.85
"""Share of the multiprocessors that a saturating training uses, as GPM counts."""
SLICE, TURN = 1.23, 0.45
"""Time-slicing: the mate's turn as a multiple of the job's own, and the busy share from which it takes all of it."""
CROWDING, OWN_POWER, MATE_POWER = 1.5, 0.41, 2.75
"""MPS: the slow-down of two jobs that saturate a GPU, less 1, and how fast it falls with either demand."""
PLAIN_CROWDING = 0.56
"""MPS, where only the plain utilisation is known."""


def slowdown(own: GpuDemand, mate: GpuDemand, mechanism: str) -> float:
    """Return ξ of a job beside a mate, from what both use of a GPU alone."""
    if mechanism == "time-slicing":
        # Jobs take turns: one that needs the GPU for only a part of its time may get its turn before it has to wait.
        return max(1.0, own.busy * (1.0 + SLICE * min(1.0, mate.busy / TURN)))
    if mechanism == "mps":
        # Kernels run side by side: a job waits for multiprocessors that its mate holds. The wait grows with both
        # demands.
        if own.gpm and mate.gpm:
            return 1.0 + CROWDING * math.pow(own.busy, OWN_POWER) * math.pow(mate.sm, MATE_POWER)
        return 1.0 + PLAIN_CROWDING * own.busy * mate.busy
    return 1.0 + own.busy * mate.busy


@dataclass
class Demands:
    """Demands by class of jobs, measured by the service."""

    mechanism: str
    known: dict[JobClass, GpuDemand] = field(default_factory=dict)

    def add(self, kind: JobClass, demand: GpuDemand) -> bool:
        """Add a measurement. Return whether the demand of the class changed noticeably."""
        before = self.known.get(kind)
        if before is None or before.gpm != demand.gpm:
            self.known[kind] = demand
            return True
        mixed = GpuDemand(
            sm=_mix(before.sm, demand.sm),
            busy=_mix(before.busy, demand.busy),
            dram=_mix(before.dram, demand.dram),
            tensor=_mix(before.tensor, demand.tensor),
            memory=max(before.memory, demand.memory),
            iteration_s=_mixed_time(before.iteration_s, demand.iteration_s),
            gpm=demand.gpm,
        )
        self.known[kind] = mixed
        return max(abs(mixed.sm - before.sm), abs(mixed.busy - before.busy)) > NOTICEABLE_SHARE

    @property
    def sd(self) -> float:
        """Standard deviation of log ξ around its prediction."""
        return DEMAND_SD.get(self.mechanism, DEMAND_SD["unknown"])

    def log_xi(self, cell: Cell, own_busy: float | None = None, mate_busy: float | None = None) -> float | None:
        """Return log ξ of a pair, or None if a demand is not known. A busy share from a profile replaces a demand."""
        own, mate = self._of(cell[0], own_busy), self._of(cell[1], mate_busy)
        return None if own is None or mate is None else math.log(slowdown(own, mate, self.mechanism))

    def _of(self, kind: JobClass, busy: float | None) -> GpuDemand | None:
        return self.known.get(kind) if busy is None else GpuDemand(sm=FULL * busy, busy=busy)

    def dump(self) -> list[list[Any]]:
        return [[*kind, *_plain(demand)] for kind, demand in self.known.items()]

    def restore(self, rows: list[list[Any]]) -> None:
        self.known = {JobClass(*row[:2]): GpuDemand(*row[2:]) for row in rows}


def _plain(demand: GpuDemand) -> tuple[Any, ...]:
    return demand.sm, demand.busy, demand.dram, demand.tensor, demand.memory, demand.iteration_s, demand.gpm


def _mix(before: float, newest: float) -> float:
    return before + NEWEST * (newest - before)


def _mixed_time(before: float, newest: float) -> float:
    """Mix two iteration times, of which 0 stands for one that is not known."""
    return _mix(before, newest) if before and newest else before or newest
