"""`bench/unknown_sim.py`: the simulator on the cases that were measured on a real GPU."""

from itertools import islice
from pathlib import Path

import pytest

from tests.support.effort import THOROUGH

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


MEASURED = ROOT / "docs" / "experiments" / "unknown"


@pytest.fixture
def unknown_sim(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import unknown_sim

    return unknown_sim


@pytest.mark.parametrize("machine", ["machine-1", "machine-2", "machine-3"])
def test_the_table_of_the_docs_is_what_the_simulator_says(unknown_sim, machine):
    page = (ROOT / "docs" / "experiments" / "unknown.md").read_text(encoding="utf-8")
    rows = list(islice(unknown_sim.rows(MEASURED / machine), None if THOROUGH else 2))
    assert len(rows) >= 2
    assert [row for row in rows if row not in page] == []


def test_a_scheduler_that_is_given_the_events_of_the_service_makes_its_plans(unknown_sim):
    rows = [row.strip("| ").split(" | ") for row in unknown_sim.plan_rows(MEASURED / "machine-2")]
    made, same = (sum(int(row[column]) for row in rows) for column in (1, 2))
    assert len(rows) == 10
    assert same >= 0.98 * made


def test_mates_are_faster_from_the_last_step_of_a_job_on_and_not_before(unknown_sim):
    from unknown_engine import Process
    from unknown_work import UnknownJob

    from carpool.core.model import GpuDemand

    alone = {"vit": 0.01, "recurrent": 0.01}
    pairs = [["vit", "recurrent", 0.02, 0.02]]
    demand = GpuDemand(sm=0.5, busy=0.5)
    measured = unknown_sim.MeasuredPairs({"alone": alone, "pairs": pairs}, dict.fromkeys(alone, demand), "mps")
    jobs = [UnknownJob("short", "vit", 100, 0.0, 1.0), UnknownJob("long", "recurrent", 300, 0.0, 3.0)]
    processes = {"short": Process(startup_s=1.0, exit_s=0.6), "long": Process(startup_s=1.0, exit_s=0.5)}
    case = unknown_sim.Case("light", "sjf-ffs", 2, "mps")
    mean_jct_s, makespan_s = unknown_sim.simulate(case, jobs, alone, measured, processes)
    short_s, long_s = 1.0 + 2.0 + 0.6, 1.0 + 2.0 + 2.0 + 0.5  # beside each other for 2 s, at half speed
    assert makespan_s == pytest.approx(long_s)
    assert mean_jct_s == pytest.approx((short_s + long_s) / 2.0)


def test_a_process_that_waits_for_its_host_is_slower_alone_but_not_beside_a_slower_mate(unknown_sim):
    from unknown_engine import Process
    from unknown_work import UnknownJob

    from carpool.core.model import GpuDemand

    alone = {"vit": 0.01, "recurrent": 0.01}
    demand = dict.fromkeys(alone, GpuDemand(sm=0.5, busy=0.5))
    measured = unknown_sim.MeasuredPairs({"alone": alone, "pairs": [["vit", "recurrent", 0.02, 0.01]]}, demand, "mps")
    job = UnknownJob("one", "vit", 100, 0.0, 1.0)
    mate = UnknownJob("mate", "recurrent", 1000, 0.0, 10.0)
    processes = {"one": Process(0.0, 0.0, pace=1.3), "mate": Process(0.0, 0.0)}
    trainings = [unknown_sim.submitted(each, alone, processes[each.name].pace) for each in (job, mate)]
    truth = unknown_sim.TrueModel(measured, trainings, processes)
    assert trainings[0].duration_s == pytest.approx(1.3)
    assert trainings[0].duration_s * truth.slowdown(trainings[0], 1, [(trainings[1], 1)]) == pytest.approx(2.0)
