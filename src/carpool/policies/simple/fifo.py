"""First in, first out."""

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Decision
from carpool.core.tenants import IN_ORDER
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option


@dataclass
class Fifo(BasePolicy):
    """Jobs start in order of submission, each alone on its GPUs."""

    name = "fifo"
    entitlement = IN_ORDER
    skip: bool = option(False, "let later jobs start before one that does not fit")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.job.submitted,)

    def decide(self, view: View) -> list[Decision]:
        return start_in_order(
            view,
            self.skip,
            "it is the first job in the queue that fits" if self.skip else "it is the first job in the queue",
        )


def start_in_order(view: View, skip: bool, why: str) -> list[Decision]:
    """Start pending jobs alone, in the queue's order. A job that does not fit is skipped, or blocks all others."""
    if not view.free.count or not len(view.queue):
        return []
    held: dict[str, int] = {}
    pending = view.queue.scan(view.free.count if skip else None, held=held)
    draft: Draft | None = None
    for job in pending:
        if draft is None:  # where every job needs more GPUs than are free, none is made
            draft = Draft(view, held=held)
        if draft.start(job, why):
            if not draft.free_count:
                break
            continue
        if not skip and draft.may_start(job):  # a job at a user's limit does not block the others
            break
        pending.skip_alike()
    return draft.decisions if draft is not None else []
