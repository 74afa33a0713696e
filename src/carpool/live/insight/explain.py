"""Why a job waits, why it is where it is, and when it will be done: `carpool explain`, as data and in plain sentences.

These are pure functions over the scheduler's state. The policy says why a job does not share, in its own `explain`. The
service passes an `ExplainContext` with what the state does not contain: the names of jobs and GPUs, and how long a job
should take. Every estimate carries its source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from carpool.belief.estimate import Estimate
from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.perf import Mate
from carpool.core.record import JobRecord
from carpool.core.scheduler import Policy
from carpool.core.state import State
from carpool.live.insight.forecast import Forecast, forecast
from carpool.live.insight.guesses import guess_of, outlived_sentence
from carpool.live.insight.receipt import receipt
from carpool.live.statuses import shown_status
from carpool.live.text import clock, span
from carpool.policies.base import Explanation, PairComparison

SHOWN_HOSTS = 5
"""Number of hosts in the data about what the policy compared."""


@dataclass(frozen=True)
class ExplainContext:
    """What an explanation is made from."""

    state: State
    policy: Callable[[], Policy]
    """Makes a fresh policy: the forecast lets it decide about the future."""
    estimate: Callable[[Job], Estimate]
    """Duration of a job in seconds."""
    name: Callable[[JobId], str] = lambda job: ""
    gpu: Callable[[GpuId], str] = str
    why: Callable[[JobId], str] = lambda job: ""
    """The policy's reason for the GPUs that the job has now."""
    pause_why: Callable[[JobId], str] = lambda job: ""
    """The policy's reason for the latest pause of the job."""
    pair: Callable[[JobRecord, JobRecord], tuple[float, float, str]] | None = None
    """Range of a job's slow-down beside a mate, and its source."""
    now: float = 0.0
    """Current time; the state's own is that of its last event."""

    def called(self, record: JobRecord) -> str:
        """Return the job's id with its name and user."""
        words = [word for word in (self.name(record.job.id), record.job.user) if word]
        return f"job {record.job.id}" + (f" ({', '.join(words)})" if words else "")

    def spread(self, job: Job) -> tuple[float, float]:
        """Return the factors by which a job may be shorter and longer than believed."""
        estimate = self.estimate(job)
        if not estimate.value > 0.0:
            return 1.0, 1.0
        return min(1.0, estimate.low / estimate.value), max(1.0, estimate.high / estimate.value)


def explain(context: ExplainContext, job: JobId, ahead: dict[JobId, Forecast] | None = None) -> dict[str, Any]:
    """Explain a job that has not ended. `ahead` is a recent forecast; None: make one."""
    record, now = context.state.jobs[job], max(context.now, context.state.now)
    if ahead is None:
        ahead = forecast(context.state, context.policy, context.spread, now=now)
    estimate = context.estimate(record.job)
    status, explanation = record.status, _policy_says(context, record)
    data: dict[str, Any] = {
        "job": job,
        "name": context.name(job),
        "user": record.job.user,
        "status": shown_status(status),
        "position": position(context.state, record),
        "waiting": len(context.state.queue),
        "reason": reason(context, record, explanation),
        "compared": [_compared(pair) for pair in explanation.compared[:SHOWN_HOSTS]] if explanation else [],
        "mates": [_mate(context, record, mate) for mate in _mates(context.state, record)],
        "run": {"value": estimate.value, "low": estimate.low, "high": estimate.high, "source": estimate.source},
        **times_of(ahead.get(job), estimate.source),
        "resume": resume_of(record, ahead.get(job)),
        "receipt": receipt(record, now),
    }
    return {**data, "sentences": _sentences(context, record, data)}


def times_of(found: Forecast | None, source: str) -> dict[str, Any]:
    """Return start and end as estimates; None where the forecast does not reach them."""
    if found is None:
        return {"start": None, "end": None}
    source = f"a forecast of the queue with the speeds believed now; this job's from {source}"
    ends = {}
    for key in ("start", "end"):
        value, low, high = (getattr(t, key) for t in (found.believed, found.early, found.late))
        ends[key] = None if value == inf else {"value": value, "low": low, "high": _finite(high), "source": source}
    return ends


