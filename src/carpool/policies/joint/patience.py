"""How long jobs wait at most before they go first: the joint rule's patience.

A job starves if it has waited for more than `patience` times its length and the mean JCT; it is overdue if it has lost
that much to waits and pauses together. `policy` asks which jobs that are when a pass begins.
"""

from bisect import bisect_left
from collections.abc import Iterable

from carpool.core.model import Status
from carpool.core.view import JobView, View

ROUNDING_S = 1.0
"""Seconds by which a job may seem to starve too late, because moments are rounded."""


def is_overdue(job: JobView, now: float, patience: float, mean_jct_s: float) -> bool:
    """Return whether a job has lost more than `patience` times its time left and the mean JCT to waits and pauses."""
    if not patience:
        return False
    lost = job.waited(now) + job.paused(now)
    return lost > patience * mean_jct_s and lost > patience * job.alone_left(now)


def starved(view: View, patience: float) -> list[JobView]:
    """Return the jobs that have waited more than `patience` times their length and the mean JCT, in queue order."""
    now, least = view.now, patience * view.mean_jct_s
    found = [
        record
        for record in _perhaps_starved(view, patience, least)
        if (waited := record.waited(now)) > least and waited > patience * record.alone_left(now)
    ]
    found.sort(key=lambda record: (-record.shape.priority, record.seq))
    return found


def _perhaps_starved(view: View, patience: float, least: float) -> list[JobView]:
    """Return the jobs that were submitted long enough ago: by `patience` times their length, or by `least` seconds,
    whichever are fewer. A long queue has many of one sort, and few of both."""
    queue, now = view.queue, view.now
    by_length = queue.by_patience(patience)
    number = bisect_left(by_length, (now + ROUNDING_S,))
    if not number:
        return []
    by_age = queue.by_age
    old = bisect_left(by_age, now - least, key=lambda entry: entry[1].job.submitted)
    return [job for *_, job in by_length[:number]] if number < old else [job for _, job in by_age[:old]]


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
    return sorted(paused.values(), key=lambda job: (-job.shape.priority, job.alone_left(now), job.seq))
