"""Which reports of a worker can be true: a report that contradicts its own counters or the clock is dropped.

A worker writes its report itself, so it may say anything. What it says about its speed becomes a measurement that other
jobs are placed by. `progress.py` asks `ReportTrust` about every report. The first report of an attempt is taken as it
is, because a job may go on from a checkpoint that the service does not know.
"""

from dataclasses import dataclass
from math import inf, isfinite

from carpool.channel import Report
from carpool.live.text import span

MAX_AHEAD_S = 300.0
"""Seconds by which a worker's clock may be ahead."""
RATE = 2.0
"""Seconds of claimed work for each second that passed. Above 1, because the reported time is a moving average."""
CREDIT_S = 30.0
"""Seconds of claimed work that may come at once, for reports that were delayed."""
CREDIT_STEPS = 40
"""Iterations that may come at once. When a worker becomes faster, its moving average claims up to twelve old iterations
too much before it has followed."""


@dataclass(slots=True)
class ReportTrust:
    """What a gang has reported, as far as it was believed."""

    iteration: int | None = None
    """Iteration of the latest report that was believed; None: none was."""
    at: float = -inf
    """Time of the service at which that was."""
    time: float = 0.0
    """The worker's own time in it."""
    credit_s: float = CREDIT_S
    """Seconds of work that the worker may claim now."""
    seconds: float = 0.0
    """Seconds per iteration in that report."""
    slowest: float = 0.0
    """Largest number of seconds per iteration that was believed."""

    def contradiction(self, report: Report, now: float, wall: float) -> str:
        """Return what a report contradicts, as half a sentence; empty: it is believed. `wall`: seconds since 1970."""
        found = _own_contradiction(report) or self._clock(report, wall)
        if found:
            return found
        if self.iteration is None:
            self._believe(report, now, 0)
            return ""
        if report.iteration < self.iteration:
            return f"it is at iteration {report.iteration} after iteration {self.iteration}"
        elapsed, steps = max(0.0, now - self.at), report.iteration - self.iteration
        seconds = min(self.seconds, report.seconds)  # most of these steps may have been as quick as those before
        claimed = steps * seconds - RATE * elapsed
        if claimed > self.credit_s:
            return f"{steps} iterations of {seconds:.3g} s each within {elapsed:.3g} s"
        self._believe(report, now, claimed)
        return ""

    def _clock(self, report: Report, wall: float) -> str:
        if report.time > wall + MAX_AHEAD_S:
            return f"its clock is {span(report.time - wall)} ahead"
        if report.time < self.time - MAX_AHEAD_S:
            return f"its clock went back by {span(self.time - report.time)}"
        return ""

    def _believe(self, report: Report, now: float, claimed: float) -> None:
        slower = max(0.0, report.seconds - self.slowest)
        self.slowest += slower
        most = CREDIT_S + CREDIT_STEPS * self.slowest
        self.credit_s = min(most, self.credit_s - claimed + CREDIT_STEPS * slower)
        self.iteration, self.at, self.time, self.seconds = report.iteration, now, report.time, report.seconds


def _own_contradiction(report: Report) -> str:
    if not (isfinite(report.seconds) and report.seconds >= 0.0 and isfinite(report.time)):
        return "its seconds per iteration, or its time, are not a number"
    if report.checkpoint > report.iteration:
        return f"it has a checkpoint of iteration {report.checkpoint}, and is at iteration {report.iteration}"
    if report.accumulation < 1:
        return f"its accumulation is {report.accumulation}"
    return ""
