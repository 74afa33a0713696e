"""Metrics of a run: completion times, queuing times, makespan, GPU utilisation, pauses, and the cost of sharing.

They are computed from the records that a `State` keeps of every job, so that a live history and a simulation are
measured alike. Percentiles interpolate linearly between the two nearest ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from operator import sub
from statistics import fmean

from carpool.core.guesses import Guesses
from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.core.trial import Trials
from carpool.sim.fairness import Fairness
from carpool.sim.unknown import real_model


@dataclass(frozen=True, slots=True)
class SubsetSummary:
    """Metrics of some of the jobs, such as the large ones or those of one model. Means over no jobs are 0."""

    jobs: int
    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    mean_queue_s: float
    makespan_s: float


@dataclass(frozen=True, slots=True)
class CorrectedUser:
    """What came of the guesses of a user whose later guesses are corrected."""

    user: str
    kind: str
    """What was guessed: duration or iterations."""
    jobs: int
    ratio: float
    """What the jobs took over what was guessed."""
    correction: float
    """What the next guess is multiplied by."""
    spread: float
    """Factor by which that may be wrong, four times out of five."""


def corrected_users(guesses: Guesses) -> tuple[CorrectedUser, ...]:
    """Return the users whose guesses are corrected, the most wrong first."""
    found = [
        CorrectedUser(user, kind, record.jobs, record.ratio, record.factor, record.spread)
        for user, kind, record in guesses
        if record.factor != 1.0
    ]
    return tuple(sorted(found, key=lambda one: (-abs(log(one.correction)), one.user)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of a run. Times are in seconds; `--json` prints the fields under these names."""

    policy: str
    workload: str
    jobs: int
    mean_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    mean_queue_s: float
    """Mean wait of a job (`JobRecord.waited_s`); the paper calls it queuing time."""
    makespan_s: float
    gpu_utilisation: float
    """Share of GPU time, from the first submission to the last end, in which a GPU held at least one job."""
    shares: int
    """Number of times that a job joined others on their GPUs."""
    preemptions: int
    pauses: int
    """Number of times that a job was paused."""
    paused_s: float
    """Seconds that jobs were paused, from the decision to pause until they compute again; sum over all jobs."""
    mean_paused_s: float
    """Mean over all jobs, also those that were never paused, as `mean_queue_s`."""
    residents_mean: float
    """Mean number of jobs on a GPU, active and paused ones, over the time in which it held at least one."""
    residents_max: int
    """Largest number of jobs that a GPU held."""
    trials: int
    """Number of pairs of jobs that were tried."""
    trials_kept: int
    """Number of tried pairs that went on beside each other."""
    trial_cost_s: float
    """Seconds that trials cost both sides together, in slow-downs and pauses."""
    hosts: int
    """Number of jobs that others joined."""
    host_slowdown_mean: float
    """Mean over those jobs of their run time divided by the time that the same iterations take alone."""
    host_slowdown_max: float
    decisions: int
    decision_mean_cpu_s: float
    """Mean CPU time of a scheduling step in which the policy was asked: events, decision, check and plan applied."""
    decision_p99_cpu_s: float
    cpu_s: float
    """CPU time of the whole run."""
    large: SubsetSummary
    small: SubsetSummary
    models: dict[str, SubsetSummary]
    at_limit: int = 0
    """Number of jobs that ended at their time limits. The other metrics leave them out, because they did not finish."""
    fairness: Fairness | None = None
    """How evenly tenants were treated, where that was measured and there is more than one."""
    corrected: tuple[CorrectedUser, ...] = ()
    """The users whose guesses turned out to be wrong, and are corrected."""


