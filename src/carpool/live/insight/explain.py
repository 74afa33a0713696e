"""Why a job waits, why it is where it is, and when it will be done: `carpool explain`, in data and in plain sentences.

Pure functions over the scheduler's state. The service hands over a `Book`, which says what the state does not know:
how jobs and GPUs are called, and how long a job should take and how that is known. Every estimate carries its source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.perf import Mate
from carpool.core.record import JobRecord
from carpool.core.scheduler import Policy
from carpool.core.state import State
from carpool.live.insight.forecast import Forecast, forecast
from carpool.live.insight.receipt import receipt
from carpool.live.text import clock, span
from carpool.policies.sharing.pair import apart, options, together

HOSTS_LOOKED_AT = 200
PUBLIC = {Status.BLOCKED: "pending", Status.HELD: "pending", Status.CANCELLING: "stopping"}
"""States as users see them, where the scheduler's own words differ."""


class Estimate(Protocol):
    """A number with its range and where it came from."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Book:
    """What an explanation draws on."""

    state: State
    policy: Callable[[], Policy]
    """A fresh one, to play the future with."""
    estimate: Callable[[Job], Estimate]
    """Seconds of the whole job, alone."""
    name: Callable[[JobId], str] = lambda job: ""
    gpu: Callable[[GpuId], str] = str
    why: Callable[[JobId], str] = lambda job: ""
    """The policy's reason for the job's present place."""
    pair: Callable[[JobRecord, JobRecord], tuple[float, float, str]] | None = None
    """The range of a job's slow-down beside a mate, and how it is known."""
    now: float = 0.0
    """The time, where it is later than the state's last event."""

    def called(self, record: JobRecord) -> str:
        words = [word for word in (self.name(record.job.id), record.job.user) if word]
        return f"job {record.job.id}" + (f" ({', '.join(words)})" if words else "")

    def spread(self, job: Job) -> tuple[float, float]:
        """How much shorter and longer than believed a job may be."""
        estimate = self.estimate(job)
        if not estimate.value > 0.0:
            return 1.0, 1.0
        return min(1.0, estimate.low / estimate.value), max(1.0, estimate.high / estimate.value)


def explain(book: Book, job: JobId, ahead: dict[JobId, Forecast] | None = None) -> dict[str, Any]:
    """All there is to say about a job that has not ended. `ahead`: a forecast made a moment ago, where there is one."""
    record, now = book.state.jobs[job], max(book.now, book.state.now)
    if ahead is None:
        ahead = forecast(book.state, book.policy, book.spread, now=now)
    estimate = book.estimate(record.job)
    status = record.status
    data: dict[str, Any] = {
        "job": job,
        "name": book.name(job),
        "user": record.job.user,
        "status": PUBLIC.get(status, str(status)),
        "position": position(book.state, record),
        "waiting": len(book.state.queue),
        "reason": reason(book, record),
        "mates": [_mate(book, record, mate) for mate in _mates(book.state, record)],
        "run": {"value": estimate.value, "low": estimate.low, "high": estimate.high, "source": estimate.source},
        **times_of(ahead.get(job), estimate.source),
        "receipt": receipt(record, now),
    }
    return {**data, "sentences": _sentences(book, record, data)}


def times_of(found: Forecast | None, source: str) -> dict[str, Any]:
    """Start and end as estimates; None where they are not in sight."""
    if found is None:
        return {"start": None, "end": None}
    source = f"the queue played forward with the speeds believed now; this job's from {source}"
    ends = {}
    for key in ("start", "end"):
        value, low, high = (getattr(t, key) for t in (found.believed, found.early, found.late))
        ends[key] = None if value == inf else {"value": value, "low": low, "high": _finite(high), "source": source}
    return ends


def _finite(value: float) -> float | None:
    return None if value == inf else value


def position(state: State, record: JobRecord) -> int | None:
    """The job's place in the queue, from 1; None: it is not in the queue."""
    if record.queue_entry is None:
        return None
    return next(number for number, other in enumerate(state.queue, 1) if other is record)


# ---- mates -----------------------------------------------------------------------------------------------------------


def _mates(state: State, record: JobRecord) -> list[JobRecord]:
    mates = {other.job.id: other for gpu in record.gpus for other in state.jobs_on(gpu) if other is not record}
    return list(mates.values())


