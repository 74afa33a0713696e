"""Drained and reserved GPUs: what may start there, what happens to jobs when their time comes, and what is kept."""

import json
from random import Random

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.closures import choose
from carpool.core.model import Closure, Status
from carpool.core.scheduler import Scheduler
from carpool.core.validate import validate
from carpool.sim.engine import Costs, Engine
from carpool.sim.timeline import segments
from tests.support.world import job, model, nodes

DRAIN = Closure("n0", (0, 1, 2, 3), 60.0, 150.0)
RESERVED = Closure("1", (4, 5), 30.0, 90.0, group="red")


def run(jobs, policy="sjf-bsbf", closures=(DRAIN, RESERVED), shape="2x4", told=0.0, **options):
    seen = []
    settings = [ev.ClosureSet(told, one) for one in closures]
    made = Engine(
        jobs,
        nodes(shape),
        policies.make(policy),
        belief=options.pop("belief", None) or model(1.5),
        settings=settings,
        log=seen.append,
        **options,
    )
    return made.run(), seen


def random_jobs(seed):
    random = Random(seed)
    return [
        job(
            f"j{n}",
            random.choice([1, 1, 2, 4]),
            random.randint(5, 120),
            submitted=random.choice([0, random.randint(0, 70)]),
            group=random.choice(["", "red"]),
            can_checkpoint=random.random() < 0.6,
            can_pause=random.random() < 0.7,
        )
        for n in range(16)
    ]


def starts(seen, jobs):
    """Yield the time, the job, the GPUs and the seconds that are left of it at each start, as the events tell."""
    held, done = {}, dict.fromkeys(jobs, 0.0)
    for event in seen:
        if isinstance(event, ev.Stopped):
            done[event.job] = event.done
            held.pop(event.job, None)
        elif isinstance(event, ev.Planned):
            for one in event.decisions:
                gpus = one.allocation.gpus if one.allocation else ()
                if gpus and gpus != held.get(one.job):
                    yield event.at, jobs[one.job], gpus, jobs[one.job].iterations - done[one.job]
                held[one.job] = gpus


