"""The data of trials: what `core.trials` keeps, policies read and snapshots carry."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Protocol

from carpool.core.model import JobId

LEAST_BUDGET_S = 3.0
"""Seconds that a trial may cost each side in any case."""
SHARE_OF_LEFT = 0.02
"""Share of its time left that a trial may cost each side."""
LEAST_LENGTH_S = 5.0
"""Seconds that a trial may last in any case. A job of it may not be able to report, and other jobs wait for its end."""
MOST_ENDED = 200
"""Number of ended trials that are kept."""


class Progress(Protocol):
    """What a trial reads of its jobs."""

    @property
    def slowdown(self) -> float:
        """ξ beside its present mates."""

    @property
    def computing(self) -> bool:
        """Whether it iterates now."""

    @property
    def pace_seen(self) -> bool:
        """Whether its slow-down was measured beside its present mates."""

    @property
    def since(self) -> float:
        """Time of its last settlement."""

    def alone_done(self, now: float) -> float:
        """Return the seconds that its iterations so far would have taken alone."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the jobs of a trial."""

    job: JobId
    seq: int
    attempt: int
    budget_s: float = 0.0
    """Seconds that the trial may cost it."""
    alone_s: float = 0.0
    """Seconds that its iterations would have taken alone, when the trial began to cost."""
    worst: float = 1.0
    """High end of what is believed of its slow-down beside the others."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Jobs that share to find out whether they should: a guest, and the hosts that it joined."""

    guest: Side
    hosts: tuple[Side, ...]
    began: float = -1.0
    """When the guest first computed beside them; −1: it still starts up."""
    longest_s: float = inf
    """Seconds after `began` at which it ends, whatever it has cost."""
    ended: float = -1.0
    kept: bool = False
    """Whether all went on beside each other."""
    costs_s: tuple[float, ...] = ()
    """Seconds that it cost the guest and each host, once it has ended."""

    @property
    def sides(self) -> tuple[Side, ...]:
        """The guest, then its hosts."""
        return self.guest, *self.hosts

    @property
    def seqs(self) -> tuple[int, ...]:
        """The `seq` of the guest and of its hosts."""
        return tuple([side.seq for side in self.sides])

    def costs(self, records: Sequence[Progress], now: float) -> tuple[float, ...]:
        """Return the seconds that the trial has cost its sides so far; `records` are their jobs."""
        elapsed = now - self.began
        return tuple(
            [
                max(0.0, elapsed - (record.alone_done(now) - side.alone_s))
                for side, record in zip(self.sides, records, strict=True)
            ]
        )

    def spent(self, records: Sequence[Progress], now: float) -> bool:
        """Return whether a side may have used up its budget, or the trial has lasted long enough."""
        return self.spent_at(records, now) <= now + 1e-6

    def spent_at(self, records: Sequence[Progress], now: float) -> float:
        """Return when a side may have used up its budget, or the trial has lasted long enough.

        A slow-down that was not measured counts as the worst.
        """
        moment = self.began + self.longest_s
        for side, record, cost in zip(self.sides, records, self.costs(records, now), strict=True):
            speed = 1.0 / record.slowdown if record.computing else 0.0
            if record.computing and not record.pace_seen:
                cost += (now - record.since) * max(0.0, speed - 1.0 / side.worst)
                speed = min(speed, 1.0 / side.worst)
            if speed < 1.0:
                moment = min(moment, now + max(0.0, side.budget_s - cost) / (1.0 - speed))
        return moment


@dataclass(slots=True)
class Trials:
    """The trials of a state: those that run, by the guest's `seq`, the latest that ended, and counters."""

    running: dict[int, Trial] = field(default_factory=dict)
    ended: deque[Trial] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    begun: int = 0
    kept: int = 0
    cost_s: float = 0.0
    """Seconds that ended trials cost both sides."""

    def dump(self) -> dict[str, Any]:
        """Return all trials as plain data."""
        return {
            "running": [[seq, asdict(trial)] for seq, trial in self.running.items()],
            "ended": [asdict(trial) for trial in self.ended],
            "counters": [self.begun, self.kept, self.cost_s],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> "Trials":
        """Return the trials that `dump` described."""
        begun, kept, cost_s = data["counters"]
        running = {seq: _trial(trial) for seq, trial in data["running"]}
        return cls(running, deque(map(_trial, data["ended"]), maxlen=MOST_ENDED), begun, kept, cost_s)


def _trial(data: dict[str, Any]) -> Trial:
    hosts = data.pop("host", None)  # a snapshot of the version in which a trial had one host
    hosts = data["hosts"] if hosts is None else [hosts]
    sides = {"guest": Side(**data["guest"]), "hosts": tuple([Side(**host) for host in hosts])}
    return Trial(**{**data, **sides, "costs_s": tuple(data["costs_s"])})