def _mate(book: Book, record: JobRecord, mate: JobRecord) -> dict[str, Any]:
    shared = [book.gpu(gpu) for gpu in record.gpus if gpu in mate.gpus]
    return {
        "job": mate.job.id,
        "name": book.name(mate.job.id),
        "user": mate.job.user,
        "on": shared,
        "slowdown": _slowdown(book, record, mate),
        "their_slowdown": _slowdown(book, mate, record),
    }


def _slowdown(book: Book, record: JobRecord, mate: JobRecord) -> dict[str, Any]:
    """Of a job beside all its mates; the range and the source are those beside this one."""
    found: dict[str, Any] = {"predicted": _predicted(book.state, record), "measured": _measured(record)}
    if book.pair is not None:
        found["low"], found["high"], found["source"] = book.pair(record, mate)
    return found


def _predicted(state: State, record: JobRecord) -> float:
    """ξ as believed now, beside all who are on its GPUs; a gang waits for its slowest worker."""
    worst = 1.0
    for gpu in record.gpus:
        mates: list[Mate] = [(other.job, other.accumulation) for other in state.jobs_on(gpu) if other is not record]
        if mates:
            worst = max(worst, state.perf.slowdown(record.job, record.accumulation, mates))
    return worst


def _measured(record: JobRecord) -> float | None:
    """ξ as its workers report it beside these mates; None: they have not yet."""
    seen = getattr(record, "pace_seen", False) and record.iteration_s and record.alone_iteration_s
    return record.iteration_s / record.alone_iteration_s if seen else None


# ---- why it waits ----------------------------------------------------------------------------------------------------


def reason(book: Book, record: JobRecord) -> str:
    """Why a job does not run, as half a sentence; empty for one that does."""
    state, job = book.state, record.job
    if record.status is Status.HELD:
        return f"it is held; `carpool release {job.id}` lets it start"
    if record.status is Status.BLOCKED:
        waits = [f"job {name} ({_state_of(state, name)})" for name in record.waits_for]
        return f"it starts after {', '.join(waits)}"
    if record.status is not Status.PENDING:
        return ""
    return limit_reason(state, record) or _room(book, record)


def _state_of(state: State, name: JobId) -> str:
    found = state.jobs.get(name)
    return PUBLIC.get(found.status, str(found.status)) if found else "ended"


def limit_reason(state: State, record: JobRecord) -> str:
    """The user's limit that keeps it waiting, if one does."""
    if not state.limits:
        return ""
    user = record.job.user
    limits, (jobs, gpus) = state.limits_of(user), state.held_by(user)
    if limits.jobs is not None and jobs + 1 > limits.jobs:
        return f"{user} runs {jobs} job{'s' if jobs != 1 else ''}, and may run {limits.jobs} at a time"
    if limits.gpus is not None and gpus + record.job.gpus > limits.gpus:
        return f"{user} holds {gpus} GPU{'s' if gpus != 1 else ''}, and may hold {limits.gpus} at a time"
    return ""


def _room(book: Book, record: JobRecord) -> str:
    state, wanted = book.state, record.job.gpus
    total, free = len(state.cluster.residents), state.free.count
    if wanted > total:
        return f"it asks for {wanted} GPUs and there are {total}"
    if free >= wanted:
        place = position(state, record) or 1
        ahead = f"; {place - 1} jobs go before it" if place > 1 else ""
        return f"{free} GPUs are free, but the policy keeps them, or too little memory is free on them{ahead}"
    text = (
        f"it asks for {wanted} GPU{'s' if wanted > 1 else ''} and {free or 'none'} {'are' if free > 1 else 'is'} free"
    )
    return text + _why_not_share(book, record)


def _why_not_share(book: Book, record: JobRecord) -> str:
    """Why it does not join somebody, where the policy would let it."""
    state, policy = book.state, str(getattr(book.policy(), "name", ""))
    joint = policy == "carpool"
    if state.jobs_per_gpu == 1 or not (joint or "bsbf" in policy):
        return ""
    if record.job.exclusive:
        return "; it asked not to share"
    best = _best_host(state, record)
    if best is None:
        return "; it fits beside no running job (their wishes, or memory)"
    host, guest_xi, host_xi, pays = best
    slower = f"it would be {guest_xi:.2f} times slower and that one {host_xi:.2f} times"
    beside = f"; beside {book.called(host)}, its best host, {slower}"
    if joint:
        return f"{beside}, and no move was found that lowers the sum over it, them and everybody who waits"
    if pays:
        return "; enough hosts for the whole gang are not there yet"
    return f"{beside}, so waiting is sooner for the two together"


