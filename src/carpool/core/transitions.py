"""What each kind of event does to the state: one function for each, found by its `@handles`.

`State.apply` calls them. Events of an earlier attempt, and events about jobs that have ended, are ignored.
"""

from dataclasses import replace
from typing import Any

from carpool.core import events as ev
from carpool.core import learning, trials
from carpool.core.claims import claim, count_for_user, leave, memory_needed, preempt, retune
from carpool.core.model import ALIVE, PAUSE, WORKING, Allocation, Decision, Status
from carpool.core.pace import follow, learn, learn_startup, predict_alone, settle, update_pace
from carpool.core.pausing import end_pause, pause, resume, swap_in, swap_out
from carpool.core.queueing import dequeue, end, enqueue, has_finished, never_starts, requeue, reshape, resize_pending
from carpool.core.record import JobRecord
from carpool.core.state import State, handles

NOTICEABLE = 0.02
"""Relative change of a slow-down after which it is decided again whether a job should share."""

# ---- what users do -----------------------------------------------------------------------------------------------


@handles(ev.Submitted)
def _submitted(state: State, event: ev.Submitted) -> None:
    job = event.job
    if job.id in state.jobs or job.id in state.ended:
        raise ValueError(f"job {job.id} exists already")
    shape = state.shape_of(job, job.priority)
    record = JobRecord(job, shape, state.submissions, state.perf.iteration_time(job, 1, shape.placement))
    state.submissions += 1
    record.startup_s = state.perf.startup_s(job)
    state.jobs[job.id] = record
    record.pending_since = state.now
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
    if record.gpus:
        settle(state, record)
        trials.withdraw(state, record)
        end_pause(state, record)
        record.iteration_s = 0.0
        record.status = Status.CANCELLING
        record.warming_up = record.standby = False
        record.pace_version += 1
        update_pace(state, [record, *state.cluster.mates(record)])
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
    if record is None or record.on_hold:
        return
    record.on_hold = True
    if record.status is Status.PENDING:
        dequeue(state, record)
        record.status = Status.HELD


@handles(ev.Released)
def _released(state: State, event: ev.Released) -> None:
    record = state.jobs.get(event.job)
    if record is None:
        return
    record.on_hold = False
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
    if record is not None and record.paused_by_owner:
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


@handles(ev.LimitsChanged)
def _limits_changed(state: State, event: ev.LimitsChanged) -> None:
    if not state.limits:  # without limits the holdings of users are not counted
        for record in state.holders.values():
            count_for_user(state, record, 1)
    state.limits[event.user] = event.limits
    for record in state.jobs.values():
        if not event.user or record.job.user == event.user:
            reshape(state, record, record.shape.priority)
    state.capacity_changed()


# ---- what the scheduler does -------------------------------------------------------------------------------------


@handles(ev.Planned)
def _planned(state: State, event: ev.Planned) -> None:
    claims: list[tuple[JobRecord, Allocation]] = []
    resumed: list[JobRecord] = []
    for decision in event.decisions:
        record, allocation = state.jobs[decision.job], decision.allocation
        if record.gpus:
            if allocation is not None and allocation.gpus == record.gpus:
                if allocation.active and record.active:
                    retune(state, record, allocation)
                elif allocation.active:
                    resumed.append(record)
                else:
                    _pause_as_planned(state, record, decision)
                continue
            preempt(state, record)
        if allocation is not None:  # a start, or a move: the job stops on its old GPUs and starts on these
            claims.append((record, allocation))
    for record in resumed:
        resume(state, record)
    for record, allocation in claims:
        claim(state, record, allocation)
    trials.begin(state, event.decisions)
    if state.trials.running:
        for decision in event.decisions:
            trials.look(state, state.jobs[decision.job])


def _pause_as_planned(state: State, record: JobRecord, decision: Decision) -> None:
    if not record.active:
        swap_out(state, record)
        return
    if decision.trial is None:
        trials.withdraw(state, record)
    pause(state, record, swapped=decision.allocation is not None and decision.allocation.swapped)


# ---- what workers do ---------------------------------------------------------------------------------------------


@handles(ev.Started)
def _started(state: State, event: ev.Started) -> None:
    record = state.current(event)
    if record is None or record.status is not Status.STARTING:
        return
    record.status = Status.RUNNING
    record.warming_up = not event.computes
    record.leaving = ()
    if event.done is not None:
        record.done = min(event.done, float(record.job.iterations))
    if record.first_start < 0.0:
        record.first_start = state.now
    if len(record.gpus) > record.most_gpus:
        record.most_gpus = len(record.gpus)
    if event.computes:
        _computes(state, record)
    elif record.paused_by_owner:
        pause(state, record)
    else:
        update_pace(state, [record, *state.cluster.mates(record)])


