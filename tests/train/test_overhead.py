"""What the library costs when it has nothing to do, with the bench's own code."""

import sys
import time

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import train_overhead as bench


@pytest.mark.alone
@pytest.mark.parametrize("can_shrink", [False, True])
def test_a_step_costs_little_more(tmp_path, can_shrink):
    """The bench holds the sharp bound of 50 µs; here it is CPU time, on a machine that may be busy."""
    small = {"width": 32, "samples": 32, "steps": 20, "pairs": 60, "clock": time.process_time}
    found = []
    with bench.environment(str(tmp_path)):
        while len(found) < 5 and not any(extra <= bench.BOUND_US for extra in found):
            found.append(bench.measure(**small, can_shrink=can_shrink)["extra_us"])
    assert min(found) <= 1.5 * bench.BOUND_US, found


def test_a_report_costs_far_less(tmp_path):
    with bench.environment(str(tmp_path)):
        assert min(bench.report_cost(3000) for _ in range(3)) < 50
