"""What a run amounts to: completion times, queueing, makespan, use of the GPUs, and the price of sharing.

Computed from the records that a `State` keeps of every job, so that a live history and a simulation are measured alike.
Percentiles interpolate linearly between the two nearest ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State


@dataclass(frozen=True, slots=True)
class Group:
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
    large: Group
    small: Group
    models: dict[str, Group]


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


def group(records: Sequence[JobRecord]) -> Group:
    if not records:
        return Group(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    times = sorted([record.ended - record.job.submitted for record in records])
    first = min([record.job.submitted for record in records])
    last = max([record.ended for record in records])
    return Group(
        jobs=len(times),
        mean_jct_s=fmean(times),
        p50_jct_s=percentile(times, 0.50),
        p95_jct_s=percentile(times, 0.95),
        p99_jct_s=percentile(times, 0.99),
        mean_queue_s=fmean([record.waited_s for record in records]),
        makespan_s=last - first,
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
    everything = group(records)
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
        large=group([record for record in records if record.job.gpus > large_above]),
        small=group([record for record in records if record.job.gpus <= large_above]),
        models=_by(records, lambda record: record.job.model),
    )


def finished(state: State) -> list[JobRecord]:
    return [record for record in state.ended.values() if record.status is Status.FINISHED]


def _by(records: Iterable[JobRecord], name: Callable[[JobRecord], str]) -> dict[str, Group]:
    parts: dict[str, list[JobRecord]] = {}
    for record in records:
        parts.setdefault(name(record), []).append(record)
    return {key: group(part) for key, part in sorted(parts.items())}