def _computes(state: State, record: JobRecord) -> None:
    """Let a job compute that has started up, or pause it where it is not its turn."""
    learn_startup(state, record)
    waits = record.standby and any(mate.active for mate in state.cluster.mates(record))
    record.standby, record.active = False, True
    update_pace(state, [record, *state.cluster.mates(record)])
    _awaken_unseen(state, record)
    trials.compute(state, record)
    if record.paused_by_owner or waits:
        pause(state, record)
    else:
        state.cluster.note_activity(record.gpus)


def _awaken_unseen(state: State, record: JobRecord) -> None:
    """Let the policy think about a job that begins to compute, if nobody knows how fast it is alone."""
    if state.learner is not None and not record.alone_seen and record.slowdown > 1.0:
        state.awakened[record.seq] = record
        state.needs_decision = True


@handles(ev.Computing)
def _computing(state: State, event: ev.Computing) -> None:
    record = state.current(event)
    if record is None or not record.warming_up:
        return
    record.warming_up = False
    if record.status is not Status.RUNNING:  # it was paused at the same moment
        state.reindex(record)
        return
    _computes(state, record)
    state.needs_decision = True


@handles(ev.Paused)
def _paused(state: State, event: ev.Paused) -> None:
    record = state.current(event)
    if record is None or record.status is not Status.PAUSING:
        return
    record.status = Status.PAUSED
    del state.switching[record.seq]
    state.awakened[record.seq] = record
    state.reindex(record)
    state.needs_decision = True


@handles(ev.SwapFailed)
def _swap_failed(state: State, event: ev.SwapFailed) -> None:
    record = state.current(event)
    if record is None or record.status is not Status.PAUSING or not record.swapped:
        return
    swap_in(state, record)
    record.status = Status.PAUSED
    del state.switching[record.seq]
    gpu = record.gpus[0]
    for mate in reversed(state.jobs_on(gpu)):  # the plan gave its memory to others, which have not been launched
        over = state.memory_used(gpu) > state.topology.memory_of(gpu)
        if over and mate is not record and mate.memory and mate.status in WORKING:
            preempt(state, mate)
    state.reindex(record)
    state.capacity_changed()


@handles(ev.Resumed)
def _resumed(state: State, event: ev.Resumed) -> None:
    record = state.current(event)
    if record is None or record.status is not Status.RESUMING:
        return
    end_pause(state, record)
    record.status = Status.RUNNING
    update_pace(state, [record, *state.cluster.mates(record)])
    _awaken_unseen(state, record)
    if record.paused_by_owner:
        pause(state, record)
    state.needs_decision = True


@handles(ev.Progressed)
def _progressed(state: State, event: ev.Progressed) -> None:
    record = state.current(event)
    if record is not None and (record.iteration_s or record.status in PAUSE):
        settle(state, record)
        record.done = min(event.done, record.job.iterations)
        if record.done >= record.pace_valid_until and record.batch is not None:  # its pace changes here
            predict_alone(state, record)
            update_pace(state, [record])
        state.reindex(record)


@handles(ev.Observed)
def _observed(state: State, event: ev.Observed) -> None:
    record = state.current(event)
    if record is None or not record.iteration_s:
        return
    since = record.since
    settle(state, record)
    record.done = min(event.done, record.job.iterations)
    seen = None if state.learner is None else learning.observe_running(state.cluster, record, event.iteration_s)
    before, ran = record.slowdown, state.now - since
    if any(mate.status is not Status.PAUSED and not mate.starts_up for mate in state.cluster.mates(record)):
        record.slowdown = max(1.0, event.iteration_s / record.alone_iteration_s)
    else:
        record.alone_iteration_s = event.iteration_s
        record.alone_seen = True
    if not record.pace_seen:  # so fast it was all the time since its pace changed
        record.alone_s += ran * (1.0 / record.slowdown - 1.0 / before)
    record.iteration_s = event.iteration_s
    record.pace_seen = True
    record.reported |= not event.relative  # else the end of the job teaches how long it takes
    state.reindex(record)
    changed = abs(record.slowdown - before) > NOTICEABLE * before
    if state.learner is not None and (state.trials.running or changed):
        state.awakened[record.seq] = record  # whether it should share, and what a trial waits for, may be another now
        state.needs_decision = True
    if seen is not None and (seen.cells or not event.relative):
        learn(state, seen)
    if state.trials.running:
        trials.look(state, record)


@handles(ev.DemandMeasured)
def _demand_measured(state: State, event: ev.DemandMeasured) -> None:
    record = state.current(event)
    if record is not None and isinstance(state.perf, learning.DemandLearner):
        follow(state, state.perf.learn_demand(record.job, record.accumulation, event.demand))


