"""Jobs and GPUs as rows of plain data, as the API and the commands show them. Nothing is changed here."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from carpool.channel import Report
from carpool.core.model import PAUSE, GpuId, Status, UserGroup
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.errors import InputError
from carpool.job_schema import SUBMITTED_COLUMNS
from carpool.live.executors.base import NodeInventory
from carpool.live.insight.closures import closed_why
from carpool.live.insight.explain import limit_reason, never_starts
from carpool.live.insight.receipt import ran, receipt, sentences
from carpool.live.spec import UNCOUNTED, Spec, stored
from carpool.live.statuses import shown_status

Row = dict[str, Any]
MEASURED = ("duration_s", "can_shrink", "retries")
"""Fields of a spec that a replay ignores, because the history has measured ones."""
PICTURED = ("places", "trace")
"""Fields of a story that are shown on the page of the job only."""
WHY_WAITING = {
    Status.PENDING: "waits for GPUs, or for a host where sharing pays",
    Status.HELD: "on hold; `carpool release` lets it start",
    Status.PAUSING: "the policy pauses it",
    Status.PAUSED: "the policy paused it",
    Status.RESUMING: "goes on as soon as its GPUs are clear",
}


def job_row(
    state: State,
    record: JobRecord,
    spec: Spec,
    labels: Mapping[GpuId, str],
    now: float,
    *,
    done: float | None = None,
    report: Report | None = None,
) -> Row:
    """Return the row of a job that has not ended. `now` may be later than the latest event of the state.

    `done`: the iterations done as the latest report of its workers tells, in those of the state.
    """
    job = record.job
    started = record.first_start if record.first_start >= 0.0 else None
    return {
        "job": job.id,
        "name": spec.name,
        "user": job.user,
        "group": job.group,
        "project": job.project,
        "status": shown_status(record.status),
        "gpus": job.gpus,
        "submitted": job.submitted,
        "started": started,
        "finished": None,
        "exit_code": None,
        "reason": reason(state, record),
        "priority": record.shape.priority,
        "held": record.on_hold,
        "model": spec.model,
        "array_job": spec.array_job,
        "array_index": spec.array_index,
        "attempt": record.attempt,
        "waited_s": record.waited(max(now, state.now)),
        "ran_s": max(0.0, ran(record, max(now, state.now))),
        "limit_s": record.limit_s,
        "limit_left_s": None if record.limit_s is None else max(0.0, record.limit_left(max(now, state.now))),
        "pauses": record.pauses,
        "paused_s": record.paused(max(now, state.now)),
        "progress": progress(record, done, max(now, state.now)),
        "measured": done is not None,
        "watched": report is not None and report.watched,
        "reported_iteration_s": report.seconds if report is not None and report.seconds > 0.0 else None,
        "peak_memory": report.peak_memory if report is not None and report.peak_memory else None,
        "on": [labels.get(gpu, f"GPU {gpu}") for gpu in record.gpus],
        "mates": sorted((mate.job.id for mate in state.cluster.mates(record)), key=int) if record.gpus else [],
    }


def reason(state: State, record: JobRecord) -> str:
    """Return why a job does not run, in one line for tables; empty for a running job."""
    if record.status is Status.BLOCKED:
        return f"waits for job {', '.join(record.waits_for)}"
    if record.status is Status.HELD and record.hold_why:
        return f"never starts: {never_starts(record)}" if record.held_for_good else f"on hold: {record.hold_why}"
    if record.status is Status.CANCELLING:
        return record.reason
    if record.kept_paused and record.status in PAUSE:
        return "its GPUs are drained or reserved; it goes on after that"
    if record.paused_by_owner and record.status in PAUSE:
        return "its owner paused it; `carpool resume` lets it go on"
    over_limit = limit_reason(state, record) if record.status is Status.PENDING else ""
    if record.status is Status.PENDING and record.job.exclusive:
        return over_limit or "waits for GPUs that no other job holds: it asked not to share"
    return over_limit or WHY_WAITING.get(record.status, "")


def progress(record: JobRecord, done: float | None, now: float) -> float:
    """Return the share of a job that is done: as its workers report, otherwise as believed."""
    if done is None or record.status not in (Status.RUNNING, *PAUSE):
        done = record.job.iterations - record.iterations_left(max(now, record.since))
    return min(1.0, max(0.0, done / record.job.iterations))


def ended_row(state: State, record: JobRecord, spec: Spec, exit_code: int | None) -> Row:
    """Return the row of a job that has ended, as the journal keeps it."""
    finished = record.status is Status.FINISHED
    done = 1.0 if finished else min(1.0, record.done / record.job.iterations)
    return {
        **job_row(state, record, spec, {}, record.ended),
        "status": str(record.status),
        "finished": record.ended,
        "exit_code": exit_code,
        "reason": record.reason,
        "progress": done,
        "receipt": receipt(record, record.ended),
    }


def gpu_rows(state: State, node: NodeInventory, specs: Mapping[str, Spec], now: float) -> list[Row]:
    """Return the GPUs of a node with their residents, and why some of them are closed."""
    rows = []
    for slot in node.slots:
        if slot.id not in state.topology.node_of:
            continue
        residents = [
            {"job": r.job.id, "name": specs[r.job.id].name, "user": r.job.user, "status": shown_status(r.status)}
            for r in state.jobs_on(slot.id)
            if r.job.id in specs
        ]
        total = state.topology.nodes[state.topology.node_of[slot.id]].memory
        rows.append(
            {
                "gpu": slot.label,
                "index": slot.index,
                "uuid": slot.uuid or None,
                "name": slot.device or None,
                "memory": total if slot.device else None,
                "reserved": state.memory_used(slot.id),
                "foreign": state.topology.taken.get(slot.id, 0),
                "jobs": residents,
                "closed": closed_why(state, slot.id, now),
            }
        )
    return rows


class DamagedStory(InputError):
    """The journal's row of an ended job cannot be read."""


