"""Every rule that a plan must obey, broken once."""

import pytest

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Limits, Status
from carpool.core.rules import IllegalPlan, check
from carpool.core.scheduler import Scheduler
from carpool.core.state import State
from tests.support.world import cluster, job, model, nodes, pending, running
from tests.support.world import given as situation


class Rogue:
    """A policy that proposes the decisions it was given."""

    restart_s = 0.0

    def __init__(self, *decisions):
        self.decisions = decisions

    def key(self, record, now):
        return (record.job.submitted,)

    def decide(self, view):
        return self.decisions

    def wake(self, view):
        return None


def put(name, *gpus, accumulation=1, why="because"):
    return Decision(name, Allocation(tuple(gpus), accumulation), why)


FOUR = cluster("1x4")
A_RUNS = (running("a", on=[0, 1]), pending("b", gpus=2, left=10))


class TestRules:
    @pytest.mark.parametrize(
        ("parts", "plan", "problem"),
        [
            (A_RUNS, [put("z", 2)], "job z does not exist"),
            (A_RUNS, [put("b", 2, 3), put("b", 2, 3)], "two decisions"),
            (A_RUNS, [put("b", 2, 3, why="")], "no reason"),
            (A_RUNS, [put("b", 2)], "gang of 2 GPUs and got 1"),
            (A_RUNS, [put("b", 2, 2)], "twice"),
            (A_RUNS, [put("b", 2, 9)], "does not exist"),
            (A_RUNS, [put("b", 2, 3, accumulation=0)], "cannot split"),
            (A_RUNS, [put("b", 2, 3, accumulation=9)], "cannot split"),
            (A_RUNS, [Decision("b", None, "because")], "does not run"),
            ((pending("b", can_shrink=False),), [put("b", 0, accumulation=2)], "may not be split"),
            ((*A_RUNS, running("c", on=[0])), [put("b", 0, 2)], "the limit is 2"),
            ((pending("b"), pending("c"), pending("d")), [put("b", 0), put("c", 0), put("d", 0)], "the limit is 2"),
            ((running("a", model="fat", batch=64), pending("b", model="fat")), [put("b", 0)], "do not fit"),
            ((running("a", exclusive=True), pending("b")), [put("b", 0)], "a asked not to share"),
            ((running("a"), pending("b", exclusive=True)), [put("b", 0)], "b asked not to share"),
            ((running("a", max_slowdown=1.2), pending("b")), [put("b", 0)], "its limit is 1.20"),
            ((running("a"), pending("b", max_slowdown=1.2)), [put("b", 0)], "its limit is 1.20"),
            ((running("a"), pending("b", after=("a",))), [put("b", 1)], "b is blocked"),
            ((running("a", max_slowdown=1.7), pending("b"), pending("c")), [put("b", 0), put("c", 0)], "limit"),
        ],
    )
    def test_an_illegal_plan_is_refused_and_changes_nothing(self, parts, plan, problem):
        state = situation(FOUR, *parts).state(lambda record, now: (record.job.submitted,))
        with pytest.raises(IllegalPlan, match=problem):
            check(state, plan)

    @pytest.mark.parametrize("picky", [0, 1, 2, 3])
    def test_a_gang_is_checked_beside_each_of_its_mates(self, picky):
        hosts = [running(f"h{n}", on=[n], max_slowdown=1.2 if n == picky else None) for n in range(4)]
        state = situation(FOUR, *hosts, pending("b", gpus=4)).state(lambda record, now: (0.0,))
        with pytest.raises(IllegalPlan, match=f"job h{picky} would take"):
            check(state, [put("b", 0, 1, 2, 3)])

    @pytest.mark.parametrize("last", [0, 1, 2, 3])
    def test_a_gang_beside_one_job_is_checked_with_the_others_that_arrive(self, last):
        parts = (running("a", on=[0, 1, 2, 3]), pending("b", gpus=4), pending("c"))
        state = situation(FOUR, *parts).state(lambda record, now: (0.0,))
        with pytest.raises(IllegalPlan, match=f"GPU {last}: 3 jobs on one GPU"):
            check(state, [put("b", 0, 1, 2, 3), put("c", last)])

    @pytest.mark.parametrize(("limits", "problem"), [(Limits(jobs=1), "1 jobs"), (Limits(gpus=3), "3 GPUs")])
    def test_users_are_kept_within_their_limits(self, limits, problem):
        limited = cluster("1x4", limits={"eve": limits})
        parts = (running("a", gpus=2, user="eve"), pending("b", gpus=2, user="eve"))
        state = situation(limited, *parts).state(lambda record, now: (0.0,))
        with pytest.raises(IllegalPlan, match=problem):
            check(state, [put("b", 2, 3)])
        check(state, [Decision("a", None, "make room"), put("b", 2, 3)])

    def test_a_preemption_makes_room_within_the_same_plan(self):
        state = situation(FOUR, running("a", gpus=4, exclusive=True), pending("b", gpus=4)).state(lambda r, n: (0.0,))
        with pytest.raises(IllegalPlan):
            check(state, [put("b", 0, 1, 2, 3)])
        check(state, [Decision("a", None, "make room"), put("b", 0, 1, 2, 3)])

    def test_a_retuned_job_keeps_its_memory_until_the_workers_confirm(self):
        host = running("a", model="fat", batch=64)  # 12.4 GiB; split into 8 it needs 6.8
        state = situation(FOUR, host, pending("b", batch=64)).state(lambda r, n: (0.0,))  # 7.4 GiB
        retune = put("a", 0, accumulation=8)
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [retune, put("b", 0)])
        check(state, [retune])
        state.apply(ev.Planned(0.0, (retune,)))
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [put("b", 0)])
        state.apply(ev.Retuned(0.0, "a", 1, 8))
        check(state, [put("b", 0)])
        assert state.jobs["a"].iteration_s == pytest.approx(state.perf.iteration_time(host.job, 8, (1, 1)))

    def test_simulation_raises_and_live_refuses(self):
        for strict in (True, False):
            scheduler = Scheduler(Rogue(put("a", 7)), model(), strict=strict)
            events = [ev.NodeJoined(0.0, node) for node in nodes("1x4")] + [ev.Submitted(0.0, job("a"))]
            if strict:
                with pytest.raises(IllegalPlan):
                    scheduler.step(0.0, events)
            else:
                assert scheduler.step(0.0, events) is None
                assert "does not exist" in str(scheduler.refused[0])
            assert scheduler.state.free.count == 4

    def test_a_job_that_can_never_run_is_refused_with_a_reason(self):
        state = situation(cluster("2x2", limits={"eve": Limits(gpus=1)})).state(lambda r, n: (0.0,))
        assert "cluster has 4" in state.refusal(job("a", gpus=5))
        assert "which may not be split" in state.refusal(job("a", model="fat", batch=200, can_shrink=False))
        assert "may hold 1" in state.refusal(job("a", gpus=2, user="eve"))
        assert state.refusal(job("a", model="fat", batch=200)) is None
        small = situation(cluster("1x4", memory_gib=4.0)).state(lambda r, n: (0.0,))
        assert "6.1 GiB per GPU even at sub-batch 1" in small.refusal(job("a", model="fat", batch=200))


