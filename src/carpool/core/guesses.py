"""How far users' guesses of the length of their jobs can be trusted, and what is believed in their place.

A user's record compares what finished jobs took with what the user guessed, for durations and for iterations apart. The
next guess is multiplied by the factor that follows from it. What is left of a job that outlives its guess follows from
`expected_left`. `State` owns the one `Guesses`; `healing` applies it to jobs; `carpool explain` reads it.
"""

from collections.abc import Iterator
from math import exp, inf, log, sqrt
from typing import Any

MEMORY = 32.0
"""Number of jobs after which an older one counts for a third (1/e)."""
KEEP = 1.0 - 1.0 / MEMORY
"""What a job counts for once another one has been added."""
DOUBT = 0.25
"""Number of jobs with right guesses that a new user is believed to have had: it takes a few to be sure."""
OUTLIER = 16.0
"""Most that one job counts for, in multiples of what was believed of it: a job that hung says little about others."""
LEAST_FACTOR, MOST_FACTOR = 0.25, 1000.0
"""Bounds of the correction. The range below 1 is narrow, so that users gain little rank for a long job by guessing too
long for short ones."""
NOTICEABLE = 0.05
"""Change of the logarithm of a correction below which the one in use stays."""
FOUR_IN_FIVE = 1.2816
"""Standard deviations on either side of the mean that hold four times out of five."""
NEW_SD, NEW_WEIGHT = log(2.0) / FOUR_IN_FIVE, 2.0
"""Spread of a new user's guesses (a factor of two, four times out of five), and the number of jobs that it counts
for."""
GROWTH = 2.0
"""What a guess is multiplied by when its job outlives the range of it."""
LEAST_LEFT = 0.05
"""Smallest time left of a job, as a share of what it has done."""
LEAST_SPREAD, MOST_SPREAD = 1.1, 4.0

DURATION, ITERATIONS = "duration", "iterations"


class UserRecord:
    """What came of one user's guesses of one kind."""

    __slots__ = ("factor", "guessed", "jobs", "log_squares", "log_sum", "true", "weight")

    def __init__(self) -> None:
        self.jobs = 0
        """Number of jobs that it counts."""
        self.weight = 0.0
        """The same, where older jobs count less."""
        self.true = 0.0
        """Sum of what the jobs took, older ones counting less."""
        self.guessed = 0.0
        """Sum of what the user guessed for them."""
        self.log_sum = 0.0
        self.log_squares = 0.0
        self.factor = 1.0
        """Correction that is in use."""

    @property
    def ratio(self) -> float:
        """What the jobs took over what was guessed. Sums are compared, so that a wrong guess counts by its length."""
        return self.true / self.guessed if self.guessed else 1.0

    def add(self, true: float, guess: float) -> bool:
        """Add a finished job, and return whether the correction in use changed."""
        most, least = OUTLIER * max(1.0, self.factor) * guess, 1e-9 * guess
        if true > most:
            true = most
        ratio = log((true if true > least else least) / guess)
        self.jobs += 1
        self.weight = KEEP * self.weight + 1.0
        self.true = KEEP * self.true + true
        self.guessed = KEEP * self.guessed + guess
        self.log_sum = KEEP * self.log_sum + ratio
        self.log_squares = KEEP * self.log_squares + ratio * ratio
        return self._take_up()

    def add_unfinished(self, least: float, guess: float) -> bool:
        """Add a job that failed or was cancelled: it would have taken `least` or more, so it can only raise the
        correction."""
        return least > guess * max(self.ratio, self.factor) * (1.0 + NOTICEABLE) and self.add(least, guess)

    def _take_up(self) -> bool:
        wanted = self.ratio ** (self.weight / (self.weight + DOUBT))
        wanted = min(MOST_FACTOR, max(LEAST_FACTOR, wanted))
        if abs(log(wanted / self.factor)) <= NOTICEABLE:
            return False
        self.factor = wanted
        return True

    @property
    def spread(self) -> float:
        """Factor by which a corrected guess may be too short or too long, four times out of five."""
        mean = self.log_sum / self.weight if self.weight else 0.0
        squares = max(0.0, self.log_squares - self.weight * mean * mean)
        sd = sqrt((squares + NEW_WEIGHT * NEW_SD**2) / (self.weight + NEW_WEIGHT))
        return exp(FOUR_IN_FIVE * sd)


NEW_USER = UserRecord()


def in_words(user: str, kind: str, jobs: int, ratio: float) -> str:
    """Return how wrong a user's guesses were: that many jobs took `ratio` times what was guessed."""
    what = "their guesses" if kind == DURATION else "the iterations that were guessed"
    return f"{user}'s jobs took {ratio:.2g} times {what} ({jobs} job{'s' if jobs != 1 else ''})"


class Guesses:
    """The records of all users."""

    def __init__(self) -> None:
        self.trusted = False
        """Whether guesses count as they are, and nothing is learned about them."""
        self._records: dict[tuple[str, str], UserRecord] = {}

    def of(self, user: str, kind: str) -> UserRecord:
        """Return what is known of a user's guesses of a kind. The answer is only to be read."""
        return self._records.get((user, kind), NEW_USER)

    def add(self, user: str, kind: str, true: float, guess: float, *, finished: bool) -> bool:
        """Learn from a job that has ended, and return whether the user's correction changed."""
        record = self._records.get((user, kind)) or UserRecord()
        changed = record.add(true, guess) if finished else record.add_unfinished(true, guess)
        if record.jobs:
            self._records[user, kind] = record
        return changed

    def __iter__(self) -> Iterator[tuple[str, str, UserRecord]]:
        for (user, kind), record in self._records.items():
            yield user, kind, record

    def dump(self) -> dict[str, Any]:
        """Return everything as plain data."""
        records = [
            {"user": user, "kind": kind, **{name: getattr(record, name) for name in UserRecord.__slots__}}
            for user, kind, record in self
        ]
        return {"trusted": self.trusted, "records": records}

    @classmethod
    def load(cls, data: dict[str, Any]) -> "Guesses":
        """Return what `dump` wrote."""
        guesses = cls()
        guesses.trusted = data["trusted"]
        for raw in data["records"]:
            record = guesses._records[raw["user"], raw["kind"]] = UserRecord()
            for name in UserRecord.__slots__:
                setattr(record, name, raw[name])
        return guesses


def expected_left(done: float, guess: float, spread: float) -> float:
    """Return how much a job has left after `done`, where its length was guessed to be `guess`, in the same unit.

    The true length is between guess ÷ spread and guess · spread, with an even chance for every factor, and at least
    `done`; the answer is its mean less `done`. If the job has outlived the whole range, the guess is doubled first.
    """
    spread = min(MOST_SPREAD, max(LEAST_SPREAD, spread))
    while 0.0 < guess * spread * (1.0 - LEAST_LEFT) <= done < inf:
        guess *= GROWTH
    shortest, longest = max(done, guess / spread), guess * spread
    return max(LEAST_LEFT * done, (longest - shortest) / log(longest / shortest) - done)
