"""What a policy says about a job that waits: the hosts it compared, and why the job does not share."""

from random import Random

import pytest

from carpool import policies
from carpool.core.perf import MeasuredPair, TableInterference
from carpool.policies.base import BasePolicy
from carpool.policies.joint.policy import Carpool
from carpool.policies.sharing import pair
from carpool.policies.sharing.bsbf import SjfBsbf
from carpool.policies.sharing.lucid import Lucid
from carpool.policies.sharing.tesserae import Tesserae
from tests.support.world import cluster, given, pending, running

FOUR = cluster("1x4")
SHARING = [policies.make(name) for name, cls in policies.BUILT_IN.items() if cls.explain is not BasePolicy.explain]
OTHERS = [policies.make(name) for name, cls in policies.BUILT_IN.items() if cls.explain is BasePolicy.explain]
MODELS = ("plain", "thin", "fat")


def explain(policy, *parts, where=FOUR, xi=1.5, job="b"):
    state = given(where, *parts, xi=xi).state(policy.key)
    return policy.explain(state, state.jobs[job])


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
class TestEverySharingPolicy:
    def test_says_that_a_job_asked_not_to_share(self, policy):
        said = explain(policy, running("a", gpus=4), pending("b", exclusive=True))
        assert said.why == "it asked not to share"
        assert not said.compared

    def test_has_nothing_to_say_where_one_job_runs_per_gpu(self, policy):
        alone = cluster("1x4", jobs_per_gpu=1)
        assert explain(policy, running("a", gpus=4), pending("b"), where=alone) is None

    def test_explains_a_job_that_fits_beside_no_other(self, policy):
        said = explain(policy, running("a", gpus=4, exclusive=True), pending("b", gpus=4))
        assert "room" in said.why or "fits beside no running job" in said.why

    def test_leaves_the_view_as_it_was(self, policy):
        state = given(FOUR, running("a", gpus=4, left=10), pending("b", gpus=4, left=100), xi=3.0).state(policy.key)
        before = policy.decide(state)
        policy.explain(state, state.jobs["b"])
        assert policy.decide(state) == before


@pytest.mark.parametrize("policy", OTHERS, ids=lambda policy: policy.name)
def test_a_policy_without_explanations_never_shares(policy):
    plan = given(FOUR, running("a", gpus=4), pending("b", gpus=4, left=10), xi=1.0).plan(policy)
    assert not plan["b"].startswith("shares"), "override explain(): it says why a job waits instead of sharing"


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_a_policy_with_explanations_shares(policy):
    jobs = (running("a", gpus=4), pending("b", gpus=4, left=10))
    given(FOUR, *jobs, xi=1.0).expect(policy, b="shares a")


class TestBsbf:
    def test_waiting_is_better_in_sum(self):
        said = explain(SjfBsbf(), running("a", gpus=4, left=100), pending("b", left=90), xi=2.5)
        (found,) = said.compared
        assert (found.host, found.guest_slowdown, found.host_slowdown, found.pays) == ("a", 2.5, 2.5, False)
        assert said.why == pair.WAITING_WINS

    def test_too_few_hosts_for_the_gang(self):
        hosts = (running("a", on=[0, 1], left=5000), running("h", on=[2, 3], exclusive=True))
        said = explain(SjfBsbf(), *hosts, pending("b", gpus=4, left=100))
        assert said.compared[0].pays
        assert said.why == "but too few GPUs have such a host for the whole gang"

    def test_the_floor_keeps_the_pair_apart(self):
        jobs = (running("a", gpus=4, left=100), pending("b", left=10))
        assert "total speed of 0.95" in explain(SjfBsbf(floor=0.95), *jobs, xi=2.2).why

    def test_the_best_host_comes_first(self):
        hosts = (running("a", on=[0], left=900), running("c", on=[1], left=300), running("d", on=[2, 3], left=20))
        said = explain(SjfBsbf(), *hosts, pending("b", gpus=4, left=100))
        assert [pair.host for pair in said.compared] == ["c", "a", "d"]
        assert [pair.pays for pair in said.compared] == [True, True, False]


