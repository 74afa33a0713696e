"""What a run amounts to: completion times, queueing, makespan, use of the GPUs, and the price of sharing.

Computed from the records that a `State` keeps of every job, so that a live history and a simulation are measured alike.
Percentiles interpolate linearly between the two nearest ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State


@dataclass(frozen=True, slots=True)
class SubsetSummary:
    """A set of jobs: all large ones, say, or all of one model. Means of no jobs are 0."""

    jobs: int
    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    mean_queue_s: float
    makespan_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Times are seconds; the names are those of `--json`."""

    policy: str
    workload: str
    jobs: int
    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    mean_queue_s: float
    makespan_s: float
    gpu_utilisation: float
    """Share of GPU time, from the first submission to the last end, in which a GPU held at least one job."""
    shares: int
    """Times a job joined others on their GPUs."""
    preemptions: int
    hosts: int
    """Jobs that were joined by others."""
    host_slowdown_mean: float
    """Run time of those jobs over what the same iterations take alone."""
    host_slowdown_max: float
    decisions: int
    decision_mean_s: float
    decision_p99_s: float
    cpu_s: float
    large: SubsetSummary
    small: SubsetSummary
    models: dict[str, SubsetSummary]


def jct(record: JobRecord) -> float:
    return record.ended - record.job.submitted


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order."""
    if not ordered:
        return 0.0
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


Times = tuple[float, float, float, float]
"""One job's completion time, time in the queue, submission and end."""


def times_of(record: JobRecord) -> Times:
    submitted, ended = record.job.submitted, record.ended
    return ended - submitted, record.waited_s, submitted, ended


def group(jobs: Sequence[Times]) -> SubsetSummary:
    if not jobs:
        return SubsetSummary(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    jcts, waited, submitted, ended = zip(*jobs, strict=True)
    ordered = sorted(jcts)
    return SubsetSummary(
        jobs=len(jobs),
        mean_jct_s=fmean(ordered),
        p50_jct_s=percentile(ordered, 0.50),
        p95_jct_s=percentile(ordered, 0.95),
        p99_jct_s=percentile(ordered, 0.99),
        mean_queue_s=fmean(waited),
        makespan_s=max(ended) - min(submitted),
    )


def summarise(
    state: State,
    *,
    policy: str,
    workload: str,
    decision_s: Iterable[float] = (),
    cpu_s: float = 0.0,
    large_above: int = 4,
) -> Summary:
    """Measure all jobs that finished."""
    records = finished(state)
    times = [times_of(record) for record in records]
    everything = group(times)
    sizes: dict[bool, list[Times]] = {True: [], False: []}
    models: dict[str, list[Times]] = {}
    for record, own in zip(records, times, strict=True):
        sizes[record.job.gpus > large_above].append(own)
        models.setdefault(record.job.model, []).append(own)
    hosts = [record.ran_s / record.alone_s for record in records if record.hosted and record.alone_s > 0.0]
    decisions = sorted(decision_s)
    gpu_time = state.topology.total() * everything.makespan_s
    return Summary(
        policy=policy,
        workload=workload,
        jobs=everything.jobs,
        mean_jct_s=everything.mean_jct_s,
        p50_jct_s=everything.p50_jct_s,
        p95_jct_s=everything.p95_jct_s,
        p99_jct_s=everything.p99_jct_s,
        mean_queue_s=everything.mean_queue_s,
        makespan_s=everything.makespan_s,
        gpu_utilisation=state.busy_gpu_s / gpu_time if gpu_time else 0.0,
        shares=state.shares,
        preemptions=state.preemptions,
        hosts=len(hosts),
        host_slowdown_mean=fmean(hosts) if hosts else 1.0,
        host_slowdown_max=max(hosts, default=1.0),
        decisions=len(decisions),
        decision_mean_s=fmean(decisions) if decisions else 0.0,
        decision_p99_s=percentile(decisions, 0.99),
        cpu_s=cpu_s,
        large=group(sizes[True]),
        small=group(sizes[False]),
        models={model: group(part) for model, part in sorted(models.items())},
    )


def finished(state: State) -> list[JobRecord]:
    return [record for record in state.ended.values() if record.status is Status.FINISHED]
