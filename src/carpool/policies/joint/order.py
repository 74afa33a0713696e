"""The order in which the joint rule tries jobs that wait: least service first.

The service that a job has left is its time left alone, times its GPUs. Where jobs wait for GPUs, the sum of completion
times falls the most per GPU second if those go first that need the fewest: of a gang of sixteen GPUs and two of eight
that take half as long again, the two go first, and one job waits instead of two.
"""

from carpool.core.view import JobView, View


def service_left(job: JobView, now: float) -> float:
    """Return the GPU seconds that a job has left alone."""
    return job.shape.gpus * job.alone_left(now)


def goes_before(paused: JobView, pending: JobView, view: View) -> bool:
    """Return whether a paused job is looked at before a pending one: the shares of their tenants count, too."""
    ours, theirs = paused.shape.priority, pending.shape.priority
    lighter = view.weight_of(pending) / view.weight_of(paused) if view.shares_count else 1.0
    less = service_left(paused, view.now) * lighter < service_left(pending, view.now)
    return ours > theirs or (ours == theirs and less)