def resume_of(record: JobRecord, found: Forecast | None) -> dict[str, Any] | None:
    """Return when a paused job goes on, as an estimate; None where it is not paused or the forecast does not say."""
    if record.paused_since < 0.0 or found is None or found.believed.resume == inf:
        return None
    value, low, high = (times.resume for times in (found.believed, found.early, found.late))
    source = "a forecast of the queue with the speeds believed now"
    return {"value": value, "low": low, "high": _finite(high), "source": source}


def _finite(value: float) -> float | None:
    return None if value == inf else value


def position(state: State, record: JobRecord) -> int | None:
    """Return the job's place in the queue, from 1; None: it is not in the queue."""
    if record.queue_entry is None:
        return None
    return next(number for number, other in enumerate(state.queue, 1) if other is record)


# ---- mates -----------------------------------------------------------------------------------------------------------


def _mates(state: State, record: JobRecord) -> list[JobRecord]:
    mates = {other.job.id: other for gpu in record.gpus for other in state.jobs_on(gpu) if other is not record}
    return list(mates.values())


def _mate(context: ExplainContext, record: JobRecord, mate: JobRecord) -> dict[str, Any]:
    shared = [context.gpu(gpu) for gpu in record.gpus if gpu in mate.gpus]
    return {
        "job": mate.job.id,
        "name": context.name(mate.job.id),
        "user": mate.job.user,
        "on": shared,
        "slowdown": _slowdown(context, record, mate),
        "their_slowdown": _slowdown(context, mate, record),
    }


def _slowdown(context: ExplainContext, record: JobRecord, mate: JobRecord) -> dict[str, Any]:
    """Return a job's slow-down beside all its mates; range and source are those beside this mate."""
    found: dict[str, Any] = {"predicted": _predicted(context.state, record), "measured": _measured(record)}
    if context.pair is not None:
        found["low"], found["high"], found["source"] = context.pair(record, mate)
    return found


def _predicted(state: State, record: JobRecord) -> float:
    """Return ξ as believed now beside all its active mates; a gang waits for its slowest worker."""
    worst = 1.0
    for gpu in record.gpus:
        active = [other for other in state.jobs_on(gpu) if other is not record and other.active]
        mates: list[Mate] = [(other.job, other.accumulation) for other in active]
        if mates:
            worst = max(worst, state.perf.slowdown(record.job, record.accumulation, mates))
    return worst


def _measured(record: JobRecord) -> float | None:
    """Return ξ as its workers report it beside these mates; None: no report so far."""
    seen = getattr(record, "pace_seen", False) and record.iteration_s and record.alone_iteration_s
    return record.iteration_s / record.alone_iteration_s if seen else None


# ---- why it waits ----------------------------------------------------------------------------------------------------


def reason(context: ExplainContext, record: JobRecord, explanation: Explanation | None) -> str:
    """Return why a job does not run, as half a sentence; empty for one that does."""
    state, job = context.state, record.job
    if record.status is Status.HELD and record.held_for_good:
        return f"it never starts: {never_starts(record)}"
    if record.status is Status.HELD and record.hold_why:
        return f"it is held: {record.hold_why}; `carpool release {job.id}` tries it again"
    if record.status is Status.HELD:
        return f"it is held; `carpool release {job.id}` lets it start"
    if record.status is Status.BLOCKED:
        waits = [f"job {name} ({_state_of(state, name)})" for name in record.waits_for]
        return f"it starts after {', '.join(waits)}"
    if record.status in (Status.PAUSING, Status.PAUSED):
        if record.kept_paused:
            return "its GPUs are drained or reserved, and it goes on after that"
        if record.paused_by_owner:
            return f"its owner paused it; `carpool resume {job.id}` lets it go on"
        return context.pause_why(job.id) or "the policy lets other jobs use its GPUs"
    if record.status is not Status.PENDING:
        return ""
    return (
        limit_reason(state, record)
        or share_reason(state, record)
        or (_room(context, record) + _why_not_share(context, explanation))
    )


