import tempfile
from pathlib import Path

import pytest

from carpool.live.home import Home


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def quick_home():
    """A home in memory, where there is such a place: for tests in which syncing proves nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Home(folder)