@pytest.mark.parametrize("policy", [*policies.BUILT_IN, "carpool:suspend=true"])
def test_nothing_starts_that_would_run_into_a_closure_and_nothing_stays_under_any_policy(policy):
    for seed in range(4):
        jobs = {one.id: one for one in random_jobs(seed)}
        costs, told = Costs(stop_s=2.0 * (seed % 2), pause_s=0.5), 20.0 * (seed // 2)
        state, seen = run(jobs.values(), policy, costs=costs, told=told)
        validate(state)
        assert all(record.status is Status.FINISHED for record in state.ended.values())
        for at, one, gpus, left in starts(seen, jobs):
            for closure in (DRAIN, RESERVED):
                if not set(gpus).isdisjoint(closure.gpus) and told <= at < closure.end:
                    assert closure.is_for(one) or at + left <= closure.start + 1e-6, (at, one, closure)
        for part in segments(seen):
            for closure in (DRAIN, RESERVED):
                begins, ends = closure.start + costs.stop_s + costs.pause_s, closure.end
                if part.gpu in closure.gpus and max(part.start, begins) < min(part.end, ends):
                    strangers = [jobs[name] for name in part.jobs if not closure.is_for(jobs[name])]
                    assert not any(one.can_checkpoint for one in strangers)
                    assert all(one.id in part.paused for one in strangers if one.can_pause)


def test_short_jobs_still_run_on_gpus_that_are_drained_later():
    jobs = [job("a", 1, 50), job("b", 1, 51), job("c", 1, 70)]
    state, seen = run(jobs, "sjf", closures=[Closure("n0:0", (0,), 60.0)], shape="1x2")
    found = {one.job: one.allocation.gpus for event in seen if isinstance(event, ev.Planned) for one in event.decisions}
    assert found == {"a": (1,), "b": (0,), "c": (1,)}
    assert [state.ended[name].ended for name in "abc"] == [50.0, 51.0, 120.0]


def test_a_drain_without_a_time_lets_running_jobs_finish():
    made = Scheduler(policies.make("sjf"), model(1.5))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x2")])
    made.step(0.0, [ev.Submitted(0.0, job("a", 1, 50))])
    made.step(0.0, [ev.Started(0.0, "a", 1)])
    made.step(1.0, [ev.ClosureSet(1.0, Closure("n0", (0, 1), 1.0, lets_finish=True)), ev.ClosureBegan(1.0, "n0")])
    made.step(2.0, [ev.Submitted(2.0, job("b", 1, 5))])
    assert [record.status for record in made.state.jobs.values()] == [Status.RUNNING, Status.PENDING]
    made.step(3.0, [ev.ClosureRemoved(3.0, "n0")])
    assert made.state.jobs["b"].status is Status.STARTING


def test_a_job_that_cannot_be_saved_is_paused_and_goes_on_after_the_reservation():
    plain = {"can_checkpoint": False, "group": "blue"}
    closures = [Closure("1", (0,), 30.0, 50.0, group="red")]
    made = Scheduler(policies.make("carpool"), model(1.5))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x1")])
    made.step(0.0, [ev.Submitted(0.0, job("a", 1, 50, **plain))])
    made.step(0.0, [ev.Started(0.0, "a", 1)])
    made.step(10.0, [ev.ClosureSet(10.0, closures[0])])
    made.step(30.0, [ev.ClosureBegan(30.0, "1")])
    record = made.state.jobs["a"]
    assert (record.status, record.kept_paused) == (Status.PAUSING, True)
    made.step(30.0, [ev.Paused(30.0, "a", 1), ev.ResumedByOwner(30.0, "a")])
    made.step(31.0, [ev.Submitted(31.0, job("r", 1, 10, group="red")), ev.Submitted(31.0, job("s", 1, 5))])
    assert {r.job.id: r.status for r in made.state.jobs.values()} == {"a": "paused", "r": "starting", "s": "pending"}
    made.step(31.0, [ev.Started(31.0, "r", 1)])
    kept = snapshot.restore(json.loads(json.dumps(snapshot.encode(made.state))), model(1.5), made.policy.key)
    validate(kept)
    assert snapshot.encode(kept) == snapshot.encode(made.state)
    made.step(41.0, [ev.Finished(41.0, "r", 1)])
    assert made.state.jobs["a"].status is Status.PAUSED
    made.step(50.0, [ev.ClosureRemoved(50.0, "1")])
    assert made.state.jobs["a"].status is Status.RESUMING


@pytest.mark.parametrize(
    ("fields", "computes", "expected"),
    [
        ({}, True, Status.STOPPING),
        ({"saves": None}, True, Status.PAUSING),
        ({"saves": False}, True, Status.PAUSING),
        ({"saves": None}, False, Status.STOPPING),
        ({"saves": None, "can_pause": False}, True, Status.STOPPING),
        ({"saves": False, "can_pause": False}, True, Status.RUNNING),
    ],
)
def test_a_job_moves_from_a_closed_gpu_only_if_that_loses_nothing_or_it_cannot_be_paused(fields, computes, expected):
    made = Scheduler(policies.make("sjf"), model(1.5))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x1")])
    made.step(0.0, [ev.Submitted(0.0, job("a", 1, 500, **fields))])
    made.step(0.0, [ev.Started(0.0, "a", 1, computes=computes)])
    made.step(1.0, [ev.ClosureSet(1.0, Closure("r1", (0,), 30.0, 50.0, "red")), ev.ClosureBegan(30.0, "r1")])
    assert made.state.jobs["a"].status is expected


def test_what_its_workers_show_decides_whether_a_job_may_be_suspended():
    made = Scheduler(policies.make("srtf"), model(1.5))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("1x1")])
    made.step(0.0, [ev.Submitted(0.0, job("a", 1, 500, saves=None))])
    made.step(0.0, [ev.Started(0.0, "a", 1), ev.SavingSeen(0.0, "a", 1, False)])
    made.step(1.0, [ev.Submitted(1.0, job("b", 1, 5))])
    assert made.state.jobs["a"].status is Status.RUNNING, "its work would be lost"
    made.step(2.0, [ev.SavingSeen(2.0, "a", 1, True), ev.Submitted(2.0, job("c", 1, 4))])
    assert made.state.jobs["a"].status is Status.STOPPING