def jct(record: JobRecord) -> float:
    """Completion time of an ended job."""
    return record.ended - record.job.submitted


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of values that are sorted in ascending order; `share` is 0.95 for the 95th."""
    if not ordered:
        return 0.0
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class SubsetTimes:
    """The times of some jobs."""

    jcts: list[float]
    """Completion times, in ascending order."""
    waited: list[float]
    began: float
    """The first submission."""
    ended: float
    """The last end."""

    @classmethod
    def of(cls, records: Sequence[JobRecord]) -> "SubsetTimes":
        """Return the times of these jobs, of which there is at least one."""
        submitted = [record.job.submitted for record in records]
        ended = [record.ended for record in records]
        jcts = sorted(map(sub, ended, submitted))
        return cls(jcts, [record.waited_s for record in records], min(submitted), max(ended))


def summarise_subset(parts: Sequence[SubsetTimes]) -> SubsetSummary:
    """Return the metrics of the jobs of all these parts."""
    if not parts:
        return SubsetSummary(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = [*chain.from_iterable([part.jcts for part in parts])]
    ordered.sort()  # which costs little, because each part is sorted
    return SubsetSummary(
        jobs=len(ordered),
        mean_jct_s=fmean(ordered),
        p50_jct_s=percentile(ordered, 0.50),
        p95_jct_s=percentile(ordered, 0.95),
        p99_jct_s=percentile(ordered, 0.99),
        mean_queue_s=fmean([*chain.from_iterable([part.waited for part in parts])]),
        makespan_s=max([part.ended for part in parts]) - min([part.began for part in parts]),
    )


def summarise(
    state: State,
    *,
    policy: str,
    workload: str,
    decisions: int | None = None,
    decision_cpu_s: Iterable[float] = (),
    cpu_s: float = 0.0,
    large_above: int = 4,
    trials: Trials | None = None,
) -> Summary:
    """Return the metrics of all jobs that finished. `trials` are those of the scheduler's state, where `state` is
    another one. `decisions` is their number where not all of them were timed."""
    trials = trials or state.trials
    records = finished(state)
    parts = _by_model_and_size(records)
    everything = summarise_subset([*parts.values()])
    sizes: dict[bool, list[SubsetTimes]] = {True: [], False: []}
    models: dict[str, list[SubsetTimes]] = {}
    for (model, gpus), part in parts.items():
        sizes[gpus > large_above].append(part)
        models.setdefault(model, []).append(part)
    paused_s = sum([record.paused_s for record in records])
    hosts = [record.ran_s / record.alone_s for record in records if record.hosted and record.alone_s > 0.0]
    timed = sorted(decision_cpu_s)
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
        pauses=state.pauses,
        paused_s=paused_s,
        mean_paused_s=paused_s / len(records) if records else 0.0,
        residents_mean=_mean_residents(state),
        residents_max=state.most_residents,
        trials=trials.begun,
        trials_kept=trials.kept,
        trial_cost_s=trials.cost_s,
        hosts=len(hosts),
        host_slowdown_mean=fmean(hosts) if hosts else 1.0,
        host_slowdown_max=max(hosts, default=1.0),
        decisions=len(timed) if decisions is None else decisions,
        decision_mean_cpu_s=fmean(timed) if timed else 0.0,
        decision_p99_cpu_s=percentile(timed, 0.99),
        cpu_s=cpu_s,
        large=summarise_subset(sizes[True]),
        small=summarise_subset(sizes[False]),
        models={model: summarise_subset(own) for model, own in sorted(models.items())},
        at_limit=len([r for r in state.ended.values() if r.at_limit and r.status is Status.FAILED]),
    )


def _by_model_and_size(records: Iterable[JobRecord]) -> dict[tuple[str, int], SubsetTimes]:
    """Return the times of jobs by the model behind the name of their family, and by their number of GPUs."""
    parts: dict[tuple[str, int], list[JobRecord]] = {}
    for record in records:
        job = record.job
        part = parts.get((job.model, job.gpus))
        if part is None:
            part = parts[job.model, job.gpus] = []
        part.append(record)
    real: dict[tuple[str, int], list[JobRecord]] = {}
    for (model, gpus), part in parts.items():
        real.setdefault((real_model(model), gpus), []).extend(part)
    return {of: SubsetTimes.of(part) for of, part in real.items()}


def _mean_residents(state: State) -> float:
    """Return the GPU-seconds that jobs held over those in which a GPU held a job; 0 if no job ever held one."""
    held = sum([record.served for record in state.ended.values()])
    held += sum([record.service(state.now) for record in state.jobs.values()])
    return held / state.busy_gpu_s if state.busy_gpu_s else 0.0


def finished(state: State) -> list[JobRecord]:
    """Return the records of the jobs that finished, in the order in which they ended."""
    return [record for record in state.ended.values() if record.status is Status.FINISHED]
