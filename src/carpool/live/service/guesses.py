"""How much of a job is left when its duration is a guess: more than the guess less what it has done.

A guess may be wrong by a factor either way. A job that has run for as long as was guessed is therefore among those that
take longer, and is not about to end. `ProgressWatch` asks for jobs that report steps but not how many they make.
"""

from math import log

LEAST_LEFT = 0.05
"""Smallest time left of a job that has outlived every guess, as a share of what it has done."""
LEAST_SPREAD, MOST_SPREAD = 1.1, 4.0


def expected_left(done_s: float, guess_s: float, spread: float) -> float:
    """Return the seconds alone that a job has left after `done_s`, where its duration was guessed to be `guess_s`.

    The true duration is between guess ÷ spread and guess · spread, with an even chance for every factor, and at least
    `done_s`; the answer is its mean less `done_s`.
    """
    spread = min(MOST_SPREAD, max(LEAST_SPREAD, spread))
    shortest, longest = max(done_s, guess_s / spread), guess_s * spread
    if shortest >= longest * (1.0 - LEAST_LEFT):
        return LEAST_LEFT * done_s
    return max(LEAST_LEFT * done_s, (longest - shortest) / log(longest / shortest) - done_s)
