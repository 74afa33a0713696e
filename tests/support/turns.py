"""A policy for tests that lets jobs take turns by the clock: it pauses and resumes, and stops none.

Every `turn_s` seconds the jobs of the other half, by order of submission, compute. Whatever the rules refuse waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import ClassVar

from carpool.core.model import Allocation, Decision, Status
from carpool.core.rules import IllegalPlan, check
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option


@dataclass
class TakeTurns(BasePolicy):
    """Half of the jobs compute, then the other half."""

    name: ClassVar[str] = "take-turns"
    pauses: ClassVar[bool] = True

    turn_s: float = option(8.0, "seconds of a turn")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.job.submitted,)

    def wake(self, view: View) -> float | None:
        return (floor(view.now / self.turn_s) + 1) * self.turn_s if view.running else None

    def decide(self, view: View) -> Sequence[Decision]:
        turn = floor(view.now / self.turn_s) % 2
        plan: list[Decision] = []
        residents = sorted(view.running, key=lambda job: job.seq)
        at_boundary = view.now % self.turn_s == 0.0  # at any other time it would pause what it resumed a moment before
        for job in residents if at_boundary else ():
            if job.status is Status.RUNNING and job.seq % 2 != turn and self._has_company(view, job):
                self._add(view, plan, job, Allocation(job.gpus, job.accumulation, job.batch, active=False))
        for job in sorted(residents, key=lambda job: (job.seq % 2 != turn, job.seq)):
            if job.status is Status.PAUSED:
                self._add(view, plan, job, Allocation(job.gpus, job.accumulation, job.batch))
        for job in view.queue:
            load = {gpu: sum(other.active for other in view.jobs_on(gpu)) for gpu in view.topology.node_of}
            emptiest = sorted(load, key=lambda gpu: (load[gpu], len(view.jobs_on(gpu)), gpu))
            self._add(view, plan, job, Allocation(tuple(sorted(emptiest[: job.job.gpus]))))
        return plan

    def _has_company(self, view: View, job: JobView) -> bool:
        """Whether another job, a resident or one that waits, could use the GPUs."""
        return bool(view.queue) or any(len(view.jobs_on(gpu)) > 1 for gpu in job.gpus)

    def _add(self, view: View, plan: list[Decision], job: JobView, allocation: Allocation) -> None:
        decision = Decision(job.job.id, allocation, "its turn" if allocation.active else "another's turn")
        try:
            check(view, [*plan, decision])
        except IllegalPlan:
            return
        plan.append(decision)
