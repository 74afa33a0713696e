"""EASY backfilling, the default of batch systems: first come first served, with a reservation for the head of the queue
(Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 12(6), 2001).

A head that does not fit gets a reservation at the earliest moment at which enough GPUs will be free. A later job may
start now if it ends before that moment or takes only GPUs that the head will not need. Simplifications: the run times
are those that the scheduler believes, not users' estimates; GPUs are counted, not named, so the head can start later
than reserved where memory or placement makes GPUs unequal.
"""

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Decision, GpuId
from carpool.core.perf import Placement
from carpool.core.shapes import Size
from carpool.core.tenants import IN_ORDER
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy


@dataclass
class Backfill(BasePolicy):
    """Jobs start in order of submission; later ones fill gaps where that does not delay the first that waits."""

    name = "backfill"
    entitlement = IN_ORDER

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.job.submitted,)

    def decide(self, view: View) -> list[Decision]:
        if not view.free.count:
            return []
        draft = Draft(view)
        ends = [(view.end_times.ends[job.seq], len(job.gpus)) for job in view.running]
        reservation: HeadReservation | None = None
        pending = draft.pending()
        for job in pending:
            if not draft.free_count:
                break
            place = draft.place_alone(job)
            if place is None:
                if reservation is None and draft.may_start(job):  # a job at a user's limit holds no other back
                    reservation = HeadReservation.of(job, view.now, draft.free_count, ends)
                pending.skip_alike()
                continue
            end = _end(view, job, *place)
            if reservation is None:
                draft.start(job, "it is the first job in the queue")
                ends.append((end, job.shape.gpus))
            elif reservation.allows(job, end):
                draft.start(job, "fills a gap and does not delay the first in the queue")
        return draft.decisions


def _end(view: View, job: JobView, gpus: tuple[GpuId, ...], size: Size) -> float:
    """Return when the job would end if it started there now."""
    placement = Placement(len(gpus), view.topology.nodes_spanned(gpus))
    seconds = view.perf.iteration_time(job.job, size.accumulation, placement) * job.stretch
    return view.now + job.iterations_left(view.now) * seconds


@dataclass
class HeadReservation:
    """When the head of the queue will start, and how many GPUs will then be left over."""

    start: float
    spare: int

    @classmethod
    def of(cls, head: JobView, now: float, free: int, ends: list[tuple[float, int]]) -> "HeadReservation":
        """Reserve GPUs for the head; `ends` says when jobs end and how many GPUs each gives back."""
        start = now
        for end, gpus in sorted(ends):
            if free >= head.shape.gpus and end > start:
                break
            free += gpus
            start = max(start, end)
        return cls(start, free - head.shape.gpus)

    def allows(self, job: JobView, end: float) -> bool:
        """Return whether a job that would end then may start before the head; if so, count its GPUs as taken."""
        if end <= self.start:
            return True
        if job.shape.gpus > self.spare:
            return False
        self.spare -= job.shape.gpus
        return True
