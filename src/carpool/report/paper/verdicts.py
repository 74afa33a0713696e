"""The rules by which a claim gets its verdict. They use numbers only; `[verdict]` in the configuration sets them."""

from collections.abc import Sequence
from enum import StrEnum

from carpool.sim.sweep import Mean


class ClaimVerdict(StrEnum):
    """Whether our results agree with a claim of the paper."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not reproduced"
    UNTESTED = "not tested"


def less(found: Mean | None, printed: float, points: float) -> ClaimVerdict:
    """Return the verdict on a claim "lower by `printed` per cent", for which we find `found`.

    The distance may be at most `points`, and at most half of `printed`, because almost any result is within ten points
    of 5 %.
    """
    if found is None:
        return ClaimVerdict.UNTESTED
    if found.value <= 2.0 * (found.error or 0.0):
        return ClaimVerdict.NOT
    near = abs(found.value - printed) <= min(points, printed / 2.0)
    return ClaimVerdict.REPRODUCED if near else ClaimVerdict.PARTLY


def equal(found: Mean | None, printed: float, within: float) -> ClaimVerdict:
    """Return the verdict on a claim that a value is `printed`: reproduced up to `within`, partly up to twice that."""
    if found is None:
        return ClaimVerdict.UNTESTED
    gap = abs(found.value - printed)
    return (
        ClaimVerdict.REPRODUCED if gap <= within else ClaimVerdict.PARTLY if gap <= 2.0 * within else ClaimVerdict.NOT
    )


def every(tests: Sequence[bool | None], least: int | None = None) -> ClaimVerdict:
    """Return the verdict on many cases: reproduced if all hold, partly if at least half (or `least`) of them do."""
    known = [test for test in tests if test is not None]
    if not known or len(known) < len(tests):
        return ClaimVerdict.UNTESTED
    holds = sum(known)
    if holds == len(known):
        return ClaimVerdict.REPRODUCED
    return ClaimVerdict.PARTLY if holds >= (len(known) / 2 if least is None else least) else ClaimVerdict.NOT


def combined(verdicts: Sequence[ClaimVerdict]) -> ClaimVerdict:
    """Return one verdict for several readings of a claim: untested if one is, theirs if they agree, or else partly."""
    if not verdicts or ClaimVerdict.UNTESTED in verdicts:
        return ClaimVerdict.UNTESTED
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return ClaimVerdict.PARTLY
