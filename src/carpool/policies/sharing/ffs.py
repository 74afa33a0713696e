"""SJF with first-fit sharing: the paper's baseline for sharing without thinking."""

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.free import lowest
from carpool.core.model import Decision, GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, shortest_first


@dataclass
class SjfFfs(BasePolicy):
    """Shortest job first; what finds no free GPUs joins the first lent GPUs with room, whatever that costs."""

    name = "sjf-ffs"

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        pending = draft.pending(draft.free_count + draft.shareable().bit_count())
        for job in pending:
            if not draft.start(job, "shortest in the queue that fits") and not self._join_first_fit(draft, job):
                pending.skip_alike()
        return draft.decisions

    def _join_first_fit(self, draft: Draft, job: JobView) -> bool:
        shape = job.shape
        if shape.exclusive or not draft.may_start(job):
            return False
        lent = draft.shareable()
        if draft.free_count + lent.bit_count() < shape.gpus:
            return False
        for size in shape.sizes:
            gpus = self._first_fit(draft, job, size, lent)
            gpus += draft.some_free(shape.gpus - len(gpus), size)
            if len(gpus) == shape.gpus:
                draft.assign(job, gpus, size, "shortest in the queue; no GPUs free, joins the first that have room")
                return True
        return False

    def _first_fit(self, draft: Draft, job: JobView, size: Size, lent: int) -> list[GpuId]:
        gpus: list[GpuId] = []
        while lent and len(gpus) < job.shape.gpus:
            gpu = lowest(lent)
            lent &= lent - 1
            if draft.accepts(gpu, job, size):
                gpus.append(gpu)
        return gpus
