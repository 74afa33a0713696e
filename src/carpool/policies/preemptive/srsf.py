"""Shortest remaining service first, preemptive: time left times GPUs, the oracle with which Gu et al. compare Tiresias
(NSDI 2019).

Where `srtf` prefers the job that ends soonest, this rule prefers the one that costs the cluster least: a long job on
one GPU may come before a short one on sixteen. The simplifications are those of `srtf`.
"""

from dataclasses import dataclass

from carpool.core.model import Decision
from carpool.core.tenants import WITH_PREEMPTION
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option
from carpool.policies.preemptive.preemption import RESTART_S, first_in_order


@dataclass
class Srsf(BasePolicy):
    """Jobs with the least GPU time left run, each alone; they displace jobs that have more."""

    name = "srsf"
    entitlement = WITH_PREEMPTION
    restart_s: float = option(RESTART_S, "seconds that the simulator charges when a suspended job starts again")  # type: ignore[misc]

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.whole_left(now) * job.shape.gpus,)  # not alone_left, see srtf

    def decide(self, view: View) -> list[Decision]:
        return first_in_order(view, self.key, "others have less GPU time left", "has the least GPU time left")
