"""Correction of guesses: what is believed of a job whose user guessed its length, and what is learned when it ends.

A guess is corrected by its user's record when the job is submitted, and again while it waits. A job that outlives what
is believed of it is believed to take longer, so that it loses the rank of a short one. A speed that was measured
replaces the guess. Called by `transitions`.
"""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from carpool.core.guesses import DURATION, ITERATIONS, UserRecord, expected_left
from carpool.core.model import Guess, Job, Status
from carpool.core.pace import predicted_alone, predicted_slowdown, settle
from carpool.core.queueing import reshape
from carpool.core.record import JobRecord
from carpool.core.state import State

PART_THAT_MOVES = 0.25
"""Part of the queue from which on moving jobs one by one in its sorted lists costs more than sorting them again."""


class GuessedLength(NamedTuple):
    """What the user of a job guessed of its length, and what came of the user's earlier guesses of that kind."""

    kind: str
    guess: float
    """Seconds or iterations."""
    factor: float
    """What the guess is multiplied by; 1 where something better is known."""
    record: UserRecord


def guessed_length(state: State, job: Job) -> GuessedLength | None:
    """Return what is known about the guess of a job as it is submitted; None: there is none that may be corrected."""
    if not job.user or state.guesses.trusted:
        return None
    kind, duration_s = job.guess, job.duration_s
    if duration_s is not None and (kind is None or kind is Guess.DURATION):
        record = state.guesses.of(job.user, DURATION)
        return GuessedLength(DURATION, duration_s, record.factor if state.relies_on_guess(job) else 1.0, record)
    if kind in (None, Guess.ITERATIONS) and not job.elastic:  # the phases of an elastic job follow from their number
        record = state.guesses.of(job.user, ITERATIONS)
        return GuessedLength(ITERATIONS, job.iterations, record.factor, record)
    return None


def note_guess(state: State, record: JobRecord) -> None:
    """Note what the user of a job that was just submitted guessed, and correct it."""
    found = guessed_length(state, record.job)
    if found is None:
        return
    kind, guess, factor, _ = found
    if kind == DURATION:
        record.guess_s = guess
    else:
        record.guess_iterations = record.job.iterations
    if factor != 1.0:
        _multiply_guess(state, record, factor)


def _correct(state: State, record: JobRecord) -> None:
    """Correct the guess of a job by its user's record."""
    unused = record.guess_s and not state.relies_on_guess(record.job)
    _multiply_guess(state, record, 1.0 if unused else record_of(state, record).factor)


def _multiply_guess(state: State, record: JobRecord, factor: float) -> None:
    if record.guess_s:
        _set_correction(state, record, factor)
    elif record.guess_iterations:
        _set_iterations(record, max(1, ceil(record.guess_iterations * factor)))


def _set_correction(state: State, record: JobRecord, factor: float) -> None:
    if factor != record.correction:
        record.correction = factor
        refresh_whole(state, record)


def refresh_whole(state: State, record: JobRecord) -> None:
    """Compute a job's iteration time again, from the model and the correction of its guess."""
    record.whole_iteration_s = state.perf.iteration_time(record.job, 1, record.shape.placement) * record.stretch


def _set_iterations(record: JobRecord, iterations: int) -> None:
    """Change the believed number of iterations; one of them takes as long as before."""
    job = record.job
    if iterations == job.iterations:
        return
    duration_s = None if job.duration_s is None else job.duration_s / job.iterations * iterations
    if record.pace_valid_until >= job.iterations:
        record.pace_valid_until = float(iterations)
    record.job = replace(job, iterations=iterations, duration_s=duration_s)


def outlive(state: State, record: JobRecord) -> None:
    """Increase the believed duration of a job that runs and should have ended."""
    if state.guesses.trusted or not record.iteration_s or record.iterations_left(state.now):
        return
    done = _done(state, record)
    settle(state, record)
    if record.reported:
        _grow(state, record, done)
    else:  # what it has done was a guess as well
        record.outlived += 1
        believed = record.job.iterations
        left = expected_left(done, believed / record.stretched, record_of(state, record).spread)
        factor = (done + left) / believed
        record.stretched *= factor
        record.whole_iteration_s *= factor
        record.alone_iteration_s *= factor
        record.iteration_s *= factor
        record.done = done / factor
    record.pace_version += 1
    state.pace_changes.append(record)
    state.reindex(record)
    state.needs_decision = True


