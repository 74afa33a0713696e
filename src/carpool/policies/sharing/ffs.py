"""SJF-FFS: shortest job first with first-fit sharing, the paper's baseline that shares without weighing the cost."""

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.free import lowest
from carpool.core.model import Decision, GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, Explanation, shortest_first
from carpool.policies.sharing.explain import ASKED_NOT_TO_SHARE


@dataclass
class SjfFfs(BasePolicy):
    """Shortest job first; a job that finds no free GPUs joins the first GPUs with room, whatever that costs."""

    name = "sjf-ffs"

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        pending = draft.pending(draft.free_count + draft.shareable().bit_count())
        for job in pending:
            if not draft.start(job, "it is the shortest job in the queue that fits") and not self._join_first_fit(
                draft, job
            ):
                pending.skip_alike()
        return draft.decisions

    def explain(self, view: View, job: JobView) -> Explanation | None:
        if view.jobs_per_gpu == 1:
            return None
        if job.shape.exclusive:
            return ASKED_NOT_TO_SHARE
        return Explanation("too few GPUs have room for it within the limits of the jobs there and the memory")

    def _join_first_fit(self, draft: Draft, job: JobView) -> bool:
        shape = job.shape
        if shape.exclusive or not draft.may_start(job):
            return False
        shareable = draft.shareable()
        if draft.free_count + shareable.bit_count() < shape.gpus:
            return False
        for size in shape.sizes:
            gpus = self._first_fit(draft, job, size, shareable)
            gpus += draft.some_free(job, shape.gpus - len(gpus), size)
            if len(gpus) == shape.gpus:
                draft.assign(
                    job,
                    gpus,
                    size,
                    "it is the shortest job in the queue; too few GPUs are free, so it joins the first jobs with room",
                )
                return True
        return False

    def _first_fit(self, draft: Draft, job: JobView, size: Size, shareable: int) -> list[GpuId]:
        gpus: list[GpuId] = []
        while shareable and len(gpus) < job.shape.gpus:
            gpu = lowest(shareable)
            shareable &= shareable - 1
            if draft.accepts(gpu, job, size):
                gpus.append(gpu)
        return gpus
