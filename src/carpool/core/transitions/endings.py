"""How workers end: with their job, before it, at its time limit or by a failure; and what follows for the job."""

from carpool.core import events as ev
from carpool.core import learning, trials
from carpool.core.claims import leave, preempt
from carpool.core.healing import learn_guess
from carpool.core.model import ALIVE, WORKING, Status
from carpool.core.pace import end_startup, learn, learn_startup, settle, update_pace
from carpool.core.pausing import end_pause
from carpool.core.queueing import end, requeue
from carpool.core.record import JobRecord
from carpool.core.state import State, handles
from carpool.core.time_limits import reason_at_limit


@handles(ev.Stopped)
def _stopped(state: State, event: ev.Stopped) -> None:
    record = state.current(event)
    if record is None or record.status not in (Status.STOPPING, Status.CANCELLING):
        return
    record.checkpoint = min(event.done, float(record.job.iterations))
    workers_gone(state, record)


@handles(ev.LimitNeared)
def _limit_neared(state: State, event: ev.LimitNeared) -> None:
    record = state.current(event)
    if record is not None and record.status in WORKING:
        record.near_limit = True


@handles(ev.LimitReached)
def _limit_reached(state: State, event: ev.LimitReached) -> None:
    record = state.current(event)
    if record is None or record.status not in WORKING or record.limit_s is None:
        return
    record.at_limit = not record.job.requeue
    if record.at_limit:
        record.reason = reason_at_limit(record.limit_s)
        wind_down(state, record)
        return
    preempt(state, record)
    record.limit_from, record.near_limit = record.ran_s, False


@handles(ev.Finished)
def _finished(state: State, event: ev.Finished) -> None:
    record = state.current(event)
    if record is None or record.status not in ALIVE:
        return
    seen = None
    if record.guess_s or record.guess_iterations:
        learn_guess(state, record, finished=True)
    if record.gpus:
        if state.learner is not None:
            settle(state, record)
            if record.warming_up and not record.alone_s:  # it never reported that it computes
                record.alone_s = state.now - record.first_start
                learn_startup(state, record, told=False)
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
    count_loss(state, record)
    own_fault = record.status in WORKING and not event.again
    if own_fault and not record.retries_left:
        learn_guess_of(state, record, finished=False)
        leave(state, record)
        end(state, record, Status.FAILED, event.reason)
        return
    record.retries_left -= own_fault
    workers_gone(state, record)


def count_loss(state: State, record: JobRecord) -> None:
    """Count what a job held since its last checkpoint as lost, unless its owner cancelled it."""
    if state.accounts.on and record.status is not Status.CANCELLING:
        state.accounts.lose(state.cluster, record, state.now)


def learn_guess_of(state: State, record: JobRecord, *, finished: bool) -> None:
    if record.guess_s or record.guess_iterations:
        learn_guess(state, record, finished=finished)


def workers_gone(state: State, record: JobRecord) -> None:
    """Requeue a job whose workers are all gone, with what it saved; end it if it was cancelled."""
    if record.gpus:
        leave(state, record)
    record.leaving = ()
    record.done = record.checkpoint
    if record.status is Status.CANCELLING:
        end(state, record, Status.FAILED if record.at_limit else Status.CANCELLED, record.reason)
        return
    if record.paused_by_owner:  # it has no place left to be paused in
        record.on_hold = record.on_hold or not record.kept_paused or record.paused_before
        record.paused_by_owner = record.kept_paused = record.paused_before = False
    requeue(state, record)


def wind_down(state: State, record: JobRecord) -> None:
    """Stop a job for good. It holds its GPUs until its workers are gone, and then ends."""
    learn_guess_of(state, record, finished=False)
    settle(state, record)
    end_startup(state, record)
    trials.withdraw(state, record)
    if record.paused_since >= 0.0:
        end_pause(state, record)
    record.iteration_s = 0.0
    record.status = Status.CANCELLING
    record.standby = False
    record.pace_version += 1
    update_pace(state, [record, *state.cluster.mates(record)])
