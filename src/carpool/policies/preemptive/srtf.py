"""Shortest remaining time first, preemptive: Schrage's rule (Operations Research 16(3), 1968), optimal on one machine.

It is an oracle: it needs the time that every job has left. Simplifications: no GPU is shared; a suspended job pays
`restart_s` when it starts again and nothing when it stops (`--stop-s` adds that); a gang that does not fit into the
GPUs that are left is skipped, and none are kept for it.
"""

from dataclasses import dataclass

from carpool.core.model import Decision
from carpool.core.tenants import WITH_PREEMPTION
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option
from carpool.policies.preemptive.preemption import RESTART_S, first_in_order


@dataclass
class Srtf(BasePolicy):
    """Jobs with the least time left run, each alone; they displace jobs that have more."""

    name = "srtf"
    entitlement = WITH_PREEMPTION
    restart_s: float = option(RESTART_S, "seconds that the simulator charges when a suspended job starts again")  # type: ignore[misc]

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        # At the best placement, whatever the present one: a job that was started on scattered GPUs must not look longer
        # than it did in the queue, or two jobs would displace each other for ever.
        return (job.whole_left(now),)

    def decide(self, view: View) -> list[Decision]:
        return first_in_order(view, self.key, "others have less time left", "has the least time left")
