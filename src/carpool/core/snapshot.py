"""A whole state as plain data and back, so that a journal need not be replayed from its beginning.

The live service keeps snapshots beside its journal; a state restored from one, with the events since, equals the state
replayed from the start. Ended jobs are left out: nothing depends on them any more, because a blocked job records which
of the jobs it waits for have not finished.
"""

from dataclasses import fields
from typing import Any

from carpool.core import closures, renames
from carpool.core.accounts import Accounts
from carpool.core.claims import count_for_user
from carpool.core.codec import builder, decode_job, plain
from carpool.core.guesses import Guesses
from carpool.core.joins import may_compute
from carpool.core.learning import LearningModel
from carpool.core.model import Limits, Node, Status
from carpool.core.perf import PerformanceModel
from carpool.core.ranked_queue import RankedQueue
from carpool.core.record import JobRecord
from carpool.core.renames import renamed
from carpool.core.state import RESIDENT_PER_GPU, State
from carpool.core.tenants import Tenants
from carpool.core.trial import Trials
from carpool.core.view import SortKey

_NOT_PLAIN = {"job", "seq", "status", "shape", "gpus", "leaving", "waits_for", "shared_with", "queue_entry", "ended"}
_KEPT = tuple(field.name for field in fields(JobRecord) if field.name not in _NOT_PLAIN)
"""The fields of a record that are plain data; `_encode_job` writes the others, or they follow from these."""
_COUNTERS = (
    "now",
    "busy_gpu_s",
    "shares",
    "preemptions",
    "pauses",
    "most_residents",
    "submissions",
    "needs_decision",
    "belief_version",
    "completed",
    "completed_jct_s",
)


def encode(state: State) -> dict[str, Any]:
    """Return all that a state holds about the cluster and the jobs that have not ended, as plain data."""
    topology = state.topology
    return {
        "belief": state.perf.dump() if isinstance(state.perf, LearningModel) else None,
        "counters": {name: getattr(state, name) for name in _COUNTERS},
        "nodes": [plain(node) for node in topology.nodes],
        "present": sorted(topology.present.values()),
        "taken": sorted(topology.taken.items()),
        "closed": sorted(topology.closed),
        "closures": closures.dump(state),
        "trials": state.trials.dump(),
        "tenants": state.tenants.dump(),
        "accounts": state.accounts.dump() if state.accounts.on else None,
        "guesses": state.guesses.dump(),
        "limits": {user: plain(limits) for user, limits in state.limits.items()},
        "jobs": [_encode_job(record) for record in state.jobs.values()],
        "running": [record.job.id for record in state.running],
        "residents": [[gpu, [record.job.id for record in there]] for gpu, there in state.cluster.residents.items()],
    }


def _encode_job(record: JobRecord) -> dict[str, Any]:
    data = {name: getattr(record, name) for name in _KEPT}
    entry: Any = record.queue_entry
    return {
        "job": plain(record.job),
        "seq": record.seq,
        "status": str(record.status),
        "priority": record.shape.priority,
        "gpus": list(record.gpus),
        "leaving": list(record.leaving),
        "waits_for": list(record.waits_for),
        "shared_with": list(record.shared_with),
        "key": list(entry[1]) if entry is not None else None,
        **data,
    }


def restore(
    data: dict[str, Any],
    perf: PerformanceModel,
    sort_key: SortKey,
    jobs_per_gpu: int = 2,
    resident_per_gpu: int = RESIDENT_PER_GPU,
) -> State:
    """Return the state that `encode` described. Raise ValueError where a GPU holds more jobs than these numbers allow.

    A model that learns gets what the model of the encoded state had learned.
    """
    if isinstance(perf, LearningModel) and data["belief"] is not None:
        perf.restore(data["belief"])
    state = State(perf, sort_key, jobs_per_gpu, resident_per_gpu)
    _restore_nodes(state, data)
    state.limits = {user: Limits(**limits) for user, limits in data["limits"].items()}
    if "tenants" in data:  # a snapshot of an older release has none
        state.tenants = Tenants.load(data["tenants"])
        if state.tenants.on:
            state.queue = RankedQueue(state.tenants)
    if "guesses" in data:  # a snapshot of an older release has none
        state.guesses = Guesses.load(data["guesses"])
    for entry in data["jobs"]:
        _restore_job(state, entry)
    _restore_residents(state, data)
    if "trials" in data:  # a snapshot of an older release has none
        state.trials = Trials.load(data["trials"])
    for name, value in renamed(data["counters"], renames.COUNTERS).items():
        setattr(state, name, value)
    if data.get("accounts") is not None:  # a snapshot of an older release has none
        state.accounts = Accounts.load(data["accounts"])
    return state


