"""Tests against real servers of a cluster: `make test-cluster` installs what they need and runs them.

Every test in this folder has the mark `cluster`, which the other suites leave out. A test whose server is not installed
fails instead of being skipped: nothing must be left out unseen.
"""

from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server that no test kills."""
    server = PostgresServer()
    try:
        yield server.start()
    finally:
        server.close()
