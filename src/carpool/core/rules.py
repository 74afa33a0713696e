"""The rules that every plan must obey, whatever the policy.

Drafts ask `sharing_problem` while they look for a place. The scheduler runs `check` on every plan before it is applied,
so a policy cannot forget a rule, and the error names the rule that it broke.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from carpool.core.model import WORKING, Allocation, Decision, GpuId, Job, Status, as_scaled, sub_batch
from carpool.core.perf import PerformanceModel
from carpool.core.view import JobView, View


class IllegalPlan(ValueError):
    """A plan breaks a rule; nothing of it is applied."""


class Resident(NamedTuple):
    """A job that holds memory on a GPU, or will hold it once a plan is applied."""

    record: JobView
    accumulation: int
    memory: int
    batch: int | None = None
    """Batch that the scheduler chose; None: the user's own."""
    active: bool = True
    """Whether it computes; a paused job holds memory and nothing else."""


def resident_of(record: JobView) -> Resident:
    """Return a job that holds GPUs as the resident that it is now."""
    return Resident(record, record.accumulation, record.memory, record.batch, record.active)


def sharing_problem(residents: Sequence[Resident], view: View, memory: int) -> str | None:
    """Return why these jobs cannot be together on one GPU with this much memory, or None."""
    needed = sum([resident.memory for resident in residents])
    if needed > memory:
        return f"{needed / 2**30:.2f} GiB do not fit in {memory / 2**30:.2f} GiB"
    if len(residents) == 1:
        return None
    if len(residents) > view.resident_per_gpu:
        return f"{len(residents)} jobs hold memory on one GPU, the limit is {view.resident_per_gpu}"
    scaled = _scaled_problem(residents)
    if scaled is not None:
        return scaled
    return computing_problem([resident for resident in residents if resident.active], view)


def computing_problem(active: Sequence[Resident], view: View) -> str | None:
    """Return why these jobs cannot compute on one GPU at the same time, or None."""
    if len(active) > view.jobs_per_gpu:
        return f"{len(active)} jobs on one GPU, the limit is {view.jobs_per_gpu}"
    if len(active) < 2:
        return None
    return _scaled_problem(active) or _slowdown_problem(active, view.perf)


def exclusive_problem(residents: Sequence[Resident]) -> str | None:
    """Return why a job may not be put beside others on a GPU, or None: one of them is to be alone there.

    A paused job counts, too. Those that are together already may still take turns: the rule was less strict before.
    """
    exclusive = [resident.record.job.id for resident in residents if resident.record.job.exclusive]
    return f"job {exclusive[0]} asked not to share" if exclusive and len(residents) > 1 else None


def _scaled_problem(residents: Sequence[Resident]) -> str | None:
    for resident in residents:
        if resident.batch is not None:
            return f"job {resident.record.job.id} runs with a batch that the scheduler chose and does not share"
    return None


def _slowdown_problem(active: Sequence[Resident], perf: PerformanceModel) -> str | None:
    """Return which of these jobs does not accept the others beside it, or None."""
    for record, accumulation, *_ in active:
        job = record.job
        if job.exclusive:
            return f"job {job.id} asked not to share"
        if job.max_slowdown is not None:
            mates = [(mate.job, mate_accumulation) for mate, mate_accumulation, *_ in active if mate is not record]
            slowdown = perf.slowdown(job, accumulation, mates)
            if slowdown > job.max_slowdown:
                return f"job {job.id} would take {slowdown:.2f}× as long, its limit is {job.max_slowdown:.2f}×"
    return None


def check(state: View, decisions: Sequence[Decision]) -> None:
    """Raise `IllegalPlan` where the plan breaks a rule."""
    named: dict[str, JobView] = {}
    for decision in decisions:
        record = state.jobs.get(decision.job)
        if record is None:
            raise IllegalPlan(f"job {decision.job} does not exist or has ended")
        if decision.job in named:
            raise IllegalPlan(f"job {decision.job} has two decisions in one plan")
        if not decision.why:
            raise IllegalPlan(f"job {decision.job}: the decision gives no reason")
        named[decision.job] = record
        _check_gang(state, record, decision)
    _check_gpus(state, named, decisions)
    if state.limits:
        _check_users(state, named, decisions)
    if state.caps:
        _check_groups(state, named, decisions)


