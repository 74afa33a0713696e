"""What sharing gained a job or cost it: the receipt that `carpool show` and `carpool history` print.

The cost is known: the time it ran beside others, less what the same iterations take alone. The gain is an estimate,
made at the moment it joined: how much longer it would have waited for the GPUs of its hosts to become free. Pure
functions over the state's records; the service calls `waiting_saved` after a plan and `receipt` for a job at any time.
"""

from collections.abc import Mapping
from typing import Any

from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.text import span

NOTICEABLE_S = 0.5


def waiting_saved(state: State, record: JobRecord) -> float | None:
    """Of a job that was just given GPUs beside others: how much sooner it starts than if it had waited for all of them
    to end, each running alone from now on. None: it shares with nobody."""
    hosts = {
        other.job.id: other
        for gpu in record.gpus
        for other in state.residents(gpu)
        if other is not record and other.order != record.order and other.status in (Status.RUNNING, Status.STARTING)
    }
    return max((host.alone_left(state.now) for host in hosts.values()), default=None)


def receipt(record: JobRecord, now: float, saved_s: float | None = None) -> dict[str, Any]:
    """The job's account up to now. `saved_s` is what `waiting_saved` said, summed over its starts."""
    ran_s, alone_s, waited_s = record.ran_s, record.alone_s, record.waited_s
    if record.iteration_s:  # since the last settlement
        ran_s += now - record.since
        alone_s += (now - record.since) / record.slowdown
    if record.queue_entry is not None:
        waited_s += now - record.pending_since
    lost_s = max(0.0, ran_s - alone_s)
    account: dict[str, Any] = {
        "waited_s": waited_s,
        "ran_s": ran_s,
        "alone_s": alone_s,
        "slowdown": ran_s / alone_s if alone_s > 0.0 else None,
        "lost_s": lost_s,
        "saved_s": saved_s,
        "gained_s": None if saved_s is None else saved_s - lost_s,
        "shares": record.shares,
        "hosted": record.hosted,
        "preemptions": record.preemptions,
    }
    return {**account, "sentences": sentences(account)}


def sentences(account: Mapping[str, Any]) -> list[str]:
    """The account in words."""
    if not account["ran_s"]:
        return [f"It has waited {span(account['waited_s'])} and has not run."]
    lines = [f"It waited {span(account['waited_s'])} and ran {span(account['ran_s'])}."]
    if not account["shares"] and not account["hosted"]:
        return [*lines, "It never shared a GPU."]
    joined = f"joined others {_times(account['shares'])}" if account["shares"] else ""
    hosted = f"was joined {_times(account['hosted'])}" if account["hosted"] else ""
    lines.append(
        f"It {' and '.join(filter(None, (joined, hosted)))}; alone it would have run {span(account['alone_s'])}: "
        f"sharing cost it {span(account['lost_s'])}."
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
