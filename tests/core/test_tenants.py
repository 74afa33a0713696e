"""Groups and users: what they are charged, when they go first, and what is kept for them."""

from dataclasses import replace
from itertools import count
from math import log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import FairShare, Job, Status, UserGroup
from carpool.core.scheduler import Scheduler
from carpool.core.validate import validate
from carpool.sim.engine import Engine
from tests.support.effort import cases
from tests.support.world import job, model, nodes

HALF_LIFE_S = 1000.0


def scheduler(policy="sjf", *settings, shape="1x4", xi=1.5, **fair):
    made = Scheduler(policies.make(policy), model(xi, int(shape.split("x")[1])))
    made.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes(shape)])
    events = [*settings, ev.FairShareChanged(0.0, FairShare(**{"half_life_s": HALF_LIFE_S, **fair}))]
    made.step(0.0, events)
    return made


def submit(made, *jobs, at=0.0):
    made.step(at, [ev.Submitted(at, one) for one in jobs])
    return launch(made, at)


def launch(made, at):
    starting = [r for r in made.state.jobs.values() if r.status is Status.STARTING]
    made.step(at, [ev.Started(at, r.job.id, r.attempt) for r in starting])


def finish(made, name, at):
    made.step(at, [ev.Finished(at, name, made.state.jobs[name].attempt)])
    launch(made, at)


def running(made):
    return {record.job.id for record in made.state.running}


def group(made, name):
    return made.state.tenants.groups[name]


def test_usage_counts_half_after_a_half_life():
    made = scheduler(strength=0.5)
    submit(made, job("a", gpus=2, group="red"))
    finish(made, "a", 100.0)
    used = group(made, "red").used_at(100.0, HALF_LIFE_S)
    expected = 2 * HALF_LIFE_S / log(2) * (1 - 0.5**0.1)  # a stream of 2 GPUs for a tenth of a half-life
    assert used == pytest.approx(expected)
    assert group(made, "red").used_at(100.0 + HALF_LIFE_S, HALF_LIFE_S) == pytest.approx(used / 2)


def test_a_shared_gpu_costs_each_job_its_part():
    made = scheduler("sjf-ffs", strength=0.5, shape="1x1")
    submit(made, job("a", group="red"), job("b", group="blue", user="bob"))
    assert running(made) == {"a", "b"}
    assert (group(made, "red").rate, group(made, "blue").rate) == (0.5, 0.5)
    assert group(made, "blue").members["bob"].rate == 0.5
    finish(made, "a", 10.0)
    assert (group(made, "red").rate, group(made, "blue").rate) == (0.0, 1.0)


def test_a_paused_job_pays_only_where_no_other_computes():
    made = scheduler("sjf-ffs", strength=0.5, shape="1x1")
    submit(made, job("a", group="red"), job("b", group="blue"))
    made.step(5.0, [ev.PausedByOwner(5.0, "a")])
    assert (group(made, "red").rate, group(made, "blue").rate) == (0.0, 1.0)
    made.step(6.0, [ev.Paused(6.0, "a", 1), ev.PausedByOwner(6.0, "b")])
    assert (group(made, "red").rate, group(made, "blue").rate) == (0.5, 0.5)
    validate(made.state)


def test_the_group_that_used_less_goes_first():
    made = scheduler(strength=1.0, shape="1x1")
    submit(made, job("a", left=500, group="red"), job("b", left=1, group="red"), job("c", left=900, group="blue"))
    assert running(made) == {"b"}, "so far none has used anything, so the shortest goes first"
    finish(made, "b", 1.0)
    assert running(made) == {"c"}


@pytest.mark.parametrize("used", [5e-324, 1e-320, -1e-14, 0.0])
def test_next_to_nothing_counts_as_nothing(used):
    made = scheduler(strength=0.5, shape="1x2")
    submit(made, job("a", group="red"), job("b", group="blue"), job("c", group="red"))
    for name, gpu_s in (("red", used), ("blue", 100.0)):
        tenant = group(made, name)
        tenant.used, tenant.rate, tenant.since = gpu_s, 0.0, 100.0
    made.state.advance(100.0)
    made.state.rank_queue(at_once=True)
    assert (group(made, "red").tier, group(made, "red").below) == (-7, True)