def legal_part(view: View, decisions: Sequence[Decision]) -> tuple[tuple[Decision, ...], list[IllegalPlan]]:
    """Return a plan without the decisions that break a rule, so that one of them does not block the others, and why
    each of these is left out."""
    kept: tuple[Decision, ...] = ()
    refused: list[IllegalPlan] = []
    for decision in decisions:
        try:
            check(view, (*kept, decision))
            kept = (*kept, decision)
        except IllegalPlan as illegal:
            refused.append(illegal)
    return kept, refused


def _check_gang(state: View, record: JobView, decision: Decision) -> None:
    job, allocation = record.job, decision.allocation
    if record.status is not Status.PENDING and record.status not in WORKING:
        raise IllegalPlan(f"job {job.id} is {record.status} and can be neither started nor stopped")
    if allocation is None:
        if not record.gpus:
            raise IllegalPlan(f"job {job.id} does not run and cannot be stopped")
        return
    gpus = allocation.gpus
    if allocation.swapped:
        _check_swap(state, record, allocation)
    if gpus and gpus == record.gpus:
        _check_change(record, allocation)
    elif not allocation.active:
        _check_start_up(state, record, allocation)
    if allocation.batch is not None:
        _check_scale(state, record, allocation)
    elif len(gpus) != job.gpus:
        raise IllegalPlan(f"job {job.id} is a gang of {job.gpus} GPUs and got {len(gpus)}")
    if len(gpus) > 1 and len(set(gpus)) != len(gpus):
        raise IllegalPlan(f"job {job.id} got a GPU twice")
    _check_places(state, record, gpus)
    _check_split(job, allocation)


def _check_places(state: View, record: JobView, gpus: Sequence[GpuId]) -> None:
    """Check that the GPUs of a job exist, and that it may start on those that it does not have already."""
    topology = state.topology
    node_of, some_closed = topology.node_of, topology.closed_gpus != 0
    for gpu in gpus:
        if gpu not in node_of:
            raise IllegalPlan(f"job {record.job.id} got GPU {gpu}, which does not exist")
        if some_closed and gpu not in record.gpus and topology.is_closed(gpu) and not state.may_use(record, gpu):
            raise IllegalPlan(f"job {record.job.id} got GPU {gpu}, where nothing new may start")


def _check_start_up(state: View, record: JobView, allocation: Allocation) -> None:
    """Check the start of a job that has no turn to compute so far."""
    job = record.job
    if record.gpus or allocation.batch is not None:
        raise IllegalPlan(f"job {job.id} cannot be paused where it does not run")
    if not job.can_pause:
        raise IllegalPlan(f"job {job.id} asked not to be paused, and cannot start without a turn to compute")
    if not may_start_ahead(state, job):
        raise IllegalPlan(f"job {job.id} does not report when it is up, and cannot start without a turn to compute")


def may_start_ahead(state: View, job: Job) -> bool:
    """Return whether a job may start up before its turn to compute: it can be paused, and is known to report the end of
    its start-up. For other jobs it is unknown when they must be paused."""
    if not job.can_pause or job.can_start_ahead is False:
        return False
    seen = state.learner.announces(job) if state.learner is not None else None
    return job.can_start_ahead is True if seen is None else seen


