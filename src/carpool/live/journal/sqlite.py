"""A journal in a SQLite file, the default: one service has it, by the lock of its home.

The file is checked at every start, and salvaged if it is damaged. A file that was deleted or replaced while a service
runs is not written: the next service would not find what is in it.
"""

import os
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, NullPool, create_engine, event

from carpool.errors import InputError
from carpool.live.journal.salvage import is_sound, read_only, salvage

BUSY_S = 5.0
"""Seconds that a write waits for another process, a backup for example, to release the database."""


class SqliteJournal:
    """A journal in a file."""

    shared = False
    """Only one service can have it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = (0, 0)
        """Device and number of the file."""

    def __str__(self) -> str:
        return str(self.path)

    def engine(self) -> Engine:
        options = {"timeout": BUSY_S, "check_same_thread": False}
        engine = create_engine(URL.create("sqlite", database=str(self.path)), connect_args=options)

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, _: Any) -> None:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")  # a commit waits until the disk has it

        return engine

    def look(self) -> Engine | None:
        """Return what reads the file and changes nothing; None: there is no file. Raise `InputError` for a file that is
        not a sound database."""
        if not os.path.lexists(self.path):
            return None
        try:
            sound = self.path.stat().st_size > 0 and is_sound(self.path)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}); give a journal") from None
        if not sound:
            raise InputError(f"{self.path}: is not a journal, or is damaged; nothing was changed. Give a journal")
        return create_engine("sqlite://", creator=lambda: read_only(self.path), poolclass=NullPool)

    def make(self) -> None:
        """Make the file. Raise `InputError` if there is one, or a link."""
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made ({error.strerror}); give another place") from None

    def remove(self) -> None:
        """Remove the file again, with those that SQLite makes beside it."""
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def prepare(self) -> list[str]:
        """Make the file, or salvage what is left of it; return notes for the operator."""
        notes = []
        self.path.touch(mode=0o600, exist_ok=True)
        if not is_sound(self.path):
            kept, rows = salvage(self.path)
            notes.append(f"the journal's file was damaged; {rows} rows were saved, the rest is in {kept.name}")
        found = os.stat(self.path)
        self._place = found.st_dev, found.st_ino
        return notes

    def problem(self) -> str:
        """Return why the file must not be written; empty: it may."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            return f"{self.path} is gone ({error.strerror}); stop the service"
        if (found.st_dev, found.st_ino) != self._place:
            return f"{self.path} was replaced by another file; stop the service"
        return ""

    def reason(self, error: BaseException) -> str:
        """Return why something failed, without the statement and the link that SQLAlchemy adds."""
        return str(getattr(error, "orig", None) or error)