def make_room(state: State, record: JobRecord, done: float) -> None:
    """Increase the believed number of iterations of a job that reports more than all of them."""
    if done > record.job.iterations and not record.job.elastic and not state.guesses.trusted:
        _grow(state, record, done)


def _grow(state: State, record: JobRecord, done: float) -> None:
    """Increase the believed number of iterations of a job to more than it has done."""
    if record.job.elastic:
        return
    record.outlived += 1
    before = record.job.iterations
    iterations = ceil(done + expected_left(done, before / record.grown, record_of(state, record).spread))
    record.grown *= iterations / before
    _set_iterations(record, iterations)


def record_of(state: State, record: JobRecord) -> UserRecord:
    """Return what came of earlier guesses of the user of a job, of the kind that the user made for it."""
    return state.guesses.of(record.job.user, DURATION if record.guess_s else ITERATIONS)


def believe_measured(state: State, record: JobRecord) -> None:
    """Let the speed that a job reports alone replace its guess, also for its next attempt."""
    if record.guess_s and state.relies_on_guess(record.job):
        predicted = predicted_alone(state, record).iteration_s / record.correction
        if predicted > 0.0:
            _set_correction(state, record, record.alone_iteration_s / predicted)


def learn_guess(state: State, record: JobRecord, *, finished: bool) -> None:
    """Add a job that ends to its user's record, and correct the guesses of the user's jobs that wait."""
    if state.guesses.trusted:
        return
    user = record.job.user
    if record.guess_s:
        kind, guess, true = DURATION, record.guess_s, _worked_s(state, record)
    elif record.reported:
        kind, guess, true = ITERATIONS, float(record.guess_iterations), _done(state, record)
    else:
        return
    if finished and record.guess_iterations and not record.outlived:
        _set_iterations(record, record.guess_iterations)  # the end of the job shows that there were no more
    if true > 0.0 and state.guesses.add(user, kind, true, guess, finished=finished):
        state.new_factors.add(user)
        if kind != DURATION or not state.defers_waiting:  # numbers of iterations are rounded at every step
            correct_waiting(state)


def correct_waiting(state: State) -> None:
    """Correct the guesses of jobs that never started, of users whose records changed."""
    if not state.new_factors:
        return
    users, state.new_factors = state.new_factors, set()
    new = [record for record in state.jobs.values() if record.job.user in users and not record.attempt]
    if len(new) > PART_THAT_MOVES * len(state.queue):
        state.queue.forget_orders()
    for record in new:
        before = record.correction, record.job
        _correct(state, record)
        if record.status is Status.PENDING and before != (record.correction, record.job):
            reshape(state, record, record.shape.priority)


def _done(state: State, record: JobRecord) -> float:
    """Return the iterations done; they exceed the believed number where the job took longer."""
    return record.done + ((state.now - record.since) / record.iteration_s if record.iteration_s else 0.0)


def _worked_s(state: State, record: JobRecord) -> float:
    """Return the seconds that the iterations of a job so far take alone, as a guess counts them; 0: not known."""
    if record.relative:  # its iterations were made up from the guess
        ran = state.now - record.since if record.iteration_s else 0.0
        return record.alone_s + ran / record.slowdown if record.attempt == 1 else 0.0
    whole_s = record.whole_iteration_s
    if record.reported and record.gpus and record.iteration_s:
        predicted = predicted_alone(state, record).iteration_s
        # beside mates the model gives the slow-down, because the guess of its time alone may be wrong
        alone = (
            record.alone_iteration_s if record.alone_seen else record.iteration_s / predicted_slowdown(state, record)
        )
        whole_s *= alone / predicted
    return _done(state, record) * whole_s
