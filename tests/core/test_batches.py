"""Events that are applied together leave the state that they leave one by one, and waiting jobs are computed once."""

import random

import pytest

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.batches import apply_together
from carpool.core.model import Allocation, Decision, Guess, Job, Node
from carpool.core.state import State
from carpool.live.service.estimator import JobEstimator

GPUS, WAITING = 12, 40


class Cluster:
    """A state with a belief that learns, with jobs that run and jobs that wait."""

    def __init__(self, seed):
        self.keys = 0
        rng = random.Random(seed)
        self.state = State(JobEstimator(4, "logical").initial_belief(), self.key)
        self.state.apply(ev.AccountsOpened(0.0))
        for number in range(GPUS // 4):
            gpus = tuple(range(4 * number, 4 * number + 4))
            self.state.apply(ev.NodeJoined(0.0, Node(f"n{number}", gpus, 2**40)))
        for number in range(GPUS + WAITING):
            self.state.apply(ev.Submitted(0.0, self.job(number, rng)))
        starts = tuple(Decision(str(number), Allocation((number,), 1), "first") for number in range(GPUS))
        self.state.apply(ev.Planned(0.0, starts))
        for number in range(GPUS):
            self.state.apply(ev.Started(0.0, str(number), 1))
        self.keys = 0

    @staticmethod
    def job(number, rng):
        guess = rng.choice([Guess.DURATION, Guess.ITERATIONS])
        return Job(
            str(number),
            0.0,
            rng.choice(["train.py", "tune.py", "true"]),
            1,
            1,
            rng.choice([100, 1000]),
            user=rng.choice(["ann", "bob"]),
            duration_s=rng.uniform(10.0, 100.0),
            after=(str(number - GPUS),) if number >= GPUS and rng.random() < 0.1 else (),
            guess=guess,
        )

    def key(self, record, now):
        self.keys += 1
        return (record.alone_left(now),)


def ends(seed):
    """Events of one step, at the times at which they happened."""
    rng = random.Random(seed)
    free_waiting = [record.job.id for record in Cluster(seed).state.queue]
    events, at = [], 5.0
    for number in rng.sample(range(GPUS), GPUS):
        at += rng.uniform(0.0, 20.0)
        what = rng.random()
        if what < 0.2:
            events.append(ev.Observed(at, str(number), 1, rng.uniform(0.0, 90.0), rng.uniform(0.01, 1.0)))
        elif what < 0.3:
            events.append(ev.Failed(at, str(number), 1, "a failure"))
        elif what < 0.4:
            events.append(ev.Submitted(at, Job(f"new{number}", at, "train.py", 1, 1, 100, user="ann", duration_s=9.0)))
        else:
            events.append(ev.Finished(at, str(number), 1))
            if rng.random() < 0.3:  # a plan of the step before is applied by what is believed at that moment
                waiting = free_waiting.pop()
                events.append(ev.Planned(at, (Decision(waiting, Allocation((number,), 1), "next"),)))
                events.append(ev.Started(at, waiting, 1))
    return events


@pytest.mark.parametrize("seed", range(20))
def test_together_and_one_by_one_are_the_same(seed):
    together, single = Cluster(seed).state, Cluster(seed).state
    apply_together(together, ends(seed))
    for event in ends(seed):
        single.apply(event)
    assert snapshot.encode(together) == snapshot.encode(single)
    assert [record.job.id for record in together.queue] == [record.job.id for record in single.queue]


def test_waiting_jobs_are_computed_once_for_many_ends():
    together, single = Cluster(1), Cluster(1)
    finished = [ev.Finished(10.0 * (1.3**number), str(number), 1) for number in range(GPUS)]
    apply_together(together.state, finished)
    for event in finished:
        single.state.apply(event)
    assert together.state.belief_version == single.state.belief_version > 4
    assert together.keys <= 2 * WAITING < single.keys
