"""Random errors of believed slow-downs."""

from math import log, sqrt

import pytest

from carpool.core.perf import ConstantInterference
from carpool.sim import Setup, philly_like, simulate
from carpool.sim.estimation_error import MisestimatedSlowdowns


class TestMisestimatedSlowdowns:
    def test_errors_depend_on_the_seed_and_on_the_pair(self):
        table = ConstantInterference(2.0)
        one, same, other = (
            MisestimatedSlowdowns(table, 0.3, 1),
            MisestimatedSlowdowns(table, 0.3, 1),
            MisestimatedSlowdowns(table, 0.3, 2),
        )
        assert one.pair("a", 1, "b", 1) == same.pair("a", 9, "b", 9)
        assert len({one.pair("a", 1, "b", 1), one.pair("b", 1, "a", 1), other.pair("a", 1, "b", 1)}) == 3

    def test_errors_have_the_requested_spread(self):
        table = MisestimatedSlowdowns(ConstantInterference(50.0), 0.3, 1)
        errors = [log(table.pair(f"m{n}", 1, "b", 1) / 50.0) for n in range(400)]
        assert sum(errors) / 400 == pytest.approx(0.0, abs=0.05)
        assert sqrt(sum(e * e for e in errors) / 400) == pytest.approx(0.3, rel=0.1)

    def test_no_job_is_believed_to_run_faster_beside_mates(self):
        table = MisestimatedSlowdowns(ConstantInterference(1.0), 0.5, 1)
        assert min(table.pair(f"m{n}", 1, "b", 1) for n in range(50)) == 1.0

    def test_errors_mislead_the_policy_and_not_the_world(self):
        from carpool.profile.schema import load

        jobs = philly_like(load("t4").core_tasks(), jobs=120, load=2.0, seed=1)
        right, wrong = (simulate(jobs, "sjf-bsbf", Setup(truth="gavel", interference_error=e)) for e in (0.0, 1.5))
        assert right.summary.mean_jct_s < wrong.summary.mean_jct_s
        alone = [simulate(jobs, "sjf", Setup(interference_error=e)).summary.mean_jct_s for e in (0.0, 1.5)]
        assert alone[0] == pytest.approx(alone[1])
