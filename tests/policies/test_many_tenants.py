"""What policies leave out where many users' jobs are alike would have changed nothing."""

from dataclasses import replace
from random import Random

import pytest

from carpool.core.draft import Draft
from carpool.core.events import Event, FairShareChanged
from carpool.core.model import FairShare, Job, UserGroup
from carpool.core.state import State
from carpool.core.validate import validate
from carpool.policies.joint.policy import Carpool, JointPass
from carpool.policies.preemptive import preemption
from carpool.policies.sharing.candidates import Candidates
from carpool.policies.sharing.lucid import Lucid
from carpool.policies.sharing.shortfalls import SearchChance, Shortfalls
from carpool.policies.sharing.whole_gang_hosts import WholeGangHosts
from carpool.sim.run import Setup, simulate
from tests.support.naive import naive_choice
from tests.support.world import cluster, given, pending, running


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


def test_lucid_decides_as_if_it_searched_for_each_job_anew(monkeypatch):
    searches = 0
    search = WholeGangHosts.fits

    def counted(hosts, guest, cap):
        nonlocal searches
        searches += 1
        return search(hosts, guest, cap)

    def plain(lucid, view):
        draft = Draft(view)
        pending = draft.pending()
        for job in pending:
            started = draft.start(job, "least GPU time in the queue that fits")
            if not started and not lucid._join(draft, job, WholeGangHosts(draft)):
                pending.skip_alike()
        return draft.decisions

    def log_of(seed: int) -> list[Event]:
        events: list[Event] = []
        setup = Setup(cluster="2x4", truth="1.15", jobs_per_gpu=2 + seed % 2, fair_share=0.5)
        jobs = [replace(job, submitted=job.submitted // 60 * 60) for job in jobs_of_many_users(seed)]  # many at once
        simulate(jobs, "lucid", setup, log=events.append)
        return events

    monkeypatch.setattr(WholeGangHosts, "fits", counted)
    quick = [log_of(seed) for seed in range(5)]
    made = searches
    assert any("it shares with" in repr(event) for event in quick[0])
    monkeypatch.setattr(Lucid, "decide", plain)
    assert quick == [log_of(seed) for seed in range(5)]
    assert searches - made > 2 * made, "most searches are left out"


@pytest.mark.parametrize("policy", ["tiresias:threshold_gpu_s=100", "srtf"])
def test_policies_that_preempt_choose_as_if_they_sorted_all_jobs_again_and_again(policy, monkeypatch):
    choose = preemption._choose
    chosen = 0

    def compared(*given):
        nonlocal chosen
        choice = choose(*given)
        assert not choice[1] or choice == naive_choice(*given)
        assert choice[1] or not naive_choice(*given)[1]
        chosen += len(choice[1]) > 1
        return choice

    monkeypatch.setattr(preemption, "_choose", compared)
    for seed in range(3):
        setup = Setup(cluster="2x8", fair_share=0.7, half_life_s=200.0)
        simulate(jobs_of_many_users(seed), policy, setup)
    assert chosen > 10


@pytest.mark.parametrize("policy", ["tiresias:threshold_gpu_s=100", "srtf"])
@pytest.mark.parametrize("groups", [(), (UserGroup("g0", guarantee=3),)])
def test_the_ranks_of_jobs_that_hold_gpus_are_those_of_a_walk_over_all_of_them(policy, groups, monkeypatch):
    kept = State.ranks_of_holders
    seen: set[int] = set()

    def compared(state):
        ranks = kept(state)
        seen.update(rank[0] for rank in ranks.values())
        validate(state)
        return ranks

    monkeypatch.setattr(State, "ranks_of_holders", compared)
    for strength, half_life_s in ((0.5, 200.0), (0.9, 2000.0)):
        setup = Setup(cluster="2x4", fair_share=strength, half_life_s=half_life_s, groups=groups)
        simulate(jobs_of_many_users(1), policy, setup)
    assert seen == {0, 1}


def test_carpool_tries_one_of_the_jobs_that_differ_in_their_user_only(monkeypatch):
    """Else a few users with jobs alike would use up the tries of a pass."""
    tried: list[str] = []
    place = JointPass._place

    def counted(one, job):
        tried.append(job.job.id)
        return place(one, job)

    monkeypatch.setattr(JointPass, "_place", counted)
    fair = FairShare(0.5)
    situation = given(
        cluster("1x1", jobs_per_gpu=2),
        running("host", left=100, exclusive=True),
        *(pending(f"p{n}", left=50 + 10 * n, user=f"u{n}") for n in range(6)),
    )
    policy = Carpool()
    state = situation.state(policy.key)
    state.apply(FairShareChanged(state.now, fair))
    state.rank_queue()
    assert len({record.shape for record in state.queue}) == 6
    assert list(policy.decide(state)) == []
    assert tried == ["p0"]