def first_come(record, now):
    return (record.job.submitted,)


def turn(name, *gpus, active, accumulation=1):
    return Decision(name, Allocation(tuple(gpus), accumulation, active=active), "its turn" if active else "another's")


def paused(state: State, name: str, confirmed: bool = True) -> None:
    state.apply(ev.Planned(state.now, (turn(name, *state.jobs[name].gpus, active=False),)))
    if confirmed:
        state.apply(ev.Paused(state.now, name, state.jobs[name].attempt))


class TestPauses:
    def test_a_job_can_be_paused_only_while_it_runs_and_resumed_only_while_it_is_paused(self):
        state = situation(FOUR, running("a", on=[0]), pending("b")).state(first_come)
        steps = [
            (None, Status.RUNNING),
            (ev.Planned(0.0, (turn("a", 0, active=False),)), Status.PAUSING),
            (ev.Paused(0.0, "a", 1), Status.PAUSED),
            (ev.Planned(0.0, (turn("a", 0, active=True),)), Status.RESUMING),
            (ev.Resumed(0.0, "a", 1), Status.RUNNING),
            (ev.Cancelled(0.0, "a"), Status.CANCELLING),
        ]
        for event, status in steps:
            if event is not None:
                state.apply(event)
            assert state.jobs["a"].status is status
            verdicts = {}
            for active in (True, False):
                try:
                    check(state, [turn("a", 0, active=active)])
                    verdicts[active] = True
                except IllegalPlan:
                    verdicts[active] = False
            # with a job that runs, active=True is a re-tune that changes nothing
            assert verdicts[True] == (status in (Status.RUNNING, Status.PAUSED)), status
            assert verdicts[False] == (status is Status.RUNNING), status

    def test_a_job_that_asked_not_to_be_paused_is_not(self):
        state = situation(FOUR, running("a", on=[0], can_pause=False)).state(first_come)
        with pytest.raises(IllegalPlan, match="a asked not to be paused"):
            check(state, [turn("a", 0, active=False)])

    def test_only_the_owner_ends_a_pause_of_the_owner(self):
        state = situation(FOUR, running("a", on=[0])).state(first_come)
        state.apply(ev.PausedByOwner(0.0, "a"))
        state.apply(ev.Paused(0.0, "a", 1))
        with pytest.raises(IllegalPlan, match="a was paused by its owner"):
            check(state, [turn("a", 0, active=True)])
        state.apply(ev.ResumedByOwner(0.0, "a"))
        check(state, [turn("a", 0, active=True)])

    def test_a_pause_or_resume_changes_nothing_else(self):
        state = situation(FOUR, running("a", on=[0])).state(first_come)
        with pytest.raises(IllegalPlan, match="cannot be re-tuned by the decision that pauses"):
            check(state, [turn("a", 0, active=False, accumulation=2)])
        paused(state, "a")
        with pytest.raises(IllegalPlan, match="cannot be re-tuned by the decision that pauses"):
            check(state, [turn("a", 0, active=True, accumulation=2)])
        with pytest.raises(IllegalPlan, match="cannot be re-tuned by the decision that pauses"):
            check(state, [turn("a", 0, active=False, accumulation=2)])

    def test_a_job_starts_without_a_turn_and_moves_with_one(self):
        state = situation(FOUR, running("a", on=[0]), pending("b")).state(first_come)
        check(state, [turn("b", 1, active=False)])
        with pytest.raises(IllegalPlan, match="cannot be paused where it does not run"):
            check(state, [turn("a", 1, active=False)])

    @pytest.mark.parametrize("confirmed", [False, True])
    def test_a_paused_job_can_be_stopped_and_moved(self, confirmed):
        state = situation(FOUR, running("a", on=[0])).state(first_come)
        paused(state, "a", confirmed)
        check(state, [Decision("a", None, "make room")])
        check(state, [put("a", 1)])

    def test_jobs_per_gpu_counts_jobs_that_compute(self):
        state = situation(FOUR, running("a", on=[0]), running("b", on=[0]), pending("c")).state(first_come)
        with pytest.raises(IllegalPlan, match="3 jobs on one GPU, the limit is 2"):
            check(state, [put("c", 0)])
        check(state, [turn("a", 0, active=False), put("c", 0)])
        paused(state, "a")
        state.apply(ev.Planned(0.0, (put("c", 0),)))
        with pytest.raises(IllegalPlan, match="3 jobs on one GPU, the limit is 2"):
            check(state, [turn("a", 0, active=True)])

    def test_resident_per_gpu_and_memory_count_all_jobs(self):
        small = cluster("1x1", memory_gib=6.0, resident_per_gpu=3)
        parts = (running("a", on=[0]), running("b", on=[0]), pending("c"), pending("d", model="thin"), pending("e"))
        state = situation(small, *parts).state(first_come)  # 1.8 GiB each; d 0.58 GiB
        paused(state, "a")
        paused(state, "b")
        state.apply(ev.Planned(0.0, (put("c", 0),)))
        with pytest.raises(IllegalPlan, match="4 jobs hold memory on one GPU, the limit is 3"):
            check(state, [put("d", 0)])
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [put("e", 0)])
        check(state, [Decision("a", None, "make room"), put("d", 0)])

    def test_only_jobs_that_compute_slow_others_down(self):
        state = situation(FOUR, running("a", on=[0]), pending("c", max_slowdown=1.1)).state(first_come)
        with pytest.raises(IllegalPlan):
            check(state, [put("c", 0)])
        check(state, [turn("a", 0, active=False), put("c", 0)])

    def test_an_exclusive_job_has_no_place_where_another_is_paused(self):
        state = situation(FOUR, running("a", on=[0, 1]), pending("b", exclusive=True)).state(first_come)
        with pytest.raises(IllegalPlan, match="b asked not to share"):
            check(state, [turn("a", 0, 1, active=False), put("b", 1)])
        paused(state, "a")
        with pytest.raises(IllegalPlan, match="b asked not to share"):
            check(state, [put("b", 0)])
        with pytest.raises(IllegalPlan, match="b asked not to share"):
            check(state, [turn("b", 0, active=False)])
        check(state, [Decision("a", None, "make room"), put("b", 0)])

    def test_no_job_has_a_place_where_an_exclusive_one_is_paused(self):
        state = situation(FOUR, running("a", on=[0], exclusive=True), pending("b")).state(first_come)
        with pytest.raises(IllegalPlan, match="a asked not to share"):
            check(state, [turn("a", 0, active=False), put("b", 0)])
        check(state, [turn("a", 0, active=False)])
        paused(state, "a")
        with pytest.raises(IllegalPlan, match="a asked not to share"):
            check(state, [put("b", 0)])
        check(state, [turn("a", 0, active=True)])

    def test_an_exclusive_job_beside_a_paused_one_in_an_old_journal_takes_turns_with_it(self):
        state = situation(FOUR, running("a", on=[0]), pending("b", exclusive=True)).state(first_come)
        paused(state, "a")
        state.apply(ev.Planned(0.0, (put("b", 0),)))
        state.apply(ev.Started(0.0, "b", 1))
        with pytest.raises(IllegalPlan, match="b asked not to share"):
            check(state, [turn("a", 0, active=True)])
        check(state, [turn("a", 0, active=True), turn("b", 0, active=False)])
        paused(state, "b")
        check(state, [turn("b", 0, active=True)])

    def test_a_gang_is_paused_as_a_whole(self):
        state = situation(FOUR, running("a", on=[0, 1])).state(first_come)
        with pytest.raises(IllegalPlan, match="cannot be paused where it does not run"):
            check(state, [turn("a", 0, active=False)])
        check(state, [turn("a", 0, 1, active=False)])
