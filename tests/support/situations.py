"""Random but legal situations for property tests, and checks of a whole state."""

from dataclasses import dataclass, fields
from random import Random

from hypothesis import strategies as st

from carpool.core import events as ev
from carpool.core.model import (
    Allocation,
    Decision,
    FairShare,
    Job,
    Limits,
    Node,
    UserGroup,
    accumulations,
    sub_batch,
)
from carpool.core.perf import ConstantInterference, FittedModel, MeasuredPair, TableInterference
from carpool.core.record import JobRecord
from carpool.core.rules import IllegalPlan, check
from carpool.core.state import State
from carpool.core.tenants import Tenant
from carpool.core.validate import validate
from tests.support.world import GIB, TASKS

MODELS = sorted(TASKS)


@dataclass
class Situation:
    """A recipe for a state: the same seed always gives the same state, whatever the sort key."""

    seed: int
    jobs_per_gpu: int
    divided: bool = True
    """Whether shares and groups may count."""

    def state(self, sort_key) -> State:
        random = Random(self.seed)
        table = _interference(random)
        node_gpus = random.choice([1, 2, 4])
        state = State(FittedModel(TASKS, table, node_gpus), sort_key, self.jobs_per_gpu)
        memories = random.choice([[16], [16], [8, 16, 24]])
        for number in range(random.randint(1, 4)):
            gpus = tuple(range(number * node_gpus, (number + 1) * node_gpus))
            state.apply(ev.NodeJoined(0.0, Node(f"n{number}", gpus, random.choice(memories) * GIB)))
        if random.random() < 0.3:
            state.apply(ev.LimitsChanged(0.0, "eve", Limits(jobs=random.choice([None, 1, 2]), gpus=3)))
        if self.divided:
            _divide(Random(f"{self.seed} tenants"), state)
        all_gpus = sorted(state.topology.node_of)
        now = 0.0
        for number in range(random.randint(1, 14)):
            now += random.choice([0.0, 1.0, 7.5])
            job = random_job(random, f"j{number}", now, len(all_gpus))
            if state.refusal(job):
                continue
            state.apply(ev.Submitted(now, job))
            if random.random() < 0.6:
                _place(random, state, job, all_gpus, now)
        state.advance(now + random.choice([0.0, 3.0, 40.0]))
        state.rank_queue()
        return state


def _divide(random: Random, state: State) -> None:
    """Let shares count in some of the situations, which have other jobs neither for it nor against it."""
    if random.random() < 0.3:
        state.apply(ev.FairShareChanged(0.0, FairShare(random.choice([0.5, 1.0]), random.choice([20.0, 1e5]))))
    if random.random() < 0.2:
        cap, guarantee = random.choice([None, 4]), random.choice([0, 2])
        state.apply(ev.GroupChanged(0.0, UserGroup(random.choice(["", "red"]), 2.0, guarantee, cap)))


def _interference(random: Random):
    if random.random() < 0.5:
        return ConstantInterference(random.choice([1.0, 1.2, 1.49, 1.5, 1.51, 2.0, 3.0]))
    pairs = {}
    for a in MODELS:
        for b in MODELS:
            pairs[a, b] = [MeasuredPair(random.uniform(1.0, 2.5), samples, 16) for samples in (4, 64)]
    return TableInterference(pairs)


def random_job(random: Random, name: str, now: float, most: int) -> Job:
    return Job(
        id=name,
        submitted=now,
        model=random.choice(MODELS),
        gpus=random.randint(1, min(most, 6)),
        batch=random.choice([1, 3, 8, 32, 64]),
        iterations=random.choice([1, 10, 100, 1000]),
        user=random.choice(["", "eve", "bob"]),
        duration_s=random.choice([None, 5.0, 50.0, 500.0, 510.0, 5000.0]),
        can_shrink=random.random() < 0.7,
        exclusive=random.random() < 0.1,
        max_slowdown=random.choice([None, None, None, 1.1, 1.6]),
        priority=random.choice([0, 0, 0, 1]),
        elastic=random.random() < 0.5,
        group=Random(f"{name} {now}").choice(["", "red", "blue"]),
    )


