"""Trials: jobs that share to find out whether they should, and what that cost each of them.

A policy begins a trial with decisions that name the other side: a guest that starts beside a host, or hosts that are
paused for a moment so that a job which joined them shows how fast it is alone. The core counts the cost of all sides,
from the moment at which they all compute: what they lose to slow-downs and to pauses. A trial ends with a verdict once
all have reported how fast they run beside each other, or without one when a side has used up its budget, is paused by
another decision, or leaves, and after some seconds at the latest. `transitions`, `claims` and `pausing` call the
functions; policies read `State.trials`.
"""

from collections.abc import Sequence
from dataclasses import replace

from carpool.core.model import Decision, JobId, Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.core.trial import LEAST_BUDGET_S, LEAST_LENGTH_S, SHARE_OF_LEFT, Side, Trial


def begin(state: State, decisions: Sequence[Decision]) -> None:
    """Begin the trials of a plan.

    A guest that starts names its host. Hosts that are paused so that a job is seen alone name that job, the guest.
    """
    pausing: dict[JobId, list[JobRecord]] = {}
    for decision in decisions:
        if decision.trial is None:
            continue
        job, other = state.jobs[decision.job], state.jobs[decision.trial]
        if job.status is Status.STARTING:
            _add(state, Trial(_side(job), (_side(other),)))
        elif not job.active and other.seq not in state.trials.running:
            pausing.setdefault(decision.trial, []).append(job)
    for name, hosts in pausing.items():
        guest = state.jobs[name]
        _add(state, _costing(state, Trial(_side(guest), tuple(map(_side, hosts))), [guest, *hosts]))


def _add(state: State, trial: Trial) -> None:
    state.trials.running[trial.guest.seq] = trial
    state.trials.begun += 1


def _side(record: JobRecord) -> Side:
    return Side(record.job.id, record.seq, record.attempt)


def compute(state: State, guest: JobRecord) -> None:
    """Count the cost of a guest's trial from now on: it computes."""
    trial = state.trials.running.get(guest.seq)
    if trial is None:
        return
    records = [state.jobs.get(side.job) for side in trial.sides]
    if any(
        record is None or record.attempt != side.attempt or not record.gpus
        for side, record in zip(trial.hosts, records[1:], strict=True)
    ):
        end(state, trial, kept=False)
        return
    state.trials.running[guest.seq] = _costing(state, trial, [record for record in records if record is not None])
    state.needs_decision = True


def _costing(state: State, trial: Trial, records: Sequence[JobRecord]) -> Trial:
    """Return a trial that costs from now on; `records` are the jobs of its sides."""
    guest, *hosts = records
    sides = [_from_now(state, trial.guest, guest, hosts)]
    sides += [_from_now(state, side, host, [guest]) for side, host in zip(trial.hosts, hosts, strict=True)]
    least_left = min([record.alone_left(state.now) for record in records])
    longest = max(LEAST_LENGTH_S, SHARE_OF_LEFT * least_left)
    return Trial(sides[0], tuple(sides[1:]), began=state.now, longest_s=longest)


def _from_now(state: State, side: Side, record: JobRecord, mates: Sequence[JobRecord]) -> Side:
    budget, worst = max(LEAST_BUDGET_S, SHARE_OF_LEFT * record.alone_left(state.now)), 1.0
    if state.learner is not None:
        beside = [(mate.job, mate.accumulation) for mate in mates]
        worst = state.learner.slowdown_range(record.job, record.accumulation, beside).high
    return replace(side, budget_s=budget, alone_s=record.alone_done(state.now), worst=worst)


def look(state: State, record: JobRecord) -> None:
    """End the trial of a job if its verdict is known, or if its budget or time is used up."""
    for trial in [trial for trial in state.trials.running.values() if record.seq in trial.seqs]:
        if trial.began < 0.0:
            continue
        records = [state.jobs[side.job] for side in trial.sides]
        guest, *hosts = records
        seen_together = all(one.computing and one.pace_seen for one in records)
        seen_alone = len(hosts) > 1 and guest.computing and guest.alone_seen  # the ordinary rule chooses among several
        if seen_together or seen_alone:
            end(state, trial, kept=True)
        elif trial.spent(records, state.now):
            end(state, trial, kept=all(one.active for one in records), verdict=False)


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
    records = [one for side in trial.sides if (one := state.jobs.get(side.job)) is not None]
    complete = len(records) == len(trial.sides)
    costs = (0.0,) * len(trial.sides)
    if trial.began >= 0.0 and complete:
        lost = trial.costs(records, state.now)
        costs = tuple([min(cost, side.budget_s) for cost, side in zip(lost, trial.sides, strict=True)])
    if not verdict and complete and state.learner is not None:
        guest, *hosts = records
        for host in hosts:
            state.learner.give_up(guest.job, guest.accumulation, host.job, host.accumulation)
        state.belief_version += 1
    trials.ended.append(replace(trial, ended=state.now, kept=kept, costs_s=costs))
    trials.kept += kept
    trials.cost_s += sum(costs)
    for record in records:  # each of them, and of the jobs that it kept waiting, may go on or be paused now
        state.awakened[record.seq] = record
        for mate in state.cluster.mates(record):
            state.awakened[mate.seq] = mate
    state.capacity_changed()
