"""How long a job waited and ran: `jobs`, `show` and `explain` follow one definition. It waits while it is pending and
neither held nor blocked. It runs from the first step that it tells of; where it tells of none, from its start."""

import json
from io import StringIO

import pytest
from rich.console import Console

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision
from carpool.live.commands.tables import COLUMNS, jobs_table
from carpool.live.insight.receipt import receipt
from carpool.live.insight.views import ended_row, job_row, read_story
from carpool.live.spec import parse
from carpool.policies.simple.fifo import Fifo
from tests.support.world import cluster, given, job, running

SPEC = parse({"command": ["true"], "directory": "/"})
LABELS = {gpu: f"n0:{gpu}" for gpu in range(4)}


@pytest.fixture
def state():
    """Four GPUs that job 1 holds for a long time."""
    return given(cluster("1x4"), running("1", gpus=4, left=90_000)).state(Fifo().key)


def row_of(state, name, now):
    if name in state.ended:
        return ended_row(state, state.ended[name], SPEC, 0)
    return job_row(state, state.jobs[name], SPEC, LABELS, now)


def waited(state, name, now):
    """The seconds that all views agree on."""
    state.advance(now)
    row = row_of(state, name, now)
    record = state.jobs.get(name) or state.ended[name]
    shown = {row["waited_s"], receipt(record, now)["waited_s"], record.waited(now)}
    assert len(shown) == 1, "the views differ"
    return shown.pop()


def start(state, name, now, gpus=(0,)):
    state.apply(ev.Planned(now, (Decision(name, Allocation(gpus, 1), "test"),)))
    state.apply(ev.Started(now, name, state.jobs[name].attempt))


def test_a_pending_job_waits(state):
    state.apply(ev.Submitted(10.0, job("2", submitted=10.0)))
    assert waited(state, "2", 25.0) == 15.0


def test_an_exclusive_job_waits_for_no_host(state):
    state.apply(ev.Submitted(0.0, job("2", exclusive=True)))
    state.apply(ev.Submitted(0.0, job("3")))
    assert row_of(state, "2", 1.0)["reason"] == "waits for GPUs that no other job holds: it asked not to share"
    assert "for a host" in row_of(state, "3", 1.0)["reason"]


def test_a_held_job_does_not_wait(state):
    state.apply(ev.Submitted(0.0, job("2")))
    state.apply(ev.Held(10.0, "2"))
    assert waited(state, "2", 50.0) == 10.0
    state.apply(ev.Released(60.0, "2"))
    assert waited(state, "2", 65.0) == 15.0


def test_a_blocked_job_does_not_wait(state):
    state.apply(ev.Submitted(0.0, job("2", after=("1",))))
    assert waited(state, "2", 50.0) == 0.0
    state.apply(ev.Finished(60.0, "1", 1))
    assert waited(state, "2", 65.0) == 5.0


def test_the_waits_of_all_attempts_add_up(state):
    state.apply(ev.Submitted(0.0, job("2")))
    start(state, "2", 10.0)
    assert waited(state, "2", 40.0) == 10.0
    state.apply(ev.Planned(40.0, (Decision("2", None, "test"),)))
    assert waited(state, "2", 45.0) == 10.0, "its workers still stop"
    state.apply(ev.Stopped(50.0, "2", 1, 20.0))
    start(state, "2", 57.0)
    state.apply(ev.Finished(100.0, "2", 2))
    assert waited(state, "2", 100.0) == 17.0
    assert waited(state, "2", 500.0) == 17.0, "it has ended"


def test_the_table_of_jobs_shows_what_the_receipt_says(state):
    state.apply(ev.Submitted(0.0, job("2")))
    state.apply(ev.Held(120.0, "2"))
    state.advance(6000.0)
    console = Console(width=200, file=StringIO())
    console.print(jobs_table([row_of(state, "2", 6000.0)], console=console))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("2 ")]
    assert "2 min" in line, "it was pending for 120 s and then held"
    assert "1 h" not in line


def test_the_columns_of_a_table_without_jobs_are_the_fields_of_jobs(state):
    ended = {"batch", "iterations", "alone_estimate_s"}
    assert set(COLUMNS) == row_of(state, "1", 0.0).keys() | ended


