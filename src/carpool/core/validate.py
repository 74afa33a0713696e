"""Checks a state against itself: every index equals a recount from the records, and every rule holds.

Costs time in proportion to the number of jobs and GPUs and changes nothing. Tests call it after every event; the live
service may call it to diagnose a problem.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from carpool.core.charging import rate
from carpool.core.division import held_and_shared
from carpool.core.end_times import EndTimes
from carpool.core.hosts import Hosts, PartlyFreeHosts
from carpool.core.joins import may_compute
from carpool.core.model import HOLDING, PAUSE, GpuId, Status
from carpool.core.offers import Offers, offer_of
from carpool.core.queue import impatience
from carpool.core.ranked_queue import RankedQueue
from carpool.core.record import JobRecord
from carpool.core.sorted_jobs import LongWaits
from carpool.core.state import State
from carpool.core.tenants import Rank, Tenant
from carpool.core.usage_report import report_usage
from carpool.core.view import CellKind, HostKind, OtherHost, SharedCell

CLOSE = 1e-12
"""Difference up to which two slow-downs count as equal."""
NEAR = 1e-9
"""Relative difference up to which two iteration times count as equal."""


class InvalidState(AssertionError):
    """An index of the state disagrees with its records, or a rule is broken."""


def validate(state: State) -> None:
    """Raise `InvalidState` where the state contradicts itself."""
    _validate_gpus(state)
    _validate_free(state)
    _validate_queue(state)
    for record in state.jobs.values():
        _validate_job(state, record)
    _validate_idle(state)
    _validate_users(state)
    _validate_tenants(state)
    if state.accounts.on:
        _validate_accounts(state)
    for hosts in (state._hosts, state._active_hosts):
        if hosts is not None:
            _validate_hosts(state, hosts.refresh())
    if state._end_times is not None:
        _validate_end_times(state, state._end_times.refresh())
    if state._long_waits is not None:
        _validate_long_waits(state, state._long_waits)
    if state._holder_ranks is not None and state.tenants.on:
        _validate_holder_ranks(state, state._holder_ranks.refresh())


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidState(problem)


def _holding(state: State) -> dict[GpuId, list[JobRecord]]:
    """Return the jobs on each GPU as the records tell."""
    holding: dict[GpuId, list[JobRecord]] = {gpu: [] for gpu in state.topology.node_of}
    for record in state.jobs.values():
        for gpu in record.gpus:
            _require(gpu in holding, f"{record} holds GPU {gpu}, which is not part of the cluster")
            holding[gpu].append(record)
    return holding


def _validate_gpus(state: State) -> None:
    holding = _holding(state)
    in_use = sum(bool(records) for records in holding.values())
    _require(state.cluster.in_use == in_use, f"{state.cluster.in_use} GPUs count as used, {in_use} hold jobs")
    places = sum(len(records) for records in holding.values())
    _require(state.cluster.places == places, f"{state.cluster.places} places count as held, {places} are")
    for gpu, records in holding.items():
        there = state.jobs_on(gpu)
        _require(set(there) == set(records), f"GPU {gpu}: residents are {there}, the records tell {records}")
        _require(len(there) == len(records), f"GPU {gpu}: a job is listed twice in {there}")
        _require(len(there) <= state.resident_per_gpu, f"GPU {gpu} holds {len(there)} jobs")
        active = [record for record in records if record.active]
        _require(len(active) <= state.jobs_per_gpu, f"{len(active)} jobs compute on GPU {gpu}")
        used = sum(record.memory for record in records)
        _require(state.memory_used(gpu) == used, f"GPU {gpu}: {state.memory_used(gpu)} bytes reserved, not {used}")
        memory = state.topology.nodes[state.topology.node_of[gpu]].memory
        _require(used <= memory, f"GPU {gpu}: {used} bytes reserved of {memory}")
        exclusive = any(record.job.exclusive for record in active)
        _require(len(active) == 1 or not exclusive, f"GPU {gpu}: an exclusive job shares it: {active}")
        _require(bool(state.gpus_holding(len(records)) >> gpu & 1), f"GPU {gpu} is not listed under its load")
    for number in range(state.resident_per_gpu + 1):
        counted = sum(len(records) == number for records in holding.values())
        listed = state.gpus_holding(number).bit_count()
        _require(listed == counted, f"{listed} GPUs are listed with {number} jobs, not {counted}")


def _validate_free(state: State) -> None:
    topology = state.topology
    free = {gpu for gpu in topology.node_of if not state.jobs_on(gpu)}
    covered = {gpu for closure in state.closures.values() for gpu in closure.gpus}
    closed_gpus = {gpu for gpu, number in topology.node_of.items() if number in topology.closed or gpu in covered}
    usable = free - closed_gpus
    _require(state.free.count == len(usable), f"{state.free.count} GPUs count as free, not {len(usable)}")
    closed = sum(1 << gpu for gpu in closed_gpus)
    _require(topology.closed_gpus == closed, f"the closed GPUs are {topology.closed_gpus:b}, not {closed:b}")
    for number in topology.present.values():
        bits = sum(1 << index for index, gpu in enumerate(topology.nodes[number].gpus) if gpu in free)
        name = topology.nodes[number].id
        _require(
            state.free.of_node[number] == bits, f"node {name}: free GPUs {state.free.of_node[number]:b}, not {bits:b}"
        )
        listed = sum(gpu in usable for gpu in topology.nodes[number].gpus)
        counted = state.free.by_count[listed] >> number & 1
        _require(bool(counted), f"node {name} is not listed with {listed} free GPUs")


def _validate_queue(state: State) -> None:
    pending = [record for record in state.jobs.values() if record.status is Status.PENDING]
    entries = [record.queue_entry for record in pending]
    _require(None not in entries, "a pending job has no queue entry")
    if isinstance(state.queue, RankedQueue):
        ranks = {shape: rank for _, rank, _, shape in state.queue.heads()}
        ranked = sorted((entry[0], ranks[entry[3].shape], entry) for entry in entries)  # type: ignore[index]
        in_order = [entry for *_, entry in ranked]
    else:
        in_order = sorted(entries)  # type: ignore[type-var]
    expected = [entry[3] for entry in in_order]  # type: ignore[index]
    _require(list(state.queue) == expected, f"the queue is {list(state.queue)}, not {expected}")
    _require(len(state.queue) == len(pending), f"the queue counts {len(state.queue)} jobs, not {len(pending)}")
    if state.queue._in_order is not None:
        _require(state.queue._in_order == in_order, "the queue in order differs from its buckets")
    if state.queue._waiting is not None:
        waiting = [
            (record.shape.gpus, record.alone_left(state.now) + record.startup_s, record.seq, record.shape.priority)
            for record in expected
        ]
        _require(state.queue._waiting == waiting, "what the queue's jobs wait for differs from their records")
    if state.queue._by_patience is not None:
        by_patience = sorted(impatience(record, state.queue._patience) for record in pending)
        _require(state.queue._by_patience == by_patience, "the queue by patience differs from its records")


def _validate_tenants(state: State) -> None:
    tenants = state.tenants
    _require(tenants.on is isinstance(state.queue, RankedQueue), "the queue does not follow whether shares count")
    for group in tenants.groups.values() if tenants.on else ():
        jobs = [record for record in state.jobs.values() if record.job.group == group.name]
        _validate_tenant(group, jobs)
        for user in group.members.values():
            _validate_tenant(user, [record for record in jobs if record.job.user == user.name])
        for record in jobs:
            expected = rate(state, record)
            _require(record.charge == expected, f"{record} is charged {record.charge} GPUs, not {expected}")


def _validate_tenant(tenant: Tenant, jobs: list[JobRecord]) -> None:
    held, charged = sum(len(record.gpus) for record in jobs), sum(record.charge for record in jobs)
    _require(tenant.jobs == len(jobs), f"tenant {tenant.name!r} has {tenant.jobs} jobs, not {len(jobs)}")
    _require(tenant.gpus == held, f"tenant {tenant.name!r} holds {tenant.gpus} GPUs, not {held}")
    _require(abs(tenant.rate - charged) < 1e-6, f"tenant {tenant.name!r} pays for {tenant.rate} GPUs, not {charged}")


def _validate_accounts(state: State) -> None:
    for record in state.jobs.values():
        meter = state.accounts.meters.get(record.job.id)
        held, shared = held_and_shared(state.cluster, record)
        if meter is None:
            _require(not record.gpus, f"{record} holds GPUs and has no meter")
            continue
        _require((meter.held, meter.shared) == (held, shared), f"the meter of {record} shows {meter.held}, not {held}")
        _require(meter.computed == (held if record.iteration_s else 0.0), f"the meter of {record} computes wrongly")
        paused = len(record.gpus) if record.paused_since >= 0.0 else 0
        _require(meter.paused == paused, f"the meter of {record} shows {meter.paused} paused GPUs, not {paused}")
    found = report_usage(state, (), state.now)
    total, gpus = found.total(), found.gpus
    missing = gpus.existed - total.held - gpus.idle - gpus.closed
    _require(abs(missing) <= 1e-9 * gpus.existed, f"the accounts miss {missing} GPU-seconds")


def _validate_job(state: State, record: JobRecord) -> None:
    holds = bool(record.gpus)
    may_hold = record.status in HOLDING
    must_hold = may_hold and record.status is not Status.CANCELLING
    _require(may_hold if holds else not must_hold, f"{record} holds {len(record.gpus)} GPUs")
    _require((record.seq in state.holders) == holds, f"{record} is not listed right among the jobs that hold GPUs")
    _require(set(record.leaving) <= set(state.topology.node_of), f"{record} leaves GPUs that are not there")
    _validate_pause(state, record)
    _validate_joins(state, record)
    leaves = record.status in (Status.STOPPING, Status.STARTING, Status.CANCELLING)
    _require(leaves or not record.leaving, f"{record} leaves GPUs {record.leaving}")
    _require(0.0 <= record.done <= record.job.iterations, f"{record} has done {record.done} iterations")
    whole_s = state.perf.iteration_time(record.job, 1, record.shape.placement) * record.stretch
    near = abs(record.whole_iteration_s - whole_s) <= NEAR * whole_s
    _require(near, f"{record}: iterations of {record.whole_iteration_s} s are believed, not of {whole_s} s")
    if holds and record.batch is None:
        _require(len(record.gpus) == record.job.gpus, f"{record} is a gang of {record.job.gpus}")
    elif holds:
        alone = all(state.jobs_on(gpu) == (record,) for gpu in record.gpus)
        _require(
            record.job.elastic and alone, f"{record} has a batch that the scheduler chose, and shares or is not elastic"
        )
    splits = record.accumulation > 1 and holds
    _require(record.job.can_shrink or not splits or record.batch is not None, f"{record} may not split its batch")
    if record.status is Status.BLOCKED:
        waits = all(record.job.id in state.dependents.get(name, ()) for name in record.waits_for)
        _require(bool(record.waits_for) and waits, f"{record} waits for {record.waits_for}, which do not list it")
    _require(record.status in (Status.RUNNING, *PAUSE) or not record.warming_up, f"{record} warms up")
    starts = record.status is Status.STARTING or record.warming_up
    _require(starts or not record.standby, f"{record} does not start up, and has no turn")
    if not record.computing:
        _require(not record.iteration_s, f"{record} iterates")
    elif not record.pace_seen:
        expected = _worst_slowdown(state, record)
        _require(abs(record.slowdown - expected) <= CLOSE, f"{record}: slow-down {record.slowdown}, not {expected}")


def _validate_pause(state: State, record: JobRecord) -> None:
    status, seq = record.status, record.seq
    if status is not Status.CANCELLING:
        active = status in (Status.STARTING, Status.RUNNING, Status.RESUMING) and not record.standby
        _require(record.active == active, f"{record} counts as {'active' if record.active else 'not active'}")
    _require((record.paused_since >= 0.0) == (status in PAUSE), f"{record} is paused since {record.paused_since}")
    paused = status in (Status.PAUSING, Status.PAUSED)
    _require(not record.swapped or (paused and not record.memory), f"{record} holds {record.memory} bytes, swapped out")
    _require((seq in state.paused) == paused, f"{record} is not listed right among the paused jobs")
    switching = status in (Status.PAUSING, Status.RESUMING)
    _require((seq in state.switching) == switching, f"{record} is not listed right among those that switch")


def _validate_joins(state: State, record: JobRecord) -> None:
    mates = state.cluster.mates(record)
    joined = tuple(sorted([mate.seq for mate in mates if record.seq in mate.shared_with]))
    _require(record.shared_with == joined, f"{record} counts as having joined {record.shared_with}, not {joined}")
    beside = {mate.seq for mate in mates if may_compute(mate)} if may_compute(record) else set()
    _require(beside <= set(joined), f"{record} computes beside {sorted(beside)} and has joined {joined} only")


def _validate_idle(state: State) -> None:
    idle = {gpu for gpu, there in _holding(state).items() if there and not any(record.active for record in there)}
    _require(set(state.idle()) == idle, f"the idle GPUs are {sorted(state.idle())}, not {sorted(idle)}")
    paused = {gpu for gpu, there in _holding(state).items() if not all(record.active for record in there)}
    counted = sorted(state.with_paused())
    _require(set(counted) == paused, f"the GPUs with paused jobs are {counted}, not {sorted(paused)}")


def _worst_slowdown(state: State, record: JobRecord) -> float:
    worst = 1.0
    for gpu in record.gpus:
        mates = [mate for mate in state.jobs_on(gpu) if mate is not record and mate.computing]
        if mates:
            beside = [(mate.job, mate.accumulation) for mate in mates]
            worst = max(worst, state.perf.slowdown(record.job, record.accumulation, beside))
    return worst


def _validate_users(state: State) -> None:
    if not state.limits:
        return
    counted: dict[str, list[int]] = {}
    for record in state.running:
        held = counted.setdefault(record.job.user, [0, 0])
        held[0] += 1
        held[1] += len(record.gpus)
    for user in counted.keys() | state.held.keys():
        jobs, gpus = counted.get(user, (0, 0))
        held_jobs, held_gpus = state.held_by(user)
        _require(held_jobs == jobs, f"user {user!r} counts as holding {held_jobs} jobs, not {jobs}")
        _require(held_gpus == gpus, f"user {user!r} counts as holding {held_gpus} GPUs, not {gpus}")


def _validate_hosts(state: State, kept: Hosts) -> None:
    which = "active hosts" if kept.only_active else "hosts"
    lone: dict[HostKind, list[tuple[float, int]]] = {}
    others: dict[int, OtherHost] = {}
    cells: dict[CellKind, set[SharedCell]] = {}
    for record in state.jobs.values():
        entry = kept.describe(record)
        if isinstance(entry, OtherHost):
            others[record.seq] = entry
        elif entry is not None:
            lone.setdefault(entry, []).append((record.end(), record.seq))
        for kind, cell in kept.describe_cells(record) if state.jobs_per_gpu > 2 else ():
            cells.setdefault(kind, set()).add(cell)
    listed = {kind: [seq for _, seq, _ in group.entries] for kind, group in kept.lone.items()}
    expected = {kind: [seq for _, seq in sorted(entries)] for kind, entries in lone.items()}
    _require(listed == expected, f"the lone {which} are {listed}, not {expected}")
    _require(kept.others == others, f"the index of other {which} is wrong")
    in_order = {kind: sorted(group) for kind, group in cells.items()}
    _require(kept.cells == in_order, f"the cells of several {which} are {kept.cells}, not {in_order}")
    partly = {
        (kind, slowdown, host) for kind, group in kept.partly_free.items() for slowdown, host in _partly_free(group)
    }
    expected_partly = {
        (host.kind, host.record.slowdown if host.record.computing else None, host) for host in others.values()
    }
    _require(partly == expected_partly, f"the partly free {which} are wrong")
    for group in kept.partly_free.values():
        for entries in group.running.values():
            ends = [end for end, _, _ in entries]
            exact = [host.record.end() for _, _, host in entries]
            near = all(abs(one - other) <= CLOSE * max(1.0, other) for one, other in zip(ends, exact, strict=True))
            _require(ends == sorted(ends) and near, f"the partly free {which} end at {exact}, not at {ends}")

    if kept._offers is not None:
        _validate_offers(kept, kept._offers, lone, others)


def _validate_offers(
    kept: Hosts, offers: Offers, lone: Mapping[HostKind, list[tuple[float, int]]], others: Mapping[int, OtherHost]
) -> None:
    records = {seq: record for group in kept.lone.values() for _, seq, record in group.entries}
    expected = {seq: offer_of(records[seq], kind) for kind, group in lone.items() for _, seq in group}
    expected |= {seq: offer_of(host.record, host) for seq, host in others.items()}
    exact = {seq: replace(offer, end=0.0) for seq, offer in expected.items()}
    _require({seq: replace(offer, end=0.0) for seq, offer in offers.by_seq.items()} == exact, "the offers are wrong")
    near = all(abs(offers.by_seq[seq].end - one.end) <= CLOSE * max(1.0, one.end) for seq, one in expected.items())
    _require(near, "the offers end at another time")


def _partly_free(group: PartlyFreeHosts) -> Iterator[tuple[float | None, OtherHost]]:
    """Yield the hosts of a kind and the slow-downs under which they are listed; None: they do not run yet."""
    for slowdown, entries in group.running.items():
        for _, _, host in entries:
            yield slowdown, host
    for host in group.starting.values():
        yield None, host


def _validate_long_waits(state: State, kept: LongWaits) -> None:
    fresh = sorted((record.waited_s, record.seq, record) for record in state.running)
    _require(kept.longer_than(-1.0) == [record for *_, record in fresh], "the long waits differ from a sort")


def _validate_holder_ranks(state: State, kept: Mapping[int, Rank]) -> None:
    entitled: dict[str, int] = {}  # GPUs of the jobs that each group is entitled to
    expected: dict[int, Rank] = {}
    for record in sorted(state.running, key=lambda record: record.seq):
        gpus = entitled.get(record.job.group, 0) + len(record.gpus)
        rank = expected[record.seq] = state.tenants.rank(record.shape, gpus)
        if not rank[0]:
            entitled[record.job.group] = gpus
    _require(kept == expected, f"the ranks of the jobs that hold GPUs are {kept}, not {expected}")


def _validate_end_times(state: State, kept: EndTimes) -> None:
    fresh = EndTimes(state.cluster, state.perf, state.holders)
    for record in state.running:
        fresh.touch(record)
    fresh.refresh()
    _require(kept.ends == fresh.ends, "the predicted ends differ from a new prediction")
    _require(kept.lent.moments == fresh.lent.moments, "the times at which GPUs are free differ from a new prediction")
    _require(kept.soonest_first == fresh.soonest_first, "the jobs by predicted end differ from a sort")
    groups = {group: jobs for group, jobs in kept.running.items() if jobs}
    _require(groups == dict(fresh.running), "the running jobs by number of GPUs and mates differ from a recount")
