"""Receipts: the time that sharing gained or cost a job, as `carpool show` and `carpool history` print it.

The cost is measured: the run time beside mates minus the time that the same iterations take alone. The gain is an
estimate that is made when the job joins: how much longer it would have waited for the ends of its hosts. Pure functions
over the records of the state, which remember both.
"""

from collections.abc import Mapping
from typing import Any

from carpool.core.record import JobRecord
from carpool.live.text import span

NOTICEABLE_S = 0.5


def receipt(record: JobRecord, now: float) -> dict[str, Any]:
    """Return the receipt of a job up to now. `measured` tells whether its slow-down comes from its own reports."""
    ran_s, alone_s = ran(record, now), record.alone_s
    if record.iteration_s:  # since the last settlement
        alone_s += (now - record.since) / record.slowdown
    if record.silent_s:
        alone_s = min(alone_s + record.silent_s, ran_s)
    lost_s = max(0.0, ran_s - alone_s)
    saved_s = record.saved_s if record.shares else None
    waited_s, paused_s = record.waited(now), record.paused(now)
    on_gpus_s = record.service(now) / record.job.gpus
    account: dict[str, Any] = {
        "waited_s": waited_s,
        "held_s": max(0.0, now - record.job.submitted - waited_s - on_gpus_s),  # on hold, or behind other jobs
        "startup_s": max(0.0, on_gpus_s - ran_s - paused_s),  # on its GPUs: it starts, saves or stops
        "ran_s": ran_s,
        "alone_s": alone_s,
        "slowdown": ran_s / alone_s if alone_s > 0.0 else None,
        "lost_s": lost_s,
        "saved_s": saved_s,
        "gained_s": None if saved_s is None else saved_s - lost_s,
        "gpu_s": record.service(now),
        "measured": bool(getattr(record, "reported", False)),
        "shares": record.shares,
        "hosted": record.hosted,
        "preemptions": record.preemptions,
        "pauses": record.pauses,
        "paused_s": paused_s,
    }
    return {**account, "sentences": sentences(account, running=bool(record.gpus))}


def ran(record: JobRecord, now: float) -> float:
    """Return the seconds that a job has computed on its GPUs, in all attempts. Where it never reported that it
    computes, it counts as computing from its start."""
    return record.ran_s + record.silent_s + (now - record.since if record.iteration_s else 0.0)


def sentences(account: Mapping[str, Any], running: bool = False) -> list[str]:
    """Return the receipt in words; that of a running job says what holds so far."""
    if not account["ran_s"]:
        return [f"The job has waited {span(account['waited_s'])} and has not run."]
    pauses, held_s, startup_s = (account.get(key, 0) for key in ("pauses", "held_s", "startup_s"))  # 0.1 lacks them
    parts = [
        f"waited {span(account['waited_s'])}",
        f"was on hold or behind other jobs for {span(held_s)}" if held_s > NOTICEABLE_S else "",
        f"started and stopped for {span(startup_s)}" if startup_s > NOTICEABLE_S else "",
        f"was paused {_times(pauses)} for {span(account['paused_s'])} in all" if pauses else "",
    ]
    spent = [part for part in parts if part]
    lines = [f"The job {', '.join(spent)}{',' if len(spent) > 1 else ''} and ran {span(account['ran_s'])}."]
    if not account["shares"] and not account["hosted"]:
        return [*lines, "It never shared a GPU."]
    joined = f"joined a running job {_times(account['shares'])}" if account["shares"] else ""
    hosted = f"was joined {_times(account['hosted'])}" if account["hosted"] else ""
    how = "measured" if account["measured"] else "estimated: the job does not report its speed"
    alone = "So far, alone, it would have run" if running else "Alone it would have run"
    lines.append(
        f"It {' and '.join(filter(None, (joined, hosted)))}. {alone} {span(account['alone_s'])}: "
        f"sharing cost {span(account['lost_s'])} ({how})."
    )
    if account["saved_s"] is not None:
        gained = account["gained_s"]
        verdict = "gained" if gained >= 0 else "cost"
        total = "So far" if running else "In total"
        lines.append(
            f"Without sharing it would have started about {span(account['saved_s'])} later (estimated when it joined). "
            f"{total}, sharing {verdict} {span(abs(gained))}."
        )
    elif account["lost_s"] > NOTICEABLE_S:
        lines.append("It only hosted other jobs, so sharing saved it no time.")
    return lines


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
