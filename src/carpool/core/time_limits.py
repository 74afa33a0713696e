"""Time limits of jobs: which one a job has, when it is warned, and why it ends.

A limit counts the seconds in which a job computes. `transitions` applies a limit at submission and at its end;
`State.refusal` refuses one above the maximum of a group. Drivers ask `due` or `JobRecord.limit_left` when to say
`LimitNeared` and `LimitReached`.
"""

from collections.abc import Iterable, Iterator, Mapping

from carpool.core import events as ev
from carpool.core.model import Job, UserGroup
from carpool.core.record import JobRecord

NOTICE_S = 300.0
"""Seconds before its limit at which a job is warned and asked for a checkpoint, at most."""
NOTICE_PART = 0.1
"""Part of its limit before the end of which a job with a short limit is warned."""


def notice_s(limit_s: float) -> float:
    """Return how many seconds before its limit a job is warned."""
    return min(NOTICE_S, NOTICE_PART * limit_s)


def limit_of(job: Job, groups: Mapping[str, UserGroup]) -> float | None:
    """Return the time limit of a job: its own, else the default of its group, and never above the group's maximum."""
    group = groups.get(job.group)
    if group is None:
        return job.limit_s
    wanted = group.default_limit_s if job.limit_s is None else job.limit_s
    given = [limit for limit in (wanted, group.max_limit_s) if limit is not None]
    return min(given, default=None)


def limit_problem(job: Job, groups: Mapping[str, UserGroup]) -> str | None:
    """Return why a job may not have the limit that it asks for, or None."""
    group = groups.get(job.group)
    if group is None or group.max_limit_s is None or job.limit_s is None or job.limit_s <= group.max_limit_s:
        return None
    return (
        f"limit: job {job.id} asks for {hours(job.limit_s)} and group {job.group or '(none)'} allows "
        f"{hours(group.max_limit_s)}; ask for at most that"
    )


def due(records: Iterable[JobRecord], now: float) -> Iterator[ev.Event]:
    """Yield the events of jobs that are near their limits or have reached them, as long as they are not applied."""
    for record in records:
        if record.limit_s is None or not record.iteration_s:
            continue
        left = record.limit_left(now)
        if left <= 0.0:
            yield ev.LimitReached(now, record.job.id, record.attempt)
        elif not record.near_limit and left <= notice_s(record.limit_s):
            yield ev.LimitNeared(now, record.job.id, record.attempt, left)


def reason_at_limit(limit_s: float) -> str:
    """Return why a job has ended that reached its limit."""
    return f"ran to its limit of {hours(limit_s)}"


def hours(seconds: float) -> str:
    """Return a duration in the largest unit that it is at least one of."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{round(seconds / size, 2):g}{unit}"
    return f"{round(seconds, 2):g}s"
