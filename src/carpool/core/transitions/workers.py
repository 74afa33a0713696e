"""What workers of running jobs report: that they start, compute, pause, resume, and how fast they are."""

from dataclasses import replace

from carpool.core import events as ev
from carpool.core import learning, trials
from carpool.core.charging import charge
from carpool.core.claims import memory_needed, preempt, retune
from carpool.core.healing import believe_measured, make_room, outlive
from carpool.core.model import PAUSE, WORKING, Allocation, Status
from carpool.core.pace import end_startup, follow, learn, learn_startup, predict_alone, settle, update_pace
from carpool.core.pausing import end_pause, pause, swap_in
from carpool.core.record import JobRecord
from carpool.core.state import State, handles

NOTICEABLE = 0.02
"""Relative change of a slow-down after which it is decided again whether a job should share."""


@handles(ev.Started)
def _started(state: State, event: ev.Started) -> None:
    record = state.current(event)
    if record is None or record.status is not Status.STARTING:
        return
    record.status = Status.RUNNING
    record.warming_up = not event.computes
    if record.warming_up:
        record.silent_from = state.now - record.paused(state.now)
    record.leaving = ()
    if event.done is not None:
        record.done = min(event.done, float(record.job.iterations))
        state.openings += 1  # it may have more left than the plan counted on
    if record.first_start < 0.0:
        record.first_start = state.now
    if len(record.gpus) > record.most_gpus:
        record.most_gpus = len(record.gpus)
    if event.computes:
        _computes(state, record, told=record.job.can_start_ahead is not False)
    elif record.paused_by_owner:
        pause(state, record)
    else:
        update_pace(state, [record, *state.cluster.mates(record)])


def _computes(state: State, record: JobRecord, *, told: bool) -> None:
    """Let a job compute that has started up, or pause it where it is not its turn."""
    mates, standby = state.cluster.mates(record), record.standby
    waits = standby and any(mate.active for mate in mates)
    if state.learner is not None:
        learn_startup(state, record, told)
    starts_late = standby and not record.active
    record.standby, record.active = False, True
    if starts_late and state.tenants.on:
        charge(state, record)
    update_pace(state, [record, *mates], came=record)
    if state.learner is not None:
        _awaken_unseen(state, record)
    if state.trials.running:
        trials.compute(state, record)
    if record.paused_by_owner or waits:
        pause(state, record)
    elif standby:
        state.cluster.note_activity(record.gpus)


def _awaken_unseen(state: State, record: JobRecord) -> None:
    """Let the policy decide about a job that begins to compute, if its speed alone is not known."""
    if not record.alone_seen and record.slowdown > 1.0:
        state.awakened[record.seq] = record
        state.needs_decision = True


@handles(ev.Computing)
def _computing(state: State, event: ev.Computing) -> None:
    record = state.current(event)
    if record is None or not record.warming_up:
        return
    end_startup(state, record, told=event.told)
    if record.status is not Status.RUNNING:  # it was paused at the same moment
        state.reindex(record)
        return
    _computes(state, record, told=event.told)
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
    if state.learner is not None:
        _awaken_unseen(state, record)
    if record.paused_by_owner:
        pause(state, record)
    state.needs_decision = True


@handles(ev.Progressed)
def _progressed(state: State, event: ev.Progressed) -> None:
    record = state.current(event)
    if record is not None and (record.iteration_s or record.status in PAUSE):
        settle(state, record)
        make_room(state, record, event.done)
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
    make_room(state, record, event.done)
    record.done = min(event.done, record.job.iterations)
    seen = None if state.learner is None else learning.observe_running(state.cluster, record, event.iteration_s)
    before, ran = record.slowdown, state.now - since
    if any(mate.status is not Status.PAUSED and not mate.starts_up for mate in state.cluster.mates(record)):
        record.slowdown = max(1.0, event.iteration_s / record.alone_iteration_s)
    else:
        record.alone_iteration_s = event.iteration_s
        record.alone_seen = True
    if not record.pace_seen:  # it has been this fast since its pace changed
        record.alone_s += ran * (1.0 / record.slowdown - 1.0 / before)
    record.iteration_s = event.iteration_s
    record.pace_seen = True
    if record.silent_from >= 0.0:  # it had a start-up
        record.told, record.silent_s = True, 0.0
    record.reported |= not event.relative  # otherwise the end of the job shows how long it takes
    record.relative |= event.relative
    if record.guess_s and record.alone_seen and not event.relative:
        believe_measured(state, record)
    state.reindex(record)
    changed = abs(record.slowdown - before) > NOTICEABLE * before
    if state.learner is not None and (state.trials.running or changed):
        state.awakened[record.seq] = record  # whether it should share may have changed, or its trial
        state.needs_decision = True
    if seen is not None and (seen.cells or not event.relative):
        learn(state, seen)
    if state.trials.running:
        trials.look(state, record)


@handles(ev.Outlived)
def _outlived(state: State, event: ev.Outlived) -> None:
    record = state.current(event)
    if record is not None:
        outlive(state, record)


@handles(ev.SavingSeen)
def _saving_seen(state: State, event: ev.SavingSeen) -> None:
    record = state.current(event)
    if record is not None:
        record.job = replace(record.job, saves=event.saves)


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
        if state.accounts.on:
            state.accounts.save(state.cluster, record, state.now)
