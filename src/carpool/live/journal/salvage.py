"""Salvage of a damaged journal: the rows that can be read go into a new file, and the old file is kept beside it.

Only SQLite needs this. The store checks its file at every start. If the check fails, it calls `salvage` and continues
with the rows that were saved. Recovery then finds out what is missing.
"""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

TABLES = ("meta", "leader", "users", "jobs", "snapshots", "estimates", "events")


def read_only(path: Path) -> sqlite3.Connection:
    """Open a database for reading. Beside one that has no log, no file is made."""
    alone = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro{alone}", uri=True)


def is_sound(path: Path) -> bool:
    """Return whether every page can be read. A sound file of 100 MB takes about half a second."""
    if not path.exists() or path.stat().st_size == 0:
        return True
    try:
        connection = read_only(path)
        try:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        return "malformed" not in str(error)  # locked, for example: no sign of damage
    except sqlite3.DatabaseError:
        return False


def salvage(path: Path) -> tuple[Path, int]:
    """Replace a damaged journal by one with all rows that can be read. Return the old file and the number of rows."""
    damaged = path.with_name(f"{path.stem}.damaged-{time.time_ns()}{path.suffix}")
    path.rename(damaged)
    for end in ("-wal", "-shm"):
        beside = path.with_name(path.name + end)
        if beside.exists():
            beside.rename(damaged.with_name(damaged.name + end))
    saved = 0
    path.touch(mode=0o600)
    target = sqlite3.connect(path)
    with target:
        for table in TABLES:
            for statement, rows in _table(damaged, table):
                target.execute(statement)
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    saved += target.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row).rowcount
    target.close()
    return damaged, saved


def _table(path: Path, table: str) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield the statement that made a table and its rows, read from both ends up to where they cannot be read."""
    try:
        source = sqlite3.connect(path)
    except sqlite3.DatabaseError:
        return
    try:
        made = source.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()
        if made is not None:
            found = {}
            for order in ("ASC", "DESC"):
                try:
                    for number, *row in source.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid {order}"):
                        found[number] = tuple(row)
                except sqlite3.DatabaseError:
                    continue
            yield made[0], [found[number] for number in sorted(found)]
    except sqlite3.DatabaseError:
        return
    finally:
        source.close()
