"""What the preemptive policies have in common: all jobs, running or not, are sorted by one key, and the first of them
get the GPUs. `tiresias`, `srtf`, `srsf` and `las` differ only in that key."""

from collections.abc import Callable
from heapq import merge

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.shapes import Shape
from carpool.core.view import JobView, View

Rank = tuple[float, tuple[int, ...], tuple[float, ...], float]
"""−priority, the rank of the job's tenants, the policy's key, and `seq`, so that no two jobs have the same rank."""
RankedJob = tuple[Rank, JobView]
RESTART_S = 30.0
"""Default cost of a restart in seconds, the one that Pollux's authors charge."""


def by_key(key: Callable[[JobView, float], tuple[float, ...]], view: View) -> Callable[[JobView], Rank]:
    """Return the order of the queue, extended to running jobs; equal keys are sorted by submission."""
    now = view.now
    if not view.shares_count:
        return lambda job: (-job.shape.priority, (), key(job, now), job.seq)
    ranks = view.ranks_of_holders()

    def rank(job: JobView) -> Rank:
        tenants = ranks.get(job.seq)
        return (-job.shape.priority, view.rank_of(job) if tenants is None else tenants, key(job, now), job.seq)

    return rank


def first_in_order(view: View, rank: Callable[[JobView], Rank], stops: str, starts: str) -> list[Decision]:
    """Give the GPUs to the first jobs in order, running or not, each alone, and suspend the other running jobs.

    `stops` and `starts` are the reasons that users read.
    """
    if not len(view.queue):
        return []
    running, capacity = [], view.topology.total()
    for job in view.running:
        if job.status is Status.CANCELLING or not job.job.can_suspend:
            capacity -= len(job.gpus)  # it keeps its GPUs in any case
        else:
            running.append((rank(job), job))
    running.sort()
    most: dict[Shape, int] = {}  # there are enough GPUs, but too few have the memory, or a tenant is at a limit
    while True:
        keep, start = _choose(view, running, rank, capacity, most)
        if not start:
            return []
        draft = Draft(view)
        for _, job in running:
            if job.seq not in keep:
                draft.stop(job, stops)
        failed = next((job for job in start if not draft.start(job, starts)), None)
        if failed is None:
            return draft.decisions
        most[failed.shape] = sum(job.shape is failed.shape for job in start[: start.index(failed)])


def _choose(
    view: View, running: list[RankedJob], rank: Callable[[JobView], Rank], left: int, most: dict[Shape, int]
) -> tuple[set[int], list[JobView]]:
    """Return which jobs keep running (by `seq`) and which start on `left` GPUs; a job that does not fit is skipped.

    `most` is the number of jobs of a shape that may start, where not all can.
    """
    started: dict[Shape, int] = {}
    keep: set[int] = set()
    start: list[JobView] = []
    for _, job in merge(running, ((rank(job), job) for job in view.queue.scan(left))):
        if left == 0:
            break
        fits = job.shape.gpus <= left
        if job.gpus:
            if fits:
                keep.add(job.seq)
                left -= job.shape.gpus
        elif fits and (not most or started.get(job.shape, 0) < most.get(job.shape, len(view.queue))):
            started[job.shape] = started.get(job.shape, 0) + 1
            start.append(job)
            left -= job.shape.gpus
    return keep, start