def _place(random: Random, state: State, job: Job, all_gpus: list[int], now: float) -> None:
    for _ in range(4):
        gpus = tuple(random.sample(all_gpus, job.gpus))
        decision = Decision(job.id, Allocation(gpus, random.choice(accumulations(job.batch))), "given")
        try:
            check(state, [decision])
        except IllegalPlan:
            continue
        state.apply(ev.Planned(now, (decision,)))
        if random.random() < 0.8:
            state.apply(ev.Started(now, job.id, 1))
            if random.random() < 0.1:
                state.apply(ev.PausedByOwner(now, job.id))
                state.apply(ev.Paused(now, job.id, 1))
        return


situations = st.builds(Situation, st.integers(0, 10**9), st.sampled_from([1, 2, 2, 3, 4]))


def facts(state: State) -> dict:
    """Return everything that a state knows as plain values, to compare two states."""
    records = {}
    for name, r in sorted({**state.jobs, **state.ended}.items()):
        known = {field.name: getattr(r, field.name) for field in fields(r)}
        entry = known.pop("queue_entry")
        del known["shape"]
        records[name] = {**known, "priority": r.shape.priority, "key": entry and entry[:3]}
    gpus = {g: ([r.job.id for r in state.jobs_on(g)], state.memory_used(g)) for g in sorted(state.topology.node_of)}
    return {
        "now": state.now,
        "jobs": records,
        "gpus": gpus,
        "queue": [r.job.id for r in state.queue],
        "free": (list(state.free.of_node), list(state.free.by_count), state.free.count),
        "limits": dict(state.limits),
        "counters": (state.busy_gpu_s, state.shares, state.preemptions, state.pauses, state.most_residents),
        "tenants": {name: _rated(group) for name, group in _tenants(state).items()},
        "guesses": state.guesses.dump(),
        "paused": (sorted(state.paused), sorted(state.switching)),
        "hosts": hosts_of(state),
    }


def _rated(group: Tenant) -> tuple:
    """Return what a group holds and how it is rated. One without jobs keeps the last rating, which counts for nothing:
    it is rated anew when a job of it comes."""
    return (group.jobs, group.gpus, group.tier, group.below) if group.jobs else (0, group.gpus)


def _tenants(state: State) -> dict:
    return dict(sorted(state.tenants.groups.items())) if state.tenants.on else {}


def hosts_of(state: State) -> dict:
    """Return the index of hosts as plain values."""
    lone = {kind: [(end, seq) for end, seq, _ in group.entries] for kind, group in state.hosts.lone.items()}
    hosts = state.hosts.others.items()
    others = {seq: (host.kind, host.alone_on) for seq, host in hosts}
    cells = {kind: [(cell.end, cell.seqs, cell.gpus) for cell in group] for kind, group in state.hosts.cells.items()}
    return {"lone": lone, "others": others, "cells": cells}


def check_state(state: State) -> None:
    """Validate all indexes of a state, and check the slow-downs against the pair table itself."""
    _ = (
        state.hosts.offers,
        state.active_hosts.offers,
        state.end_times.running,
        state.end_times.soonest_first,
        state.long_waits,
        state.queue.in_order,
        state.queue.by_patience(10.0),
        state.ranks_of_holders() if state.tenants.on else {},
    )  # kept from here on, and so validated
    validate(state)
    for record in state.jobs.values():
        if record.computing:
            assert abs(record.slowdown - _worst_xi(state, record)) < 1e-12


def _worst_xi(state: State, record: JobRecord) -> float:
    worst = 1.0
    for gpu in record.gpus:
        mates = [mate for mate in state.jobs_on(gpu) if mate is not record and mate.computing]
        worst = max(worst, 1.0 + sum(_xi(state, record, mate) - 1.0 for mate in mates))
    return worst


def _xi(state: State, record: JobRecord, mate: JobRecord) -> float:
    mine, its = sub_batch(record.job.batch, record.accumulation), sub_batch(mate.job.batch, mate.accumulation)
    return state.perf.interference.pair(record.job.model, mine, mate.job.model, its)
