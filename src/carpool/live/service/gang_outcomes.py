"""What a gang's end means for its job, as events. Pure functions; `executor_events.py` calls them with the state."""

from carpool.core import events as ev
from carpool.core.model import ALIVE, Status, accumulations
from carpool.core.record import JobRecord
from carpool.live.executors.base import GangEnded, GangOutcome

RESTARTED = (GangOutcome.LOST, GangOutcome.NEVER_STARTED, GangOutcome.STOPPED)
"""Outcomes that are not the job's fault, so that it restarts without using a retry."""


def end_events(ended: GangEnded, record: JobRecord, now: float, shared: bool) -> list[ev.Event]:
    """Return the events of an end. `record` is at the attempt that ended; `shared`: the gang had mates at some time."""
    job, attempt = ended.job, ended.attempt
    if record.status not in ALIVE:  # its GPUs are gone, and it is in the queue already
        return []
    if ended.outcome is GangOutcome.FINISHED:
        return [ev.Finished(now, job, attempt)]
    saved = record.checkpoint if ended.checkpoint is None else ended.checkpoint
    isolate = ended.outcome is GangOutcome.LOST and ended.needs_alone
    alone: list[ev.Event] = [ev.ConstraintsChanged(now, job, exclusive=True)] if isolate else []
    if record.status in (Status.STOPPING, Status.CANCELLING):
        return [ev.Stopped(now, job, attempt, saved), *alone]
    kept: list[ev.Event] = [ev.Checkpointed(now, job, attempt, saved)] if saved != record.checkpoint else []
    if ended.outcome is GangOutcome.REFUSED:  # it would be refused again
        return [ev.Held(now, job, ended.reason), ev.Failed(now, job, attempt, ended.reason, True)]
    if ended.outcome is GangOutcome.OUT_OF_MEMORY:
        return kept + _out_of_memory(ended, record, now, shared)
    reason = ended.reason or "its workers were stopped on a request that is not recorded"
    return [*kept, ev.Failed(now, job, attempt, reason, ended.outcome in RESTARTED), *alone]


def _out_of_memory(ended: GangEnded, record: JobRecord, now: float, shared: bool) -> list[ev.Event]:
    """Restart with a split batch; if that was tried, alone; if that was tried too, fail."""
    job, attempt = ended.job, ended.attempt
    finer = [accumulation for accumulation in accumulations(record.job.batch) if accumulation > record.accumulation]
    if record.job.can_shrink and finer and record.job.min_accumulation == 1 and not ended.needs_alone:
        reason = f"{ended.reason}; it restarts with its batch split into {finer[0]}"
        return [ev.Failed(now, job, attempt, reason, True), ev.ConstraintsChanged(now, job, min_accumulation=finer[0])]
    if shared and not record.job.exclusive:
        reason = f"{ended.reason}; it restarts alone on its GPUs"
        return [ev.Failed(now, job, attempt, reason, True), ev.ConstraintsChanged(now, job, exclusive=True)]
    return [ev.Failed(now, job, attempt, f"{ended.reason}, although it had its GPUs to itself")]
