"""How long jobs wait at most before they go first: the joint rule's patience.

A job starves if it has waited for more than `patience` times its length and the mean JCT; it is overdue if it has lost
that much to waits and pauses together. `policy` asks which jobs that are when a pass begins.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from carpool.core.draft import Draft
from carpool.core.model import Status
from carpool.core.view import JobView, View
from carpool.policies.joint.order import service_left

AT_ONCE = 4
"""Number of starved jobs for which GPUs are reserved at the same time. The others follow in turn, the oldest first."""

PART = 0.0625
"""Part of the GPUs from which on starved jobs get no more of them before others. Where more long jobs are submitted
than can run, all of them starve in the end, and would keep every short job waiting."""

ROUNDING_S = 1.0
"""Seconds by which a job may seem to starve too late, because moments are rounded."""


def is_overdue(job: JobView, now: float, patience: float, mean_jct_s: float) -> bool:
    """Return whether a job has lost more than `patience` times its time left and the mean JCT to waits and pauses."""
    if not patience:
        return False
    lost = job.waited(now) + job.paused(now)
    return lost > patience * mean_jct_s and lost > patience * job.alone_left(now)


def starved_first(draft: Draft, patience: float) -> list[JobView]:
    """Return the starved jobs that go first now: of those that can start at all, those that have starved for longest.

    A node may have been lost, or limits may keep a job from starting. It must not hold up all others.
    """
    view = draft.view
    total, largest = len(view.topology.node_of), view.topology.largest_memory
    longest = starved(view, patience) if patience else iter(())
    first = next(longest, None)  # mostly there is none, and what others hold need not be counted
    if first is None or _held_by_starved(view, patience) >= PART * total:
        return []
    possible = (
        job
        for job in chain((first,), longest)
        if job.shape.gpus <= total and job.shape.sizes[-1].memory <= largest and draft.may_start(job)
    )
    return list(islice(possible, AT_ONCE))


def starved(view: View, patience: float) -> Iterator[JobView]:
    """Yield the jobs that have waited more than `patience` times their length and the mean JCT, by priority and by the
    moment at which they had waited for that many times their length."""
    queue, now, least = view.queue, view.now, patience * view.mean_jct_s
    by_moment = queue.by_patience(patience)
    number = bisect_left(by_moment, (now + ROUNDING_S,))
    perhaps: Iterable[JobView] = (job for *_, job in islice(by_moment, number))
    if number and len({shape.priority for shape in queue.buckets}) > 1:
        perhaps = sorted(perhaps, key=lambda job: -job.shape.priority)
    for job in perhaps:
        if (waited := job.waited(now)) > least and waited > patience * job.alone_left(now):
            yield job


def _held_by_starved(view: View, patience: float) -> int:
    """Return the number of GPUs of jobs that starved before they got them."""
    long = view.long_waits.longer_than(patience * view.mean_jct_s)
    return sum([len(job.gpus) for job in long if job.waited(view.now) > patience * job.alone_left(view.now)])


def resumable(view: View, patience: float) -> list[JobView]:
    """Return the paused jobs that may go on now, in queue order.

    Their mates changed at this moment, or all of their GPUs are idle, or they have been paused for too long.
    """
    found = dict(view.awakened)
    idle = view.idle()
    for gpu in idle:
        for job in view.jobs_on(gpu):
            if job.seq not in found and all(other in idle for other in job.gpus):
                found[job.seq] = job
    now, mean = view.now, view.mean_jct_s
    for job in view.overdue(patience).by(now, patience * mean) if patience else ():
        if now - job.paused_since >= patience * mean and is_overdue(job, now, patience, mean):
            found[job.seq] = job
    return paused_in_order(found.values(), now)


def paused_in_order(jobs: Iterable[JobView], now: float) -> list[JobView]:
    """Return those of some jobs that are paused and may go on, each once, in queue order."""
    paused = {job.seq: job for job in jobs if job.status is Status.PAUSED and not job.paused_by_owner}
    return sorted(paused.values(), key=lambda job: (-job.shape.priority, service_left(job, now), job.seq))