def test_shares_that_are_turned_off_leave_nothing_behind_where_caps_count_on():
    made = scheduler("sjf", ev.GroupChanged(0.0, UserGroup("red", cap=4)), strength=0.9, shape="1x1")
    submit(made, job("a", left=50, group="red"))
    finish(made, "a", 50.0)
    more = [job("b", left=50, group="red"), job("c", left=90, group="blue"), job("d", left=70, group="red")]
    submit(made, *more, at=50.0)
    assert running(made) == {"c"}, "red used the cluster"
    made.step(60.0, [ev.FairShareChanged(60.0, FairShare(0.0, HALF_LIFE_S))])
    finish(made, "c", 140.0)
    submit(made, job("e", left=80, group="blue"), at=140.0)
    assert set(map(made.state.rank_of, made.state.queue)) == {(1, 0, 0)}, "all wait with one rank"
    assert running(made) == {"b"}


@pytest.mark.parametrize(
    ("policy", "below", "may_hold"),
    [("sjf", False, 1), ("srtf", True, 4), ("pollux", True, 1), ("fifo", True, 2), ("backfill", True, 2)],
)
def test_a_policy_that_preempts_or_keeps_the_order_lets_a_group_have_more_before_others(policy, below, may_hold):
    """At strength 0.5: a group that used two fifths of its share is below it. Under the others it would have to use
    less than a fifth. It may hold half of its share, all of it under policies that preempt, or a quarter."""
    made = scheduler(policy, strength=0.5, shape="1x8")
    submit(made, job("a", group="red"), *(job(f"b{n}", group="blue") for n in range(4)))
    made.step(60.0, [], wake=True)
    launch(made, 60.0)
    made.step(120.0, [], wake=True)
    assert (group(made, "red").below, group(made, "red").share_gpus) == (below, may_hold)


def test_a_plan_starts_no_more_jobs_of_a_group_first_than_the_group_is_entitled_to():
    made = scheduler("sjf", strength=0.5, shape="1x8")
    submit(made, job("gang", 7, left=500, group="blue"), job("red", left=200, group="red"))
    finish(made, "red", 200.0)
    submit(made, job("more", left=300, group="blue"), at=200.0)
    submit(made, *(job(f"r{n}", left=900, group="red") for n in range(4)), at=201.0)
    submit(made, *(job(f"b{n}", left=9, group="blue") for n in range(7)), at=202.0)
    made.step(500.0, [ev.Finished(500.0, "gang", 1), ev.Finished(500.0, "more", 1)])
    red = group(made, "red")
    assert (red.below, red.tier, red.share_gpus) == (True, 0, 1)
    assert running(made) == {"r0", *(f"b{n}" for n in range(7))}, "the other jobs of red are longer"


def test_a_policy_that_preempts_does_not_start_what_it_would_stop_at_once():
    made = scheduler("srtf", strength=0.5, shape="1x8")
    submit(made, *(job(f"b{n}", left=900, group="blue") for n in range(7)), job("red", left=100, group="red"))
    finish(made, "red", 100.0)
    submit(made, job("b7", left=900, group="blue"), at=100.0)
    submit(made, *(job(f"r{n}", left=2000, group="red") for n in range(8)), at=200.0)
    red = group(made, "red")
    assert (red.below, red.tier, red.share_gpus) == (True, 0, 4)
    assert {name for name in running(made) if name[0] == "r"} == {"r0", "r1", "r2", "r3"}
    assert made.state.preemptions == 4


def test_pollux_leaves_no_gpu_free_while_it_refuses_to_displace_many_jobs_for_a_gang_that_comes_first():
    made = scheduler("pollux", strength=0.5, shape="1x8")
    submit(made, *(job(f"b{n}", left=1000, group="blue") for n in range(6)))
    made.step(60.0, [], wake=True)
    launch(made, 60.0)
    submit(made, job("gang", 8, group="red"), *(job(f"b{n}", left=1000, group="blue") for n in (6, 7)), at=100.0)
    made.step(120.0, [], wake=True)
    launch(made, 120.0)
    ranks = [made.state.rank_of(made.state.jobs[name]) for name in ("gang", "b0")]
    assert ranks[0] < ranks[1], "the gang comes first"
    assert running(made) == {f"b{n}" for n in range(8)}


