"""The contract of journals, for PostgreSQL."""

import pytest

from carpool.live.journal.postgres import PostgresJournal
from tests.support.journal_contract import JournalContract


class TestPostgresJournal(JournalContract):
    @pytest.fixture
    def place(self, postgres):
        address = postgres.new_database()
        return lambda: PostgresJournal(address)
