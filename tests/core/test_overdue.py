"""The index of paused jobs by the moment at which they are overdue, against a look at all of them."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.overdue import MOST_DRIFT_S, OverdueJobs
from tests.support.effort import cases

PATIENCE = 10.0


@dataclass(eq=False)
class PausedJob:
    """What the index reads of a job."""

    seq: int
    paused_since: float
    waited_s: float
    left: float
    paused_s: float = 0.0

    def alone_left(self, now: float) -> float:
        return self.left

    def overdue_at(self, least: float) -> float:
        """Return the moment at which the pause has lasted for `least`, and its losses for the patience."""
        return max(self.paused_since + least, self.paused_since - self.waited_s + PATIENCE * self.left)


seconds = st.integers(0, 5000).map(float)
jobs = st.lists(st.tuples(seconds, seconds, st.integers(0, 500).map(float)), min_size=1, max_size=12)
least = st.integers(0, int(4 * MOST_DRIFT_S)).map(float)


@settings(max_examples=cases(200))
@given(jobs, st.lists(st.tuples(st.integers(0, 11), least, seconds), min_size=1, max_size=12))
def test_the_first_and_all_overdue_jobs_are_those_that_a_look_at_all_finds(jobs, asked):
    paused = [PausedJob(seq, *one) for seq, one in enumerate(jobs)]
    known = {job.seq: job for job in paused[: len(paused) // 2]}
    index = OverdueJobs(PATIENCE, known)
    for number, least, now in asked:
        job = paused[number % len(paused)]
        if known.pop(job.seq, None) is None:
            known[job.seq] = job
        index.touch(job)
        moments = {seq: one.overdue_at(least) for seq, one in known.items()}
        assert index.first(least) == min(moments.values(), default=float("inf"))
        assert {one.seq for one in index.by(now, least)} == {seq for seq, moment in moments.items() if moment <= now}
