"""Fixtures of the live tests: a home for each test, and one real service for each module, to save time."""

import os
import tempfile
from pathlib import Path

import pytest

from carpool.live.home import Home
from tests.support.served import Served


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def quick_home():
    """A home in memory, where the system has such a place, for tests that do not depend on syncing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Home(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("live") / "home", "--gpus", "4").start()
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def alice(service):
    return service.client().post("/v1/users", {"name": "alice"})["token"]


@pytest.fixture(scope="module")
def bob(service):
    return service.client().post("/v1/users", {"name": "bob"})["token"]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("CARPOOL_") and name != "CARPOOL_DATA":
            monkeypatch.delenv(name)
