"""The contract of journals, for the default: a SQLite file."""

import pytest

from carpool.live.journal.sqlite import SqliteJournal
from tests.support.journal_contract import JournalContract


class TestSqliteJournal(JournalContract):
    @pytest.fixture
    def place(self, tmp_path):
        return lambda: SqliteJournal(tmp_path / "journal.db")
