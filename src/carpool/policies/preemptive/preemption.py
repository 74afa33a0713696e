"""What the preemptive policies have in common: all jobs, running or not, are sorted by one key, and the first of them
get the GPUs. `tiresias`, `srtf`, `srsf` and `las` differ only in that key."""

from collections.abc import Callable, Iterable, Mapping
from heapq import merge
from itertools import chain

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.shapes import Shape
from carpool.core.view import JobView, ScanView, View

Key = Callable[[JobView, float], tuple[float, ...]]
"""A policy's `key`."""
Rank = tuple[float, tuple[int, ...], tuple[float, ...], float]
"""−priority, the rank of the job's tenants, the policy's key, and `seq`, so that no two jobs have the same rank."""
RankedJob = tuple[Rank, JobView]
RESTART_S = 30.0
"""Default cost of a restart in seconds, the one that Pollux's authors charge."""


def first_in_order(view: View, key: Key, stops: str, starts: str) -> list[Decision]:
    """Give the GPUs to the first jobs in the order of the key, running or not, each alone, and suspend the other
    running jobs. Equal keys are sorted by submission.

    `stops` and `starts` are the reasons that users read.
    """
    if not len(view.queue):
        return []
    running, capacity = [], view.topology.total()
    rank = _rank_of_running(view, key)
    for job in view.running:
        if job.status is Status.CANCELLING or not job.job.can_suspend:
            capacity -= len(job.gpus)  # it keeps its GPUs in any case
        else:
            running.append((rank(job), job))
    most: dict[Shape, int] = {}  # there are enough GPUs, but too few have the memory, or a tenant is at a limit
    while True:
        stop, start = _choose(view, running, key, capacity, most)
        if not start:
            return []
        draft = Draft(view)
        for job in stop:
            draft.stop(job, stops)
        failed = next((job for job in start if not draft.start(job, starts)), None)
        if failed is None:
            return draft.decisions
        most[failed.shape] = sum(job.shape is failed.shape for job in start[: start.index(failed)])


def _rank_of_running(view: View, key: Key) -> Callable[[JobView], Rank]:
    """Return the order of the queue, extended to running jobs."""
    now = view.now
    if not view.shares_count:
        return lambda job: (-job.shape.priority, (), key(job, now), job.seq)
    ranks = view.ranks_of_holders()
    return lambda job: (-job.shape.priority, ranks[job.seq], key(job, now), job.seq)


def _rank_of_pending(view: View, key: Key, held: Mapping[str, int]) -> Callable[[JobView], Rank]:
    """Return the order of the queue, where groups hold as many GPUs as `held` says."""
    now = view.now
    if not view.shares_count:
        return lambda job: (-job.shape.priority, (), key(job, now), job.seq)
    return lambda job: (-job.shape.priority, view.rank_of(job, held.get(job.job.group)), key(job, now), job.seq)


def _choose(
    view: View, running: list[RankedJob], key: Key, left: int, most: dict[Shape, int]
) -> tuple[list[JobView], list[JobView]]:
    """Return which jobs stop and which start, if `left` GPUs go to the first jobs; a job that does not fit is skipped.

    `most` is the number of jobs of a shape that may start, where not all can.
    """
    held: dict[str, int] = {}  # GPUs of the groups of which a job starts
    rank = _rank_of_pending(view, key, held)
    scan = view.queue.scan(left, held=held)
    pending: Iterable[JobView] = scan
    if _gpus(running) <= left:  # no two of them share a GPU, so those that come before all pending jobs go on
        first, running, left = _first_to_start(scan, running, rank, left)
        if first is None:
            return [], []
        pending = chain([first], scan)
    running = sorted(running)
    started: dict[Shape, int] = {}
    keep: set[int] = set()
    start: list[JobView] = []
    for _, job in merge(running, ((rank(job), job) for job in pending)):
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
            if view.shares_count:
                held[job.job.group] = held.get(job.job.group, view.held_by_group(job.job.group)) + job.shape.gpus
    return [job for _, job in running if job.seq not in keep], start


def _first_to_start(
    pending: ScanView, running: list[RankedJob], rank: Callable[[JobView], Rank], left: int
) -> tuple[JobView | None, list[RankedJob], int]:
    """Return the first pending job that fits beside the running jobs before it, the running jobs after it, and how many
    of the `left` GPUs there are for these. None: no pending job fits.

    Most decisions start nothing. Finding that out this way takes no sorting.
    """
    for job in pending:
        if job.shape.gpus <= left:
            own = rank(job)
            later = [one for one in running if one[0] > own]
            left -= _gpus(running) - _gpus(later)
            running = later
            if job.shape.gpus <= left:
                return job, running, left
            if not left:
                break
        pending.skip_alike()  # fewer and fewer GPUs are left
    return None, running, left


def _gpus(running: list[RankedJob]) -> int:
    return sum([job.shape.gpus for _, job in running])
