"""The rules by which a claim is judged. They look at numbers only; `[verdict]` in the configuration states them."""

from collections.abc import Sequence
from enum import StrEnum

from carpool.sim.sweep import Mean


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not reproduced"
    UNTESTED = "not tested"


def less(found: Mean | None, printed: float, points: float) -> Verdict:
    """The claim "lower by `printed` per cent", of which `found` is our value.

    Half of `printed` bounds the distance as well: within ten points of 5 % lies nearly everything.
    """
    if found is None:
        return Verdict.UNTESTED
    if found.value <= 2.0 * (found.error or 0.0):
        return Verdict.NOT
    near = abs(found.value - printed) <= min(points, printed / 2.0)
    return Verdict.REPRODUCED if near else Verdict.PARTLY


def equal(found: Mean | None, printed: float, within: float) -> Verdict:
    """The claim that a value is `printed`, up to `within`; partly up to twice that."""
    if found is None:
        return Verdict.UNTESTED
    gap = abs(found.value - printed)
    return Verdict.REPRODUCED if gap <= within else Verdict.PARTLY if gap <= 2.0 * within else Verdict.NOT


def every(tests: Sequence[bool | None], least: int | None = None) -> Verdict:
    """A claim on many cases: reproduced if it holds in all, partly if in at least half (or `least`) of them."""
    known = [test for test in tests if test is not None]
    if not known or len(known) < len(tests):
        return Verdict.UNTESTED
    holds = sum(known)
    if holds == len(known):
        return Verdict.REPRODUCED
    return Verdict.PARTLY if holds >= (len(known) / 2 if least is None else least) else Verdict.NOT


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several readings of a claim: reproduced if all are, not if none is at all, otherwise partly."""
    if not verdicts or Verdict.UNTESTED in verdicts:
        return Verdict.UNTESTED
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return Verdict.PARTLY
