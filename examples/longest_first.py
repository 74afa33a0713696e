"""A complete policy outside the package. docs/how-to/write-a-policy.md explains it; run it with

carpool simulate --policy examples/longest_first.py:LongestFirst
"""

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Decision
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option


@dataclass
class LongestFirst(BasePolicy):
    """The job with the most time left starts first."""

    name = "longest-first"
    skip: bool = option(True, "let shorter jobs start before one that does not fit")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        """Return the sort key of a job in the queue, smallest first."""
        return (-job.alone_left(now),)

    def decide(self, view: View) -> list[Decision]:
        """Return what to change now, as a list of decisions."""
        draft = Draft(view)
        pending = draft.pending()
        for job in pending:
            if not draft.start(job, "longest in the queue that fits"):
                if not self.skip:
                    break
                pending.skip_alike()  # jobs of the same shape do not fit either
        return draft.decisions
