"""A policy for chaos.py that pauses, resumes and starts jobs at random.

It keeps those of its random decisions that break no rule, and changes ten times a second which jobs compute.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from carpool.core.model import Allocation, Decision, Status
from carpool.core.rules import IllegalPlan, check
from carpool.policies.base import BasePolicy

EVERY_S = 0.1


@dataclass
class Restless(BasePolicy):
    """Pauses and resumes at random."""

    name: ClassVar[str] = "restless"
    pauses: ClassVar[bool] = True

    def key(self, job, now):
        return (job.job.submitted,)

    def decide(self, view):
        drawn = Random(view.now)
        gpus = sorted(view.topology.node_of)
        pauses, resumes = [], []
        for record in view.running:
            again = Allocation(record.gpus, record.accumulation, record.batch, record.status is Status.PAUSED)
            if record.status is Status.RUNNING and record.job.can_pause and drawn.random() < 0.5:
                pauses.append(Decision(record.job.id, again, "chance"))
            elif record.status is Status.PAUSED and not record.paused_by_owner and drawn.random() < 0.6:
                resumes.append(Decision(record.job.id, again, "chance"))
        starts = []
        for record, _ in zip(view.queue, range(4), strict=False):
            place = tuple(sorted(drawn.sample(gpus, record.job.gpus)))
            starts.append(Decision(record.job.id, Allocation(place), "chance"))
        changes = resumes + starts
        drawn.shuffle(changes)
        kept = []
        for decision in (*pauses, *changes):
            try:
                check(view, [*kept, decision])
                kept.append(decision)
            except IllegalPlan:
                continue
        return kept

    def wake(self, view):
        return view.now + EVERY_S
