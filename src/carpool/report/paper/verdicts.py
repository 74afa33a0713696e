"""The rules by which a claim is judged. They look at numbers only; `[verdict]` in the configuration states them."""

from collections.abc import Sequence
from enum import StrEnum

from carpool.sim.sweep import Mean


class ClaimVerdict(StrEnum):
    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not reproduced"
    UNTESTED = "not tested"


def less(found: Mean | None, printed: float, points: float) -> ClaimVerdict:
    """The claim "lower by `printed` per cent", of which `found` is our value.

    Half of `printed` bounds the distance as well: within ten points of 5 % lies nearly everything.
    """
    if found is None:
        return ClaimVerdict.UNTESTED
    if found.value <= 2.0 * (found.error or 0.0):
        return ClaimVerdict.NOT
    near = abs(found.value - printed) <= min(points, printed / 2.0)
    return ClaimVerdict.REPRODUCED if near else ClaimVerdict.PARTLY


def equal(found: Mean | None, printed: float, within: float) -> ClaimVerdict:
    """The claim that a value is `printed`, up to `within`; partly up to twice that."""
    if found is None:
        return ClaimVerdict.UNTESTED
    gap = abs(found.value - printed)
    return (
        ClaimVerdict.REPRODUCED if gap <= within else ClaimVerdict.PARTLY if gap <= 2.0 * within else ClaimVerdict.NOT
    )


def every(tests: Sequence[bool | None], least: int | None = None) -> ClaimVerdict:
    """A claim on many cases: reproduced if it holds in all, partly if in at least half (or `least`) of them."""
    known = [test for test in tests if test is not None]
    if not known or len(known) < len(tests):
        return ClaimVerdict.UNTESTED
    holds = sum(known)
    if holds == len(known):
        return ClaimVerdict.REPRODUCED
    return ClaimVerdict.PARTLY if holds >= (len(known) / 2 if least is None else least) else ClaimVerdict.NOT


def combined(verdicts: Sequence[ClaimVerdict]) -> ClaimVerdict:
    """One verdict for several readings of a claim: reproduced if all are, not if none is at all, otherwise partly."""
    if not verdicts or ClaimVerdict.UNTESTED in verdicts:
        return ClaimVerdict.UNTESTED
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return ClaimVerdict.PARTLY