def _check_change(record: JobView, allocation: Allocation) -> None:
    """Check what changes for a job on its GPUs: a re-tune, a pause or a resume."""
    job = record.job
    if allocation.active and record.active:
        if record.status is not Status.RUNNING:
            raise IllegalPlan(f"job {job.id} is {record.status} and cannot be re-tuned before it runs")
        return
    # a pause or a resume changes nothing else, and the workers have confirmed the last one
    if (allocation.accumulation, allocation.batch) != (record.accumulation, record.batch):
        raise IllegalPlan(f"job {job.id} cannot be re-tuned by the decision that pauses or resumes it")
    if allocation.active:
        if record.status is not Status.PAUSED:
            raise IllegalPlan(f"job {job.id} is {record.status} and cannot be resumed")
        if record.paused_by_owner:
            raise IllegalPlan(f"job {job.id} was paused by its owner")
    elif record.status is not Status.RUNNING and not (record.status is Status.PAUSED and allocation.swapped):
        raise IllegalPlan(f"job {job.id} is {record.status} and cannot be paused")
    elif not job.can_pause and not record.paused_by_owner:
        raise IllegalPlan(f"job {job.id} asked not to be paused")


def _check_swap(state: View, record: JobView, allocation: Allocation) -> None:
    job, topology = record.job, state.topology
    if allocation.active or not record.gpus or allocation.gpus != record.gpus:
        raise IllegalPlan(f"job {job.id} cannot compute or move while its memory is swapped out")
    if record.swapped or len(record.gpus) > 1 or record.batch is not None:
        raise IllegalPlan(f"job {job.id} cannot be swapped out: only jobs of one GPU can, and only once")
    if not topology.nodes[topology.node_of[record.gpus[0]]].can_swap:
        raise IllegalPlan(f"job {job.id} cannot be swapped out: its node cannot do that")


def _check_split(job: Job, allocation: Allocation) -> None:
    batch = job.batch if allocation.batch is None else allocation.batch
    if not 1 <= allocation.accumulation <= batch:
        raise IllegalPlan(f"job {job.id} cannot split a batch of {batch} into {allocation.accumulation} micro-batches")
    if job.can_shrink and allocation.batch is None and allocation.accumulation < job.min_accumulation:
        raise IllegalPlan(f"job {job.id} must split its batch into at least {job.min_accumulation} micro-batches")
    if allocation.accumulation > 1 and not job.can_shrink:
        raise IllegalPlan(f"the batch of job {job.id} may not be split")


def _check_scale(state: View, record: JobView, allocation: Allocation) -> None:
    """Check the GPUs and the batch of an elastic job against the limits of its task; its own are always allowed."""
    job, gpus, batch = record.job, len(allocation.gpus), allocation.batch
    assert batch is not None
    scaling = state.perf.scaling(job)
    if scaling is None:
        raise IllegalPlan(f"the GPUs and the batch of job {job.id} may not be changed")
    if gpus < 1 or (scaling.max_gpus is not None and gpus > max(scaling.max_gpus, job.gpus)):
        raise IllegalPlan(f"job {job.id} got {gpus} GPUs, its task takes 1 to {scaling.max_gpus}")
    own = job.batch * job.gpus
    least, most = min(scaling.initial_batch, own), max(scaling.max_batch, own)
    if not least <= gpus * batch <= most:
        raise IllegalPlan(f"job {job.id} got a total batch of {gpus * batch}, its task takes {least} to {most}")
    samples = sub_batch(batch, max(1, allocation.accumulation))
    if samples > max(scaling.max_sub_batch, job.batch):
        raise IllegalPlan(f"job {job.id} got {samples} samples per GPU, its task takes {scaling.max_sub_batch}")


