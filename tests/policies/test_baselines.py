"""What the baselines decide in named situations. `test_properties` tests what holds for every policy."""

from itertools import permutations
from random import Random

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.draft import Draft
from carpool.core.model import Limits, Status
from carpool.core.perf import MeasuredPair, TableInterference
from carpool.policies.preemptive.las import Las
from carpool.policies.preemptive.srsf import Srsf
from carpool.policies.preemptive.srtf import Srtf
from carpool.policies.sharing.lucid import Lucid
from carpool.policies.sharing.tesserae import Tesserae, best_matching
from carpool.policies.sharing.whole_gang_hosts import WholeGangHosts
from carpool.policies.simple.backfill import Backfill
from tests.support.situations import Situation
from tests.support.world import cluster, given, pending, running, starting

FOUR = cluster("1x4")
TEN_MINUTES = 600.0


@pytest.mark.parametrize("policy", [Backfill(), Srtf(), Srsf(), Las(), Lucid(), Tesserae()], ids=lambda p: p.name)
class TestEveryBaseline:
    def test_starts_what_fits_alone(self, policy):
        given(FOUR, pending("a", gpus=2), pending("b", gpus=2)).expect(policy, a="starts", b="starts")

    def test_leaves_a_gang_that_is_too_large_whole_and_waiting(self, policy):
        given(FOUR, running("a", gpus=3, left=10, exclusive=True), pending("b", gpus=2)).expect(policy, b="waits")

    def test_respects_priority(self, policy):
        jobs = (pending("low", gpus=4, left=10), pending("high", gpus=4, left=99, priority=1, exclusive=True))
        given(FOUR, *jobs).expect(policy, high="starts", low="waits")

    def test_a_job_at_a_users_limit_does_not_hold_others_back(self, policy):
        limited = cluster("1x4", limits={"eve": Limits(jobs=1)})
        jobs = (running("a", user="eve"), pending("b", user="eve", left=5), pending("c", submitted=1, left=9))
        given(limited, *jobs).expect(policy, b="waits", c="starts")

    def test_splits_the_batch_of_a_job_that_needs_too_much_memory(self, policy):
        given(FOUR, pending("a", model="fat", batch=128)).expect(policy, a="starts in 2")


class TestBackfill:
    def test_a_short_job_fills_the_gap_before_the_head_starts(self):
        jobs = (running("a", gpus=3, left=100), pending("head", gpus=4), pending("short", left=99, submitted=1))
        given(FOUR, *jobs).expect(Backfill(), head="waits", short="starts")

    def test_a_job_that_would_delay_the_head_waits(self):
        jobs = (running("a", gpus=3, left=100), pending("head", gpus=4), pending("long", left=101, submitted=1))
        given(FOUR, *jobs).expect(Backfill(), head="waits", long="waits")

    def test_a_long_job_starts_on_gpus_that_the_head_will_not_need(self):
        jobs = (running("a", gpus=3, left=100), pending("head", gpus=3), pending("long", left=999, submitted=1))
        given(FOUR, *jobs).expect(Backfill(), head="waits", long="starts")

    def test_spare_gpus_are_given_once(self):
        late = [pending(name, left=999, submitted=number) for number, name in enumerate(("b", "c"), start=1)]
        given(FOUR, running("a", gpus=2, left=100), pending("head", gpus=3), *late).expect(
            Backfill(), head="waits", b="starts", c="waits"
        )

    def test_the_head_is_the_first_that_does_not_fit(self):
        jobs = (pending("first", gpus=2, left=50), pending("head", gpus=4, submitted=1))
        jobs += (pending("early", gpus=2, left=50, submitted=2), pending("late", gpus=1, left=51, submitted=3))
        given(FOUR, *jobs).expect(Backfill(), first="starts", head="waits", early="starts", late="waits")

    def test_the_promise_counts_jobs_that_are_still_starting(self):
        jobs = (starting("a", gpus=3, left=100), pending("head", gpus=4), pending("long", left=101, submitted=1))
        given(FOUR, *jobs).expect(Backfill(), head="waits", long="waits")

    def test_never_shares(self):
        given(FOUR, running("a", gpus=4), pending("b", left=1)).expect(Backfill(), b="waits")


