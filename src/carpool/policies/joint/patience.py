"""How long jobs wait at most before they go first: the joint rule's patience.

A job starves if it has waited for more than `patience` times its length and the mean JCT; it is overdue if it has lost
that much to waits and pauses together. `policy` asks which jobs that are when a pass begins.
"""

from carpool.core.model import Status
from carpool.core.view import JobView, View


def is_overdue(job: JobView, now: float, patience: float, mean_jct_s: float) -> bool:
    """Return whether a job has lost more than `patience` times its time left and the mean JCT to waits and pauses."""
    if not patience:
        return False
    lost = job.waited(now) + job.paused(now)
    return lost > patience * mean_jct_s and lost > patience * job.alone_left(now)


def starved(view: View, patience: float) -> list[JobView]:
    """Return the jobs that have waited more than `patience` times their length and the mean JCT, in queue order."""
    now, least = view.now, patience * view.mean_jct_s
    found = []
    young = now - least
    for _, record in view.queue.by_age:
        job = record.job
        if job.submitted >= young:
            break
        if patience * (job.iterations - record.done) * record.alone_iteration_s >= now - job.submitted:
            continue  # mostly: it is too long to have starved since it came, and a call for each job would cost more
        waited = record.waited(now)
        if waited > least and waited > patience * record.alone_left(now):
            found.append(record)
    found.sort(key=lambda record: (-record.shape.priority, record.seq))
    return found


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
    paused = [job for job in found.values() if job.status is Status.PAUSED and not job.paused_by_owner]
    return sorted(paused, key=lambda job: (-job.shape.priority, job.alone_left(now), job.seq))