def _check_gpus(state: View, named: dict[str, JobView], decisions: Sequence[Decision]) -> None:
    """Check every GPU that gets a job as it will be once the whole plan is applied."""
    topology, jobs_on = state.topology, state.jobs_on
    equal = topology.largest_memory if topology.equal_memory else None
    if len(decisions) == 1 and equal is not None:
        _check_only(state, named[decisions[0].job], decisions[0], equal)
        return
    arriving: dict[GpuId, list[Resident]] = {}
    entered: set[GpuId] = set()
    for decision in decisions:
        allocation = decision.allocation
        if allocation is not None:
            record = named[decision.job]
            resident = _as_planned(state, record, allocation)
            for gpu in allocation.gpus:
                arriving.setdefault(gpu, []).append(resident)
            if allocation.gpus != record.gpus:
                entered.update(allocation.gpus)
    last: tuple[object, ...] = ()
    for gpu, residents in arriving.items():
        there = jobs_on(gpu)
        memory = topology.memory_of(gpu) if equal is None else equal
        if not there and len(residents) == 1 and residents[0].memory <= memory:
            continue
        alike = (there, tuple(residents), memory, gpu in entered)
        if alike == last:  # a gang often joins a job on several GPUs
            continue
        last = alike
        residents += [resident_of(record) for record in there if record.job.id not in named]
        _check_gpu(state, gpu, residents, memory, entered=gpu in entered)


def _check_only(state: View, record: JobView, decision: Decision, memory: int) -> None:
    """Check the GPUs of a plan of one decision, as most plans are, where all GPUs have the same memory."""
    allocation = decision.allocation
    if allocation is None:
        return
    resident, jobs_on, last = _as_planned(state, record, allocation), state.jobs_on, None
    entered = allocation.gpus != record.gpus
    for gpu in allocation.gpus:
        there = jobs_on(gpu)
        if there == last:
            continue
        last = there
        if there or resident.memory > memory:
            residents = [resident, *[resident_of(other) for other in there if other is not record]]
            _check_gpu(state, gpu, residents, memory, entered=entered)


def _as_planned(state: View, record: JobView, allocation: Allocation) -> Resident:
    """Return a job as the resident that it becomes by a plan."""
    # a re-tuned job keeps the larger of both sub-batches until its workers confirm
    held = record.memory if record.gpus == allocation.gpus else 0
    job = record.job if allocation.batch is None else as_scaled(record.job, allocation)
    needed = state.perf.memory(job, allocation.accumulation)
    memory = 0 if allocation.swapped else max(held, needed)
    return Resident(record, allocation.accumulation, memory, allocation.batch, allocation.active)


def _check_gpu(state: View, gpu: GpuId, residents: Sequence[Resident], memory: int, *, entered: bool) -> None:
    """Check one GPU that a plan `entered`, or whose residents it changes."""
    problem = sharing_problem(residents, state, memory)
    if problem is None and entered:
        problem = exclusive_problem(residents)
    if problem:
        raise IllegalPlan(f"GPU {gpu}: {problem}")


def _check_users(state: View, named: dict[str, JobView], decisions: Iterable[Decision]) -> None:
    change: dict[str, list[int]] = {}
    for decision in decisions:
        record = named[decision.job]
        allocation = decision.allocation
        jobs_gpus = change.setdefault(record.job.user, [0, 0])
        jobs_gpus[0] += (allocation is not None) - bool(record.gpus)
        jobs_gpus[1] += (len(allocation.gpus) if allocation else 0) - len(record.gpus)
    for user, (jobs, gpus) in change.items():
        limits, held = state.limits_of(user), state.held_by(user)
        if jobs > 0 and limits.jobs is not None and held[0] + jobs > limits.jobs:
            raise IllegalPlan(f"user {user or '(none)'} may run {limits.jobs} jobs at a time")
        if gpus > 0 and limits.gpus is not None and held[1] + gpus > limits.gpus:
            raise IllegalPlan(f"user {user or '(none)'} may hold {limits.gpus} GPUs at a time")


def _check_groups(state: View, named: dict[str, JobView], decisions: Iterable[Decision]) -> None:
    change: dict[str, int] = {}
    for decision in decisions:
        record, allocation = named[decision.job], decision.allocation
        more = (len(allocation.gpus) if allocation else 0) - len(record.gpus)
        change[record.job.group] = change.get(record.job.group, 0) + more
    for group, gpus in change.items():
        cap = state.caps.get(group)
        if gpus > 0 and cap is not None and state.held_by_group(group) + gpus > cap:
            raise IllegalPlan(f"group {group or '(none)'} may hold {cap} GPUs at a time")