def never_starts(record: JobRecord) -> str:
    """Return why no release lets a job start, and what to do."""
    return f"{record.hold_why}; cancel it and submit it again"


def share_reason(state: State, record: JobRecord) -> str:
    """Return how shares keep the job waiting, if free GPUs are kept for jobs of other groups."""
    if not state.shares_count:
        return ""
    kept = [job for job, _ in state.kept_for()]
    if not state.free.count or any(job.job.group == record.job.group for job in kept):
        return ""
    ahead = sorted({job.job.group or "(none)" for job in kept if job.shape.priority >= record.shape.priority})
    if not ahead:
        return ""
    groups = f"group{'s' if len(ahead) > 1 else ''} {', '.join(ahead)}"
    return f"{state.free.count} GPUs are free and are kept for {groups}, which used less than their share"


def _state_of(state: State, name: JobId) -> str:
    found = state.jobs.get(name)
    return shown_status(found.status) if found else "ended"


def limit_reason(state: State, record: JobRecord) -> str:
    """Return the limit of its user or the cap of its group that keeps the job waiting, if one does."""
    group = record.job.group
    cap, held = state.cap_of(group), state.held_by_group(group)
    if cap is not None and held + record.job.gpus > cap:
        return f"group {group} holds {held} GPU{'s' if held != 1 else ''}, and may hold {cap} at a time"
    if not state.limits:
        return ""
    user = record.job.user
    limits, (jobs, gpus) = state.limits_of(user), state.held_by(user)
    if limits.jobs is not None and jobs + 1 > limits.jobs:
        return f"{user} runs {jobs} job{'s' if jobs != 1 else ''}, and may run {limits.jobs} at a time"
    if limits.gpus is not None and gpus + record.job.gpus > limits.gpus:
        return f"{user} holds {gpus} GPU{'s' if gpus != 1 else ''}, and may hold {limits.gpus} at a time"
    return ""


def _room(context: ExplainContext, record: JobRecord) -> str:
    state, wanted = context.state, record.job.gpus
    total, free = len(state.cluster.residents), state.free.count
    if wanted > total:
        return f"it asks for {wanted} GPUs and there are {total}"
    if free >= wanted:
        place = position(state, record) or 1
        ahead = f"; its place in the queue is {place}" if place > 1 else ""
        if free == 1:
            return f"1 GPU is free, but the policy keeps it for other jobs, or it has too little memory{ahead}"
        return f"{free} GPUs are free, but the policy keeps them for other jobs, or they have too little memory{ahead}"
    gpus, are = f"{wanted} GPU{'s' if wanted > 1 else ''}", "are" if free > 1 else "is"
    return f"it asks for {gpus} and {free or 'none'} {are} free"


def _why_not_share(context: ExplainContext, explanation: Explanation | None) -> str:
    """Return the policy's explanation as the end of a sentence; empty where it has none."""
    if explanation is None:
        return ""
    if not explanation.compared:
        return f"; {explanation.why}"
    best = explanation.compared[0]
    slower = f"it would take {best.guest_slowdown:.2f}× as long, the host {best.host_slowdown:.2f}×"
    return f"; beside {context.called(context.state.jobs[best.host])}, its best host, {slower}, {explanation.why}"


def _compared(pair: PairComparison) -> dict[str, Any]:
    return {
        "job": pair.host,
        "slowdown": pair.guest_slowdown,
        "their_slowdown": pair.host_slowdown,
        "share_s": pair.share_s,
        "wait_s": pair.wait_s,
        "pays": pair.pays,
    }


