"""The journal on disk: events appended durably, jobs' specs and stories, snapshots, users.

All writing goes through one thread and one connection, so that the event loop never waits for the disk and everything
that is ready at the same time shares one sync. Reading uses connections of its own (WAL: readers and the writer do
not wait for each other). A commit is durable when `write` returns, and it is written whole or not at all.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, bindparam, create_engine, event, func, select
from sqlalchemy.exc import DBAPIError

from carpool import __version__
from carpool.core import codec
from carpool.core import events as ev
from carpool.live.clock import since_boot
from carpool.live.journal import schema
from carpool.live.journal.salvage import is_sound, salvage

BUSY_S = 5.0
"""Seconds that a write waits for another process, a backup for example, to release the database."""
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a row raises that a fault of the disk or another program changed."""
NOTE = "Note"
"""Kind of the rows that are notes for operators."""
DAMAGED = "Damaged"
"""Kind of the rows from the first one on that could not be read: kept for operators, left out of every replay."""


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


class Store:
    """The journal of one home."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = _engine(path)
        self._writer = ThreadPoolExecutor(1, "journal")
        self._connection: Connection | None = None
        self.seq = 0
        """Number of the last event on disk."""
        self.notes: list[str] = []
        """Lines for the operator about the state in which the file was found."""
        self._release_recorded = False
        self._place = (0, 0)
        """Device and number of the file."""

    def open(self) -> int:
        """Make or upgrade the tables, and return the version that was found."""
        try:
            self.path.touch(mode=0o600, exist_ok=True)
            if not is_sound(self.path):
                kept, rows = salvage(self.path)
                self.notes.append(f"the journal's file was damaged; {rows} rows were saved, the rest is in {kept.name}")
            return self._writer.submit(self._open).result()
        except (DBAPIError, OSError) as error:
            raise StoreError(_short(error)) from error

    def _open(self) -> int:
        self._connection = self._engine.connect()
        with self._connection.begin():
            found = schema.bring_up_to_date(self._connection)
        place = os.stat(self.path)
        self._place = place.st_dev, place.st_ino
        with self._connection.begin():
            last = self._connection.execute(select(func.max(schema.events.c.seq))).scalar()
            kept = self._connection.execute(select(func.max(schema.snapshots.c.seq))).scalar()
        self.seq = max(last or 0, kept or 0)
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._writer.submit(self._connection.close).result()
        self._writer.shutdown()
        self._engine.dispose()

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def write(self, commit: Commit) -> None:
        """Write a commit; durable on return. Raise `StoreError` and change nothing if that is not possible."""
        await self._do(self._write, commit)

    async def keep_snapshot(self, data: Mapping[str, Any], seq: int, keep_events: int) -> None:
        """Keep a snapshot of the state after event `seq`, and remove events older than `keep_events` before it."""
        await self._do(self._keep_snapshot, data, seq, keep_events)

    async def set_aside(self, seq: int) -> None:
        """Leave event `seq` and all later ones out of every replay from now on."""
        await self._do(self._set_aside, seq)

    async def _do(self, function: Callable[..., None], *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, function, *arguments)
        except (DBAPIError, OSError) as error:
            raise StoreError(_short(error)) from error

    def _check_place(self) -> None:
        """Refuse to write into a file that was deleted or replaced: the next service would not find what is in it."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise StoreError(f"{self.path} is gone ({error.strerror}); stop the service") from None
        if (found.st_dev, found.st_ino) != self._place:
            raise StoreError(f"{self.path} was replaced by another file; stop the service")

    def _write(self, commit: Commit) -> None:
        assert self._connection is not None
        self._check_place()
        connection, uptime = self._connection, since_boot()
        rows = [_event_row(happened, uptime, commit.now) for happened in commit.events]
        rows += [{"at": at, "uptime": uptime, "kind": NOTE, "data": json.dumps(text)} for at, text in commit.notes]
        with connection.begin():
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
            for name, text in commit.users.items():
                _replace_row(connection, schema.users, name, text)
            for name, text in (commit.meta | self._new_release(rows)).items():
                _replace_row(connection, schema.meta, name, text)
        self.seq += len(rows)
        if rows:
            self._release_recorded = True

    def _new_release(self, rows: list[dict[str, Any]]) -> dict[str, str]:
        """Return the meta row for the first events that this release writes, if another one wrote those before."""
        if not rows or self._release_recorded:
            return {}
        assert self._connection is not None
        asked = select(schema.meta.c.value).where(schema.meta.c.key == schema.RELEASES)
        releases = _releases({schema.RELEASES: self._connection.execute(asked).scalar() or "[]"})
        if releases and releases[-1][1] == __version__:
            return {}
        return {schema.RELEASES: json.dumps([*releases, [rows[0]["seq"], __version__]])}

    def _keep_snapshot(self, data: Mapping[str, Any], seq: int, keep_events: int) -> None:
        assert self._connection is not None
        text = json.dumps(data, separators=(",", ":"))
        table = schema.snapshots
        with self._connection.begin():
            self._connection.execute(table.delete().where(table.c.seq == seq))
            self._connection.execute(table.insert().values(seq=seq, data=text))
            # two snapshots are kept, because the latest may be damaged
            older = select(table.c.seq).order_by(table.c.seq.desc()).offset(2)
            self._connection.execute(table.delete().where(table.c.seq.in_(older)))
            oldest = self._connection.execute(select(func.min(table.c.seq))).scalar() or 0
            self._connection.execute(schema.events.delete().where(schema.events.c.seq <= oldest - keep_events))

    def _set_aside(self, seq: int) -> None:
        assert self._connection is not None
        table = schema.events
        with self._connection.begin():
            self._connection.execute(
                table.update().where(table.c.seq >= seq, table.c.kind != NOTE).values(kind=DAMAGED)
            )

    # ---- reading ---------------------------------------------------------------------------------------------------

    def snapshots(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the snapshots that can be read, the latest first."""
        with self._engine.connect() as connection:
            for seq, data in connection.execute(select(schema.snapshots).order_by(schema.snapshots.c.seq.desc())):
                try:
                    yield seq, json.loads(data)
                except DAMAGE:
                    continue

    def events_after(self, seq: int) -> Iterator[tuple[int, ev.Event | None]]:
        """Yield the events after `seq` in order, without notes. A row that cannot be read, or before which rows are
        missing, gives None. Raise `UnknownEvent` for a kind that only another release knows: that is no damage."""
        table = schema.events
        asked = select(table.c.seq, table.c.kind, table.c.data).where(table.c.seq > seq).order_by(table.c.seq)
        last = seq
        with self._engine.connect() as connection:
            for number, kind, data in connection.execution_options(yield_per=1000).execute(asked):
                if kind not in (NOTE, DAMAGED):
                    yield number, self._decode(number, data) if number == last + 1 else None
                last = number

    def _decode(self, seq: int, data: str) -> ev.Event | None:
        try:
            return codec.decode(json.loads(data))
        except codec.UnknownEvent as unknown:
            raise codec.UnknownEvent(unknown.kind, self.release_of(seq)) from None
        except DAMAGE:
            return None

    def release_of(self, seq: int) -> str | None:
        """Return the release that wrote an event; None: not recorded."""
        releases = _releases(self.meta())
        return next((release for first, release in reversed(releases) if first <= seq), None)

    def last_moment(self) -> tuple[float, float] | None:
        """Return the time and the time since boot of the last event; None if there is none, or if they are damaged."""
        asked = select(schema.events.c.at, schema.events.c.uptime).order_by(schema.events.c.seq.desc()).limit(1)
        with self._engine.connect() as connection:
            row = connection.execute(asked).first()
        return (row[0], row[1]) if row and all(isinstance(part, float | int) for part in row) else None

    def meta(self) -> dict[str, str]:
        with self._engine.connect() as connection:
            return dict(tuple(row) for row in connection.execute(select(schema.meta)))

    def users(self) -> dict[str, dict[str, Any]]:
        """Return the rows of users that can be read; `users.json` has a copy of the others."""
        users: dict[str, dict[str, Any]] = {}
        with self._engine.connect() as connection:
            for name, row in connection.execute(select(schema.users)):
                try:
                    users[name] = json.loads(row)
                except DAMAGE:
                    self.notes.append(f"the journal's row of user {name} cannot be read")
        return users

    def living_jobs(self) -> list[dict[str, Any]]:
        """Return the rows of jobs that have not ended."""
        return self._rows(select(schema.jobs).where(schema.jobs.c.state.is_(None)).order_by(schema.jobs.c.id))

    def job(self, number: int) -> dict[str, Any] | None:
        rows = self._rows(select(schema.jobs).where(schema.jobs.c.id == number))
        return rows[0] if rows else None

    def ended_jobs(self, limit: int | None, before: int | None = None, user: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of jobs that have ended, the latest submitted first."""
        table = schema.jobs
        asked = select(table).where(table.c.state.is_not(None)).order_by(table.c.id.desc())
        if before is not None:
            asked = asked.where(table.c.id < before)
        if user is not None:
            asked = asked.where(table.c.user == user)
        return self._rows(asked.limit(limit) if limit is not None else asked)

    def ends(self) -> list[tuple[str, str, float]]:
        """Return all jobs that have ended, with their users, and when."""
        table = schema.jobs
        asked = select(table.c.id, table.c.user, table.c.ended).where(table.c.state.is_not(None))
        with self._engine.connect() as connection:
            return [(str(number), user, at or 0.0) for number, user, at in connection.execute(asked)]

    def known_jobs(self) -> set[int]:
        with self._engine.connect() as connection:
            return {row[0] for row in connection.execute(select(schema.jobs.c.id))}

    def estimates(self) -> list[dict[str, Any]]:
        return self._rows(select(schema.estimates).order_by(schema.estimates.c.id))

    def rows(self, last: int = 1000) -> list[dict[str, Any]]:
        """Return the latest rows of the journal unchanged, notes included."""
        table = schema.events
        return self._rows(select(table).order_by(table.c.seq.desc()).limit(last))[::-1]

    def _rows(self, asked: Any) -> list[dict[str, Any]]:
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(asked).mappings()]


def _event_row(happened: ev.Event, uptime: float, now: float | None) -> dict[str, Any]:
    """Return the row of an event. One that is learnt of late gets the time since boot of its own moment."""
    uptime -= 0.0 if now is None else max(0.0, now - happened.at)
    data = json.dumps(codec.encode(happened), separators=(",", ":"))
    return {"at": happened.at, "uptime": uptime, "kind": type(happened).__name__, "data": data}


def _replace_row(connection: Connection, table: Table, name: str, text: str) -> None:
    """Replace a row of a table with a key and a value."""
    key, value = table.columns
    connection.execute(table.delete().where(key == name))
    connection.execute(table.insert().values({key.name: name, value.name: text}))


def _releases(meta: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return which release wrote the events from which number on, in order."""
    try:
        return [(int(first), str(release)) for first, release in json.loads(meta.get(schema.RELEASES, "[]"))]
    except (ValueError, TypeError):
        return []


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # a commit waits until the disk has it

    return engine


def _short(error: Exception) -> str:
    """Return the reason without the statement and the link that SQLAlchemy adds."""
    return str(getattr(error, "orig", None) or error)
