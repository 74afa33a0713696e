"""A paused job whose memory is moved to main memory, so that a job fits that would not fit beside it."""

import pytest

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Node, Status
from carpool.core.rules import IllegalPlan, check
from carpool.core.state import State
from carpool.core.validate import validate
from tests.support.world import GIB, job, model

OUT = Allocation((0,), active=False, swapped=True)
ON = Allocation((0,))


def large(name, gpus=1):
    """Return a job of 14 GiB, two of which do not fit in 16 GiB; it cannot be split."""
    return job(name, gpus, model="fat", batch=80, can_shrink=False)


def world(*, can_swap=True, gpus=1, **attributes):
    """Return a state in which the job `a` runs and `b` waits."""
    state = State(model(), lambda record, now: (0.0,))
    state.apply(ev.NodeJoined(0.0, Node("n", (0, 1), 16 * GIB, can_swap)))
    state.apply(ev.Submitted(0.0, large("a", gpus)))
    state.apply(ev.Submitted(0.0, large("b")))
    plan(state, a=Allocation(tuple(range(gpus))))
    state.apply(ev.Started(0.0, "a", 1))
    return state


def plan(state, **allocations):
    decisions = tuple(Decision(name, allocation, "by hand") for name, allocation in allocations.items())
    check(state, decisions)
    state.apply(ev.Planned(state.now, decisions))
    validate(state)


def refused(state, problem, **allocations):
    with pytest.raises(IllegalPlan, match=problem):
        plan(state, **allocations)


def test_a_pause_keeps_the_memory_and_a_swap_frees_it():
    state = world()
    refused(state, "do not fit", a=Allocation((0,), active=False), b=ON)
    plan(state, a=OUT, b=ON)
    assert state.jobs["a"].status is Status.PAUSING
    assert state.memory_used(0) == state.jobs["b"].memory
    assert state.leaving((0,)) == [state.jobs["a"]], "b is not launched before the memory is free"
    state.apply(ev.Paused(1.0, "a", 1))
    assert not state.leaving((0,))


def test_a_swapped_job_comes_back_when_its_memory_fits():
    state = world()
    plan(state, a=OUT, b=ON)
    state.apply(ev.Paused(1.0, "a", 1))
    state.apply(ev.Started(1.0, "b", 1))
    refused(state, "do not fit", a=ON)
    state.apply(ev.Finished(5.0, "b", 1))
    plan(state, a=ON)
    assert state.memory_used(0) == state.jobs["a"].memory > 0
    state.apply(ev.Resumed(6.0, "a", 1))
    validate(state)
    assert (state.jobs["a"].status, state.jobs["a"].done, state.jobs["a"].paused_s) == (Status.RUNNING, 0.0, 6.0)


def test_a_paused_job_can_be_swapped_out_later():
    state = world()
    plan(state, a=Allocation((0,), active=False))
    state.apply(ev.Paused(1.0, "a", 1))
    plan(state, a=OUT, b=ON)
    state.apply(ev.Paused(2.0, "a", 1))
    validate(state)
    assert state.jobs["a"].paused_since == 0.0, "one pause"


def test_where_a_swap_fails_the_job_keeps_its_memory_and_the_other_one_waits_again():
    state = world()
    plan(state, a=OUT, b=ON)
    state.apply(ev.SwapFailed(1.0, "a", 1))
    validate(state)
    assert (state.jobs["a"].status, state.jobs["b"].status) == (Status.PAUSED, Status.STOPPING)
    assert state.memory_used(0) == state.jobs["a"].memory > 0


@pytest.mark.parametrize(
    ("options", "problem"), [({"can_swap": False}, "its node cannot do that"), ({"gpus": 2}, "only jobs of one GPU")]
)
def test_what_cannot_be_swapped(options, problem):
    state = world(**options)
    refused(state, problem, a=Allocation(state.jobs["a"].gpus, active=False, swapped=True))


def test_a_job_does_not_compute_while_it_is_swapped_out():
    refused(world(), "cannot", a=Allocation((0,), active=True, swapped=True))


def test_a_cancelled_job_that_was_swapped_out_holds_no_memory():
    state = world()
    plan(state, a=OUT)
    state.apply(ev.Cancelled(1.0, "a"))
    validate(state)
    state.apply(ev.Stopped(2.0, "a", 1, 0.0))
    validate(state)
    assert not state.memory_used(0)
