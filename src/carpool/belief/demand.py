"""Slow-downs predicted from demands: what two jobs ask of a GPU alone gives ξ of both before they ever met.

The prediction is unequal for the two sides: a job bound by launches suffers otherwise beside a saturating one than the
other way round. The coefficients belong to the mechanism and are fitted by `bench/demand_fit.py` to pairs measured with
`bench/demands.py`. `Belief` uses them as the prior of pairs whose demands are known.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carpool.belief.pairs import Cell, JobClass
from carpool.core.model import GpuDemand

DEMAND_SD = 0.15
"""Standard deviation of log ξ around its prediction from demands."""
NEWEST = 0.5
"""Weight of the newest measurement in the demand of a family."""
NOTICEABLE_SHARE = 0.02
"""Smallest change of a share that takes effect: a smaller one is not worth recomputing all answers."""
FULL = 0.8
"""Share of the multiprocessors that a saturating training uses, as GPM counts."""


class Coefficients(NamedTuple):
    """ξ of a job = 1 + weight · own^own_power · mate^mate_power, where both are shares of a full GPU."""

    weight: float
    own_power: float
    mate_power: float


COEFFICIENTS = {
    "mps": Coefficients(0.46, 1.0, 1.0),
    "time-slicing": Coefficients(1.15, 1.0, 1.0),
    "unknown": Coefficients(1.0, 1.0, 1.0),
}


def slowdown(own: GpuDemand, mate: GpuDemand, mechanism: str) -> float:
    """Return ξ of a job beside a mate, from what both ask of a GPU alone."""
    weight, own_power, mate_power = COEFFICIENTS.get(mechanism, COEFFICIENTS["unknown"])
    return 1.0 + weight * math.pow(_load(own), own_power) * math.pow(_load(mate), mate_power)


def _load(demand: GpuDemand) -> float:
    """Return the share of a full GPU that a job uses."""
    return min(1.0, max(0.01, demand.sm / (FULL if demand.gpm else 1.0)))


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
            dram=_mix(before.dram, demand.dram),
            tensor=_mix(before.tensor, demand.tensor),
            memory=max(before.memory, demand.memory),
            iteration_s=_mix(before.iteration_s, demand.iteration_s) if demand.iteration_s else before.iteration_s,
            gpm=demand.gpm,
        )
        self.known[kind] = mixed
        changes = (abs(mixed.sm - before.sm), abs(mixed.dram - before.dram), abs(mixed.tensor - before.tensor))
        return max(changes) > NOTICEABLE_SHARE

    def log_xi(self, cell: Cell, own_busy: float | None = None, mate_busy: float | None = None) -> float | None:
        """Return log ξ of a pair, or None if a demand is not known. A busy share from a profile replaces a demand."""
        own, mate = self._of(cell[0], own_busy), self._of(cell[1], mate_busy)
        return None if own is None or mate is None else math.log(slowdown(own, mate, self.mechanism))

    def _of(self, kind: JobClass, busy: float | None) -> GpuDemand | None:
        return self.known.get(kind) if busy is None else GpuDemand(sm=FULL * busy)

    def dump(self) -> list[list[Any]]:
        return [[*kind, *_plain(demand)] for kind, demand in self.known.items()]

    def restore(self, rows: list[list[Any]]) -> None:
        self.known = {JobClass(*row[:2]): GpuDemand(*row[2:]) for row in rows}


def _plain(demand: GpuDemand) -> tuple[Any, ...]:
    return demand.sm, demand.dram, demand.tensor, demand.memory, demand.iteration_s, demand.gpm


def _mix(before: float, newest: float) -> float:
    return before + NEWEST * (newest - before)
