"""Copying a journal from one place to another: from SQLite to PostgreSQL, back, or to a backup.

Both journals are led meanwhile, so that no service can use them. Everything is written in one transaction and compared
before it is committed. `carpool journal copy` calls `copy_journal`.
"""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, func, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from carpool.errors import InputError
from carpool.live.journal import schema
from carpool.live.journal.leadership import TAKE_OVER_S
from carpool.live.journal.reader import JournalPlace
from carpool.live.journal.store import Commit, Store, StoreError

TABLES = (schema.meta, schema.users, schema.jobs, schema.snapshots, schema.estimates, schema.events)
OF_A_PLACE = ("version", schema.MOVED, schema.HOMED, schema.MACHINE)
"""Keys of meta rows that say something about one place only."""
MADE_EMPTY = (*OF_A_PLACE, schema.RELEASES, schema.IDENTITY)
"""Keys of meta rows that a journal without content may have."""
PAGE = {"snapshots": 1}
"""Number of rows that are copied at a time, where they are large."""
USUAL_PAGE = 1000


@dataclass(frozen=True, slots=True)
class TableContents:
    """What is compared of a table: its number of rows, and the length of the texts in one column."""

    rows: int
    characters: int


async def copy_journal(source: JournalPlace, target: JournalPlace, *, backup: bool = False) -> dict[str, int]:
    """Copy a journal into an empty one or a new file, and return the number of rows of each table.

    The source is marked as moved, so that no service continues there; a `backup` is a journal of its own instead. What
    is not a journal is refused and left as it is, and a copy that fails leaves no new file.
    """
    new = _check_places(source, target)
    reading, writing = Store(source), Store(target)
    unfinished = False
    """Whether the target is a file that was made here and is not complete."""
    try:
        for store in (reading, writing):
            try:
                if store is writing and new:
                    target.make()
                    unfinished = True
                store.open()
                await asyncio.wait_for(store.lead(), TAKE_OVER_S + 2.0)
            except TimeoutError:
                raise InputError(f"{store.place}: {store.leader().holder} leads; stop the service first") from None
        if not backup:  # the copy is the same journal, and the home identifies it by this id
            same = {schema.IDENTITY: reading.meta().get(schema.IDENTITY) or secrets.token_hex(8)}
            await reading.write(Commit(meta=same))
        counts = await writing.transact(lambda connection: _fill(connection, reading, writing, backup))
        unfinished = False
        if not backup:
            await reading.write(Commit(meta={schema.MOVED: str(target)}))
        return counts
    except StoreError as error:
        raise InputError(f"the journal was not copied: {error}") from error
    finally:
        writing.close()
        reading.close()
        if unfinished:
            target.remove()


def _check_places(source: JournalPlace, target: JournalPlace) -> bool:
    """Return whether nothing is at the target. Raise `InputError` unless a journal can be copied there.

    Both are only read, because opening a store would create, upgrade or salvage it.
    """
    with _looking(source) as connection:
        if connection is None or not schema.is_journal(connection):
            raise InputError(f"{source}: is not a journal; give a home directory, a journal.db, or postgresql://…")
        moved = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == schema.MOVED)).scalar()
        if moved:
            raise InputError(f"{source}: was moved to {moved}; copy from there")
    with _looking(target) as connection:
        if connection is None:
            return True
        if schema.is_journal(connection):
            _check_empty(connection, target)
        elif not target.shared or inspect(connection).get_table_names():
            raise InputError(f"{target}: is there, and is not a journal; give a place where nothing is")
    return False


@contextmanager
def _looking(place: JournalPlace) -> Iterator[Connection | None]:
    """Yield a connection that only reads; None: there is nothing."""
    engine = place.look()
    if engine is None:
        yield None
        return
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise InputError(f"{place}: cannot be read ({place.reason(error)}); nothing was copied") from error
    finally:
        engine.dispose()


def _fill(connection: Connection, reading: Store, writing: Store, backup: bool) -> dict[str, int]:
    left_out = (*OF_A_PLACE, schema.IDENTITY) if backup else OF_A_PLACE
    _check_empty(connection, writing.place)
    connection.execute(schema.meta.delete().where(schema.meta.c.key.not_in(left_out)))
    for table in TABLES:
        for page in _pages(reading, table):
            if table is schema.meta:
                page = [row for row in page if row["key"] not in left_out]
            if page:
                connection.execute(table.insert(), page)
    if connection.dialect.name == "postgresql":
        last = "coalesce((SELECT max(id) FROM estimates), 0) + 1"
        connection.execute(text(f"SELECT setval(pg_get_serial_sequence('estimates', 'id'), {last}, false)"))
    counts = _compare(connection, reading, left_out)
    # Agents obey the highest term that they know, so terms must go on growing.
    writing.leadership.term = max(writing.leadership.term, reading.leadership.term)
    connection.execute(schema.leader.update().values(term=writing.leadership.term))
    return counts


def _check_empty(connection: Connection, place: JournalPlace) -> None:
    known = inspect(connection).get_table_names()
    for table in (table for table in TABLES if table.name in known):
        asked = select(func.count()).select_from(table)
        if table is schema.meta:
            asked = asked.where(table.c.key.not_in(MADE_EMPTY))
        if connection.execute(asked).scalar():
            raise InputError(f"{place}: is not empty ({table.name} has rows); give an empty place")


def _pages(reading: Store, table: Table) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a table in the order of its key."""
    key, size = next(iter(table.primary_key.columns)), PAGE.get(table.name, USUAL_PAGE)
    asked = select(table).order_by(key).limit(size)
    page = reading.select_rows(asked)
    while page:
        yield page
        page = reading.select_rows(asked.where(key > page[-1][key.name]))


def _compare(connection: Connection, reading: Store, left_out: tuple[str, ...]) -> dict[str, int]:
    """Return the number of rows of each table; raise `StoreError` if the copy differs from the original."""
    counts = {}
    for table in TABLES:
        column = list(table.columns)[-1]  # the longest text of every table
        asked = select(func.count(), func.coalesce(func.sum(func.length(column)), 0)).select_from(table)
        if table is schema.meta:
            asked = asked.where(table.c.key.not_in(left_out))
        (row,) = reading.select_rows(asked)
        original = TableContents(*map(int, row.values()))
        copied = TableContents(*map(int, connection.execute(asked).one()))
        if original != copied:
            raise StoreError(f"{table.name} has {original} in the original and {copied} in the copy")
        counts[table.name] = copied.rows
    return counts
