import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.effort import cases

# A suite that was started in the background ignores these, and so would every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Images of containers often switch the caching of bytecode off. Here hundreds of processes import Carpool, and each of
# them would compile all of it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

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


LONGEST_FIRST = (
    "cluster/test_slurm.py",
    "cluster/test_ray.py",
    "cluster/test_agents.py",
    "cluster/test_chaos_rules.py",
    "bench/test_physical.py",
    "packaging/test_wheel.py",
    "train/test_gang.py",
    "live/commands/test_commands.py",
    "report/paper/test_paper.py",
    "live/service/test_chaos.py",
    "profile/measure/test_conclude.py",
    "watch/test_site.py",
    "commands/test_profiles.py",
    "sim/test_bound.py",
    "cli/test_bad_input.py",
    "policies/test_pollux.py",
    "attack/test_outside.py",
    "attack/test_fuzz.py",
    "live/http/test_api.py",
    "docs/test_site.py",
    "cli/test_commands.py",
    "live/executors/test_gangs.py",
    "profile/measure/test_measure.py",
    "train/test_adapters.py",
    "live/service/test_twin.py",
    "sim/test_calibrated.py",
    "bench/test_demands.py",
    "live/commands/test_demo.py",
    "live/http/test_starting.py",
    "train/test_check.py",
    "train/test_memory.py",
    "sim/test_generate.py",
)
"""Files that take longest. They start first: a process that gets one of them last keeps the other one waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file; the tests of a file keep their order."""
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    assert all(path.exists() for path in ranks), "LONGEST_FIRST names a file that is not there"
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture
def data() -> Path:
    """The folder of reference data named by CARPOOL_DATA."""
    folder = os.environ.get("CARPOOL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("CARPOOL_DATA does not name a folder of reference data")
    return Path(folder)
