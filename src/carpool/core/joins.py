"""Counts which jobs share GPUs: each pair once, when both have a turn to compute for the first time.

A job joins others by its claim, or by a resume beside mates that are active. A pair that is paused and resumed has
joined already, until one of the two leaves its GPUs. Called by `claims` and `pausing`.
"""

from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State


def join(state: State, record: JobRecord, mates: list[JobRecord]) -> None:
    """Count that a job computes from now on beside those of its mates that are active."""
    known = record.shared_with
    hosts = [mate for mate in mates if may_compute(mate) and mate.seq not in known]
    if not hosts:
        return
    record.shares += 1
    record.saved_s += max([host.alone_left(state.now) for host in hosts])
    state.shares += 1
    record.shared_with = _with(known, [host.seq for host in hosts])
    for host in hosts:
        host.hosted += 1
        host.shared_with = _with(host.shared_with, [record.seq])


def part(record: JobRecord, mates: list[JobRecord]) -> None:
    """Forget beside which jobs a job computed: it leaves its GPUs, and joins again if it comes back."""
    for mate in mates if record.shared_with else ():
        if record.seq in mate.shared_with:
            mate.shared_with = tuple([seq for seq in mate.shared_with if seq != record.seq])
    record.shared_with = ()


def may_compute(record: JobRecord) -> bool:
    """Return whether a job that holds GPUs has a turn to compute."""
    return record.active and record.status is not Status.CANCELLING


def _with(seqs: tuple[int, ...], more: list[int]) -> tuple[int, ...]:
    return tuple(sorted([*seqs, *more]))