def test_the_parts_of_a_receipt_add_up(state):
    state.apply(ev.Submitted(0.0, job("2", iterations=10**6)))
    state.apply(ev.Held(10.0, "2"))
    state.apply(ev.Released(40.0, "2"))
    state.apply(ev.Finished(60.0, "1", 1))
    state.apply(ev.Planned(70.0, (Decision("2", Allocation((0,), 1), "test"),)))
    state.apply(ev.Started(86.0, "2", 1))
    state.apply(ev.Finished(100.0, "2", 1))
    account = receipt(state.ended["2"], 100.0)
    assert [account[f"{part}_s"] for part in ("waited", "held", "startup", "paused", "ran")] == [40, 30, 16, 0, 14]
    said = "The job waited 40 s, was on hold or behind other jobs for 30 s, started and stopped for 16 s, and ran 14 s."
    assert account["sentences"][0] == said


def test_a_row_of_release_0_1_waited_what_its_receipt_says(state):
    state.apply(ev.Submitted(0.0, job("2")))
    start(state, "2", 30.0)
    state.apply(ev.Finished(50.0, "2", 1))
    row = row_of(state, "2", 50.0)
    old = {key: value for key, value in row.items() if key not in ("waited_s", "status")}
    assert read_story({"id": 1, "story": json.dumps({**old, "state": "finished"})})["waited_s"] == 30.0


ENDS = {
    "finished": [ev.Finished(124.0, "1", 1)],
    "failed": [ev.Failed(124.0, "1", 1, "exit code 1")],
    "cancelled": [ev.Cancelled(124.0, "1"), ev.Stopped(124.0, "1", 1, 0.0)],
}


def starting_up():
    """A job that starts up from second 110 on."""
    state = given(cluster("1x1")).state(Fifo().key)
    state.apply(ev.Submitted(100.0, job("1", submitted=100.0)))
    state.apply(ev.Planned(110.0, (Decision("1", Allocation((0,), 1), "test"),)))
    state.apply(ev.Started(110.0, "1", 1, computes=False))
    return state


def ran(state, now):
    """The seconds that all views agree on, and the slow-down."""
    state.advance(now)
    record = state.jobs.get("1") or state.ended["1"]
    found = receipt(record, now)
    assert row_of(state, "1", now)["ran_s"] == found["ran_s"]
    return found["ran_s"], found["slowdown"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("assumed", [False, True])
def test_a_job_that_tells_nothing_ran_from_its_start(end, assumed):
    state = starting_up()
    if assumed:
        state.apply(ev.Computing(120.0, "1", 1, told=False))
        assert ran(state, 122.0) == (12.0, 1.0)
    for event in ENDS[end]:
        state.apply(event)
    assert state.ended["1"].status == end
    assert ran(state, 130.0) == (14.0, 1.0)


def test_the_start_up_of_a_job_that_tells_of_its_steps_is_no_run_time():
    state = starting_up()
    assert ran(state, 115.0) == (0.0, None)
    state.apply(ev.Computing(120.0, "1", 1))
    state.apply(ev.Finished(124.0, "1", 1))
    assert ran(state, 130.0)[0] == 4.0


def test_a_report_that_comes_late_makes_of_the_time_before_a_start_up():
    state = starting_up()
    state.apply(ev.Computing(120.0, "1", 1, told=False))
    state.apply(ev.Observed(121.0, "1", 1, 0.5, 5.0))
    assert ran(state, 122.0)[0] == 2.0


def test_a_pause_during_a_silent_start_up_is_no_run_time():
    state = starting_up()
    state.apply(ev.PausedByOwner(112.0, "1"))
    state.apply(ev.Paused(112.0, "1", 1))
    state.apply(ev.Failed(124.0, "1", 1, "exit code 1"))
    assert ran(state, 130.0)[0] == 2.0


def test_a_silent_start_up_does_not_count_for_a_time_limit():
    state = given(cluster("1x1")).state(Fifo().key)
    state.apply(ev.Submitted(0.0, job("1", limit_s=60.0)))
    state.apply(ev.Planned(0.0, (Decision("1", Allocation((0,), 1), "test"),)))
    state.apply(ev.Started(0.0, "1", 1, computes=False))
    state.apply(ev.Computing(10.0, "1", 1, told=False))
    assert state.jobs["1"].limit_left(15.0) == 55.0
