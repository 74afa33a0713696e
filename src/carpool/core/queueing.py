"""A job's way into the queue, out of it, and to its end. Called by `transitions`, `claims` and `pace`."""

from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State


def enqueue(state: State, record: JobRecord) -> None:
    """Put a job into the queue, or hold it back where it is on hold."""
    record.status = Status.HELD if record.on_hold else Status.PENDING
    record.alone_iteration_s = _best_iteration_time(state, record)
    if record.on_hold:
        return
    state.queue.add(record, state.sort_key(record, state.now))
    state.needs_decision = True


def requeue(state: State, record: JobRecord) -> None:
    """Put a job back into the queue; it begins to wait now."""
    record.pending_since = state.now
    enqueue(state, record)


def dequeue(state: State, record: JobRecord) -> None:
    """Take a pending job out of the queue and count the time that it waited."""
    state.queue.remove(record)
    record.waited_s += state.now - record.pending_since


def reshape(state: State, record: JobRecord, priority: int) -> None:
    """Compute a job's shape and its place in the queue again."""
    waiting = record.status is Status.PENDING
    if waiting:
        state.queue.remove(record)
    record.shape = state.shape_of(record.job, priority)
    if waiting:
        enqueue(state, record)


def resize_pending(state: State) -> None:
    """Compute the sub-batch of pending jobs again: the largest GPU may be another one now."""
    for record in list(state.queue):
        if _best_iteration_time(state, record) != record.alone_iteration_s:
            reshape(state, record, record.shape.priority)


def _best_iteration_time(state: State, record: JobRecord) -> float:
    """Return the iteration time at the most consolidated placement and the largest sub-batch that fits a GPU."""
    largest = state.topology.largest_memory
    for size in record.shape.sizes:
        if size.memory <= largest:
            break
    return record.whole_iteration_s * size.relative_time


def has_finished(state: State, name: str) -> bool:
    """Return whether this job has ended with success."""
    return name in state.ended and state.ended[name].status is Status.FINISHED


def end(state: State, record: JobRecord, status: Status, reason: str) -> None:
    """End a job. Jobs that wait for it are queued if it finished, and end as well if it did not."""
    ending = [(record, status, reason)]  # a list, not recursion: chains of dependent jobs may be long
    while ending:
        record, status, reason = ending.pop()
        _end_one(state, record, status, reason)
        for name in state.dependents.pop(record.job.id, ()) if state.dependents else ():
            later = state.jobs.get(name)
            if later is None or later.status is not Status.BLOCKED:
                continue
            if status is not Status.FINISHED:
                ending.append((later, Status.CANCELLED, never_starts(record)))
                continue
            later.waits_for = tuple([other for other in later.waits_for if other != record.job.id])
            if not later.waits_for:
                requeue(state, later)
    state.capacity_changed(routine=True)


def _end_one(state: State, record: JobRecord, status: Status, reason: str) -> None:
    if record.queue_entry is not None:
        dequeue(state, record)
    now, name = state.now, record.job.id
    record.status = status
    record.reason = reason
    record.ended = now
    record.leaving = ()
    if status is Status.FINISHED:
        state.completed += 1
        state.completed_jct_s += now - record.job.submitted
    del state.jobs[name]
    state.ended[name] = record
    if state.tenants.on:
        state.tenants.count(record, -1)
    if state.accounts.on:
        state.accounts.end(record, now)
    if state.awakened:
        state.awakened.pop(record.seq, None)


def never_starts(earlier: JobRecord) -> str:
    """Return why a job that waits for an earlier one is cancelled."""
    return f"job {earlier.job.id}, which it waits for, {earlier.status}"
