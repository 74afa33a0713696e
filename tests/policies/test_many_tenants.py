"""What policies leave out where many users' jobs are alike would have changed nothing."""

from dataclasses import replace
from random import Random

import pytest

from carpool.core.events import Event
from carpool.core.model import Job
from carpool.policies.sharing.candidates import Candidates
from carpool.policies.sharing.shortfalls import SearchChance, Shortfalls
from carpool.policies.sharing.whole_gang_hosts import WholeGangHosts
from carpool.sim.run import Setup, simulate


def jobs_of_many_users(seed: int) -> list[Job]:
    random = Random(seed)
    job = Job("", 0.0, "cifar10", 1, 128, 1000)
    return [
        replace(
            job,
            id=f"j{number}",
            submitted=random.uniform(0.0, 600.0),
            gpus=random.choice([1, 1, 2, 4]),
            duration_s=random.lognormvariate(5.0, 1.5),
            user=f"u{random.randrange(8)}",
            group=f"g{random.randrange(3)}",
        )
        for number in range(120)
    ]


@pytest.mark.parametrize("policy", ["sjf-bsbf", "sjf-bsbf:floor=0.95,single_host=true"])
@pytest.mark.parametrize("jobs_per_gpu", [2, 3])
def test_a_guest_that_is_not_tried_would_have_found_too_few_hosts(policy, jobs_per_gpu, monkeypatch):
    left_out = 0
    told, told_from_before, began = Candidates.too_few_for, Shortfalls.chance, Shortfalls.begin

    def counted(candidates, guest):
        nonlocal left_out
        answer = told(candidates, guest)
        left_out += answer
        return answer

    def prospect_counted(shortfalls, draft, guest):
        nonlocal left_out
        answer = told_from_before(shortfalls, draft, guest)
        left_out += answer is not SearchChance.OPEN
        return answer

    def begin_counted(shortfalls, view):
        nonlocal left_out
        shapes = began(shortfalls, view)
        left_out += len(shapes)
        return shapes

    def begin_with_none(shortfalls, view):
        began(shortfalls, view)
        return set()

    def log_of(seed: int) -> list[Event]:
        events: list[Event] = []
        setup = Setup(cluster="2x4", truth="1.9", jobs_per_gpu=jobs_per_gpu, fair_share=0.5)
        simulate(jobs_of_many_users(seed), policy, setup, log=events.append)
        return events

    for seed in range(3):
        monkeypatch.setattr(Candidates, "too_few_for", counted)
        monkeypatch.setattr(Shortfalls, "chance", prospect_counted)
        monkeypatch.setattr(Shortfalls, "begin", begin_counted)
        quick = log_of(seed)
        monkeypatch.setattr(Candidates, "too_few_for", lambda candidates, guest: False)
        monkeypatch.setattr(Shortfalls, "chance", lambda shortfalls, draft, guest: SearchChance.OPEN)
        monkeypatch.setattr(Shortfalls, "begin", begin_with_none)
        assert quick == log_of(seed)
    assert left_out > 100


def test_a_shape_that_found_no_host_would_find_none_for_another_user(monkeypatch):
    begin = WholeGangHosts.__init__
    left_out = 0

    class Counted(set):
        def __contains__(self, shape):
            nonlocal left_out
            known = super().__contains__(shape)
            left_out += known
            return known

    class Forgetful(set):
        def add(self, shape):
            pass

    def log_of(seed: int, kind: type[set]) -> list[Event]:
        def begin_with(hosts, draft):
            begin(hosts, draft)
            hosts.none_for = kind()

        monkeypatch.setattr(WholeGangHosts, "__init__", begin_with)
        events: list[Event] = []
        setup = Setup(cluster="2x4", truth="1.15", fair_share=0.5)
        simulate(jobs_of_many_users(seed), "lucid", setup, log=events.append)
        return events

    for seed in range(3):
        quick = log_of(seed, Counted)
        assert quick == log_of(seed, Forgetful)
        assert any("it shares with" in repr(event) for event in quick)
    assert left_out > 100
