"""What each policy decides in named situations."""

import pytest

from carpool import policies
from carpool.core.model import Limits
from carpool.core.perf import MeasuredPair, TableInterference
from carpool.policies.joint.policy import Carpool
from carpool.policies.preemptive.tiresias import Tiresias
from carpool.policies.sharing.bsbf import SjfBsbf
from carpool.policies.sharing.ffs import SjfFfs
from carpool.policies.simple.fifo import Fifo
from carpool.policies.simple.sjf import Sjf
from tests.support.world import cluster, given, pending, running, starting

FOUR = cluster("1x4")
EVERY = [*(policies.make(name) for name in policies.BUILT_IN), Carpool(suspend=True)]
SHARING = [SjfFfs(), SjfBsbf(), Carpool(pause=False)]


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: policy.name)
class TestEveryPolicy:
    def test_starts_what_fits_alone(self, policy):
        given(FOUR, pending("a", gpus=2), pending("b", gpus=2)).expect(policy, a="starts", b="starts")

    def test_leaves_a_gang_that_is_too_large_whole_and_waiting(self, policy):
        given(FOUR, running("a", gpus=3, left=500, exclusive=True), pending("b", gpus=2)).expect(policy, b="waits")

    def test_respects_priority(self, policy):
        jobs = (pending("low", gpus=4, left=10), pending("high", gpus=4, left=99, priority=1, exclusive=True))
        given(FOUR, *jobs).expect(policy, high="starts", low="waits")

    def test_keeps_a_user_within_limits(self, policy):
        limited = cluster("1x4", limits={"eve": Limits(gpus=2)})
        jobs = (
            pending("a", gpus=2, user="eve", left=5, priority=1),
            pending("b", gpus=1, user="eve", left=6),
            pending("c", left=7),
        )
        given(limited, *jobs).expect(policy, a="starts", b="waits", c="starts")

    def test_counts_what_the_user_holds_already(self, policy):
        limited = cluster("1x4", limits={"": Limits(jobs=1)})
        given(limited, running("a", user="eve"), pending("b", user="eve"), pending("c", user="bob")).expect(
            policy, b="waits", c="starts"
        )

    def test_lets_a_blocked_job_wait_for_the_other(self, policy):
        given(FOUR, pending("first", left=50), pending("second", after=("first",))).expect(policy, second="waits")

    def test_splits_the_batch_of_a_job_that_needs_too_much_memory(self, policy):
        fat = pending("a", model="fat", batch=128)  # 6 + 12.8 GiB
        given(FOUR, fat).expect(policy, a="starts in 2")


class TestFifo:
    def test_the_head_blocks_all_others(self):
        jobs = (running("a", gpus=2), pending("b", gpus=4, submitted=1), pending("c", gpus=1, submitted=2))
        given(FOUR, *jobs).expect(Fifo(), b="waits", c="waits")

    def test_later_jobs_start_where_skipping_is_allowed(self):
        jobs = (running("a", gpus=2), pending("b", gpus=4, submitted=1), pending("c", gpus=1, submitted=2))
        given(FOUR, *jobs).expect(Fifo(skip=True), b="waits", c="starts")

    def test_jobs_start_in_order_of_submission(self):
        given(FOUR, pending("late", gpus=4, submitted=2, left=1), pending("early", gpus=4, submitted=1)).expect(
            Fifo(), early="starts", late="waits"
        )


class TestSjf:
    def test_the_shortest_starts_first(self):
        given(FOUR, pending("long", gpus=4, left=20), pending("short", gpus=4, left=10)).expect(
            Sjf(), short="starts", long="waits"
        )

    def test_a_job_that_does_not_fit_is_skipped(self):
        jobs = (running("a", gpus=2), pending("b", gpus=4, left=10), pending("c", gpus=2, left=20))
        given(FOUR, *jobs).expect(Sjf(), b="waits", c="starts")

    def test_a_job_that_does_not_fit_blocks_without_skipping(self):
        jobs = (running("a", gpus=2), pending("b", gpus=4, left=10), pending("c", gpus=2, left=20))
        given(FOUR, *jobs).expect(Sjf(skip=False), b="waits", c="waits")

    def test_never_shares(self):
        given(FOUR, running("a", gpus=4), pending("b", left=1)).expect(Sjf(), b="waits")