def _best_host(state: State, record: JobRecord) -> tuple[JobRecord, float, float, bool] | None:
    """The running job that is the best to join by Theorem 1: with both slow-downs, and whether joining pays."""
    best, found = inf, None
    guest_left = record.alone_left(state.now)
    for host, _ in zip(state.running, range(HOSTS_LOOKED_AT), strict=False):
        crowd = max(len(state.jobs_on(gpu)) for gpu in host.gpus)
        if host.status is not Status.RUNNING or host.job.exclusive or crowd >= state.jobs_per_gpu:
            continue
        room = min(state.topology.memory_of(gpu) - state.memory_used(gpu) for gpu in host.gpus)
        host_left = host.alone_left(state.now)
        for option in options(state.perf, record, host.job, host.accumulation, room):
            time = together(host_left, guest_left * option.relative_time, option.host_xi, option.guest_xi)
            loss = time - apart(host_left, guest_left)
            if loss < best:
                best, found = loss, (host, option.guest_xi, option.host_xi, loss < 0.0)
    return found


# ---- in words --------------------------------------------------------------------------------------------------------


def _sentences(book: Book, record: JobRecord, data: dict[str, Any]) -> list[str]:
    now = max(book.now, book.state.now)
    lines = [_head(book, record, data)]
    if data["reason"]:
        lines.append(f"It waits: {data['reason']}.")
    why = book.why(record.job.id)
    if why and record.gpus:
        lines.append(f"Why there: {why}.")
    for mate in data["mates"]:
        other = f"job {mate['job']}" + (f" ({mate['name']})" if mate["name"] else "")
        own, theirs = _xi(mate["slowdown"]), _xi(mate["their_slowdown"])
        lines.append(f"It shares {' '.join(mate['on'])} with {other}: it is slowed {own}, {other} {theirs}.")
    run = data["run"]
    lines.append(f"Alone it takes {ranged(run, span)} in all; known from: {run['source']}.")
    lines += _outlook(record, data, now)
    if record.ran_s or record.iteration_s:
        lines += data["receipt"]["sentences"][1:]
    return lines


def _head(book: Book, record: JobRecord, data: dict[str, Any]) -> str:
    called = book.called(record)
    if record.gpus:
        done = 1.0 - record.iterations_left(max(book.now, book.state.now)) / record.job.iterations
        where = " ".join(book.gpu(gpu) for gpu in record.gpus)
        place = f" on {where}, attempt {record.attempt}, {done:.0%} done"
        return f"{called[0].upper()}{called[1:]} is {data['status']}{place}."
    place = f", number {data['position']} of {data['waiting']} in the queue" if data["position"] else ""
    return f"{called[0].upper()}{called[1:]} is {data['status']}{place}."


def _outlook(record: JobRecord, data: dict[str, Any], now: float) -> list[str]:
    def moment(at: float | None) -> str:
        return "an unknown time" if at is None else clock(at, now)

    lines = []
    if record.first_start < 0.0 and data["start"]:
        lines.append(f"It should start at {ranged(data['start'], moment)}, if nobody submits anything more urgent.")
    if data["end"]:
        lines.append(f"It should end at {ranged(data['end'], moment)}.")
    elif record.queue_entry is not None or not record.gpus:
        lines.append("When it starts and ends is not in sight.")
    return lines


def ranged(estimate: dict[str, Any], show: Callable[[Any], str]) -> str:
    value, low, high = (show(estimate[key]) for key in ("value", "low", "high"))
    return value if low == high else f"{value} (between {low} and {high})"


def _xi(slowdown: dict[str, Any]) -> str:
    measured = slowdown["measured"]
    seen = "not measured yet" if measured is None else f"measured {measured:.2f}"
    source = f" from {slowdown['source']}" if "source" in slowdown else ""
    return f"{slowdown['predicted']:.2f} times (predicted{source}; {seen})"
