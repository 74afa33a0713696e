"""The journal on disk: events appended durably, jobs' specs and stories, snapshots, users.

All writing goes through one thread and one connection, so that the event loop never waits for the disk and everything
that is ready at the same time shares one sync. A commit is durable when `write` returns, and it is written whole or not
at all. Where several services share a journal, only the leader can write: see `leadership.py`.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, bindparam, func, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from carpool import __version__
from carpool.core import codec
from carpool.core import events as ev
from carpool.errors import InputError
from carpool.live.clock import since_boot
from carpool.live.errors import Deposed
from carpool.live.journal import leadership, schema
from carpool.live.journal.keeper import LeadKeeper
from carpool.live.journal.leadership import LeaderLease
from carpool.live.journal.reader import DAMAGE, DAMAGED, NOTE, JournalPlace, JournalReader, read_releases
from carpool.live.journal.sqlite import SqliteJournal

__all__ = ["DAMAGE", "Commit", "CommitInDoubt", "Store", "StoreError"]

MAKING_TABLES = 847_100_001
"""Number of the lock that a service holds in PostgreSQL while it makes the tables."""
Result = TypeVar("Result")


@dataclass(slots=True)
class Commit:
    """What is written together."""

    events: list[ev.Event] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    """New rows for the table of jobs."""
    stories: list[dict[str, Any]] = field(default_factory=list)
    """Columns that jobs' rows get at their end: id, state, ended, story."""
    estimates: list[dict[str, Any]] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    now: float | None = None
    """Time of the turn that writes it; None: that of its events."""

    def add(self, other: "Commit") -> None:
        """Write what another commit holds with this one."""
        for name in ("events", "notes", "jobs", "stories", "estimates"):
            getattr(self, name).extend(getattr(other, name))
        self.users.update(other.users)
        self.meta.update(other.meta)

    def __bool__(self) -> bool:
        return any((self.events, self.notes, self.jobs, self.stories, self.estimates, self.users, self.meta))


class StoreError(OSError):
    """The journal cannot be written or read now."""


class CommitInDoubt(StoreError):
    """The connection broke during a commit, so that it is not known whether it is written. `Store.settle` finds out."""


@dataclass(slots=True)
class DoubtfulCommit:
    """A commit of which it is not known whether it is written."""

    beat: int
    """Number that the leader's row has if it is."""
    rows: int
    """Number of its events."""


