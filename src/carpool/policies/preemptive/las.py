"""Least attained service, preemptive, without any knowledge of run times: the foreground-background rule (Nuyens and
Wierman's survey, Performance Evaluation 65, 2008) with GPU time as service, as in Tiresias (NSDI 2019).

Simplification: service counts in quanta, first come first served within one, so that jobs take turns in steps instead
of sharing a GPU in ever thinner slices. Every turn costs `restart_s`. Tiresias is this rule with two levels.
"""

from dataclasses import dataclass
from math import floor

from carpool.core.model import Decision
from carpool.core.tenants import WITH_PREEMPTION
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option
from carpool.policies.preemptive.preemption import RESTART_S, first_in_order

TICK_S = 1e-3
"""Distance in seconds from the end of a quantum that counts as its end: see `tiresias`."""


@dataclass
class Las(BasePolicy):
    """Jobs that have used the least GPU time run, each alone; they displace jobs that have used a quantum more."""

    name = "las"
    entitlement = WITH_PREEMPTION
    quantum_gpu_s: float = option(3600.0, "GPU-seconds of one quantum, the unit in which service counts")
    restart_s: float = option(RESTART_S, "seconds that the simulator charges when a suspended job starts again")  # type: ignore[misc]

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (float(self._level(job, now)), job.job.submitted)

    def decide(self, view: View) -> list[Decision]:
        return first_in_order(view, self.key, "others have used less GPU time", "has used the least GPU time")

    def wake(self, view: View) -> float | None:
        """Return the next moment at which a running job has used up a quantum."""
        if not len(view.queue):
            return None
        now, quantum = view.now, self._quantum()
        turns = ((self._level(job, now) + 1) * quantum - job.service(now) for job in view.running)
        return min((now + left / job.shape.gpus for left, job in zip(turns, view.running, strict=True)), default=None)

    def _level(self, job: JobView, now: float) -> int:
        return floor((job.service(now) + TICK_S * job.shape.gpus) / self._quantum())

    def _quantum(self) -> float:
        return max(self.quantum_gpu_s, 1.0)
