"""GPUs that are closed from a time on: drained by the operator, or reserved for a group.

From the moment that a closure is known, policies see its GPUs as closed. A job may still start there, alone, if by the
upper end of its estimate it ends before the closure begins, or if the GPUs are reserved for its group: `fill` adds such
starts to a policy's plan, gives a group what is reserved for it before other GPUs, and `rules.check` refuses all
others. When the closure begins, `cleared` says which jobs save and move, and which can only be paused. `choose` finds
GPUs where an operator says only how many. `State` keeps the closures.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from carpool.core.codec import builder, plain
from carpool.core.model import WORKING, Allocation, Closure, Decision, GpuId
from carpool.core.record import JobRecord
from carpool.core.rules import IllegalPlan, check
from carpool.core.state import State

MOST_TRIED = 200
"""Number of pending jobs that are tried on closed GPUs at one decision."""


def fill(state: State, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Return a plan with the starts on closed GPUs that their closures permit, in the order of the queue."""
    free = {gpu for gpu in _kept_gpus(state) if all(there.kept_paused for there in state.jobs_on(gpu))}
    free -= {gpu for one in decisions if one.allocation is not None for gpu in one.allocation.gpus}
    if free:
        decisions = _on_reserved(state, decisions, free)
    named = {decision.job for decision in decisions}
    tried = 0
    for record in state.queue.scan(len(free)):
        tried += 1
        if not free or tried > MOST_TRIED:
            break
        usable = [gpu for gpu in free if state.may_use(record, gpu)] if record.job.id not in named else []
        if len(usable) < record.job.gpus:
            continue
        gpus = tuple(state.topology.most_consolidated(usable, record.job.gpus))
        found = _start(state, decisions, record, gpus)
        if found is not None:
            decisions = (*decisions, found)
            free.difference_update(gpus)
    return decisions


def _on_reserved(state: State, decisions: tuple[Decision, ...], free: set[GpuId]) -> tuple[Decision, ...]:
    """Return a plan in which jobs start on GPUs that are reserved for their group rather than on others, where they may
    share or displace jobs. What the plan changed for the jobs there is left out. The GPUs used are removed from `free`.
    """
    begun = [state.closures[name] for name in state.closures_begun]
    for start in decisions:
        record = state.jobs[start.job]
        if record.gpus or start.allocation is None:
            continue
        usable = {gpu for closure in begun if closure.is_for(record.job) for gpu in closure.gpus} & free
        usable = {gpu for gpu in usable if state.may_use(record, gpu)}
        if len(usable) < record.job.gpus:
            continue
        gpus = tuple(state.topology.most_consolidated(sorted(usable), record.job.gpus))
        mates = {there.job.id for gpu in start.allocation.gpus for there in state.jobs_on(gpu)}
        others = tuple(one for one in decisions if one is not start and one.job not in mates)
        found = _start(state, others, record, gpus)
        if found is not None:
            decisions = (*others, found)
            free.difference_update(gpus)
    return decisions


def _kept_gpus(state: State) -> Iterator[GpuId]:
    for gpu in {gpu for closure in state.closures.values() for gpu in closure.gpus}:
        if gpu in state.topology.node_of:
            yield gpu


def _start(state: State, decisions: Sequence[Decision], record: JobRecord, gpus: tuple[GpuId, ...]) -> Decision | None:
    """Return the start of a job on these GPUs at the largest sub-batch that the rules allow; None: there is none."""
    for size in record.shape.sizes:
        why = "it ends before its GPUs are closed, or they are reserved for its group"
        decision = Decision(record.job.id, Allocation(gpus, size.accumulation), why)
        try:
            check(state, (*decisions, decision))
        except IllegalPlan:
            continue
        return decision
    return None


def cleared(state: State, closure: Closure) -> list[tuple[JobRecord, bool]]:
    """Return the jobs that must not go on where a closure begins, and whether each of them moves or is paused.

    A job that can be neither saved nor paused goes on.
    """
    if closure.lets_finish:
        return []
    covered = set(closure.gpus)
    there = [record for record in state.holders.values() if not covered.isdisjoint(record.gpus)]
    there = [record for record in there if record.status in WORKING and not closure.is_for(record.job)]
    return [(record, _moves(record)) for record in there if record.job.can_suspend or record.job.can_pause]


def _moves(record: JobRecord) -> bool:
    """Return whether a job saves and moves where it could also be paused: only if it loses nothing by that."""
    job = record.job
    return job.can_suspend and (job.saves is True or record.starts_up or not job.can_pause)


def choose(state: State, number: int, closure: Closure) -> tuple[GpuId, ...] | None:
    """Return GPUs for a closure that says when and for whom, but not where; None: there are not enough.

    Those on which the fewest jobs would be in the way come first, and then those that are on as few nodes as possible.
    """
    taken = {gpu for other in state.closures.values() if overlap(other, closure) for gpu in other.gpus}
    topology = state.topology
    in_the_way: dict[GpuId, int] = {}
    for gpu, node in topology.node_of.items():
        if gpu not in taken and node not in topology.closed:
            there = [record for record in state.jobs_on(gpu) if not closure.is_for(record.job)]
            in_the_way[gpu] = sum(state.latest_end(record) > closure.start for record in there)
    for most in sorted(set(in_the_way.values())):
        usable = [gpu for gpu, jobs in in_the_way.items() if jobs <= most]
        if len(usable) >= number:
            return tuple(sorted(topology.most_consolidated(usable, number)))
    return None


def overlap(one: Closure, other: Closure) -> bool:
    """Return whether two closures are closed at the same time."""
    return (one.end is None or other.start < one.end) and (other.end is None or one.start < other.end)


def is_held(state: State, record: JobRecord) -> bool:
    """Return whether a closure that has begun keeps a job paused."""
    begun = [closure for name, closure in state.closures.items() if name in state.closures_begun]
    return any(record is other and not saves for closure in begun for other, saves in cleared(state, closure))


def kept_mask(state: State) -> int:
    """Return the GPUs of all closures, one bit each."""
    return sum(1 << gpu for gpu in {gpu for closure in state.closures.values() for gpu in closure.gpus})


def dump(state: State) -> dict[str, Any]:
    """Return the closures as plain data."""
    return {"all": [plain(one) for one in state.closures.values()], "begun": sorted(state.closures_begun)}


def load(state: State, data: dict[str, Any]) -> None:
    """Restore the closures that `dump` wrote into a state whose nodes are there."""
    for raw in data["all"]:
        closure: Closure = builder(Closure)({**raw})
        state.closures[closure.id] = closure
    state.closures_begun = set(data["begun"])
    state.cluster.set_kept(kept_mask(state))


def due(state: State, now: float) -> Iterator[tuple[str, bool]]:
    """Yield the closures that begin or are over by now, and whether each of them is over."""
    for name, closure in state.closures.items():
        if closure.end is not None and closure.end <= now:
            yield name, True
        elif closure.start <= now and name not in state.closures_begun:
            yield name, False
