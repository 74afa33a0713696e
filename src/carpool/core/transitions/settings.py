"""What operators set for all jobs: limits, groups, shares, whether guesses are trusted, accounts."""

from carpool.core import events as ev
from carpool.core.charging import rate
from carpool.core.claims import count_for_user
from carpool.core.queue import Queue
from carpool.core.queueing import enqueue, reshape
from carpool.core.ranked_queue import RankedQueue
from carpool.core.record import JobRecord
from carpool.core.state import State, handles


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


@handles(ev.GroupChanged)
def _group_changed(state: State, event: ev.GroupChanged) -> None:
    was_on = state.tenants.on
    state.tenants.describe(event.group)
    _count_tenants(state, was_on)


@handles(ev.FairShareChanged)
def _fair_share_changed(state: State, event: ev.FairShareChanged) -> None:
    was_on = state.tenants.on
    state.tenants.choose(event.fair_share, state.now)
    _count_tenants(state, was_on)


@handles(ev.GuessesTrusted)
def _guesses_trusted(state: State, event: ev.GuessesTrusted) -> None:
    state.guesses.trusted = event.trusted


def _count_tenants(state: State, was_on: bool) -> None:
    """Begin to count what groups and users hold, or cease to, and sort the queue again."""
    tenants = state.tenants
    if tenants.on is not was_on:
        for record in state.jobs.values():
            _count_tenant(state, record, 1 if tenants.on else -1)
        waiting = [entry[3] for bucket in state.queue.buckets.values() for entry in bucket]
        for record in waiting:
            state.queue.remove(record)
        state.queue = RankedQueue(tenants) if tenants.on else Queue()
        for record in state.jobs.values():
            record.shape = state.shape_of(record.job, record.shape.priority)
        for record in waiting:
            enqueue(state, record)
    else:
        tenants.changed.update(tenants.groups)
    state.capacity_changed()


def _count_tenant(state: State, record: JobRecord, sign: int) -> None:
    state.tenants.count(record, sign)
    if record.gpus:
        state.tenants.hold(record, sign, rate(state, record) if sign > 0 else 0.0, state.now)


@handles(ev.AccountsOpened)
def _accounts_opened(state: State, event: ev.AccountsOpened) -> None:
    if state.accounts.on:
        return
    state.accounts.open(state.now, state.topology, exact=event.exact)
    for record in state.holders.values():
        state.accounts.follow(state.cluster, record, state.now)