class TestTiresias:
    def test_a_job_that_used_less_preempts_one_that_used_more(self):
        old = given(FOUR, running("old", gpus=4, left=10_000), pending("new", gpus=1))
        policy = Tiresias(threshold_gpu_s=100.0)
        state = old.state(policy.key)
        state.advance(20.0)  # 80 GPU-seconds: still in the first queue
        assert policy.decide(state) == []
        assert policy.wake(state) == 25.0
        state.advance(25.0)
        plan = {decision.job: decision.allocation for decision in policy.decide(state)}
        assert plan["old"] is None
        assert plan["new"] is not None

    def test_within_a_queue_first_come_first_served(self):
        given(FOUR, running("a", gpus=4, submitted=0), pending("b", gpus=1, submitted=1)).expect(Tiresias(), b="waits")

    def test_the_remaining_gpus_go_to_a_job_that_fits(self):
        jobs = (running("a", gpus=2, submitted=0), pending("b", gpus=4, submitted=1), pending("c", gpus=2, submitted=2))
        given(FOUR, *jobs).expect(Tiresias(), a="runs", b="waits", c="starts")

    def test_no_job_is_stopped_for_one_that_cannot_start(self):
        roomy = cluster("1x4", memory_gib=8.0, limits={"eve": Limits(jobs=0)})
        jobs = (running("a", gpus=4, submitted=5), pending("b", gpus=4, submitted=1, user="eve"))
        given(roomy, *jobs).expect(Tiresias(), a="runs", b="waits")


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
class TestSharing:
    def test_a_short_guest_joins_a_long_host(self, policy):
        given(FOUR, running("a", gpus=4), pending("b", gpus=2, left=10)).expect(policy, b="shares a")

    def test_free_gpus_are_preferred_where_they_suffice(self, policy):
        given(FOUR, running("a", gpus=2), pending("b", gpus=2, left=10)).expect(policy, b="starts")

    def test_a_third_job_does_not_join(self, policy):
        jobs = (running("a", gpus=4), running("b", on=[0, 1, 2, 3], left=500), pending("c", left=10))
        given(FOUR, *jobs).expect(policy, c="waits")

    def test_a_third_job_joins_where_three_may_share(self, policy):
        three = cluster("1x4", jobs_per_gpu=3)
        jobs = (running("a", gpus=4), running("b", on=[0, 1, 2, 3], left=500), pending("c", left=10))
        given(three, *jobs, xi=1.1).expect(policy, c="shares a b")

    def test_one_job_per_gpu_means_no_sharing(self, policy):
        given(cluster("1x4", jobs_per_gpu=1), running("a", gpus=4), pending("b", left=10)).expect(policy, b="waits")

    def test_no_job_joins_an_exclusive_host(self, policy):
        given(FOUR, running("a", gpus=4, exclusive=True), pending("b", left=10)).expect(policy, b="waits")

    def test_an_exclusive_guest_waits(self, policy):
        given(FOUR, running("a", gpus=4), pending("b", left=10, exclusive=True)).expect(policy, b="waits")

    def test_a_host_that_must_not_slow_down_gets_no_guest(self, policy):
        given(FOUR, running("a", gpus=4, max_slowdown=1.4), pending("b", left=10)).expect(policy, b="waits")

    def test_a_guest_that_must_not_slow_down_waits(self, policy):
        given(FOUR, running("a", gpus=4), pending("b", left=10, max_slowdown=1.4)).expect(policy, b="waits")

    def test_jobs_share_where_the_slow_down_stays_within_their_limits(self, policy):
        jobs = (running("a", gpus=4, max_slowdown=1.5), pending("b", left=10, max_slowdown=1.5))
        given(FOUR, *jobs).expect(policy, b="shares a")

    def test_the_guest_splits_its_batch_to_fit_beside_the_host(self, policy):
        host = running("a", gpus=4, model="fat", batch=64)  # 12.4 of 16 GiB
        given(FOUR, host, pending("b", left=10, batch=64)).expect(policy, b="shares a in 4")

    def test_a_guest_that_must_not_split_its_batch_waits(self, policy):
        host = running("a", gpus=4, model="fat", batch=64)
        given(FOUR, host, pending("b", left=10, batch=64, can_shrink=False)).expect(policy, b="waits")

    def test_free_gpus_top_up_a_gang(self, policy):
        given(FOUR, running("a", gpus=3), pending("b", gpus=4, left=10)).expect(policy, b="shares a")

    def test_a_job_that_is_starting_up_is_a_host_too(self, policy):
        given(FOUR, starting("a", gpus=4), pending("b", left=10)).expect(policy, b="shares a")

    def test_a_job_that_starts_in_the_same_plan_is_a_host_too(self, policy):
        jobs = (pending("a", gpus=4, left=10), pending("b", gpus=4, left=11))
        given(FOUR, *jobs, xi=1.2).expect(policy, a="starts", b="shares a")


