"""What `carpool doctor` checks about the database of a journal: whether it can be used, and which service leads."""

import os
import stat
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from carpool.errors import InputError
from carpool.live.commands.diagnosis import Diagnosis
from carpool.live.home import Home, read_json
from carpool.live.text import span

SLOW_S = 0.05
"""Seconds for a question and its answer above which the database slows the service down."""
WHAT = "database"


def examine_database(address: str | None, place: Home) -> Iterator[Diagnosis]:
    """Check the database that is given, or the one that the home's journal is in."""
    record = read_json(place.journal_record)
    address = address or (str(record.get("database")) if isinstance(record, dict) else None)
    if not address:
        return
    if find_spec("psycopg") is None or find_spec("sqlalchemy") is None:
        yield Diagnosis(WHAT, "error", "psycopg is not installed", "pip install 'carpool[postgres]'")
        return
    from carpool.live.journal.postgres import PostgresJournal
    from carpool.live.journal.reader import JournalReader

    database = PostgresJournal(address)
    if database.has_password:
        yield Diagnosis(WHAT, "warning", "the address holds the password", "write the password into ~/.pgpass")
    yield from _password_file()
    reader = JournalReader(database)
    try:
        yield from _examine(reader, str(database))
    except InputError as error:
        yield Diagnosis(WHAT, "error", f"{database}: {error}", "start it, and check address, user and password")
    finally:
        reader.close()


def _password_file() -> Iterator[Diagnosis]:
    path = Path(os.environ.get("PGPASSFILE") or Path.home() / ".pgpass")
    try:
        loose = stat.S_IMODE(path.stat().st_mode) & 0o077
    except OSError:
        return
    if loose:
        yield Diagnosis(WHAT, "error", f"others can read {path}, so it is not used", f"chmod 600 {path}")


def _examine(reader: Any, shown: str) -> Iterator[Diagnosis]:
    settings = reader.settings()
    began = time.monotonic()
    version = reader.version()
    took = time.monotonic() - began
    tables = f"journal {version}" if version else "no journal so far"
    yield Diagnosis(WHAT, "ok", f"{shown}: PostgreSQL {settings['server_version']}, {tables}")
    if settings["server_encoding"] != "UTF8":
        yield Diagnosis(WHAT, "error", f"its encoding is {settings['server_encoding']}", "make a database with UTF8")
    for name in ("fsync", "full_page_writes"):
        if settings[name] != "on":
            yield Diagnosis(WHAT, "error", f"{name} is {settings[name]}", f"set {name} = on: a crash would lose jobs")
    if settings["in_recovery"] == "on":
        yield Diagnosis(WHAT, "error", "it is a replica and cannot be written", "give the address of the primary")
    if took > SLOW_S:
        yield Diagnosis(WHAT, "warning", f"an answer takes {took:.2f} s", "put the database near the service")
    if not version:
        return
    if not reader.can_write():
        yield Diagnosis(WHAT, "error", "this user cannot write the tables", "grant it INSERT, UPDATE and DELETE")
    leader = reader.leader()
    level: Literal["ok", "warning"] = "warning" if leader.silent_s > 10.0 and not leader.released else "ok"
    if leader.released:
        yield Diagnosis("leader", "note", f"no service leads (term {leader.term})", "`carpool serve --database` does")
    else:
        renewed = f"renewed {span(max(0.0, leader.silent_s))} ago"
        remedy = "it is gone or cannot reach the database; a service that stands by takes over" if level != "ok" else ""
        yield Diagnosis("leader", level, f"{leader.holder}, term {leader.term}, {renewed}", remedy)
