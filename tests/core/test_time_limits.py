"""Time limits: what counts towards them, how jobs end at them, and what groups say about them."""

from random import Random

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Job, Status, UserGroup
from carpool.core.time_limits import hours, limit_of, notice_s
from carpool.core.validate import validate
from carpool.sim.engine import CannotFinish, Costs, Engine
from tests.support.world import job, model, nodes


def run(jobs, policy="sjf-bsbf", **options):
    seen = []
    belief = options.pop("belief", None) or model(options.pop("xi", 1.5))
    engine = Engine(jobs, nodes("1x4"), policies.make(policy), belief=belief, log=seen.append, **options)
    return engine.run(), seen


def random_jobs(seed):
    random = Random(seed)
    return [
        job(
            f"j{n}",
            random.choice([1, 1, 2, 4]),
            random.randint(5, 60),
            submitted=random.randint(0, 40),
            limit_s=random.choice([None, float(random.randint(2, 50))]),
            requeue=random.random() < 0.4,
        )
        for n in range(9)
    ]


@pytest.mark.parametrize("policy", [*policies.BUILT_IN, "carpool:suspend=true"])
def test_no_job_computes_for_longer_than_its_limit_under_any_policy(policy):
    for seed in range(4):
        jobs = random_jobs(seed)
        costs = Costs(stop_s=float(seed), launch_s=float(seed % 2))
        state, seen = run(jobs, policy, costs=costs, truth=model(1.6) if seed > 1 else None)
        validate(state)
        for one in jobs:
            record = state.ended[one.id]
            ends = [event for event in seen if isinstance(event, ev.LimitReached) and event.job == one.id]
            if one.limit_s is None:
                assert record.status is Status.FINISHED
                assert not ends
            elif one.requeue:
                assert record.status is Status.FINISHED
                assert record.ran_s <= one.limit_s * (len(ends) + 1) + 1e-6
                assert record.ran_s >= one.limit_s * len(ends) - 1e-6
            elif record.status is Status.FINISHED:
                assert record.ran_s <= one.limit_s + 1e-6
            else:
                assert (record.status, record.ran_s) == (Status.FAILED, pytest.approx(one.limit_s))
                assert record.reason == f"ran to its limit of {hours(one.limit_s)}"
                assert len(ends) == 1


def test_a_paused_job_uses_nothing_of_its_limit():
    long = job("long", 4, 100, limit_s=101.0)
    short = [job(f"s{n}", 4, 20, submitted=10.0 + n) for n in range(3)]
    state, _ = run([long, *short], "carpool", xi=3.0)
    record = state.ended["long"]
    assert record.pauses
    assert record.paused_s > 50
    assert record.status is Status.FINISHED, "it computed for 100 s, however long that took"


def test_a_job_is_warned_once_before_each_limit():
    _, seen = run([job("a", 1, 100, limit_s=40.0, requeue=True)], "carpool")
    kinds = [(type(event).__name__, event.at) for event in seen if isinstance(event, ev.LimitNeared | ev.LimitReached)]
    assert notice_s(40.0) == 4.0
    assert notice_s(1e6) == 300.0
    # the policy charges 30 s for a restart, which are no part of the limit
    assert kinds == [("LimitNeared", 36.0), ("LimitReached", 40.0), ("LimitNeared", 106.0), ("LimitReached", 110.0)]


def test_jobs_that_wait_for_one_that_ran_to_its_limit_never_start():
    state, _ = run([job("a", 1, 100, limit_s=40.0), job("b", 1, 10, after=("a",))])
    assert state.ended["b"].reason == "job a, which it waits for, failed"


@pytest.mark.parametrize(
    ("own", "default", "most", "expected"),
    [
        (None, None, None, None),
        (None, 5.0, None, 5.0),
        (None, None, 9.0, 9.0),
        (None, 5.0, 9.0, 5.0),
        (7.0, 5.0, 9.0, 7.0),
        (12.0, 5.0, 9.0, 9.0),
        (12.0, None, None, 12.0),
    ],
)
def test_a_group_gives_jobs_a_limit_and_bounds_their_own(own, default, most, expected):
    groups = {"red": UserGroup("red", default_limit_s=default, max_limit_s=most)}
    limited = Job("a", 0.0, "plain", 1, 8, 10, group="red", limit_s=own)
    assert limit_of(limited, groups) == expected
    assert limit_of(limited, {}) == own


def test_the_simulator_applies_the_limits_of_groups():
    settings = [ev.GroupChanged(0.0, UserGroup("red", default_limit_s=30.0, max_limit_s=60.0))]
    jobs = [job("a", 1, 100, group="red"), job("b", 1, 100, group="red", limit_s=60.0), job("c", 1, 100)]
    state, _ = run(jobs, settings=settings)
    assert [state.ended[name].status for name in "abc"] == ["failed", "failed", "finished"]
    assert [state.ended[name].ran_s for name in "ab"] == [30.0, 60.0]
    with pytest.raises(CannotFinish, match=r"asks for 1\.02m and group red allows 1m"):
        run([job("d", 1, 100, group="red", limit_s=61.0)], settings=settings)
