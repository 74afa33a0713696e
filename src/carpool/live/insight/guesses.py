"""What is said about users' guesses: how wrong earlier ones were, and what is believed in place of the next.

`forecaster` takes ranges of durations from here, `explain` its sentences.
"""

from dataclasses import dataclass

from carpool.core.guesses import DURATION, ITERATIONS, in_words
from carpool.core.healing import guessed_length, record_of
from carpool.core.model import Job
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.text import span


@dataclass(frozen=True, slots=True)
class GuessView:
    """A user's guess of the length of a job, in seconds or iterations, and what is believed in its place."""

    user: str
    kind: str
    guess: float
    jobs: int
    """Number of jobs of the user from which the correction follows."""
    ratio: float
    """What these jobs took over what was guessed."""
    low: float
    high: float

    @property
    def sentence(self) -> str:
        """How wrong earlier guesses were, and what is believed in place of this one."""
        took = in_words(self.user, self.kind, self.jobs, self.ratio)
        return f"{took}; guess {self._shown(self.guess)}, believed {self._shown(self.low)} to {self._shown(self.high)}."

    def _shown(self, amount: float) -> str:
        return span(amount) if self.kind == DURATION else f"{amount:.0f} iterations"


def guess_of(state: State, job: Job) -> GuessView | None:
    """Return what is believed of the guess of a job, submitted or not; None: it has none that counts."""
    record = state.jobs.get(job.id)
    if record is None:
        found = guessed_length(state, job)
        if found is None or (found.kind == DURATION and not state.relies_on_guess(job)):
            return None
        kind, guess, known, believed = found.kind, found.guess, found.record, found.guess * found.factor
    elif record.guess_s and state.relies_on_guess(job):
        kind, guess, known = DURATION, record.guess_s, record_of(state, record)
        believed = job.iterations * record.whole_iteration_s
    elif record.guess_iterations:
        kind, guess, known = ITERATIONS, float(record.guess_iterations), record_of(state, record)
        believed = float(record.job.iterations)
    else:
        return None
    low, high = believed / known.spread, believed * known.spread
    return GuessView(job.user, kind, guess, known.jobs, known.ratio, low, high)


def outlived_sentence(record: JobRecord) -> str:
    """Return that a job outlived what was believed of it; empty: it did not."""
    if not record.outlived:
        return ""
    times = {1: "once", 2: "twice"}.get(record.outlived, f"{record.outlived} times")
    longer = f"{record.stretched * record.grown:.2g} times as much as at first"
    return f"It outlived what was believed of it {times}; {longer} is believed now."
