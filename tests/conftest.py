import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.effort import cases

# A suite that was started in the background ignores these, and so would every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# pytest imports readline, which tells all child processes how wide it believes the terminal to be.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)

pytest.register_assert_rewrite("tests.support.world", "carpool.live.executors.contract")

# Derandomised, so that a failure in CI is a failure here; the machine may be slow, so no deadline.
settings.register_profile(
    "carpool", max_examples=cases(100), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("carpool")


@pytest.fixture
def data() -> Path:
    """The folder of reference data named by CARPOOL_DATA."""
    folder = os.environ.get("CARPOOL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("CARPOOL_DATA does not name a folder of reference data")
    return Path(folder)
