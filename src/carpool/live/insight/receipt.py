"""What sharing gained a job or cost it: the receipt that `carpool show` and `carpool history` print.

The cost is known: the time it ran beside others, less what the same iterations take alone. The gain is an estimate,
made at the moment it joined: how much longer it would have waited for its hosts to end. Pure functions over the
state's records, which remember both.
"""

from collections.abc import Mapping
from typing import Any

from carpool.core.record import JobRecord
from carpool.live.text import span

NOTICEABLE_S = 0.5


def receipt(record: JobRecord, now: float) -> dict[str, Any]:
    """The job's account up to now. `measured`: its slow-downs come from its own reports, not from belief."""
    ran_s, alone_s = ran(record, now), record.alone_s
    if record.iteration_s:  # since the last settlement
        alone_s += (now - record.since) / record.slowdown
    lost_s = max(0.0, ran_s - alone_s)
    saved_s = record.saved_s if record.shares else None
    account: dict[str, Any] = {
        "waited_s": record.waited(now),
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
    }
    return {**account, "sentences": sentences(account)}


def ran(record: JobRecord, now: float) -> float:
    """How long it has had its GPUs and computed, in all its attempts."""
    return record.ran_s + (now - record.since if record.iteration_s else 0.0)


def sentences(account: Mapping[str, Any]) -> list[str]:
    """The account in words."""
    if not account["ran_s"]:
        return [f"It has waited {span(account['waited_s'])} and has not run."]
    lines = [f"It waited {span(account['waited_s'])} and ran {span(account['ran_s'])}."]
    if not account["shares"] and not account["hosted"]:
        return [*lines, "It never shared a GPU."]
    joined = f"joined others {_times(account['shares'])}" if account["shares"] else ""
    hosted = f"was joined {_times(account['hosted'])}" if account["hosted"] else ""
    how = "as measured" if account["measured"] else "as believed, for it does not report its speed"
    lines.append(
        f"It {' and '.join(filter(None, (joined, hosted)))}; alone it would have run {span(account['alone_s'])}: "
        f"sharing cost it {span(account['lost_s'])} ({how})."
    )
    if account["saved_s"] is not None:
        gained = account["gained_s"]
        verdict = "gained" if gained >= 0 else "lost"
        lines.append(
            f"Without sharing it would have started about {span(account['saved_s'])} later (estimated when it joined): "
            f"all in all it {verdict} {span(abs(gained))}."
        )
    elif account["lost_s"] > NOTICEABLE_S:
        lines.append("It was a host only: it made room for others and gained nothing by it.")
    return lines


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
