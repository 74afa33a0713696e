"""Reading a journal: events, snapshots, jobs, users, estimates. Every call uses a connection of its own.

Reading waits neither for the writer nor for other readers. On PostgreSQL it waits for the network, so whatever runs on
the event loop reads through threads. `Store` adds the writing; commands that only look use the reader alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, and_, func, or_, select, text
from sqlalchemy.exc import SQLAlchemyError

from carpool.core import codec
from carpool.core import events as ev
from carpool.live.errors import Unavailable
from carpool.live.journal import leadership, schema

DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that reading a row raises if a disk fault or another program has changed it."""
NOTE = "Note"
"""Kind of the rows that are notes for operators."""
DAMAGED = "Damaged"
"""Kind of the rows from the first one on that could not be read: kept for operators, left out of every replay."""
PAGE = 2000
"""Number of events that are read at a time."""


class JournalPlace(Protocol):
    """Where a journal is: a SQLite file or a PostgreSQL database. Its text is for messages and holds no password."""

    shared: bool

    def engine(self) -> Engine: ...

    def look(self) -> Engine | None: ...

    def make(self) -> None: ...

    def remove(self) -> None: ...

    def prepare(self) -> list[str]: ...

    def problem(self) -> str: ...

    def reason(self, error: BaseException) -> str: ...