def test_a_number_of_gpus_is_reserved_where_the_fewest_jobs_of_others_would_be_in_the_way():
    made = Scheduler(policies.make("sjf"), model(1.5))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes("3x2")])
    lengths = {"a": 50, "b": 500, "c": 500}
    made.step(0.0, [ev.Submitted(0.0, job(name, 1, lengths[name])) for name in "ab"])
    made.step(0.0, [ev.Submitted(0.0, job("c", 1, 500, group="red"))])
    made.step(0.0, [ev.Started(0.0, name, 1) for name in "abc"])
    gpus = {name: record.gpus for name, record in made.state.jobs.items()}
    assert gpus == {"a": (0,), "b": (1,), "c": (2,)}
    state, later = made.state, Closure("r1", (), 100.0, 200.0, "red")
    assert choose(state, 2, later) == (2, 3), "the job there is of the group, and both are on one node"
    assert choose(state, 5, later) == (0, 2, 3, 4, 5), "the job on GPU 0 ends before"
    assert choose(state, 6, later) == (0, 1, 2, 3, 4, 5)
    assert choose(state, 7, later) is None
    made.step(1.0, [ev.ClosureSet(1.0, Closure("n1", (2, 3), 150.0)), ev.NodeClosed(1.0, "n2")])
    assert choose(state, 1, later) == (0,), "two are drained by then, and nothing starts on the last node"
    assert choose(state, 3, later) is None
    assert choose(state, 2, Closure("r1", (), 100.0, 150.0, "red")) == (2, 3), "before the drain begins"


def test_a_node_that_comes_back_is_still_drained():
    made = Scheduler(policies.make("sjf"), model(1.5))
    (node,) = nodes("1x2")
    made.step(0.0, [ev.NodeJoined(0.0, node), ev.ClosureSet(0.0, Closure("n0:1", (1,), 0.0, lets_finish=True))])
    made.step(1.0, [ev.NodeLost(1.0, "n0"), ev.NodeJoined(1.0, node)])
    made.step(2.0, [ev.Submitted(2.0, job("a", 2, 5)), ev.Submitted(2.0, job("b", 1, 5))])
    validate(made.state)
    assert [record.gpus for record in made.state.jobs.values()] == [(), (0,)]


@pytest.mark.parametrize("policy", policies.BUILT_IN)
def test_a_group_gets_what_is_reserved_for_it_before_it_shares_with_others_or_displaces_them(policy):
    reserved = Closure("r1", (2, 3), 0.0, 5000.0, group="red")
    others = [job(f"b{n}", 1, 900 + n) for n in range(2)]
    jobs = [*others, *(job(f"r{n}", 1, 60, submitted=100 + 30 * n, group="red") for n in range(2))]
    _, seen = run(jobs, policy, closures=[reserved], shape="1x4")
    places = {one.id: gpus for _, one, gpus, _ in starts(seen, {one.id: one for one in jobs})}
    assert {places["r0"], places["r1"]} == {(2,), (3,)}
    assert not any(len(part.jobs) > 1 or part.paused for part in segments(seen))


@pytest.mark.parametrize("launch_s", [0.0, 20.0])
@pytest.mark.parametrize("policy", sorted({*policies.BUILT_IN} - {"pollux"}))  # pollux decides once a minute
def test_gpus_that_a_group_leaves_for_its_reserved_ones_do_not_stay_idle(policy, launch_s):
    reserved = Closure("r1", (1,), 0.0, 5000.0, group="red")
    jobs = [job("r", 1, 60, submitted=10, group="red"), job("b", 1, 100, submitted=10, exclusive=True)]
    _, seen = run(jobs, policy, closures=[reserved], shape="1x2", costs=Costs(launch_s=launch_s))
    places = [(at, one.id, gpus) for at, one, gpus, _ in starts(seen, {one.id: one for one in jobs})]
    assert places == [(10.0, "r", (1,)), (10.0, "b", (0,))]
