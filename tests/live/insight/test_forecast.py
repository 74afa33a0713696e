"""A forecast made in the middle of a simulation says what then happens."""

import random
from dataclasses import replace

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Status
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.state import State
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.insight import forecast as module
from carpool.live.insight.forecast import forecast
from carpool.policies.simple.sjf import Sjf
from carpool.profile.schema import load
from carpool.sim import Setup, generate, simulate
from carpool.sim.run import _models
from carpool.sim.workload import Workload
from tests.support.fakes import FakeClock
from tests.support.services import one, serving, settle, shell
from tests.support.world import job, model, nodes


def story(policy, count=40, seed=3):
    """Simulate jobs that are all submitted at time 0, so that nothing unexpected arrives."""
    jobs = generate.philly_like(load("t4").core_tasks(), jobs=count, load=1.0, seed=seed).jobs
    workload = Workload(tuple(replace(job, submitted=0.0, gpus=min(job.gpus, 8)) for job in jobs))
    setup = Setup(cluster="2x4")
    events = []
    result = simulate(workload, policy, setup, log=events.append)
    perf = _models(setup, 4, workload)[0]
    return events, {record.job.id: record for record in result.jobs}, perf


def middle(events, perf, policy, share):
    state = State(perf, policies.make(policy).key, 2)
    for event in events[: int(len(events) * share)]:
        state.apply(event)
    return state


