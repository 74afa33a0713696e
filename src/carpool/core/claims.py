"""Which job holds which GPUs with how much memory: claims, releases and re-tunes.

Keeps the residents, the counts of each user and the pace of mates up to date. Called by `transitions`.
"""

from carpool.core import trials
from carpool.core.charging import charge_mates, rate
from carpool.core.joins import join, part
from carpool.core.model import Allocation, Job, Status, as_scaled
from carpool.core.pace import end_startup, predict_alone, settle, update_pace
from carpool.core.pausing import end_pause
from carpool.core.queueing import dequeue
from carpool.core.record import JobRecord
from carpool.core.state import State


def claim(state: State, record: JobRecord, allocation: Allocation) -> None:
    """Give a job the GPUs of an allocation; its workers start from now on."""
    if record.queue_entry is not None:
        dequeue(state, record)
    record.status = Status.STARTING
    record.warming_up = False
    record.attempt += 1
    record.gpus = allocation.gpus
    record.active = allocation.active
    record.standby = not record.active
    record.accumulation = allocation.accumulation
    if allocation.batch is None:
        record.memory = state.perf.memory(record.job, allocation.accumulation)
    else:
        record.batch = allocation.batch
        record.memory = memory_needed(state, record.job, allocation)
    record.gpus_since = state.now
    predict_alone(state, record)
    state.holders[record.seq] = record
    if state.limits:
        count_for_user(state, record, 1)
    most = state.cluster.enter(record)
    if state.tenants.on:
        state.tenants.hold(record, 1, rate(state, record), state.now)
        if most > 1:
            charge_mates(state, record)
    if most > state.most_residents:
        state.most_residents = most
    if record.standby:
        state.cluster.note_activity(record.gpus)
    if most > 1:
        mates = state.cluster.mates(record)
        if record.active:
            join(state, record, mates)
        for mate in mates:
            state.reindex(mate)
    state.reindex(record)


def leave(state: State, record: JobRecord) -> None:
    """Take all GPUs away from a job; its mates speed up."""
    settle(state, record)
    if record.warming_up:
        end_startup(state, record)
    if state.trials.running:
        trials.withdraw(state, record)
    if record.paused_since >= 0.0:
        end_pause(state, record)
    record.active = record.standby = False
    record.iteration_s = 0.0
    record.slowdown = 1.0
    record.pace_version += 1
    mates = state.cluster.mates(record)
    if record.shared_with:
        part(record, mates)
    state.cluster.leave(record)
    if state.tenants.on:
        state.tenants.hold(record, -1, 0.0, state.now)
        for mate in mates:
            state.tenants.charge(mate, rate(state, mate), state.now)
    record.served = record.service(state.now)
    del state.holders[record.seq]
    if state.limits:
        count_for_user(state, record, -1)
    record.gpus = ()
    record.memory = 0
    if record.batch is not None:
        record.forget_scale()
    state.reindex(record)
    if mates:
        update_pace(state, mates, left=record)
    state.capacity_changed(routine=True)


def preempt(state: State, record: JobRecord) -> None:
    """Take the GPUs away from a job whose workers are still to stop."""
    record.leaving = record.gpus
    leave(state, record)
    record.status = Status.STOPPING
    record.preemptions += 1
    state.preemptions += 1


def retune(state: State, record: JobRecord, allocation: Allocation) -> None:
    """Let a running job change its accumulation or batch on the same GPUs."""
    settle(state, record)
    record.accumulation = allocation.accumulation
    if allocation.batch is None:
        record.forget_scale()
    record.batch = allocation.batch
    needed = memory_needed(state, record.job, allocation)
    if needed > record.memory:  # until the workers confirm, the larger of the two is reserved
        state.reserve(record, needed)
    state.reindex(record)


def memory_needed(state: State, job: Job, allocation: Allocation) -> int:
    """Return the bytes that a job needs on each GPU of an allocation."""
    return state.perf.memory(as_scaled(job, allocation), allocation.accumulation)


def count_for_user(state: State, record: JobRecord, sign: int) -> None:
    """Add a job and its GPUs to what its user holds (sign 1), or subtract them (sign −1)."""
    held = state.held.setdefault(record.job.user, [0, 0])
    held[0] += sign
    held[1] += sign * len(record.gpus)
