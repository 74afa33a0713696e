"""Accounts of what jobs used: by hand, and over random runs against the periods in which jobs held GPUs."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool import policies
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.accounts import DAY_S, KEPT_DAYS
from carpool.core.model import Allocation, Decision
from carpool.core.state import State
from carpool.core.usage_report import report_usage
from carpool.sim.engine import Costs
from carpool.sim.run import Setup, simulate
from carpool.sim.timeline import segments
from tests.support.effort import cases
from tests.support.world import job, model, nodes


def state_with(*names: str, shape: str = "1x2", start: float = 0.0, exact: bool = False, **attributes) -> State:
    """A cluster with jobs of one GPU that all started on GPU 0, one after the other at the same moment."""
    state = State(model(1.6, 2), lambda record, now: (0.0,), 3)
    apply(state, *(ev.NodeJoined(start, node) for node in nodes(shape)), ev.AccountsOpened(start, exact))
    for name in names:
        begin(state, name, start, **attributes)
    return state


def apply(state: State, *events: ev.Event) -> None:
    for event in events:
        state.apply(event)


def begin(state: State, name: str, at: float, gpu: int = 0, **attributes) -> None:
    apply(
        state,
        ev.Submitted(at, job(name, user=name, left=10_000.0, submitted=at, **attributes)),
        ev.Planned(at, (Decision(name, Allocation((gpu,)), "test"),)),
        ev.Started(at, name, 1),
    )


def used(state: State, now: float, **days) -> dict[str, dict]:
    """Return the usage of each user in GPU-seconds."""
    rows = report_usage(state, ("user",), now, **days).plain()["rows"]
    return {row.pop("user"): {name.removesuffix("_gpu_s"): value for name, value in row.items()} for row in rows}


def test_a_shared_gpu_counts_in_parts_and_saves_what_both_gain():
    state = state_with("a", exact=True)
    begin(state, "b", 100.0)
    found = used(state, 200.0)
    assert (found["a"]["held"], found["b"]["held"]) == pytest.approx((150.0, 50.0))
    assert (found["a"]["shared"], found["b"]["shared"]) == pytest.approx((50.0, 50.0))
    assert found["a"]["computed"] == found["a"]["held"]
    each = 100.0 / 1.6 - 50.0  # its iterations of 100 s would take 62.5 s alone, and half a GPU was held for them
    assert (found["a"]["saved"], found["b"]["saved"]) == pytest.approx((each, each))


def test_what_sharing_saved_is_unknown_before_a_job_was_measured_alone():
    state = state_with("a", "b")
    apply(state, ev.Observed(10.0, "a", 1, 6.25, 1.6), ev.Observed(10.0, "b", 1, 6.25, 1.6))
    assert used(state, 100.0)["a"]["saved"] is None
    assert used(state, 100.0)["a"]["unjudged"] == pytest.approx(50.0)
    apply(state, ev.Progressed(100.0, "a", 1, 62.5), ev.Finished(100.0, "b", 1))
    apply(state, ev.Observed(110.0, "a", 1, 72.5, 1.0))  # alone at last: what it did before can be judged
    found = used(state, 110.0)
    assert found["a"]["saved"] == pytest.approx(62.5 - 50.0)
    assert found["b"]["saved"] is None
    apply(state, ev.Finished(120.0, "a", 1))
    assert used(state, 120.0)["a"]["saved"] == pytest.approx(62.5 - 50.0)


def test_a_paused_job_holds_nothing_beside_one_that_computes():
    state = state_with("a", "b")
    apply(state, ev.PausedByOwner(100.0, "b"), ev.Paused(100.0, "b", 1))
    found = used(state, 300.0)
    assert (found["a"]["held"], found["b"]["held"]) == pytest.approx((50.0 + 200.0, 50.0))
    assert found["b"]["paused"] == pytest.approx(200.0)
    apply(state, ev.Finished(300.0, "a", 1))
    found = used(state, 400.0)
    assert found["b"]["held"] == pytest.approx(150.0)  # nothing else is there that could hold the GPU
    assert found["b"]["computed"] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("failure", "lost"),
    [
        (ev.Failed(100.0, "a", 1, "x"), 60.0),
        (ev.Failed(100.0, "a", 1, "x", again=True), 60.0),
        (ev.NodeLost(100.0, "n0"), 60.0),
    ],
)
def test_a_failure_loses_what_was_held_since_the_last_checkpoint(failure, lost):
    state = state_with("a", retries=1)
    apply(state, ev.Checkpointed(40.0, "a", 1, 40.0), failure)
    assert used(state, 100.0)["a"]["lost"] == pytest.approx(lost)
    assert used(state, 500.0)["a"]["held"] == pytest.approx(100.0)


def test_a_cancelled_job_lost_nothing():
    state = state_with("a")
    apply(state, ev.Cancelled(50.0, "a"), ev.Failed(60.0, "a", 1, "killed"))
    assert (used(state, 60.0)["a"]["lost"], used(state, 60.0)["a"]["held"]) == (0.0, pytest.approx(60.0))


def test_hours_belong_to_the_days_in_which_they_passed():
    state = state_with("a", start=DAY_S - 100.0)
    now = 2 * DAY_S + 50.0
    days = [used(state, now, first=day, last=day)["a"]["held"] for day in range(3)]
    assert days == pytest.approx([100.0, DAY_S, 50.0])
    gpus = report_usage(state, (), now, 1, 1).gpus
    assert (gpus.existed, gpus.idle) == pytest.approx((2 * DAY_S, DAY_S))


def test_closed_and_lost_nodes_are_told_apart_from_idle_ones():
    state = state_with("a", shape="2x2")
    apply(state, ev.NodeClosed(100.0, "n0"), ev.NodeLost(300.0, "n1"), ev.NodeOpened(400.0, "n0"))
    gpus = report_usage(state, (), 500.0).gpus
    assert (gpus.existed, gpus.idle, gpus.closed, gpus.away) == pytest.approx(
        (4 * 300 + 2 * 200, 3 * 100 + 2 * 200 + 100, 300, 2 * 200)
    )


def test_old_days_are_added_up_and_none_is_forgotten():
    state = state_with("a")
    end = (KEPT_DAYS + 30) * DAY_S + 1.0
    for day in range(KEPT_DAYS + 30):
        state.advance((day + 0.5) * DAY_S)
        apply(state, ev.Checkpointed((day + 0.5) * DAY_S, "a", 1, 1.0))
    apply(state, ev.Finished(end, "a", 1))
    assert len(state.accounts.days) == KEPT_DAYS + 1
    report = report_usage(state, ("day",), end)
    assert report.total().held == pytest.approx(end)
    assert report.plain()["rows"][0]["day"] == "earlier"
    assert report.gpus.existed == pytest.approx(2 * end)


def test_accounts_survive_a_snapshot():
    state = state_with("a", "b")
    snapshot.encode(state)  # an earlier one must not keep what follows out
    apply(state, ev.PausedByOwner(100.0, "b"), ev.Checkpointed(130.0, "a", 1, 90.0))
    data = json.loads(json.dumps(snapshot.encode(state)))
    again = snapshot.restore(data, state.perf, state.sort_key, 3)
    for one in (state, again):
        apply(one, ev.Failed(200.0, "a", 1, "x"), ev.Finished(250.0, "b", 1))
    assert report_usage(again, ("user", "day"), 300.0).plain() == report_usage(state, ("user", "day"), 300.0).plain()


NAMES = sorted(set(policies.BUILT_IN) - {"pollux"})  # in a simulation without elastic jobs it is another `fifo`


@settings(max_examples=cases(60), deadline=None)
@given(
    policy=st.sampled_from(NAMES),
    per_gpu=st.integers(1, 3),
    drawn=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 4]), st.integers(1, 90_000), st.integers(0, 60_000)), max_size=9
    ),
)
def test_the_hours_of_all_jobs_and_of_unused_gpus_are_those_of_the_gpus(policy, per_gpu, drawn):
    jobs = [
        replace(job(f"j{n}", gpus, float(left), float(at)), project=f"j{n}", model="generic", batch=1)
        for n, (gpus, left, at) in enumerate(drawn)
    ]
    log: list[ev.Event] = []
    setup = Setup(cluster="2x2", jobs_per_gpu=per_gpu, memory_limit=False, costs=Costs(5.0, 3.0, 0.0))
    result = simulate(jobs, policy, setup, log=log.append, accounts=True)
    report, now = result.usage(("project",)), result.state.now
    total, gpus = report.total(), report.gpus
    assert gpus.existed == pytest.approx(4 * now)
    assert total.held + gpus.idle + gpus.closed == pytest.approx(gpus.existed)
    held = dict.fromkeys((one.id for one in jobs), 0.0)
    for one in segments(log):
        there = [name for name in one.jobs if name not in one.paused] or one.jobs
        for name in there:
            held[name] += (one.end - one.start) / len(there)
    counted = {key: usage.held for (key,), usage in report.rows.items()}
    assert counted == pytest.approx(held, abs=1e-6)
    for usage in report.rows.values():
        assert -1e-6 <= usage.computed <= usage.held + 1e-6
        assert -1e-6 <= usage.shared <= usage.held + 1e-6