def _restore_nodes(state: State, data: dict[str, Any]) -> None:
    present = set(data["present"])
    for number, raw in enumerate(data["nodes"]):  # lost nodes too, so that every node keeps its number
        state.join(builder(Node)({**raw}))
        if number not in present:
            state.cluster.lose(raw["id"])
    state.topology.taken = dict(data["taken"])
    for number in data.get("closed", ()):  # a snapshot of an older release has none
        state.cluster.set_closed(number, True)
    if "closures" in data:  # a snapshot of an older release has none
        closures.load(state, data["closures"])


def _restore_job(state: State, data: dict[str, Any]) -> None:
    data = renamed(data, renames.RECORD_FIELDS)
    job = decode_job(data["job"])
    record = JobRecord(job, state.shape_of(job, data["priority"]), data["seq"], data["whole_iteration_s"])
    record.startup_s = state.perf.startup_s(job)
    for name in _KEPT:
        if name in data:  # a snapshot of an older release has fewer fields
            setattr(record, name, data[name])
    record.status = Status(data["status"])
    record.gpus, record.leaving = tuple(data["gpus"]), tuple(data["leaving"])
    record.waits_for = tuple(data["waits_for"])
    record.shared_with = tuple(data.get("shared_with", ()))
    record.active = data.get("active", bool(record.gpus))  # before there were pauses, every holder was active
    state.jobs[job.id] = record
    if data["key"] is not None:
        state.queue.add(record, tuple(data["key"]))
    for name in record.waits_for if record.status is Status.BLOCKED else ():
        state.dependents.setdefault(name, []).append(job.id)


def _restore_residents(state: State, data: dict[str, Any]) -> None:
    """Enter all jobs that hold GPUs, then put the residents of each GPU in the order in which they came."""
    for name in data["running"]:
        record = state.jobs[name]
        state.holders[record.seq] = record
        if record.status in (Status.PAUSING, Status.PAUSED):
            state.paused[record.seq] = record
        if record.status in (Status.PAUSING, Status.RESUMING):
            state.switching[record.seq] = record
        for gpu in record.gpus:
            there = state.cluster.residents[gpu]
            if len(there) >= state.resident_per_gpu:
                raise ValueError(f"GPU {gpu} holds more than {state.resident_per_gpu} jobs")
            if record.active and sum(other.active for other in there) >= state.jobs_per_gpu:
                raise ValueError(f"more than {state.jobs_per_gpu} jobs compute on GPU {gpu}")
        state.cluster.enter(record)
        if state.limits:
            count_for_user(state, record, 1)
    for gpu, names in data["residents"]:
        state.cluster.residents[gpu] = tuple(state.jobs[name] for name in names)
        state.most_residents = max(state.most_residents, len(names))  # a snapshot of an older release counts none
        state.cluster.note_activity((gpu,))
    for entry in data["jobs"]:
        if "shared_with" not in entry:  # an older release: jobs that compute together have joined
            _restore_joins(state, state.jobs[entry["job"]["id"]])
    in_order = sorted(state.paused.values(), key=lambda record: (record.paused_since, record.seq))
    state.paused = {record.seq: record for record in in_order}


def _restore_joins(state: State, record: JobRecord) -> None:
    if may_compute(record):
        mates = state.cluster.mates(record)
        record.shared_with = tuple(sorted([mate.seq for mate in mates if may_compute(mate)]))