class TestCarpool:
    def test_no_move_lowers_the_sum(self):
        said = explain(Carpool(pause=False), running("a", gpus=4, left=50), pending("b", gpus=4, left=100), xi=3.0)
        assert said.why.startswith("and no move was found that lowers the sum of completion times")
        assert [pair.host for pair in said.compared] == ["a"]

    def test_a_host_of_a_higher_priority_is_not_joined(self):
        said = explain(Carpool(pause=False), running("a", gpus=4, priority=1), pending("b", left=10), xi=1.2)
        assert said.why == "but every host that it fits beside has a higher priority"


class TestWholeGangs:
    def test_lucid_names_its_cap(self):
        said = explain(Lucid(), running("a", gpus=4), pending("b", gpus=4), xi=1.5)
        assert "sharing with job a" in said.why
        assert "1.50× as long, and 1.20× is the limit" in said.why

    def test_tesserae_names_its_floor(self):
        said = explain(Tesserae(), running("a", gpus=4), pending("b", gpus=4), xi=2.5)
        assert "0.80× as fast as one alone, and more than 1.00× is required" in said.why

    def test_another_gang_size_has_no_host(self):
        for policy in (Lucid(), Tesserae()):
            assert "gang size" in explain(policy, running("a", gpus=4), pending("b", gpus=2)).why


# ---- one rule for decisions and explanations -------------------------------------------------------------------------


def threshold(together, apart):
    """`host_needs` for any rule, by bisection instead of a formula."""

    def host_needs(host_xi, guest_xi, relative_time):
        def loss(ratio):
            return together(ratio, relative_time, host_xi, guest_xi) - pair.PAYS_BELOW * apart(ratio, 1.0)

        low, high = 0.0, 1e9
        if loss(high) >= 0.0:
            return float("inf")
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if loss(middle) < 0.0 else (middle, high)
        return high

    return host_needs


def eager(host_left, guest_left):
    """Waiting costs more than Theorem 1 says."""
    return 3.0 * host_left + guest_left


def reluctant(host_left, guest_left):
    """Waiting costs less than Theorem 1 says."""
    return 1.4 * host_left + guest_left


@pytest.mark.parametrize("apart", [pair.apart, eager, reluctant], ids=["theorem 1", "eager", "reluctant"])
def test_decisions_and_explanations_follow_the_rule_in_pair(monkeypatch, apart):
    """With another rule in `pair`, the decision, the explanation and a search by hand must change together."""
    monkeypatch.setattr(pair, "host_needs", threshold(pair.together, apart))
    monkeypatch.setattr(pair, "apart", apart)
    shared = 0
    for seed in range(150):
        random = Random(seed)
        cells = {(a, b): [MeasuredPair(random.uniform(1.0, 3.0))] for a in MODELS for b in MODELS}
        host_left, guest_left = random.uniform(10, 1000), random.uniform(10, 1000)
        host = running("a", gpus=4, left=host_left, model=random.choice(MODELS))
        guest = pending("b", left=guest_left, model=random.choice(MODELS))
        situation = given(FOUR, host, guest, xi=TableInterference(cells))
        ours, mine = cells[host.job.model, guest.job.model][0].xi, cells[guest.job.model, host.job.model][0].xi
        share_s = pair.together(host_left, guest_left, ours, mine)
        better = share_s < apart(host_left, guest_left) * pair.PAYS_BELOW

        policy = SjfBsbf()
        state = situation.state(policy.key)
        (compared,) = policy.explain(state, state.jobs["b"]).compared
        assert (compared.share_s, compared.wait_s) == pytest.approx((share_s, apart(host_left, guest_left)))
        assert compared.pays == better
        assert situation.plan(policy)["b"] == ("shares a" if better else "waits"), f"seed {seed}"
        if not better:
            assert situation.plan(Carpool(pause=False))["b"] == "waits", f"seed {seed}"
        shared += better
    assert 10 < shared < 140, "the situations must be worth the test"


def test_the_joint_rule_takes_the_ends_of_a_pair_from_pair(monkeypatch):
    jobs = (running("a", gpus=4), pending("b", gpus=2, left=100))
    given(FOUR, *jobs, xi=1.2).expect(Carpool(pause=False), b="shares a")
    monkeypatch.setattr(pair, "pair_ends", lambda host_left, guest_left, *xis: (100 * guest_left, 100 * host_left))
    given(FOUR, *jobs, xi=1.2).expect(Carpool(pause=False), b="waits")
