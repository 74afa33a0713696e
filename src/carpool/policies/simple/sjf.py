"""Shortest job first, each job alone on its GPUs, without preemption."""

from dataclasses import dataclass

from carpool.core.model import Decision
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option, shortest_first
from carpool.policies.simple.fifo import start_in_order


@dataclass
class Sjf(BasePolicy):
    """The job with the least time left starts first, alone on its GPUs."""

    name = "sjf"
    skip: bool = option(True, "let longer jobs start before one that does not fit")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        return start_in_order(
            view,
            self.skip,
            "it is the shortest job in the queue that fits" if self.skip else "it is the shortest job in the queue",
        )
