"""Which service leads: one row with a term, which every transaction of the leader renews.

A service that is to lead reads the row. If another one leads, it stands by until the row was not renewed for
`TAKE_OVER_S`, measured by its own clock: no clock of a machine is compared with that of another. Then it raises the
term. The old leader, whose transactions all begin by renewing the row of *its* term, finds none and is deposed: it can
write nothing. It also measures by its own clock when its lease runs out, and starts and answers nothing after that.

`store.py` keeps the `LeaderLease` of a service up to date. The service, its HTTP API, its executor and the agents of a
cluster ask it: whether it leads, and in which term.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, literal_column, select

from carpool.live.clock import since_boot
from carpool.live.errors import Deposed
from carpool.live.journal.schema import leader

RENEW_S = 1.0
"""Seconds between two renewals of a leader that has nothing to write."""
LEASE_S = 4.0
"""Seconds after the beginning of its last renewal for which a leader acts and answers."""
TAKE_OVER_S = 5.0
"""Seconds without a renewal after which another service takes over. The difference to `LEASE_S` is for what the old
leader has begun just before its lease ran out."""
LOOK_S = 0.5
"""Seconds between two looks of a service that stands by."""
CLOCK = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())",
}
"""The time of the database in seconds since the epoch, for operators."""


@dataclass
class LeaderLease:
    """Whether this service leads, and its term. All times are of this machine, since its boot."""

    lease_s: float | None = None
    """Seconds that a renewal holds; None: for ever, because the lock of the home excludes other services."""
    term: int = 0
    """Number of this reign: it grows with every start of a service. 0: this service has never led."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when another service leads."""
    _renewed: float = 0.0

    def leads(self) -> bool:
        """Return whether this service may act and answer as the leader now."""
        if not self.term or self.lost.is_set():
            return False
        return self.lease_s is None or since_boot() < self._renewed + self.lease_s

    def renew(self, begun: float) -> None:
        """Note a renewal that is written. `begun`: when it began, because the row may have changed just after that."""
        self._renewed = max(self._renewed, begun)

    @property
    def age_s(self) -> float:
        """Seconds since the last renewal began."""
        return since_boot() - self._renewed


@dataclass(frozen=True, slots=True)
class LeaderState:
    """The row as it was read."""

    term: int = 0
    beat: int = 0
    released: bool = True
    holder: str = ""
    silent_s: float = 0.0
    """Seconds since the last renewal, by the clock of the database."""


@dataclass
class LeaderWatch:
    """What a service that stands by has seen of the leader."""

    state: LeaderState | None = None
    since: float = 0.0

    def sees(self, state: LeaderState, now: float) -> bool:
        """Note what was read; return whether the lead may be taken."""
        if self.state is None or (state.term, state.beat) != (self.state.term, self.state.beat):
            self.since = now
        self.state = state
        return state.released or now - self.since >= TAKE_OVER_S

    def interrupted(self) -> None:
        """Begin again: while the database was away, the leader could not renew the row either."""
        self.state = None


def read(connection: Connection) -> LeaderState:
    """Return the row; without one, the state before the first leader."""
    silent = (_now(connection) - leader.c.renewed).label("silent")
    row = connection.execute(select(leader.c.term, leader.c.beat, leader.c.released, leader.c.holder, silent)).first()
    return LeaderState(*row[:4], silent_s=float(row[4])) if row is not None else LeaderState()


def take(connection: Connection, seen: LeaderState, holder: str) -> int | None:
    """Take the lead, if the row is still as it was seen; return the new term, or None if it is not."""
    values: dict[str, Any] = {"beat": seen.beat + 1, "released": False, "holder": holder, "renewed": _now(connection)}
    if not seen.term and connection.execute(select(leader.c.id)).first() is None:
        # A damaged file lost the row. No count of starts reaches the time, so the term still grows.
        term = int(time.time())
        connection.execute(leader.insert().values(id=1, term=term, **values))
        return term
    same = (leader.c.term == seen.term) & (leader.c.beat == seen.beat)
    taken = connection.execute(leader.update().where(same).values(term=seen.term + 1, **values))
    return seen.term + 1 if taken.rowcount == 1 else None


def renew(connection: Connection, term: int, *, released: bool = False) -> int:
    """Renew the row at the beginning of a transaction and return its beat. Raise `Deposed` if another service leads.

    The row stays locked until the transaction ends: no other service can take the lead in between.
    """
    renewing = leader.update().where(leader.c.term == term)
    values = {"beat": leader.c.beat + 1, "released": released, "renewed": _now(connection)}
    beat = connection.execute(renewing.values(values).returning(leader.c.beat)).scalar()
    if beat is None:
        raise Deposed(term)
    return int(beat)


def _now(connection: Connection) -> Any:
    return literal_column(CLOCK[connection.dialect.name])