def _policy_says(context: ExplainContext, record: JobRecord) -> Explanation | None:
    """Ask the policy why a job that finds too few free GPUs does not share."""
    wanted, free = record.job.gpus, context.state.free.count
    if record.status is not Status.PENDING or limit_reason(context.state, record):
        return None
    if free >= wanted or wanted > len(context.state.cluster.residents):
        return None
    ask = getattr(context.policy(), "explain", None)  # a policy need not have it
    return ask(context.state, record) if ask is not None else None


# ---- in words --------------------------------------------------------------------------------------------------------


def _sentences(context: ExplainContext, record: JobRecord, data: dict[str, Any]) -> list[str]:
    now = max(context.now, context.state.now)
    lines = [_head(context, record, data)]
    if data["reason"]:
        stands = "It stands still" if record.gpus else "It waits"
        lines.append(f"{stands}: {data['reason']}.")
    why = context.why(record.job.id)
    if why and record.gpus:
        lines.append(f"Why it started: {why}.")
    for mate in data["mates"]:
        other = f"job {mate['job']}" + (f" ({mate['name']})" if mate["name"] else "")
        if not (record.active and context.state.jobs[mate["job"]].active):
            lines.append(f"{other[0].upper()}{other[1:]} has memory on {' '.join(mate['on'])}, too.")
            continue
        own, theirs = _xi(mate["slowdown"]), _xi(mate["their_slowdown"])
        lines.append(f"It shares {' '.join(mate['on'])} with {other}: it takes {own}, {other} {theirs}.")
    run = data["run"]
    lines.append(f"Alone it takes {ranged(run, span)} in all; source: {run['source']}.")
    guessed = guess_of(context.state, record.job)
    if guessed is not None and guessed.jobs:
        lines.append(guessed.sentence)
    if record.outlived:
        lines.append(outlived_sentence(record))
    lines += _forecast_sentences(record, data, now)
    if record.limit_s is not None:
        then = "waits for its next turn" if record.job.requeue else "ends"
        lines.append(
            f"Its time limit: after {span(max(0.0, record.limit_left(now)))} of computing it saves and {then}."
        )
    if record.ran_s or record.iteration_s:
        lines += data["receipt"]["sentences"][1:]
    return lines


def _head(context: ExplainContext, record: JobRecord, data: dict[str, Any]) -> str:
    called = context.called(record)
    if record.gpus:
        done = 1.0 - record.iterations_left(max(context.now, context.state.now)) / record.job.iterations
        where = " ".join(context.gpu(gpu) for gpu in record.gpus)
        place = f" on {where}, attempt {record.attempt}, {done:.0%} done"
        return f"{called[0].upper()}{called[1:]} is {data['status']}{place}."
    place = f", number {data['position']} of {data['waiting']} in the queue" if data["position"] else ""
    return f"{called[0].upper()}{called[1:]} is {data['status']}{place}."


def _forecast_sentences(record: JobRecord, data: dict[str, Any], now: float) -> list[str]:
    def moment(at: float | None) -> str:
        return "an unknown time" if at is None else clock(at, now)

    lines = []
    if record.first_start < 0.0 and data["start"]:
        lines.append(f"It should start at {ranged(data['start'], moment)}, if no more urgent job is submitted.")
    if data["resume"]:
        lines.append(f"It should go on at {ranged(data['resume'], moment)}.")
    if data["end"]:
        lines.append(f"It should end at {ranged(data['end'], moment)}.")
    elif record.queue_entry is not None or not record.gpus:
        lines.append("Its start and its end cannot be forecast yet.")
    return lines


def ranged(estimate: dict[str, Any], show: Callable[[Any], str]) -> str:
    """Return an estimate in words, with its range where there is one."""
    value, low, high = (show(estimate[key]) for key in ("value", "low", "high"))
    return value if low == high else f"{value} (between {low} and {high})"


def _xi(slowdown: dict[str, Any]) -> str:
    measured = slowdown["measured"]
    seen = "not measured so far" if measured is None else f"measured {measured:.2f}×"
    source = f" from {slowdown['source']}" if "source" in slowdown else ""
    return f"{slowdown['predicted']:.2f}× as long (predicted{source}; {seen})"