@pytest.mark.parametrize("policy", ["fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_forecast_says_what_then_happens(policy, share):
    events, ended, perf = story(policy)
    cut = next(i for i in range(int(len(events) * share), len(events)) if events[i].at > events[i - 1].at)
    state = State(perf, policies.make(policy).key, 2)
    for event in events[:cut]:
        state.apply(event)
    found = forecast(state, lambda: policies.make(policy))
    assert set(found) == set(state.jobs)
    assert found
    for name, times in found.items():
        assert times.believed.end == pytest.approx(ended[name].ended, rel=1e-9)
        assert times.believed.start == pytest.approx(ended[name].first_start, rel=1e-9)


@pytest.mark.parametrize("policy", ["tiresias:start_s=600,restart_s=900", "pollux", "srtf"])
def test_a_start_costs_what_the_policy_says(policy):
    """The forecast is made while jobs have their GPUs and their workers are not up."""
    events, ended, perf = story(policy, count=12)
    starting, wrong = 0, []
    for cut in range(1, len(events)):
        if events[cut].at <= events[cut - 1].at:
            continue
        state = State(perf, policies.make(policy).key, 2)
        for event in events[:cut]:
            state.apply(event)
        awaited = [name for name, record in state.jobs.items() if record.status is Status.STARTING]
        if not awaited:
            continue
        found = forecast(state, lambda: policies.make(policy))
        for name in awaited:
            starting += 1
            if state.jobs[name].attempt == 1 and found[name].believed.start != pytest.approx(ended[name].first_start):
                wrong.append((name, cut))
        if starting > 20:
            break
    assert starting, "no job was starting at any time"
    assert wrong == []


def test_a_job_far_back_in_the_queue_pays_for_its_start_too(monkeypatch):
    policy = "tiresias:start_s=600,restart_s=900"
    events, _, perf = story(policy, count=12)
    state = middle(events, perf, policy, 0.3)
    waiting = [record.job.id for record in state.queue]
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    dear = forecast(state, lambda: policies.make(policy))
    free = forecast(state, lambda: policies.make("tiresias:start_s=0,restart_s=0"))
    assert len(waiting) > 2
    for name in waiting[1:]:
        assert dear[name].believed.start >= free[name].believed.start + 600


def test_a_forecast_leaves_the_state_unchanged():
    events, _, perf = story("sjf-bsbf")
    state = middle(events, perf, "sjf-bsbf", 0.5)
    before = [(r.job.id, r.status, r.done, r.iteration_s, r.gpus) for r in state.jobs.values()]
    forecast(state, lambda: policies.make("sjf-bsbf"), lambda job: (0.5, 2.0))
    assert [(r.job.id, r.status, r.done, r.iteration_s, r.gpus) for r in state.jobs.values()] == before


def spans(found):
    return sum(times.late.end - times.early.end for times in found.values())


def test_a_range_holds_the_believed_times_and_grows_with_the_spread():
    events, _, perf = story("sjf-bsbf")
    state = middle(events, perf, "sjf-bsbf", 0.5)
    narrow = forecast(state, lambda: policies.make("sjf-bsbf"), lambda job: (0.9, 1.1))
    wide = forecast(state, lambda: policies.make("sjf-bsbf"), lambda job: (0.5, 2.0))
    for name in narrow:
        for found in (narrow[name], wide[name]):
            assert found.early.start <= found.believed.start <= found.late.start
            assert found.early.end <= found.believed.end <= found.late.end
    assert sum(f.late.end - f.early.end for f in wide.values()) > 2 * sum(
        f.late.end - f.early.end for f in narrow.values()
    )


def test_held_jobs_have_no_forecast():
    events, _, perf = story("sjf")
    state = middle(events, perf, "sjf", 0.5)
    held = next(iter(state.queue)).job.id
    state.apply(ev.Held(state.now, held))
    found = forecast(state, lambda: policies.make("sjf"))
    assert held not in found
    assert set(found) == set(state.jobs) - {held}


@pytest.mark.parametrize("waiting", [0, 5, 210, 400])
@pytest.mark.parametrize("policy", ["sjf-bsbf", "fifo"])
async def test_a_dry_run_says_what_explain_says_after_the_submission(quick_home, policy, waiting):
    clock, drawn = FakeClock(1000.0), random.Random(waiting)
    async with serving(quick_home, policy, executor=MemoryExecutor(gpus=4), clock=clock) as live:

        def spec():
            longest = drawn.choice([60, 3600, 36_000])
            return shell("true", gpus=drawn.choice([1, 1, 2, 4]), duration_s=drawn.randint(10, longest), name="x")

        await live.requests.submit([spec() for _ in range(waiting + 1)], "admin")
        await settle(live)
        for wanted in (spec(), replace(spec(), priority=1), replace(spec(), duration_s=None, name="")):
            before = await live.queries.dry_run([wanted], "admin")
            job = await one(live, wanted)
            after = live.queries.explain(job)
            if live.state.jobs[job].queue_entry is not None:
                assert before["where"] is None
                assert (before["start"], before["end"]) == (after["start"], after["end"])
            assert before["run"] == after["run"]


@pytest.mark.parametrize("waiting", [0, 5, 210])
async def test_a_dry_run_of_several_jobs_says_what_explain_says_after_their_submission(quick_home, waiting):
    clock = FakeClock(1000.0)
    async with serving(quick_home, "sjf-bsbf", executor=MemoryExecutor(gpus=4), clock=clock) as live:
        blocker = shell("true", gpus=4, duration_s=900.0, exclusive=True)
        await live.requests.submit([blocker, *[shell("true", duration_s=100.0 + i) for i in range(waiting)]], "admin")
        await settle(live)
        wanted = [shell("true", duration_s=50.0 * (i % 7 + 1), exclusive=True) for i in range(20)]
        before = await live.queries.dry_run(wanted, "admin")
        jobs = await live.requests.submit(wanted, "admin")
        after = [live.queries.explain(job) for job in jobs]
        assert [row["end"] for row in before["each"]] == [row["end"] for row in after]
        assert [row["start"] for row in before["each"]] == [row["start"] for row in after]
        ends = sorted(row["end"]["value"] for row in after)
        assert (before["first_end"]["value"], before["last_end"]["value"]) == (ends[0], ends[-1])
        assert (before["starts_now"], before["jobs"]) == (0, 20)


def test_a_job_that_warms_up_computes_when_its_start_up_is_believed_to_end():
    perf = FittedModel(model(2.0, 1).tasks, ConstantInterference(2.0), 1, ignore_memory=True, startup=lambda job: 8.0)
    state = State(perf, Sjf().key)
    for event in (
        ev.NodeJoined(0.0, nodes("1x1")[0]),
        ev.Submitted(0.0, job("first", left=100.0)),
        ev.Submitted(0.0, job("second", left=100.0, exclusive=True)),
        ev.Planned(0.0, (Decision("first", Allocation((0,)), "why"),)),
        ev.Started(2.0, "first", 1, computes=False),
    ):
        state.apply(event)
    found = forecast(state, Sjf, now=5.0)
    assert found["first"].believed.end == pytest.approx(108.0)
    assert found["second"].believed.end == pytest.approx(108.0 + 8.0 + 100.0)
