"""Tiresias: least attained service in two queues, preemptive, without knowledge of job lengths."""

from dataclasses import dataclass

from carpool.core.model import Decision
from carpool.core.tenants import WITH_PREEMPTION
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, next_round, option
from carpool.policies.preemptive.preemption import RESTART_S, first_in_order

TICK_S = 1e-3
"""Distance in seconds from the threshold that counts as over it: clocks with seconds since 1970 resolve 1e-6 s."""


@dataclass
class Tiresias(BasePolicy):
    """Jobs that have used few GPU-hours come first and may displace jobs that have used more."""

    name = "tiresias"
    entitlement = WITH_PREEMPTION
    threshold_gpu_s: float = option(3600.0, "attained service, in GPU-seconds, that moves a job to the second queue")
    restart_s: float = option(RESTART_S, "seconds that the simulator charges when a suspended job starts again")  # type: ignore[misc]
    start_s: float = option(0.0, "seconds that the simulator charges when a job starts for the first time")  # type: ignore[misc]
    round_s: float = option(0.0, "interval of decisions in seconds; 0: decide whenever something happens")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        # The level is derived from the service, never stored; a waiting job's service does not change.
        demoted = self.threshold_gpu_s - job.service(now) <= TICK_S * job.shape.gpus
        return (float(demoted), job.job.submitted)

    def decide(self, view: View) -> list[Decision]:
        return first_in_order(view, self.key, "others have used less GPU time", "has used the least GPU time")

    def wake(self, view: View) -> float | None:
        """Return the next round, or the next moment at which a running job moves to the second queue."""
        if not len(view.queue):
            return None
        if self.round_s:
            return next_round(view.now, self.round_s)
        now, threshold = view.now, self.threshold_gpu_s
        first = [job for job in view.running if self.key(job, now)[0] == 0.0]
        return min((now + (threshold - job.service(now)) / len(job.gpus) for job in first), default=None)

    @property
    def in_rounds(self) -> bool:
        return self.round_s > 0.0