class JournalReader:
    """Reads a journal."""

    def __init__(self, place: JournalPlace) -> None:
        self.place = place
        self._engine = place.engine()
        # Without transactions: PostgreSQL ends those that stay open.
        self._readers = self._engine.execution_options(isolation_level="AUTOCOMMIT") if place.shared else self._engine
        self.notes: list[str] = []
        """Lines for the operator about the state in which the journal was found."""

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._readers.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise Unavailable(f"the journal cannot be read ({self.place.reason(error)}); try again") from error

    def version(self) -> int:
        """Return the version of the tables; 0: there are none."""
        with self._reading() as connection:
            return schema.version_of(connection)

    def settings(self) -> dict[str, str]:
        """Return what an operator should know of a PostgreSQL server."""
        names = ("server_version", "server_encoding", "fsync", "full_page_writes")
        with self._reading() as connection:
            found = {name: str(connection.execute(text(f"SHOW {name}")).scalar()) for name in names}
            replica = connection.execute(text("SELECT pg_is_in_recovery()")).scalar()
        return {**found, "in_recovery": "on" if replica else "off"}

    def can_write(self) -> bool:
        """Return whether this user may change all tables of a journal in PostgreSQL."""
        rights = " AND ".join(f"has_table_privilege(name, '{right}')" for right in ("INSERT", "UPDATE", "DELETE"))
        asked = text(f"SELECT bool_and({rights}) FROM unnest(cast(:names AS text[])) AS name")
        with self._reading() as connection:
            return bool(connection.execute(asked, {"names": list(schema.metadata.tables)}).scalar())

    def leader(self) -> leadership.LeaderState:
        """Return which service leads."""
        with self._reading() as connection:
            return leadership.read(connection)

    def snapshots(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the snapshots that can be read, the latest first."""
        table = schema.snapshots
        with self._reading() as connection:
            known = list(connection.execute(select(table.c.seq).order_by(table.c.seq.desc())).scalars())
        for seq in known:
            with self._reading() as connection:
                data = connection.execute(select(table.c.data).where(table.c.seq == seq)).scalar()
            try:
                yield seq, json.loads(data or "")
            except DAMAGE:
                continue

    def events_after(self, seq: int) -> Iterator[tuple[int, ev.Event | None]]:
        """Yield the events after `seq` in order, without notes. A row that cannot be read, or before which rows are
        missing, gives None. Raise `UnknownEvent` for a kind that only another release knows: that is no damage."""
        last = seq
        while page := self._page(last):
            for number, kind, data in page:
                if kind not in (NOTE, DAMAGED):
                    yield number, self._decode(number, data) if number == last + 1 else None
                last = number

    def _page(self, after: int) -> list[tuple[int, str, str]]:
        """Return some rows after an event. No transaction stays open while they are applied."""
        table = schema.events
        asked = select(table.c.seq, table.c.kind, table.c.data).where(table.c.seq > after).order_by(table.c.seq)
        with self._reading() as connection:
            return [(row[0], row[1], row[2]) for row in connection.execute(asked.limit(PAGE))]

    def _decode(self, seq: int, data: str) -> ev.Event | None:
        try:
            return codec.decode(json.loads(data))
        except codec.UnknownEvent as unknown:
            raise codec.UnknownEvent(unknown.kind, self.release_of(seq)) from None
        except DAMAGE:
            return None

    def release_of(self, seq: int) -> str | None:
        """Return the release that wrote an event; None: not recorded."""
        releases = read_releases(self.meta())
        return next((release for first, release in reversed(releases) if first <= seq), None)

    def last_moment(self) -> tuple[float, float] | None:
        """Return the time and the time since boot of the last event; None if there is none, or if they are damaged."""
        asked = select(schema.events.c.at, schema.events.c.uptime).order_by(schema.events.c.seq.desc()).limit(1)
        with self._reading() as connection:
            row = connection.execute(asked).first()
        return (row[0], row[1]) if row and all(isinstance(part, float | int) for part in row) else None

    def meta(self) -> dict[str, str]:
        with self._reading() as connection:
            return dict(tuple(row) for row in connection.execute(select(schema.meta)))

    def users(self) -> dict[str, dict[str, Any]]:
        """Return the rows of users that can be read; `users.json` has a copy of the others."""
        users: dict[str, dict[str, Any]] = {}
        with self._reading() as connection:
            for name, row in connection.execute(select(schema.users)):
                try:
                    users[name] = json.loads(row)
                except DAMAGE:
                    self.notes.append(f"the journal's row of user {name} cannot be read")
        return users

    def living_jobs(self) -> list[dict[str, Any]]:
        """Return the rows of jobs that have not ended."""
        return self.select_rows(select(schema.jobs).where(schema.jobs.c.state.is_(None)).order_by(schema.jobs.c.id))

    def job(self, number: int) -> dict[str, Any] | None:
        rows = self.select_rows(select(schema.jobs).where(schema.jobs.c.id == number))
        return rows[0] if rows else None

    def jobs(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of these jobs, as far as there are any."""
        return self.select_rows(select(schema.jobs).where(schema.jobs.c.id.in_(numbers)))

    def ended_jobs(self, limit: int | None, before: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of jobs that have ended, the latest submitted first."""
        table = schema.jobs
        asked = select(table).where(table.c.state.is_not(None)).order_by(table.c.id.desc())
        if before is not None:
            asked = asked.where(table.c.id < before)
        return self.select_rows(asked.limit(limit) if limit is not None else asked)

    def latest_ended(self, limit: int, before: tuple[float, int] | None, user: str | None) -> list[dict[str, Any]]:
        """Return the rows of jobs that have ended, the latest end first; `before`: the end and the id of a job, None:
        from the latest on. The ids are found first, because sorting whole rows would read all stories."""
        table = schema.jobs
        ended = func.coalesce(table.c.ended, 0.0)
        found = select(table.c.id).where(table.c.state.is_not(None))
        if before is not None:
            found = found.where(or_(ended < before[0], and_(ended == before[0], table.c.id < before[1])))
        if user is not None:
            found = found.where(table.c.user == user)
        order = ended.desc(), table.c.id.desc()
        return self.select_rows(
            select(table).where(table.c.id.in_(found.order_by(*order).limit(limit))).order_by(*order)
        )

    def ended_since(self, at: float, limit: int) -> list[dict[str, Any]]:
        """Return the rows of the latest jobs that ended after a moment."""
        table = schema.jobs
        asked = select(table).where(table.c.state.is_not(None), table.c.ended >= at).order_by(table.c.ended.desc())
        return self.select_rows(asked.limit(limit))

    def ends(self) -> list[tuple[str, str, float]]:
        """Return all jobs that have ended, with their users, and when."""
        table = schema.jobs
        asked = select(table.c.id, table.c.user, table.c.ended).where(table.c.state.is_not(None))
        with self._reading() as connection:
            return [(str(number), user, at or 0.0) for number, user, at in connection.execute(asked)]

    def known_jobs(self) -> set[int]:
        with self._reading() as connection:
            return {row[0] for row in connection.execute(select(schema.jobs.c.id))}

    def estimates(self) -> list[dict[str, Any]]:
        return self.select_rows(select(schema.estimates).order_by(schema.estimates.c.id))

    def rows(self, last: int = 1000) -> list[dict[str, Any]]:
        """Return the latest rows of the journal unchanged, notes included."""
        table = schema.events
        return self.select_rows(select(table).order_by(table.c.seq.desc()).limit(last))[::-1]

    def rows_after(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return the first rows after a number, unchanged, notes included."""
        table = schema.events
        return self.select_rows(select(table).where(table.c.seq > seq).order_by(table.c.seq).limit(limit))

    def select_rows(self, asked: Any) -> list[dict[str, Any]]:
        """Return the rows that a SELECT finds."""
        with self._reading() as connection:
            return [dict(row) for row in connection.execute(asked).mappings()]


def read_releases(meta: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return which release wrote the events from which number on, in order."""
    try:
        return [(int(first), str(release)) for first, release in json.loads(meta.get(schema.RELEASES, "[]"))]
    except (ValueError, TypeError):
        return []
