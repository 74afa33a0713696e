"""The statuses of jobs as users see them: in the API, the commands, the dashboard and the metrics.

The scheduler has words of its own for two of them: a job that waits for other jobs is `pending`, and one that is being
cancelled is `stopping`. A pending job on hold is `held` where jobs are filtered, shown and counted; rows of the API
say so in a field of its own.
"""

from carpool.core.model import Status

PUBLIC = {Status.BLOCKED: "pending", Status.HELD: "pending", Status.CANCELLING: "stopping"}
"""The status as users see it, where the scheduler's own word differs."""
SHOWN = tuple(str(one) for one in Status if one is Status.HELD or one not in PUBLIC)
"""The statuses that users see, in the order of a job's life."""
ENDED = (str(Status.FINISHED), str(Status.FAILED), str(Status.CANCELLED))


def shown_status(status: Status) -> str:
    """Return a status as a row of the API shows it."""
    return PUBLIC.get(status, str(status))