def test_pollux_displaces_others_for_a_job_that_a_group_is_entitled_to():
    made = scheduler("pollux", ev.GroupChanged(0.0, UserGroup("red", guarantee=4)), strength=0.5, shape="1x8")
    submit(made, *(job(f"b{n}", left=1000, group="blue") for n in range(8)))
    made.step(60.0, [], wake=True)
    launch(made, 60.0)
    submit(made, job("gang", 4, group="red"), at=100.0)
    made.step(120.0, [], wake=True)
    starting = [record for record in made.state.holders.values() if record.job.id == "gang"]
    assert starting, "although one job runs where four did"


def test_a_user_that_used_less_goes_first_within_the_group():
    made = scheduler(strength=1.0, shape="1x1")
    submit(
        made, *(job(name, left=left, user=user) for name, left, user in (("a", 1, "x"), ("b", 2, "x"), ("c", 9, "y")))
    )
    finish(made, "a", 1.0)
    assert running(made) == {"c"}


def test_a_weight_makes_a_share_larger():
    heavy = ev.GroupChanged(0.0, UserGroup("red", weight=100.0))
    made = scheduler("sjf", heavy, strength=1.0, shape="1x1")
    jobs = [job("a", left=1, group="red"), job("b", left=2, group="blue"), job("c", left=3, group="red")]
    submit(made, *jobs, job("d", left=9, group="blue"))
    finish(made, "a", 1.0)
    assert running(made) == {"b"}, "blue has used nothing"
    finish(made, "b", 3.0)
    assert running(made) == {"c"}, "red has used half as much as blue, of a share a hundred times as large"


def test_without_strength_nothing_is_counted():
    made = scheduler(strength=0.0)
    submit(made, job("a", group="red"))
    assert not made.state.tenants.on
    assert not made.state.tenants.groups


def test_what_runs_is_counted_from_the_moment_that_shares_count():
    made = scheduler(strength=0.0)
    submit(made, job("a", gpus=4, group="red"), job("b", group="blue"))
    made.step(50.0, [ev.FairShareChanged(50.0, FairShare(1.0, HALF_LIFE_S))])
    assert (group(made, "red").rate, group(made, "red").jobs, group(made, "blue").jobs) == (4.0, 1, 1)
    validate(made.state)
    made.step(60.0, [ev.FairShareChanged(60.0, FairShare(0.0, HALF_LIFE_S))])
    assert not made.state.tenants.on
    validate(made.state)
    assert [record.job.id for record in made.state.queue] == ["b"]


def test_guaranteed_gpus_are_kept_free_for_a_gang():
    made = scheduler("sjf", ev.GroupChanged(0.0, UserGroup("red", guarantee=3)), strength=0.0)
    submit(made, *(job(f"a{n}", left=100 + n, group="blue") for n in range(4)))
    submit(made, *(job(f"b{n}", left=10 + n, group="blue") for n in range(3)), job("gang", gpus=3, group="red"), at=1.0)
    for number in range(3):
        finish(made, f"a{number}", 2.0 + number)
        assert ("gang" in running(made)) is (number == 2), "the GPUs that others give back are kept for it"
    assert running(made) == {"a3", "gang"}


def test_others_use_guaranteed_gpus_while_nobody_of_the_group_wants_them():
    made = scheduler("sjf", ev.GroupChanged(0.0, UserGroup("red", guarantee=4)), strength=0.0)
    submit(made, *(job(f"a{n}", group="blue") for n in range(4)))
    assert len(running(made)) == 4


