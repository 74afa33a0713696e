"""The tables of the journal, their version, and the upgrades from older versions.

Plain SQLAlchemy Core with portable types: the same tables are in a SQLite file and in a PostgreSQL database. Each entry
of `UPGRADES` makes one version. An entry of a release never changes; a newer release runs those that are missing.
"""

import json
from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    func,
    inspect,
    select,
)

from carpool.errors import InputError

metadata = MetaData()

Number = BigInteger().with_variant(Integer(), "sqlite")
"""Type of ids and sequence numbers, 64 bits wide. In SQLite only INTEGER names the row id, and it has 64 bits too."""

meta = Table("meta", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

events = Table(
    "events",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("uptime", Float, nullable=False),  # seconds since boot, which no user can set
    Column("kind", String, nullable=False),
    Column("data", Text, nullable=False),
)
"""Everything that happened, in order. A row of the kind Note is for operators and changes nothing."""

jobs = Table(
    "jobs",
    metadata,
    Column("id", Number, primary_key=True, autoincrement=False),
    Column("user", String, nullable=False),
    Column("name", String, nullable=False),
    Column("spec", Text, nullable=False),
    Column("submitted", Float, nullable=False),
    Column("source", Text, nullable=False),  # where its estimate came from
    Column("state", String),  # its status at the end; NULL until then
    Column("ended", Float),
    Column("story", Text),  # its row as it was at the end, with the receipt
)
Index("jobs_ended", jobs.c.state, jobs.c.id)

snapshots = Table(
    "snapshots", metadata, Column("seq", Number, primary_key=True, autoincrement=False), Column("data", Text)
)
"""The whole state after event `seq`."""

users = Table("users", metadata, Column("name", String, primary_key=True), Column("row", Text, nullable=False))

estimates = Table(
    "estimates",
    metadata,
    Column("id", Number, primary_key=True),
    Column("job", Number, nullable=False),
    Column("kind", String, nullable=False),  # start, end, duration, slowdown
    Column("at", Float, nullable=False),  # when it was made
    Column("value", Float, nullable=False),
    Column("low", Float, nullable=False),
    Column("high", Float, nullable=False),
    Column("actual", Float, nullable=False),
    Column("source", Text, nullable=False),
)
"""Accuracy of estimates: one row for each estimate that could be judged."""

leader = Table(
    "leader",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1: there is one row
    Column("term", Number, nullable=False),
    Column("beat", Number, nullable=False),  # counts the transactions of all leaders
    Column("released", Boolean, nullable=False),  # no service leads
    Column("holder", Text, nullable=False),  # the service of this term, for operators
    Column("renewed", Float, nullable=False),  # when, by the clock of the database, for operators
)
"""The service that leads: see `leadership.py`."""

RELEASES = "releases"
"""Key of the meta row that says which release wrote which events: a list of pairs, first event and release."""
IDENTITY = "journal"
"""Key of the meta row with the id of the journal."""
MOVED = "moved"
"""Key of the meta row of a journal that was copied elsewhere: where it continues."""
HOMED, MACHINE = "home", "machine"
"""Keys of the meta rows with the home of a shared journal, and with the machine on which its jobs run."""


def _to_1(connection: Connection) -> None:
    metadata.create_all(connection, tables=[meta, events, jobs, snapshots, users])


def _to_2(connection: Connection) -> None:
    """Keep and judge estimates, and the source of each job's own estimate."""
    metadata.create_all(connection, tables=[estimates])
    if "source" not in {column["name"] for column in inspect(connection).get_columns("jobs")}:
        connection.exec_driver_sql("ALTER TABLE jobs ADD COLUMN source TEXT NOT NULL DEFAULT 'unknown'")


def _to_3(connection: Connection) -> None:
    """Record the releases that write events. All events so far are from 0.1, the only release before this one."""
    written = connection.execute(select(func.max(events.c.seq))).scalar()
    releases = [[1, "0.1"]] if written else []
    connection.execute(meta.insert().values(key=RELEASES, value=json.dumps(releases)))


def _to_4(connection: Connection) -> None:
    """Record which service leads, and number the terms."""
    metadata.create_all(connection, tables=[leader])
    connection.execute(leader.insert().values(id=1, term=0, beat=0, released=True, holder="", renewed=0.0))


UPGRADES: tuple[Callable[[Connection], None], ...] = (_to_1, _to_2, _to_3, _to_4)
VERSION = len(UPGRADES)


def _number(connection: Connection, text: str) -> int:
    """Return the version that a journal states; if that is damaged, the one that its tables show."""
    if text.isdecimal() and len(text) < 10:
        return int(text)
    if inspect(connection).has_table("leader"):
        return 4
    if connection.execute(select(meta.c.value).where(meta.c.key == RELEASES)).first() is not None:
        return 3
    return 2 if inspect(connection).has_table("estimates") else 1


def version_of(connection: Connection) -> int:
    """Return the version of the tables (0: there are none). Raise `InputError` if only a newer release knows it."""
    found = 0
    if inspect(connection).has_table("meta"):
        row = connection.execute(select(meta.c.value).where(meta.c.key == "version")).first()
        found = _number(connection, str(row[0])) if row else 0
    if found > VERSION:
        raise InputError(
            f"this home was written by a newer release (journal {found}, known {VERSION}); upgrade Carpool"
        )
    return found


def is_journal(connection: Connection) -> bool:
    """Return whether a database is a journal of any release, rather than the database of another program."""
    found = inspect(connection)
    for table in (meta, events, jobs, snapshots, users):
        if not found.has_table(table.name):
            return False
        needed = set(table.columns.keys()) - {"source"}  # version 1 has none
        if not needed <= {column["name"] for column in found.get_columns(table.name)}:
            return False
    return version_of(connection) > 0


def bring_up_to_date(connection: Connection) -> int:
    """Make the tables, or upgrade those of an older release. Return the version that was found (0: none)."""
    found = version_of(connection)
    for upgrade in UPGRADES[found:]:
        upgrade(connection)
    if found == 0:
        connection.execute(meta.insert().values(key="version", value=str(VERSION)))
    elif found < VERSION:
        connection.execute(meta.update().where(meta.c.key == "version").values(value=str(VERSION)))
    return found