def read_story(row: Mapping[str, Any]) -> Row:
    """Return an ended job from its row in the journal, also where an earlier release wrote it. Raise `DamagedStory`."""
    try:
        story: Row = json.loads(row["story"])
        if "status" not in story:  # release 0.1
            story["status"] = story.pop("state")
            story["waited_s"] = story["receipt"]["waited_s"]
        story["receipt"]["sentences"] = sentences(story["receipt"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedStory(f"job {row['id']} has {row['state']}; the journal's row about it is damaged") from None
    return story


def read_stories(rows: Iterable[Mapping[str, Any]], *, whole: bool = False) -> Iterator[Row]:
    """Yield ended jobs from their rows in the journal, without those that are damaged.

    `whole`: with what only the picture of one job needs.
    """
    for row in rows:
        with contextlib.suppress(DamagedStory):
            story = read_story(row)
            yield story if whole else {key: value for key, value in story.items() if key not in PICTURED}


def workload_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield finished jobs for the simulator from their rows in the journal, without those that are damaged."""
    for row in rows:
        with contextlib.suppress(DamagedStory, KeyError):
            yield workload_row(row)


def workload_row(row: Mapping[str, Any]) -> Row:
    """Return a finished job for the simulator, with what happened to it here, from its row in the journal."""
    story, spec = read_story(row), stored(row["spec"]).plain()
    receipt = story["receipt"]
    same = ("job", "name", "user", "gpus", "submitted", "started", "finished", "batch", "iterations", "model")
    stated = {
        one.name: spec[one.name] for one in SUBMITTED_COLUMNS if one.name in spec and one.name not in (*same, *MEASURED)
    }
    shared = bool(receipt["shares"] or receipt["hosted"])
    account = {"alone_s": receipt["alone_s"], "ran_s": receipt["ran_s"], "shared": shared}
    account["group"] = story.get("group", "")  # an earlier release knew no groups
    story["iterations"] = story["iterations"] or UNCOUNTED
    return {**{key: story[key] for key in same}, **stated, **account, "measured": receipt["measured"]}


def group_rows(state: State, names: Iterable[str], now: float) -> list[dict[str, Any]]:
    """Return what groups hold, what they used, and how that compares with their shares."""
    tenants = state.tenants
    half_life_s = tenants.fair_share.half_life_s
    present = [group for group in tenants.groups.values() if group.jobs] if tenants.on else []
    all_used = sum(group.used_at(now, half_life_s) for group in present)
    weights = sum(group.weight for group in present)
    jobs, gpus = Counter[str](), Counter[str]()  # tenants count them only where shares, guarantees or caps count
    for record in state.jobs.values():
        jobs[record.job.group] += 1
        gpus[record.job.group] += len(record.gpus)
    rows = []
    for name in names:
        setting, group = tenants.settings.get(name, UserGroup(name)), tenants.groups.get(name)
        used = group.used_at(now, half_life_s) if group is not None else 0.0
        competes = group is not None and group in present and all_used > 0.0
        row = {**asdict(setting), "jobs": jobs[name], "gpus": gpus[name]}
        row["used_gpu_s"] = used if tenants.on else None
        row["of_share"] = used / all_used * weights / setting.weight if competes else None
        rows.append(row)
    return rows
