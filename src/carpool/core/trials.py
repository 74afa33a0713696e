"""Trials: pairs of jobs that share to find out whether they should, and what that cost each of them.

A policy begins a trial with a decision that names the other job. The core counts the cost of both sides, from the
guest's first iteration on: what they lose to slow-downs and to pauses. A trial ends with a verdict once both have
reported how fast they run beside each other, or without one when a side has lost what it may lose, is paused by
another decision, or leaves. `transitions`, `claims` and `pausing` call the functions; policies read `State.trials`.
"""

from collections.abc import Sequence
from dataclasses import replace

from carpool.core.model import Decision, Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.core.trial import LEAST_BUDGET_S, SHARE_OF_LEFT, Side, Trial


def begin(state: State, decisions: Sequence[Decision]) -> None:
    """Begin the trials of a plan: guests start beside the hosts that the decisions name."""
    for decision in decisions:
        if decision.trial is not None:
            guest, host = state.jobs[decision.job], state.jobs[decision.trial]
            if guest.status is Status.STARTING:
                state.trials.running[guest.seq] = Trial(_side(guest), _side(host))
                state.trials.begun += 1


def _side(record: JobRecord) -> Side:
    return Side(record.job.id, record.seq, record.attempt)


def compute(state: State, guest: JobRecord) -> None:
    """Count the cost of a guest's trial from now on: it computes."""
    trial = state.trials.running.get(guest.seq)
    host = None if trial is None else state.jobs.get(trial.host.job)
    if trial is None:
        return
    if host is None or host.attempt != trial.host.attempt or not host.gpus:
        end(state, trial, kept=False)
        return
    state.trials.running[guest.seq] = Trial(
        _from_now(state, trial.guest, guest, host), _from_now(state, trial.host, host, guest), began=state.now
    )
    state.needs_decision = True


def _from_now(state: State, side: Side, record: JobRecord, mate: JobRecord) -> Side:
    budget, worst = max(LEAST_BUDGET_S, SHARE_OF_LEFT * record.alone_left(state.now)), 1.0
    if state.learner is not None:
        beside = [(mate.job, mate.accumulation)]
        worst = state.learner.slowdown_range(record.job, record.accumulation, beside).high
    return replace(side, budget_s=budget, alone_s=record.alone_done(state.now), worst=worst)


def look(state: State, record: JobRecord) -> None:
    """End the trial of a job whose verdict is there, or that costs no more from now on."""
    for trial in [trial for trial in state.trials.running.values() if record.seq in trial.seqs]:
        if trial.began < 0.0:
            continue
        guest, host = state.jobs[trial.guest.job], state.jobs[trial.host.job]
        if guest.computing and host.computing and guest.pace_seen and host.pace_seen:
            end(state, trial, kept=True)
        elif trial.spent(guest, host, state.now):
            end(state, trial, kept=guest.active and host.active, verdict=False)


def withdraw(state: State, record: JobRecord) -> None:
    """Note that a decision outside the trial pauses a job, or that it leaves: its trial was not kept."""
    for trial in [trial for trial in state.trials.running.values() if record.seq in trial.seqs]:
        end(state, trial, kept=False, verdict=False)
    last = state.trials.ended[-1] if state.trials.ended else None
    if last is not None and last.kept and last.ended == state.now and record.seq in last.seqs:
        state.trials.ended[-1] = replace(last, kept=False)  # the verdict was against it
        state.trials.kept -= 1


def end(state: State, trial: Trial, *, kept: bool, verdict: bool = True) -> None:
    """End a trial and count what it cost. A pair without a verdict is not tried again."""
    trials = state.trials
    del trials.running[trial.guest.seq]
    guest, host = state.jobs.get(trial.guest.job), state.jobs.get(trial.host.job)
    costs = (0.0, 0.0)
    if trial.began >= 0.0 and guest is not None and host is not None:
        costs = trial.costs(guest, host, state.now)
        costs = (min(costs[0], trial.guest.budget_s), min(costs[1], trial.host.budget_s))
    if not verdict and guest is not None and host is not None and state.learner is not None:
        state.learner.give_up(guest.job, guest.accumulation, host.job, host.accumulation)
        state.belief_version += 1
    trials.ended.append(replace(trial, ended=state.now, kept=kept, costs_s=costs))
    trials.kept += kept
    trials.cost_s += sum(costs)