def test_no_gpus_are_kept_for_a_gang_beyond_the_guarantee():
    made = scheduler("sjf", ev.GroupChanged(0.0, UserGroup("red", guarantee=2)), strength=0.0)
    submit(made, *(job(f"a{n}", left=100, group="blue") for n in range(4)))
    submit(made, job("b", left=10, group="blue"), job("gang", gpus=3, left=5, group="red"), at=1.0)
    finish(made, "a0", 2.0)
    assert "b" in running(made)


@pytest.mark.parametrize("name", sorted(policies.BUILT_IN))
def test_no_policy_passes_the_cap_of_a_group(name):
    made = scheduler(name, ev.GroupChanged(0.0, UserGroup("red", cap=2)), strength=0.0)
    submit(made, *(job(f"a{n}", group="red", exclusive=True) for n in range(4)), job("b", group="blue", exclusive=True))
    made.step(60.0, [], wake=True)
    assert sum(len(record.gpus) for record in made.state.running if record.job.group == "red") == 2
    assert "b" in running(made)


def test_a_gang_above_the_cap_is_refused():
    made = scheduler("sjf", ev.GroupChanged(0.0, UserGroup("red", cap=2)))
    assert "group red may hold 2" in (made.state.refusal(job("a", gpus=3, group="red")) or "")


jobs_of_two_groups = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 30.0, 400.0]),
        st.sampled_from([1, 1, 2, 3]),
        st.sampled_from([5.0, 60.0, 800.0]),
        st.sampled_from(["red", "blue", "green"]),
    ),
    min_size=4,
    max_size=30,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fifo", "sjf", "backfill", "sjf-ffs", "sjf-bsbf", "lucid", "tesserae", "carpool"])
@given(given_jobs=jobs_of_two_groups)
@settings(max_examples=cases(60))
def test_at_full_strength_no_group_below_its_share_waits_for_one_above_it(name, given_jobs):
    """While a job of a group below its share waits, no job of a group above its share takes a GPU that is free."""
    at, jobs = 0.0, []
    for number, (gap, gpus, left, of) in enumerate(given_jobs):
        at += gap
        jobs.append(replace(job(f"j{number}", gpus, left, group=of, exclusive=True), submitted=at))
    policy = policies.make(name)
    decide = policy.decide

    def watched(view):
        decisions = decide(view)
        started = [view.jobs[one.job] for one in decisions if not view.jobs[one.job].gpus]
        below = {name for name, one in view.tenants.groups.items() if one.below}
        waits = [r for r in view.queue if r.job.group in below and r not in started]
        above = [r for r in started if r.job.group not in below]
        assert not (waits and above), f"{waits} wait for {above}"
        return decisions

    policy.decide = watched
    settings_ = [ev.FairShareChanged(0.0, FairShare(1.0, HALF_LIFE_S))]
    Engine(jobs, nodes("1x4"), policy, belief=model(1.5), settings=settings_).run()


def test_what_a_job_states_about_its_group_is_read_from_old_journals():
    assert Job("a", 0.0, "m", 1, 1, 1).group == ""


@pytest.mark.parametrize("policy", ["tiresias", "las", "srtf", "srsf", "pollux", "carpool:suspend=true"])
def test_no_policy_stops_what_it_has_just_started_because_its_group_was_entitled_to_it(policy):
    for seed in range(cases(60)):
        random = Random(seed)
        jobs = [
            job(
                f"j{number}",
                random.choice([1, 2, 2, 3, 4, 8]),
                random.randint(5, 200),
                submitted=random.choice([0, random.randint(0, 60)]),
                group=random.choice(["flood", "flood", "trickle", "gangs"]),
            )
            for number in range(20)
        ]
        fair = FairShare(strength=random.choice([0.5, 0.6, 0.8, 1.0]), half_life_s=HALF_LIFE_S)
        settings = [ev.FairShareChanged(0.0, fair), ev.GroupChanged(0.0, UserGroup("gangs", guarantee=3))]
        seen = count(1)

        def few(event, seen=seen, seed=seed):
            assert next(seen) < 5000, f"seed {seed}: {event}"

        Engine(jobs, nodes("2x4"), policies.make(policy), belief=model(1.5), settings=settings, log=few).run()