class TestSrtf:
    def test_a_job_with_less_left_displaces_one_with_more(self):
        given(FOUR, running("long", gpus=4, left=500), pending("short", gpus=2, left=100)).expect(
            Srtf(), long="stops", short="starts"
        )

    def test_a_running_job_stays_if_it_is_shorter(self):
        given(FOUR, running("short", gpus=4, left=100), pending("long", left=500)).expect(
            Srtf(), short="runs", long="waits"
        )

    def test_no_job_is_stopped_if_all_fit(self):
        jobs = (running("long", gpus=2, left=500), pending("short", gpus=2, left=100))
        given(FOUR, *jobs).expect(Srtf(), long="runs", short="starts")

    def test_the_longest_job_makes_room(self):
        jobs = (running("a", gpus=2, left=300), running("b", gpus=2, left=500), pending("c", gpus=1, left=100))
        given(FOUR, *jobs).expect(Srtf(), a="runs", b="stops", c="starts")

    def test_a_job_that_cannot_checkpoint_is_not_suspended(self):
        held = running("long", gpus=3, left=TEN_MINUTES, can_checkpoint=False)
        given(FOUR, held, pending("b", gpus=2, left=10)).expect(Srtf(), b="waits")
        given(FOUR, held, pending("b", gpus=1, left=10)).expect(Srtf(), b="starts")

    def test_a_job_on_scattered_gpus_does_not_look_longer_than_in_the_queue(self):
        """Otherwise two jobs would displace each other for ever."""
        jobs = (running("a", gpus=2, left=100), pending("b", gpus=2, left=100))
        state = given(cluster("2x1"), *jobs).state(Srtf().key)
        state.jobs["a"].alone_iteration_s *= 1.5
        assert Srtf().decide(state) == []


class TestSrsf:
    def test_gpu_time_counts_instead_of_time(self):
        jobs = (running("wide", gpus=4, left=100), pending("thin", gpus=1, left=300))
        given(FOUR, *jobs).expect(Srsf(), wide="stops", thin="starts")
        given(FOUR, *jobs).expect(Srtf(), wide="runs", thin="waits")


class TestLas:
    def test_a_job_that_used_a_quantum_makes_room_for_one_that_used_less(self):
        policy = Las(quantum_gpu_s=400.0)
        state = given(FOUR, running("old", gpus=4, left=10_000), pending("new", gpus=1, left=10_000)).state(policy.key)
        state.advance(99.0)
        assert policy.decide(state) == []
        assert policy.wake(state) == 100.0
        state.advance(100.0)
        plan = {decision.job: decision.allocation for decision in policy.decide(state)}
        assert plan["old"] is None
        assert plan["new"] is not None

    def test_two_equal_jobs_take_turns(self):
        """On one GPU two equal jobs alternate, a quantum each, and end almost together."""
        policy = "las:quantum_gpu_s=100,restart_s=0"
        ends, preemptions = simulated(policy, [400.0, 400.0])
        assert ends == [700.0, 800.0]
        assert preemptions == 6

    def test_a_job_that_has_used_nothing_comes_first_whatever_its_length(self):
        jobs = (pending("long", gpus=4, left=9999, submitted=0), pending("short", gpus=4, left=1, submitted=1))
        given(FOUR, *jobs).expect(Las(), long="starts", short="waits")


def simulated(policy, lengths):
    from carpool.core.model import Job
    from carpool.sim import Setup, simulate

    jobs = [Job(f"j{n}", 0.0, "generic", 1, 1, 100, duration_s=length) for n, length in enumerate(lengths)]
    result = simulate(jobs, policy, Setup(cluster="1x1"))
    return sorted(record.ended for record in result.jobs), result.summary.preemptions


def table(**xi: float) -> TableInterference:
    """Make a table of ξ of the first model beside the second, given as `fat_thin=1.1`; 3 for all other pairs."""
    models = ("plain", "thin", "fat")
    return TableInterference({(a, b): [MeasuredPair(xi.get(f"{a}_{b}", 3.0))] for a in models for b in models})


class TestLucid:
    def test_joins_a_job_of_its_size_where_neither_slows_down_much(self):
        given(FOUR, running("a", gpus=4), pending("b", gpus=4, left=10), xi=1.1).expect(Lucid(), b="shares a")

    def test_does_not_join_where_one_job_slows_down_more(self):
        xi = table(plain_thin=1.0, thin_plain=1.3)
        jobs = (running("a", gpus=4), pending("b", gpus=4, left=10, model="thin"))
        given(FOUR, *jobs, xi=xi).expect(Lucid(), b="waits")
        given(FOUR, *jobs, xi=xi).expect(Lucid(cap=1.3), b="shares a")

    def test_does_not_join_a_gang_of_another_size(self):
        given(FOUR, running("a", gpus=4), pending("b", gpus=2, left=10), xi=1.0).expect(Lucid(), b="waits")

    def test_takes_the_host_that_suits_best(self):
        xi = table(thin_plain=1.1, plain_thin=1.1, thin_fat=1.05, fat_thin=1.05)
        jobs = (running("a", gpus=2), running("b", gpus=2, model="fat"), pending("c", gpus=2, model="thin"))
        given(FOUR, *jobs, xi=xi).expect(Lucid(), c="shares b")

    def test_at_most_two_jobs_share(self):
        crowded = cluster("1x4", jobs_per_gpu=3)
        jobs = (running("a", gpus=4), running("b", on=[0, 1, 2, 3]), pending("c", gpus=4))
        given(crowded, *jobs, xi=1.0).expect(Lucid(), c="waits")

    def test_least_gpu_time_first(self):
        jobs = (pending("wide", gpus=4, left=100, exclusive=True), pending("thin", gpus=1, left=300, exclusive=True))
        given(FOUR, *jobs).expect(Lucid(), thin="starts", wide="waits")


