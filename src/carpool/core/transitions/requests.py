"""What users ask for a job: submit, cancel, requeue, hold, pause, change."""

from dataclasses import replace
from typing import Any

from carpool.core import events as ev
from carpool.core.claims import preempt
from carpool.core.healing import note_guess
from carpool.core.model import WORKING, Status
from carpool.core.pausing import pause
from carpool.core.queueing import dequeue, end, enqueue, has_finished, never_starts, requeue, reshape
from carpool.core.record import JobRecord
from carpool.core.state import State, handles
from carpool.core.time_limits import limit_of
from carpool.core.transitions.endings import wind_down


@handles(ev.Submitted)
def _submitted(state: State, event: ev.Submitted) -> None:
    job = event.job
    if job.id in state.jobs or job.id in state.ended:
        raise ValueError(f"job {job.id} exists already")
    shape = state.shape_of(job, job.priority)
    record = JobRecord(job, shape, state.submissions, state.perf.iteration_time(job, 1, shape.placement))
    state.submissions += 1
    if job.user:
        note_guess(state, record)
    record.startup_s = state.perf.startup_s(job)
    record.limit_s = limit_of(job, state.tenants.settings) if state.tenants.settings else job.limit_s
    state.jobs[job.id] = record
    if state.tenants.on:
        state.tenants.count(record, 1)
    record.pending_since = state.now
    if job.after:
        record.waits_for = tuple([name for name in dict.fromkeys(job.after) if not has_finished(state, name)])
    if not record.waits_for:
        enqueue(state, record)
        return
    record.status = Status.BLOCKED
    for name in record.waits_for:
        state.dependents.setdefault(name, []).append(job.id)
    failed = next((state.ended[name] for name in record.waits_for if name in state.ended), None)
    if failed is not None:
        end(state, record, Status.CANCELLED, never_starts(failed))


@handles(ev.Cancelled)
def _cancelled(state: State, event: ev.Cancelled) -> None:
    record = state.jobs.get(event.job)
    if record is None:
        return
    record.reason = "cancelled by its owner"
    record.at_limit = False
    if record.gpus:
        wind_down(state, record)
    elif record.status is Status.STOPPING:
        record.status = Status.CANCELLING
    else:
        end(state, record, Status.CANCELLED, record.reason)


@handles(ev.Requeued)
def _requeued(state: State, event: ev.Requeued) -> None:
    record = state.current(event)
    if record is not None and record.status in WORKING:
        preempt(state, record)


@handles(ev.Held)
def _held(state: State, event: ev.Held) -> None:
    record = state.jobs.get(event.job)
    if record is None:
        return
    record.hold_why = event.why or record.hold_why
    record.held_for_good = event.for_good or record.held_for_good
    if record.on_hold:
        return
    record.on_hold = True
    if record.status is Status.PENDING:
        dequeue(state, record)
        record.status = Status.HELD
        state.capacity_changed()  # jobs behind it may start now


@handles(ev.Released)
def _released(state: State, event: ev.Released) -> None:
    record = state.jobs.get(event.job)
    if record is None or record.held_for_good:
        return
    record.on_hold, record.hold_why = False, ""
    if record.status is Status.HELD:
        requeue(state, record)
        state.capacity_changed()


@handles(ev.PausedByOwner)
def _paused_by_owner(state: State, event: ev.PausedByOwner) -> None:
    record = state.jobs.get(event.job)
    if record is None or record.status not in WORKING:
        return
    record.paused_by_owner = True
    if record.status is Status.RUNNING:  # a job that starts or resumes is paused as soon as it runs
        pause(state, record)


@handles(ev.ResumedByOwner)
def _resumed_by_owner(state: State, event: ev.ResumedByOwner) -> None:
    record = state.jobs.get(event.job)
    if record is not None and record.paused_by_owner and not record.kept_paused:
        record.paused_by_owner = False
        state.awakened[record.seq] = record
        state.capacity_changed()


@handles(ev.ConstraintsChanged)
def _constraints_changed(state: State, event: ev.ConstraintsChanged) -> None:
    record = state.jobs.get(event.job)
    if record is None:
        return
    waits = not record.gpus
    changes: dict[str, Any] = {}
    if event.can_shrink is not None and (waits or event.can_shrink):
        changes["can_shrink"] = event.can_shrink
    if event.min_accumulation is not None and waits:
        changes["min_accumulation"] = min(event.min_accumulation, record.job.batch)
    if event.exclusive is not None and waits:
        changes["exclusive"] = event.exclusive
    if event.can_pause is not None and (waits or event.can_pause):
        changes["can_pause"] = event.can_pause
    record.job = replace(record.job, **changes)
    reshape(state, record, record.shape.priority)
    state.capacity_changed()


@handles(ev.PriorityChanged)
def _priority_changed(state: State, event: ev.PriorityChanged) -> None:
    record = state.jobs.get(event.job)
    if record is None:
        return
    state.capacity_changed()
    if event.priority is not None:
        reshape(state, record, event.priority)
    elif record.status is Status.PENDING:
        reshape(state, record, record.shape.priority)