class TestFfs:
    def test_joins_the_first_gpus_with_room_whatever_it_costs(self):
        jobs = (running("a", on=[0, 1], left=1), running("b", on=[2, 3], left=10_000), pending("c", gpus=2, left=100))
        given(FOUR, *jobs, xi=3.0).expect(SjfFfs(), c="shares a")


class TestBsbf:
    def test_a_tie_waits(self):
        # At ξ = 1.5 with the host ending first, sharing and waiting cost the same (notes on Theorem 1).
        given(FOUR, running("a", gpus=4, left=100), pending("b", left=200)).expect(SjfBsbf(), b="waits")

    def test_a_guest_shares_just_below_the_tie(self):
        given(FOUR, running("a", gpus=4, left=100), pending("b", left=200), xi=1.49).expect(SjfBsbf(), b="shares a")

    def test_only_short_guests_share_above_the_tie(self):
        # ξ = 2: share iff L_B < L_A / (2(ξ − 1)) = 50
        given(FOUR, running("a", gpus=4, left=100), pending("b", left=49), xi=2.0).expect(SjfBsbf(), b="shares a")
        given(FOUR, running("a", gpus=4, left=100), pending("b", left=51), xi=2.0).expect(SjfBsbf(), b="waits")

    def test_the_best_pair_is_the_host_that_ends_soonest_among_those_that_gain(self):
        jobs = (running("a", on=[0], left=900), running("b", on=[1], left=300), running("c", on=[2, 3], left=5000))
        given(FOUR, *jobs, pending("d", left=100)).expect(SjfBsbf(), d="shares b")

    def test_a_host_with_little_interference_wins(self):
        cells = {(a, b): 1.9 for a in ("plain", "thin") for b in ("plain", "thin")}
        cells["plain", "thin"] = cells["thin", "plain"] = 1.05
        table = TableInterference({pair: [MeasuredPair(xi)] for pair, xi in cells.items()})
        jobs = (running("a", on=[0, 1], left=300), running("b", on=[2, 3], left=320, model="thin"))
        given(FOUR, *jobs, pending("c", left=100), xi=table).expect(SjfBsbf(), c="shares b")

    def test_a_gang_takes_several_hosts_and_one_sub_batch_that_fits_beside_all(self):
        fat = running("a", on=[0, 1], left=900, model="fat", batch=64)  # leaves 3.6 GiB
        slim = running("b", on=[2, 3], left=900)  # leaves 14.2 GiB
        given(FOUR, fat, slim, pending("c", gpus=4, left=100, batch=64)).expect(SjfBsbf(), c="shares a b in 4")

    def test_a_partly_shared_host_lends_the_rest_of_its_gpus(self):
        jobs = (running("a", gpus=4, left=900), running("b", on=[0, 1], left=500), pending("c", gpus=2, left=100))
        given(FOUR, *jobs).expect(SjfBsbf(), c="shares a")

    def test_a_guest_waits_where_splitting_its_batch_costs_more_than_sharing_gains(self):
        # Beside the host the guest must run 64 micro-batches: 64·0.1 + 0.64 s instead of 0.1 + 0.64 s an iteration.
        host = running("a", gpus=4, left=200, model="fat", batch=88)  # leaves 1.2 GiB
        given(FOUR, host, pending("b", left=100, batch=64), xi=1.2).expect(SjfBsbf(), b="waits")

    def test_a_floor_on_total_speed_keeps_bad_pairs_apart(self):
        jobs = (running("a", gpus=4, left=100), pending("b", left=10))
        given(FOUR, *jobs, xi=2.2).expect(SjfBsbf(), b="shares a")
        given(FOUR, *jobs, xi=2.2).expect(SjfBsbf(floor=0.95), b="waits")
        given(FOUR, *jobs, xi=2.1).expect(SjfBsbf(floor=0.95), b="shares a")

    def test_one_host_may_be_preferred_to_a_better_union(self):
        hosts = (running("a", on=[0], left=300), running("b", on=[1], left=300), running("c", on=[2, 3], left=5000))
        given(FOUR, *hosts, pending("d", gpus=2, left=100)).expect(SjfBsbf(), d="shares a b")
        given(FOUR, *hosts, pending("d", gpus=2, left=100)).expect(SjfBsbf(single_host=True), d="shares c")

    def test_a_gang_waits_where_only_some_hosts_gain(self):
        jobs = (running("a", on=[0, 1], left=50), running("b", on=[2, 3], left=5000), pending("c", gpus=4, left=100))
        given(FOUR, *jobs).expect(SjfBsbf(), c="waits")
