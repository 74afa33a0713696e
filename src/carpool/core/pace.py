"""How fast jobs iterate: their progress, their iteration time on their GPUs, and their slow-down beside mates.

Progress is lazy. A job's pace changes only when its mates, its placement or the belief change, and `settle` turns the
time since the last change into iterations first. Called by `transitions` and `claims`.
"""

from collections.abc import Iterable

from carpool.core.elastic import Pace
from carpool.core.learning import ModelChange, Observation, StartUp
from carpool.core.model import Status
from carpool.core.perf import Placement
from carpool.core.queueing import reshape
from carpool.core.record import JobRecord
from carpool.core.state import State


def settle(state: State, record: JobRecord) -> None:
    """Turn the time since the last settlement into iterations."""
    if record.iteration_s:
        ran = state.now - record.since
        record.done = min(record.done + ran / record.iteration_s, float(record.job.iterations))
        record.ran_s += ran
        record.alone_s += ran / record.slowdown
    record.since = state.now


def end_startup(state: State, record: JobRecord, *, told: bool = False) -> None:
    """Note that a job's start-up is over. If no report ever came, the time counts as run: it may not have been
    start-up."""
    record.silent_s += record.silent(state.now)
    record.warming_up = False
    if told:
        record.told, record.silent_s = True, 0.0


def update_pace(
    state: State, records: Iterable[JobRecord], *, came: JobRecord | None = None, left: JobRecord | None = None
) -> None:
    """Compute the slow-down and the iteration time of jobs again: their mates or their placement changed.

    `came` or `left`: the only mate of theirs that changed, where one began to compute or gave up its GPUs.
    """
    for record in records:
        if record.status is Status.RUNNING and not record.warming_up:
            settle(state, record)
            record.slowdown = _changed_slowdown(state, record, came, left)
            record.iteration_s = record.alone_iteration_s * record.slowdown
            record.pace_seen = False
            record.pace_version += 1
            state.pace_changes.append(record)
        elif not record.active:  # it may go on now that its mates changed, and its end is predicted from here on
            settle(state, record)
            state.awakened[record.seq] = record
        state.reindex(record)


def _changed_slowdown(state: State, record: JobRecord, came: JobRecord | None, left: JobRecord | None) -> float:
    """Return the predicted slow-down of a job of which one mate came or left. Gangs have many."""
    changed = came or left
    if changed is None or changed is record or record.pace_seen:
        return predicted_slowdown(state, record)
    if state.most_residents > 2 or state.learner is not None:
        return predicted_slowdown(state, record)
    # the worst over GPUs with one mate each, by a model that never changes: the others slow it down as before
    beside = state.perf.slowdown(record.job, record.accumulation, [(changed.job, changed.accumulation)])
    if came is not None:
        return max(record.slowdown, beside)
    return record.slowdown if beside < record.slowdown else predicted_slowdown(state, record)


def predicted_slowdown(state: State, record: JobRecord) -> float:
    """Return the worst ξ over a job's GPUs: a gang waits for its slowest worker. Only mates that compute count."""
    if not record.shared_with:  # none has computed beside it so far
        return 1.0
    worst, residents = 1.0, state.cluster.residents
    last: tuple[JobRecord, ...] = ()
    for gpu in record.gpus:
        cell = residents[gpu]
        if len(cell) == 1 or cell is last:  # a gang often shares several GPUs with the same jobs
            continue
        last = cell
        mates = []
        for mate in cell:
            if mate is not record and mate.status is Status.RUNNING and not mate.warming_up:
                mates.append((mate.job, mate.accumulation))
        if mates:
            slowdown = state.perf.slowdown(record.job, record.accumulation, mates)
            if slowdown > worst:
                worst = slowdown
    return worst


def predict_alone(state: State, record: JobRecord) -> None:
    """Compute a job's iteration time alone on its GPUs at its accumulation and batch."""
    record.alone_seen = False
    if record.batch is not None:
        record.alone_iteration_s, record.pace_valid_until = predicted_alone(state, record)
        return
    nodes = state.topology.nodes_spanned(record.gpus)
    if record.accumulation == 1 and nodes == record.shape.placement.nodes:
        record.alone_iteration_s = record.whole_iteration_s
    else:
        placement = Placement(len(record.gpus), nodes)
        predicted = state.perf.iteration_time(record.job, record.accumulation, placement)
        record.alone_iteration_s = predicted * record.stretch


def predicted_alone(state: State, record: JobRecord) -> Pace:
    """Return a job's pace alone on its GPUs by the model and the correction of its guess, whatever it reported."""
    placement = Placement(len(record.gpus), state.topology.nodes_spanned(record.gpus))
    job, accumulation = record.job, record.accumulation
    if record.batch is None:
        seconds = state.perf.iteration_time(job, accumulation, placement)
        return Pace(seconds * record.stretch, record.pace_valid_until)
    pace = state.perf.scaled_pace(job, record.batch, accumulation, placement, record.done)
    return pace._replace(iteration_s=pace.iteration_s * record.stretch)


def learn(state: State, observation: Observation) -> None:
    """Pass an observation to the model. If its answers change, compute again all that follows from them."""
    if state.learner is not None:
        follow(state, state.learner.learn(observation), observation.job.model)


def follow(state: State, change: ModelChange, model: str = "") -> None:
    """Compute again all that follows from answers of the model that changed. `model`: the one whose speeds changed."""
    if not change:
        return
    state.belief_version += 1
    if change & ModelChange.SPEEDS:
        state.shapes.forget(model)
        state.new_speeds.add(model)
        for seq in sorted(state.holders):
            _refresh_speed(state, state.holders[seq])
        if not state.defers_waiting:
            refresh_waiting(state)
    # an iteration time that was measured beside the present mates does not depend on the belief
    unseen = [record for record in state.holders.values() if not record.pace_seen and record.computing]
    update_pace(state, unseen)
    state.needs_decision = True


def learn_startup(state: State, record: JobRecord, told: bool) -> None:
    """Pass the time that a job took from its claim to its first iteration to the model."""
    if state.learner is None or record.attempt > 1:  # a restart has to load a checkpoint as well
        return
    if state.learner.learn_startup(StartUp(record.job, state.now - record.gpus_since, told)):
        for other in state.jobs.values():
            other.startup_s = state.perf.startup_s(other.job)
            if other.gpus:
                state.reindex(other)
        state.queue.forget_waiting()


def refresh_waiting(state: State) -> None:
    """Compute again the estimates of jobs without GPUs whose speeds changed, and those that were corrected step by
    step: computing them anew rounds differently."""
    if not state.new_speeds:
        return
    models, state.new_speeds = state.new_speeds, set()
    for record in state.jobs.values():
        if not record.gpus and (record.job.model in models or record.stretched != 1.0 or record.guess_iterations):
            _refresh_speed(state, record)


def _refresh_speed(state: State, record: JobRecord) -> None:
    if record.guess_s and not state.relies_on_guess(record.job):
        record.correction = 1.0
    record.whole_iteration_s = state.perf.iteration_time(record.job, 1, record.shape.placement) * record.stretch
    reshape(state, record, record.shape.priority)
    if record.gpus and not record.alone_seen:
        predict_alone(state, record)
        state.reindex(record)