class TestTesserae:
    def test_matches_so_that_all_pairs_together_gain_most(self):
        """The shorter guest would do best beside a, but then the other would gain nothing."""
        xi = table(thin_plain=1.1, plain_thin=1.1, thin_fat=1.2, fat_thin=1.2, plain_plain=1.3, plain_fat=2.5)
        jobs = (running("a", gpus=2, left=900), running("b", gpus=2, left=900, model="fat"))
        guests = (pending("short", gpus=2, left=10, model="thin"), pending("long", gpus=2, left=20, model="plain"))
        given(FOUR, *jobs, *guests, xi=xi).expect(Tesserae(), short="shares b", long="shares a")

    def test_pairs_that_lose_speed_are_not_formed(self):
        given(FOUR, running("a", gpus=4), pending("b", gpus=4, left=10), xi=2.0).expect(Tesserae(), b="waits")
        given(FOUR, running("a", gpus=4), pending("b", gpus=4, left=10), xi=1.9).expect(Tesserae(), b="shares a")

    def test_a_higher_floor_asks_for_more(self):
        given(FOUR, running("a", gpus=4), pending("b", gpus=4), xi=1.9).expect(Tesserae(floor=1.1), b="waits")

    def test_a_gang_joins_one_host_of_its_size_only(self):
        jobs = (running("a", gpus=2), running("b", gpus=2), pending("c", gpus=4))
        given(FOUR, *jobs, xi=1.0).expect(Tesserae(), c="waits")

    def test_a_job_beyond_the_window_still_gets_free_gpus(self):
        jobs = [pending(f"w{n}", gpus=4, left=n + 1) for n in range(3)]
        where = (running("a", gpus=3, exclusive=True), *jobs, pending("late", left=99))
        given(FOUR, *where).expect(Tesserae(window=1), late="starts")

    @pytest.mark.parametrize("seed", range(60))
    def test_the_matching_is_the_best_there_is(self, seed):
        random = Random(seed)
        rows, columns = random.randint(1, 5), random.randint(1, 5)
        gains = [[random.choice([0.0, random.random(), 0.5]) for _ in range(columns)] for _ in range(rows)]
        found = best_matching(gains)
        taken = [column for column in found if column is not None]
        assert len(set(taken)) == len(taken)
        reached = sum(gains[row][column] for row, column in enumerate(found) if column is not None)
        slots = [*range(columns), *[None] * rows]
        best = max(
            sum(gains[row][column] for row, column in enumerate(choice) if column is not None)
            for choice in permutations(slots, rows)
        )
        assert reached == pytest.approx(best)


@pytest.mark.parametrize("name", ["srtf", "srsf", "las:quantum_gpu_s=100", "tiresias"])
def test_a_preemptive_policy_settles(name):
    """Once its stops and starts have been carried out, the policy has nothing more to do at that moment."""
    stopped = 0
    for seed in range(150):
        policy = policies.make(name)
        state = Situation(seed, 2).state(policy.key)
        for _ in range(4):
            plan = tuple(policy.decide(state))
            if not plan:
                break
            stopped += any(decision.allocation is None for decision in plan)
            state.apply(ev.Planned(state.now, plan))
            for record in list(state.jobs.values()):
                if record.status is Status.STOPPING:
                    state.apply(ev.Stopped(state.now, record.job.id, record.attempt, record.done))
                elif record.status is Status.STARTING:
                    state.apply(ev.Started(state.now, record.job.id, record.attempt))
        else:
            pytest.fail(f"seed {seed}: still not settled")
    assert stopped > 20, "the situations must be worth the test"


def test_a_draft_knows_its_own_changes_when_asked_late_what_is_shareable():
    state = given(FOUR, running("a", gpus=2), running("b"), pending("c")).state(Lucid().key)
    early, late = Draft(state), Draft(state)
    early.shareable()
    for draft in (early, late):
        assert draft.start(state.jobs["c"], "test")
        draft.stop(state.jobs["b"], "test")
    assert late.shareable() == early.shareable() == 0b1011


def test_whole_gang_hosts_are_what_a_search_over_all_gpus_finds():
    found_some = 0
    for seed in range(200):
        state = Situation(seed, 2).state(Lucid().key)
        draft = Draft(state)
        for record in list(draft.pending()):
            draft.start(record, "test")
        index = WholeGangHosts(draft)
        found = [h.record.seq for kind, _ in index.kinds() for n in range(1, 7) for h in index.hosts(kind, n)]
        wanted = []
        for record in state.jobs.values():
            gpus = draft.gpus_of(record)
            if gpus and not record.shape.exclusive and all(len(draft.residents(gpu)) == 1 for gpu in gpus):
                wanted.append(record.seq)
        assert sorted(found) == sorted(wanted), f"seed {seed}"
        found_some += len(found) > 1
    assert found_some > 50
