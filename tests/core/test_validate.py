"""`validate` finds an index that disagrees with the records. The state machine calls it after every event."""

from collections.abc import Callable

import pytest

from carpool.core import events as ev
from carpool.core.model import FairShare, Limits, Status
from carpool.core.state import State
from carpool.core.validate import InvalidState, validate
from tests.support.world import cluster, given, pending, running


@pytest.fixture
def state() -> State:
    parts = (running("a", on=[0]), running("b", on=[0]), running("c", on=[1, 2]), pending("d"), pending("e", gpus=2))
    parts = (*parts, running("p", on=[4]))
    found = given(cluster("1x5", jobs_per_gpu=3), *parts).state(lambda job, now: (job.job.submitted,))
    found.apply(ev.PausedByOwner(0.0, "p"))
    found.apply(ev.LimitsChanged(0.0, "", Limits(jobs=9)))
    _ = found.hosts, found.active_hosts, found.end_times.running, found.end_times.soonest_first, found.long_waits
    _ = found.queue.in_order, found.queue.by_patience(10.0)
    validate(found)
    return found


def forget_a_resident(state: State) -> None:
    state.cluster.residents[0] = state.jobs_on(0)[:1]


def reserve_too_much(state: State) -> None:
    state.cluster.memory[1] += 1


def lose_a_free_gpu(state: State) -> None:
    state.free.take([3])


def swap_the_queue(state: State) -> None:
    assert state.queue._in_order is not None
    state.queue._in_order.reverse()


def change_a_moment_of_patience(state: State) -> None:
    assert state.queue._by_patience is not None
    moment, *rest = state.queue._by_patience[0]
    state.queue._by_patience[0] = (moment - 1.0, *rest)


def forget_a_pending_job(state: State) -> None:
    state.queue.remove(state.jobs["d"])


def let_a_pending_job_iterate(state: State) -> None:
    state.jobs["d"].iteration_s = 1.0


def change_a_slowdown(state: State) -> None:
    state.jobs["a"].slowdown = 3.0


def miscount_a_user(state: State) -> None:
    state.held[""][1] += 1


def lose_a_host(state: State) -> None:
    state.hosts.lone.clear()


def lose_an_offer(state):
    state.hosts.offers.by_seq.clear()


def lose_an_active_host(state: State) -> None:
    state.active_hosts.lone.clear()


def lose_a_cell_of_several_jobs(state: State) -> None:
    state.hosts.cells.clear()


def forget_a_running_job(state: State) -> None:
    group = next(group for group in state.end_times.running.values() if group)
    assert isinstance(group, list)
    group.pop()


def forget_an_idle_gpu(state: State) -> None:
    state.cluster.idle.clear()


def change_a_predicted_end(state: State) -> None:
    state.end_times.ends[state.jobs["c"].seq] += 1.0


def swap_the_jobs_by_end(state: State) -> None:
    entries = state.end_times.soonest_first
    assert isinstance(entries, list)
    entries.reverse()


def forget_a_wait(state: State) -> None:
    state.long_waits._by_wait.entries.pop()


def stop_without_giving_up_gpus(state: State) -> None:
    state.jobs["c"].status = Status.STOPPING


def forget_a_paused_job(state: State) -> None:
    del state.paused[state.jobs["p"].seq]


def forget_that_a_job_switches(state: State) -> None:
    state.switching.clear()


def let_a_paused_job_count_as_active(state: State) -> None:
    state.jobs["p"].active = True


def forget_when_a_pause_began(state: State) -> None:
    state.jobs["p"].paused_since = -1.0


def let_a_paused_job_iterate(state: State) -> None:
    state.jobs["p"].iteration_s = 1.0


def let_too_many_jobs_compute(state: State) -> None:
    state.jobs_per_gpu = 1


def lower_the_resident_limit(state: State) -> None:
    state.resident_per_gpu = 1


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (forget_a_resident, "GPU 0: residents"),
        (reserve_too_much, "GPU 1: .* bytes reserved"),
        (lose_a_free_gpu, "0 GPUs count as free, not 1"),
        (swap_the_queue, "the queue in order"),
        (change_a_moment_of_patience, "the queue by patience"),
        (forget_a_pending_job, "no queue entry"),
        (let_a_pending_job_iterate, "<d pending .*> iterates"),
        (change_a_slowdown, "slow-down 3.0, not 1.5"),
        (miscount_a_user, "counts as holding 6 GPUs, not 5"),
        (lose_a_host, "lone hosts"),
        (lose_an_offer, "the offers are wrong"),
        (lose_an_active_host, "lone active hosts"),
        (lose_a_cell_of_several_jobs, "cells of several hosts"),
        (forget_a_running_job, "differ from a recount"),
        (forget_an_idle_gpu, r"the idle GPUs are \[\], not \[4\]"),
        (change_a_predicted_end, "predicted ends"),
        (swap_the_jobs_by_end, "the jobs by predicted end"),
        (forget_a_wait, "the long waits"),
        (stop_without_giving_up_gpus, "<c stopping .*> holds 2 GPUs"),
        (forget_a_paused_job, "<p pausing .*> is not listed right among the paused jobs"),
        (forget_that_a_job_switches, "<p pausing .*> is not listed right among those that switch"),
        (let_a_paused_job_count_as_active, "<p pausing .*> counts as active"),
        (forget_when_a_pause_began, "<p pausing .*> is paused since -1.0"),
        (let_a_paused_job_iterate, "<p pausing .*> iterates"),
        (let_too_many_jobs_compute, "2 jobs compute on GPU 0"),
        (lower_the_resident_limit, "GPU 0 holds 2 jobs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_to_an_index_is_found(state: State, damage: Callable[[State], None], problem: str) -> None:
    damage(state)
    with pytest.raises(InvalidState, match=problem):
        validate(state)


def test_a_wrong_rank_of_a_job_that_holds_gpus_is_found() -> None:
    found = given(cluster("1x2"), running("a")).state(lambda job, now: (job.job.submitted,))
    found.apply(ev.FairShareChanged(0.0, FairShare(0.5)))
    ranks = found.ranks_of_holders()
    validate(found)
    ranks[found.jobs["a"].seq] = (0, 9, 9)
    with pytest.raises(InvalidState, match="the ranks of the jobs that hold GPUs"):
        validate(found)