@handles(ev.Retuned)
def _retuned(state: State, event: ev.Retuned) -> None:
    record = state.current(event)
    if record is None or not record.gpus:
        return
    if event.unasked and record.job.can_shrink and record.status is not Status.CANCELLING:
        retune(state, record, Allocation(record.gpus, event.accumulation, record.batch))
    elif (event.accumulation, event.batch) != (record.accumulation, record.batch):  # another re-tune is under way
        return
    allocation = Allocation(record.gpus, record.accumulation, record.batch)
    state.reserve(record, memory_needed(state, record.job, allocation))
    predict_alone(state, record)
    update_pace(state, [record, *state.cluster.mates(record)])
    state.capacity_changed()


@handles(ev.Checkpointed)
def _checkpointed(state: State, event: ev.Checkpointed) -> None:
    record = state.current(event)
    if record is not None:
        record.checkpoint = min(event.done, float(record.job.iterations))


@handles(ev.Stopped)
def _stopped(state: State, event: ev.Stopped) -> None:
    record = state.current(event)
    if record is None or record.status not in (Status.STOPPING, Status.CANCELLING):
        return
    record.checkpoint = min(event.done, float(record.job.iterations))
    _workers_gone(state, record)


@handles(ev.Finished)
def _finished(state: State, event: ev.Finished) -> None:
    record = state.current(event)
    if record is None or record.status not in ALIVE:
        return
    seen = None
    if record.gpus:
        if state.learner is not None:
            settle(state, record)
            if record.warming_up and not record.alone_s:  # it never told that it computes
                record.alone_s = state.now - record.first_start
            seen = learning.observe_finished(state.cluster, record)
        leave(state, record)
    record.done = float(record.job.iterations)
    end(state, record, Status.FINISHED, "")
    if seen is not None:
        learn(state, seen)


@handles(ev.Failed)
def _failed(state: State, event: ev.Failed) -> None:
    record = state.current(event)
    if record is None or record.status not in ALIVE:
        return
    own_fault = record.status in WORKING and not event.again
    if own_fault and not record.retries_left:
        leave(state, record)
        end(state, record, Status.FAILED, event.reason)
        return
    record.retries_left -= own_fault
    _workers_gone(state, record)


def _workers_gone(state: State, record: JobRecord) -> None:
    """Requeue a job whose workers are all gone, with what it saved; end it if it was cancelled."""
    if record.gpus:
        leave(state, record)
    record.leaving = ()
    record.done = record.checkpoint
    if record.status is Status.CANCELLING:
        end(state, record, Status.CANCELLED, record.reason)
        return
    if record.paused_by_owner:  # it has no place left to be paused in
        record.paused_by_owner, record.on_hold = False, True
    requeue(state, record)


# ---- what nodes do -----------------------------------------------------------------------------------------------


@handles(ev.NodeJoined)
def _node_joined(state: State, event: ev.NodeJoined) -> None:
    state.join(event.node)
    resize_pending(state)
    state.capacity_changed()


@handles(ev.NodeLost)
def _node_lost(state: State, event: ev.NodeLost) -> None:
    number = state.topology.present.get(event.node)
    if number is None:
        return
    lost = state.topology.nodes[number].gpus
    for record in list(state.jobs.values()):
        if any(gpu in lost for gpu in record.gpus):
            record.leaving = record.gpus
            leave(state, record)
            record.done = record.checkpoint
            if record.status is not Status.CANCELLING:
                record.status = Status.STOPPING
        if record.leaving:
            record.leaving = tuple([gpu for gpu in record.leaving if gpu not in lost])
            if not record.leaving and record.status in (Status.STOPPING, Status.CANCELLING):
                _workers_gone(state, record)
    state.cluster.lose(event.node)
    resize_pending(state)
    state.capacity_changed()


@handles(ev.NodeClosed)
def _node_closed(state: State, event: ev.NodeClosed) -> None:
    _set_closed(state, event.node, True)


@handles(ev.NodeOpened)
def _node_opened(state: State, event: ev.NodeOpened) -> None:
    _set_closed(state, event.node, False)


def _set_closed(state: State, name: str, closed: bool) -> None:
    number = state.topology.present.get(name)
    if number is None:
        return
    state.cluster.set_closed(number, closed)
    for gpu in state.topology.nodes[number].gpus:
        for record in state.jobs_on(gpu):
            state.reindex(record)
    state.capacity_changed()


@handles(ev.SwapChanged)
def _swap_changed(state: State, event: ev.SwapChanged) -> None:
    number = state.topology.present.get(event.node)
    if number is not None:
        state.topology.set_swap(number, event.can_swap)
        state.capacity_changed()


@handles(ev.MemoryTaken)
def _memory_taken(state: State, event: ev.MemoryTaken) -> None:
    if event.gpu not in state.topology.node_of:
        return
    if event.memory > 0:
        state.topology.taken[event.gpu] = event.memory
    else:
        state.topology.taken.pop(event.gpu, None)
    for record in state.jobs_on(event.gpu):
        state.reindex(record)
    state.capacity_changed()