class Store(JournalReader):
    """The journal of one service."""

    def __init__(self, place: JournalPlace | Path) -> None:
        super().__init__(SqliteJournal(place) if isinstance(place, Path) else place)
        self._writer = ThreadPoolExecutor(1, "journal")
        self._connection: Connection | None = None
        self.seq = 0
        """Number of the last event on disk."""
        self.leadership = LeaderLease(leadership.LEASE_S if self.place.shared else None)
        """Whether this service leads; it does not before `lead`."""
        self.identity = ""
        """Id of a journal that services can share; a copy has the same."""
        self._keeper: LeadKeeper | None = None
        self._release_recorded = False
        self._closed = False
        self._beat = 0
        self._doubt: DoubtfulCommit | None = None
        self._doubt_written = False

    def open(self) -> int:
        """Make the tables, upgrade them where no other service can use them, and return the version that was found."""
        try:
            self.notes += self.place.prepare()
            return self._writer.submit(self._open).result()
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(self.place.reason(error)) from error

    def _open(self) -> int:
        with self._connected().begin() as transaction:
            connection = transaction.connection
            if self.place.shared:
                encoding = connection.execute(text("SHOW server_encoding")).scalar()
                if encoding != "UTF8":
                    raise InputError(f"{self.place}: has the encoding {encoding}; make a database with UTF8")
                connection.execute(text(f"SELECT pg_advisory_xact_lock({MAKING_TABLES})"))
                found = schema.version_of(connection)
                if found:  # the leader upgrades them
                    return found
            found = schema.bring_up_to_date(connection)
        self._find_end()
        return found

    def _find_end(self) -> None:
        with self._connected().begin() as transaction:
            last = transaction.connection.execute(select(func.max(schema.events.c.seq))).scalar()
            kept = transaction.connection.execute(select(func.max(schema.snapshots.c.seq))).scalar()
        self.seq = max(last or 0, kept or 0)

    def _connected(self) -> Connection:
        """Return the connection of the writer; a new one if it broke."""
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(SQLAlchemyError):
                self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Release the lead and everything else. The service that stands by takes over at once."""
        if self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            self._keeper.stop()
        if self.place.shared and self.leadership.leads():
            with contextlib.suppress(SQLAlchemyError, OSError, Deposed):
                self._writer.submit(self._release).result()
        self._writer.submit(self._disconnect).result()
        self._writer.shutdown()
        super().close()

    # ---- leading ---------------------------------------------------------------------------------------------------

    async def lead(self, waiting: Callable[[leadership.LeaderState], None] = lambda state: None) -> None:
        """Take the lead, as soon as no other service has it, and keep it until `close`. Only then the store can write.

        `waiting` is called once if another service leads. While the database is away, it is asked again.
        """
        seen = leadership.LeaderWatch()
        told = False
        while not self.leadership.term:
            try:
                state = await self._do(self._read_leader)
                if not self.place.shared or seen.sees(state, since_boot()):
                    await self._do(self._take, state)
                elif not told:
                    waiting(state)
                    told = True
            except StoreError:
                if not self.place.shared:
                    raise
                seen.interrupted()
            if not self.leadership.term:
                await asyncio.sleep(leadership.LOOK_S)
        if self.place.shared:
            self._keeper = LeadKeeper(self.leadership, lambda: self._writer.submit(self._renew).result())
            self._keeper.start(asyncio.get_running_loop())
            await self._do(self._upgrade)

    def _read_leader(self) -> leadership.LeaderState:
        with self._broken_is_left(), self._connected().begin() as transaction:
            return leadership.read(transaction.connection)

    def _take(self, seen: leadership.LeaderState) -> None:
        begun, holder = since_boot(), f"process {os.getpid()} on {socket.gethostname()}"
        with self._broken_is_left(), self._connected().begin() as transaction:
            term = leadership.take(transaction.connection, seen, holder)
        if term is not None:
            self._beat = seen.beat + 1
            self.leadership.term = term
            self.leadership.renew(begun)

    def _upgrade(self) -> None:
        with self._transaction() as connection:
            schema.bring_up_to_date(connection)
            asked = select(schema.meta.c.value).where(schema.meta.c.key == schema.IDENTITY)
            self.identity = connection.execute(asked).scalar() or secrets.token_hex(8)
            _replace_row(connection, schema.meta, schema.IDENTITY, self.identity)
        self._find_end()

    async def renew(self) -> None:
        """Renew the lead. Raise `Deposed` if another service has it, `StoreError` if it cannot be found out."""
        await self._do(self._renew)

    def _renew(self) -> None:
        with self._transaction():
            pass

    def _release(self) -> None:
        with self._broken_is_left(), self._connected().begin() as transaction:
            leadership.renew(transaction.connection, self.leadership.term, released=True)
        self.leadership.term = 0

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def write(self, commit: Commit) -> None:
        """Write a commit; durable on return. Raise `StoreError` and change nothing if that is not possible.

        After `CommitInDoubt`, `settle` must say whether it is written before anything else can be.
        """
        await self._do(self._write, commit)

    async def settle(self) -> bool:
        """Return whether the commit in doubt is written. Raise `StoreError` while that cannot be found out."""
        return await self._do(self._settle)

    async def keep_snapshot(self, data: Mapping[str, Any], seq: int, keep_events: int) -> None:
        """Keep a snapshot of the state after event `seq`, and remove events older than `keep_events` before it."""
        await self._do(self._keep_snapshot, data, seq, keep_events)

    async def set_aside(self, seq: int) -> None:
        """Leave event `seq` and all later ones out of every replay from now on."""
        await self._do(self._set_aside, seq)

    async def transact(self, function: Callable[[Connection], Result]) -> Result:
        """Run a function in one transaction of the leader; durable on return."""

        def run() -> Result:
            with self._transaction() as connection:
                return function(connection)

        return await self._do(run)

    async def _do(self, function: Callable[..., Result], *arguments: Any) -> Result:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._writer, function, *arguments)
        except Deposed:
            self.leadership.lost.set()
            raise
        except StoreError:
            raise
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(self.place.reason(error)) from error

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A transaction of the leader: it renews the lead first, and fails if another service has it."""
        problem = self.place.problem()
        if problem:
            raise StoreError(problem)
        begun, committing = since_boot(), False
        try:
            with self._broken_is_left(), self._connected().begin() as transaction:
                if self.place.shared:
                    self._beat = leadership.renew(transaction.connection, self.leadership.term)
                    self._learn_about_doubt()
                yield transaction.connection
                committing = True
        except DBAPIError as error:
            if committing and error.connection_invalidated:
                raise CommitInDoubt(self.place.reason(error)) from error
            raise
        self.leadership.renew(begun)

    def _learn_about_doubt(self) -> None:
        """Find out whether the commit in doubt is written. Its transaction is over, because it held the same row."""
        if self._doubt is not None:
            self._doubt_written = self._beat > self._doubt.beat
            self.seq += self._doubt.rows if self._doubt_written else 0
            self._doubt = None

    @contextmanager
    def _broken_is_left(self) -> Iterator[None]:
        """Leave a connection that broke, so that the next call makes another."""
        try:
            yield
        except DBAPIError as error:
            if error.connection_invalidated:
                self._disconnect()
            raise

    def _settle(self) -> bool:
        self._renew()
        return self._doubt_written

    def _write(self, commit: Commit) -> None:
        uptime = since_boot()
        rows = [_event_row(happened, uptime, commit.now) for happened in commit.events]
        rows += [{"at": at, "uptime": uptime, "kind": NOTE, "data": json.dumps(text)} for at, text in commit.notes]
        try:
            with self._transaction() as connection:
                self._write_rows(connection, commit, rows)
        except CommitInDoubt:
            self._doubt = DoubtfulCommit(self._beat, len(rows))
            raise
        self.seq += len(rows)
        if rows:
            self._release_recorded = True

    def _write_rows(self, connection: Connection, commit: Commit, rows: list[dict[str, Any]]) -> None:
        for number, row in enumerate(rows, self.seq + 1):
            row["seq"] = number
        if rows:
            connection.execute(schema.events.insert(), rows)
        if commit.jobs:
            connection.execute(schema.jobs.insert(), commit.jobs)
        if commit.stories:
            table, columns = schema.jobs, ("state", "ended", "story")
            update = table.update().where(table.c.id == bindparam("job"))
            rows_of = [{"job": story["id"], **{name: story[name] for name in columns}} for story in commit.stories]
            connection.execute(update.values({name: bindparam(name) for name in columns}), rows_of)
        if commit.estimates:
            connection.execute(schema.estimates.insert(), commit.estimates)
        for name, text_of in commit.users.items():
            _replace_row(connection, schema.users, name, text_of)
        for name, text_of in (commit.meta | self._new_release(connection, rows)).items():
            _replace_row(connection, schema.meta, name, text_of)

    def _new_release(self, connection: Connection, rows: list[dict[str, Any]]) -> dict[str, str]:
        """Return the meta row for the first events that this release writes, if another one wrote those before."""
        if not rows or self._release_recorded:
            return {}
        asked = select(schema.meta.c.value).where(schema.meta.c.key == schema.RELEASES)
        releases = read_releases({schema.RELEASES: connection.execute(asked).scalar() or "[]"})
        if releases and releases[-1][1] == __version__:
            return {}
        return {schema.RELEASES: json.dumps([*releases, [rows[0]["seq"], __version__]])}

    def _keep_snapshot(self, data: Mapping[str, Any], seq: int, keep_events: int) -> None:
        state = json.dumps(data, separators=(",", ":"))
        table = schema.snapshots
        with self._transaction() as connection:
            connection.execute(table.delete().where(table.c.seq == seq))
            connection.execute(table.insert().values(seq=seq, data=state))
            # two snapshots are kept, because the latest may be damaged
            older = select(table.c.seq).order_by(table.c.seq.desc()).offset(2)
            connection.execute(table.delete().where(table.c.seq.in_(older)))
            oldest = connection.execute(select(func.min(table.c.seq))).scalar() or 0
            connection.execute(schema.events.delete().where(schema.events.c.seq <= oldest - keep_events))

    def _set_aside(self, seq: int) -> None:
        table = schema.events
        with self._transaction() as connection:
            connection.execute(table.update().where(table.c.seq >= seq, table.c.kind != NOTE).values(kind=DAMAGED))


def _event_row(happened: ev.Event, uptime: float, now: float | None) -> dict[str, Any]:
    """Return the row of an event. One that becomes known late gets the time since boot of its own moment."""
    uptime -= 0.0 if now is None else max(0.0, now - happened.at)
    data = json.dumps(codec.encode(happened), separators=(",", ":"))
    return {"at": happened.at, "uptime": uptime, "kind": type(happened).__name__, "data": data}


def _replace_row(connection: Connection, table: Table, name: str, value_of: str) -> None:
    """Replace a row of a table with a key and a value."""
    key, value = table.columns
    connection.execute(table.delete().where(key == name))
    connection.execute(table.insert().values({key.name: name, value.name: value_of}))
