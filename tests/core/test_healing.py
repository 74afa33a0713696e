"""Guesses that heal: users' records, corrected guesses, and jobs that outlive what is believed of them."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import policies
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.guesses import (
    DURATION,
    ITERATIONS,
    LEAST_FACTOR,
    MOST_FACTOR,
    NOTICEABLE,
    OUTLIER,
    UserRecord,
    expected_left,
)
from carpool.core.model import Guess, Status
from carpool.core.scheduler import Scheduler
from carpool.core.validate import validate
from carpool.profile.schema import load
from carpool.sim.generate import philly_like
from carpool.sim.run import Setup, simulate
from carpool.sim.workload import Workload
from tests.support.situations import facts
from tests.support.world import job, model, nodes


def scheduler(policy="sjf", shape="1x1"):
    made = Scheduler(policies.make(policy), model(1.5, int(shape.split("x")[1])))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes(shape)])
    return made


def submit(made, *jobs, at=0.0):
    made.step(at, [ev.Submitted(at, one) for one in jobs])
    launch(made, at)


def launch(made, at):
    starting = [r for r in made.state.jobs.values() if r.status is Status.STARTING]
    made.step(at, [ev.Started(at, r.job.id, r.attempt) for r in starting])


def runs(made, name, guess_s, took_s, user="alice", how=ev.Finished):
    """Let a job run alone for a time, whatever was guessed."""
    start = made.state.now
    submit(made, job(name, left=guess_s, user=user), at=start)
    end = start + took_s
    if how is ev.Finished:
        made.step(end, [ev.Finished(end, name, 1)])
    elif how is ev.Failed:
        made.step(end, [ev.Failed(end, name, 1, "it crashed")])
    else:
        made.step(end, [ev.Cancelled(end, name), ev.Stopped(end, name, 1, 0.0)])
    launch(made, end)


def believed(made, name):
    return made.state.jobs[name].alone_left(made.state.now)


def test_right_guesses_are_corrected_by_exactly_one():
    made = scheduler()
    for number in range(30):
        runs(made, f"j{number}", 10.0 + number / 7, 10.0 + number / 7)
    assert made.state.guesses.of("alice", DURATION).factor == 1.0
    submit(made, job("next", left=12.3, user="alice"), at=made.state.now)
    assert made.state.jobs["next"].stretch == 1.0


def test_a_users_record_corrects_the_next_guess_and_no_others():
    made = scheduler()
    for number in range(20):
        runs(made, f"j{number}", 10.0, 100.0)
    now = made.state.now
    submit(made, job("alices", left=50.0, user="alice"), job("bobs", left=50.0, user="bob"), at=now)
    submit(made, job("nobodys", left=50.0), at=now)
    assert believed(made, "bobs") == believed(made, "nobodys") == 50.0
    assert believed(made, "alices") == pytest.approx(500.0, rel=0.1)
    record = made.state.guesses.of("alice", DURATION)
    assert (record.jobs, record.ratio) == (20, pytest.approx(10.0))
    assert record.spread < UserRecord().spread == pytest.approx(2.0), "the more is known, the narrower is the range"
    validate(made.state)


def test_jobs_that_wait_lose_their_rank_when_the_record_changes():
    made = scheduler()
    first = job("first", left=10.0, user="alice")
    submit(made, first, job("alices", left=20.0, user="alice"), job("bobs", left=60.0, user="bob"))
    assert [record.job.id for record in made.state.queue] == ["alices", "bobs"]
    made.step(100.0, [ev.Finished(100.0, "first", 1)])
    assert made.state.jobs["bobs"].gpus, "the first job of alice took ten times its guess"
    assert believed(made, "alices") > 100.0
    validate(made.state)


@pytest.mark.parametrize("how", [ev.Cancelled, ev.Failed])
def test_a_job_that_did_not_finish_only_raises_the_correction(how):
    made = scheduler()
    runs(made, "short", 100.0, 1.0, how=how)
    assert made.state.guesses.of("alice", DURATION).jobs == 0, "a job that ended early says nothing"
    runs(made, "long", 100.0, 700.0, how=how)
    assert made.state.guesses.of("alice", DURATION).factor > 2.0, "it would have taken seven times its guess or more"
    raised = made.state.guesses.of("alice", DURATION).factor
    runs(made, "again", 100.0, 150.0, how=how)
    assert made.state.guesses.of("alice", DURATION).factor == raised


def test_a_job_that_outlives_its_guess_is_believed_to_have_more_left():
    made = scheduler("srtf")
    submit(made, job("a", left=10.0, user="alice"))
    record, totals = made.state.jobs["a"], [10.0]
    for _ in range(12):
        end = record.end() + 0.1
        made.step(end, [ev.Outlived(end, "a", 1)])
        left = record.alone_left(end)
        assert 0.0 < left <= 2.2 * end, "what is left is bounded by what it has run"
        totals.append(end + left)
    assert totals == sorted(totals)
    assert totals[1] == pytest.approx(14.4, abs=0.2), "the mean of all durations up to twice the guess"
    assert totals[-1] > 40.0, "beyond its range the guess is doubled"
    submit(made, job("b", left=made.state.now / 50.0), at=made.state.now)
    assert made.state.jobs["b"].gpus, "the job that ran too long is no longer the shortest"
    validate(made.state)


def test_a_job_that_has_time_left_has_not_outlived_its_guess():
    made = scheduler()
    submit(made, job("a", left=10.0, user="alice"))
    made.step(5.0, [ev.Outlived(5.0, "a", 1)])
    assert made.state.jobs["a"].outlived == 0
    assert believed(made, "a") == 5.0
    made.step(5.0, [ev.GuessesTrusted(5.0)])
    made.step(20.0, [ev.Outlived(20.0, "a", 1)])
    assert believed(made, "a") == 0.0


def test_a_job_that_reports_more_iterations_than_it_should_make_gets_more():
    made = scheduler()
    counted = replace(job("a", left=100.0, user="alice"), iterations=100, guess=Guess.ITERATIONS)
    submit(made, counted)
    made.step(150.0, [ev.Observed(150.0, "a", 1, 150.0, 1.0)])
    assert made.state.jobs["a"].job.iterations > 150
    assert 10.0 < believed(made, "a") < 150.0
    made.step(1000.0, [ev.Observed(1000.0, "a", 1, 1000.0, 1.0), ev.Finished(1000.0, "a", 1)])
    assert made.state.guesses.of("alice", ITERATIONS).ratio == pytest.approx(10.0)
    assert made.state.guesses.of("alice", DURATION).jobs == 0
    submit(made, replace(counted, id="b"), at=1000.0)
    assert believed(made, "b") == pytest.approx(100.0 * made.state.guesses.of("alice", ITERATIONS).factor, rel=0.02)
    made.step(1050.0, [ev.Observed(1050.0, "b", 1, 50.0, 1.0)])
    made.step(1100.0, [ev.Finished(1100.0, "b", 1)])
    assert made.state.ended["b"].job.iterations == 100, "it was right this time"
    assert made.state.guesses.of("alice", ITERATIONS).ratio == pytest.approx(5.4, abs=0.2)


def test_a_preempted_job_does_not_fall_back_to_a_guess_that_a_report_replaced():
    made = scheduler("srtf")
    submit(made, job("a", left=10.0, user="alice"))
    record = made.state.jobs["a"]
    made.step(1.0, [ev.Observed(1.0, "a", 1, record.job.iterations / 100, 100.0 / record.job.iterations)])
    submit(made, job("b", left=20.0), at=2.0)
    made.step(2.0, [ev.Stopped(2.0, "a", 1, record.done)])
    assert record.status is Status.PENDING
    assert believed(made, "a") == pytest.approx(98.0, abs=1.0)


def test_records_and_corrections_survive_a_snapshot():
    made = scheduler()
    for number in range(3):
        runs(made, f"j{number}", 10.0, 100.0)
    submit(made, job("a", left=10.0, user="alice"), job("b", left=10.0, user="alice"), at=made.state.now)
    end = made.state.jobs["a"].end() + 5.0
    made.step(end, [ev.Outlived(end, "a", 1)])
    made.state.ended.clear()
    data = json.loads(json.dumps(snapshot.encode(made.state)))
    again = snapshot.restore(data, model(1.5, 1), made.policy.key)
    assert facts(again) == facts(made.state)
    assert again.jobs["a"].outlived == 1
    del data["guesses"]
    assert snapshot.restore(data, model(1.5, 1), made.policy.key).guesses.of("alice", DURATION).factor == 1.0


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), max_size=60))
def test_a_correction_is_bounded_and_one_job_moves_it_a_bounded_way(jobs):
    record = UserRecord()
    for true, guess in jobs:
        before = max(1.0, record.factor)
        record.add(true, guess)
        assert LEAST_FACTOR <= record.factor <= MOST_FACTOR
        assert record.factor <= OUTLIER * before * (1.0 + NOTICEABLE)
        assert 1.0 < record.spread < inf


@given(st.floats(0.0, 1e6), st.floats(1e-3, 1e6), st.floats(1.0, 10.0))
def test_what_is_left_is_positive_and_bounded(done, guess, spread):
    left = expected_left(done, guess, spread)
    assert 0.05 * done <= left <= 8.0 * max(done, guess)


def test_a_user_that_divides_its_guesses_by_ten_gains_nothing():
    """The measurement of docs/experiments/healing.md, on one small workload."""
    made = philly_like(load("t4").core_tasks(), jobs=300, load=2.0, seed=1)
    jobs = tuple(replace(one, user=f"user{n % 3}") for n, one in enumerate(made.jobs))
    honest = Setup(guesses=(("user0", 1.0), ("user1", 1.0), ("user2", 1.0)), report_s=inf)
    lying = replace(honest, guesses=(("user0", 0.1), *honest.guesses[1:]))
    jct = {}
    for name, setup in {"honest": honest, "heal": lying, "trusted": replace(lying, trust_guesses=True)}.items():
        done = sorted(simulate(Workload(jobs), "sjf", setup).jobs, key=lambda record: record.seq)
        own = [record.ended - record.job.submitted for record in done if record.job.user == "user0"][20:]
        jct[name] = sum(own) / len(own)
    assert jct["trusted"] < 0.9 * jct["honest"], "it is worth lying where guesses are trusted"
    assert jct["heal"] > 0.95 * jct["honest"]


def test_right_guesses_change_no_decision():
    jobs = philly_like(load("t4").core_tasks(), jobs=60, load=2.0, seed=2).jobs
    named = [replace(one, user=f"user{n % 3}") for n, one in enumerate(jobs)]
    logs = []
    for setup in (Setup(), Setup(trust_guesses=True)):
        log = []
        simulate(named, "sjf-bsbf", setup, log=log.append)
        logs.append([event for event in log if isinstance(event, ev.Planned)])
    assert logs[0] == logs[1]
