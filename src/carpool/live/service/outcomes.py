"""What a gang's end means for its job: the events that it gives. Pure; the driver calls it with the state at hand."""

from carpool.core import events as ev
from carpool.core.model import Status, accumulations
from carpool.core.record import JobRecord
from carpool.core.state import ALIVE
from carpool.live.executors.base import Ended, Outcome


def events_of(ended: Ended, record: JobRecord, now: float, shared: bool) -> list[ev.Event]:
    """`record` is at the attempt that ended; `shared`: it had mates at some time of that attempt."""
    job, attempt = ended.job, ended.attempt
    if record.status not in ALIVE:  # its GPUs are gone, and it waits already
        return []
    if ended.outcome is Outcome.FINISHED:
        return [ev.Finished(now, job, attempt)]
    saved = record.checkpoint if ended.done is None else ended.done
    alone: list[ev.Event] = [ev.ConstraintsChanged(now, job, exclusive=True)] if _reached_too_often(ended) else []
    if record.status in (Status.STOPPING, Status.CANCELLING):
        return [ev.Stopped(now, job, attempt, saved), *alone]
    kept: list[ev.Event] = [ev.Checkpointed(now, job, attempt, saved)] if saved != record.checkpoint else []
    if ended.outcome is Outcome.OUT_OF_MEMORY:
        return kept + _short_of_memory(ended, record, now, shared)
    again = ended.outcome in (Outcome.LOST, Outcome.NEVER, Outcome.STOPPED)
    reason = ended.reason or "its workers were stopped, and nobody remembers why"
    return [*kept, ev.Failed(now, job, attempt, reason, again), *alone]


def _reached_too_often(ended: Ended) -> bool:
    return ended.outcome is Outcome.LOST and ended.needs_alone


def _short_of_memory(ended: Ended, record: JobRecord, now: float, shared: bool) -> list[ev.Event]:
    """Back with smaller pieces; if that was tried, alone; if that was tried, it has failed."""
    job, attempt = ended.job, ended.attempt
    finer = [accumulation for accumulation in accumulations(record.job.batch) if accumulation > record.accumulation]
    if record.job.can_shrink and finer and record.job.min_accumulation == 1 and not ended.needs_alone:
        reason = f"{ended.reason}; it comes back with its batch cut into {finer[0]}"
        return [ev.Failed(now, job, attempt, reason, True), ev.ConstraintsChanged(now, job, min_accumulation=finer[0])]
    if shared and not record.job.exclusive:
        reason = f"{ended.reason}; it comes back alone on its GPUs"
        return [ev.Failed(now, job, attempt, reason, True), ev.ConstraintsChanged(now, job, exclusive=True)]
    return [ev.Failed(now, job, attempt, f"{ended.reason}, though it had its GPUs to itself")]
