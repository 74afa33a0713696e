"""Tiresias: least attained service in two queues, preemptive, without knowledge of job lengths."""

from dataclasses import dataclass
from heapq import merge

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.record import JobRecord, JobView, Shape
from carpool.core.view import View
from carpool.policies.base import BasePolicy, next_round, option

TICK_S = 1e-3
"""So close to the threshold counts as over it: clocks that show seconds since 1970 resolve no less than 1e-6 s."""


@dataclass
class Tiresias(BasePolicy):
    """Jobs that have used few GPU-hours come first and may push out those that have used more."""

    name = "tiresias"
    threshold_gpu_s: float = option(3600.0, "attained service, in GPU-seconds, that moves a job to the second queue")
    restart_s: float = option(30.0, "seconds the simulator charges when a preempted job starts again")  # type: ignore[misc]
    start_s: float = option(0.0, "seconds the simulator charges when a job starts for the first time")  # type: ignore[misc]
    round_s: float = option(0.0, "decide only at multiples of so many seconds; 0: whenever something happens")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        # The level is derived from the service, never stored; a waiting job's service does not change.
        demoted = self.threshold_gpu_s - job.service(now) <= TICK_S * job.shape.gpus
        return (float(demoted), job.job.submitted)

    def decide(self, view: View) -> list[Decision]:
        """Give the GPUs to the first jobs in order, running or not; stop who runs and is not among them."""
        if not len(view.queue):
            return []
        leaving = [job for job in view.running if job.status is Status.CANCELLING]
        running = [job for job in view.running if job.status is not Status.CANCELLING]
        running.sort(key=lambda job: self._rank(job, view.now))
        capacity = view.topology.total() - sum(len(job.gpus) for job in leaving)
        hopeless: set[Shape] = set()  # there are GPUs enough, but none with the memory, or the user is at a limit
        while True:
            keep, start = self._choose(view, running, capacity, hopeless)
            if not start:
                return []
            draft = Draft(view)
            for job in running:
                if job.order not in keep:
                    draft.stop(job, "others have used less GPU time")
            failed = next((job for job in start if not draft.start(job, "has used the least GPU time")), None)
            if failed is None:
                return draft.decisions
            hopeless.add(failed.shape)

    def wake(self, view: View) -> float | None:
        """The next round, or the next moment at which a running job moves to the second queue."""
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

    def _rank(self, job: JobRecord, now: float) -> tuple[int, tuple[float, ...], int]:
        return (-job.shape.priority, self.key(job, now), job.order)

    def _choose(
        self, view: View, running: list[JobRecord], left: int, hopeless: set[Shape]
    ) -> tuple[set[int], list[JobRecord]]:
        """Who keeps running (by order) and who starts, as far as `left` GPUs go; what does not fit is skipped."""
        keep: set[int] = set()
        start: list[JobRecord] = []
        now = view.now
        waiting = view.queue.scan(left)
        candidates = merge(
            ((self._rank(job, now), job) for job in running),
            ((self._rank(job, now), job) for job in waiting),
        )
        for _, job in candidates:
            if left == 0:
                break
            fits = job.shape.gpus <= left
            if job.gpus:
                if fits:
                    keep.add(job.order)
                    left -= job.shape.gpus
            elif fits and job.shape not in hopeless:
                start.append(job)
                left -= job.shape.gpus
        return keep, start
