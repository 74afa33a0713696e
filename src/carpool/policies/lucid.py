"""Indolent packing after Lucid (Hu et al., ASPLOS 2023): jobs share only where hardly anybody will notice.

Jobs stand in the order of their GPU time. One that finds no free GPUs joins a running job of the same gang size on
exactly its GPUs, if neither is predicted to slow down by more than a cap; of several such hosts it takes the one
where both together lose least. Two jobs at most share a GPU, as in the original, whatever C is. What we simplify: Lucid
classes jobs by their GPU utilisation and predicts run times with models of its own, where we use the slow-downs and
times that the scheduler believes; its profiling partition, and that it packs more eagerly under load, are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import Decision, GpuId, Status
from carpool.core.record import JobRecord, JobView, Size
from carpool.core.rules import Member
from carpool.core.view import View
from carpool.policies.base import BasePolicy, option


class Pair(NamedTuple):
    """A guest beside a host on all the host's GPUs; sorts by what both lose."""

    slowdowns: float
    order: int
    gpus: tuple[GpuId, ...]
    size: Size
    host: str
    guest_xi: float
    host_xi: float


@dataclass
class Lucid(BasePolicy):
    """The least GPU time first; what finds no free GPUs joins a job of its size where neither slows down much."""

    name = "lucid"
    cap: float = option(1.2, "the most that a job may be predicted to slow down by sharing")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.alone_left(now) * job.shape.gpus,)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        pending = draft.pending()
        for job in pending:
            if draft.start(job, "least GPU time in the queue that fits"):
                continue
            pair = min(self._pairs(draft, job), default=None)
            if pair is None:
                pending.skip_alike()
                continue
            slower = f"{pair.guest_xi:.2f} times slower (it {pair.host_xi:.2f}), at most {self.cap:.2f}"
            draft.assign(job, pair.gpus, pair.size, f"shares with {pair.host}: {slower}")
        return draft.decisions

    def _pairs(self, draft: Draft, guest: JobRecord) -> Iterator[Pair]:
        if guest.shape.exclusive or not draft.may_start(guest):
            return
        for gpus, host in lone_hosts(draft, guest.shape.gpus):
            pair = beside(draft, guest, host, gpus)
            if pair is not None and max(pair.guest_xi, pair.host_xi) <= self.cap:
                yield pair


def lone_hosts(draft: Draft, gpus: int) -> Iterator[tuple[tuple[GpuId, ...], Member]]:
    """Jobs on so many GPUs with nobody else on any of them, those that this draft placed included."""
    lent = draft.shareable()
    if lent.bit_count() < gpus:
        return
    seen: set[int] = set()
    while lent:
        gpu = (lent & -lent).bit_length() - 1
        lent &= lent - 1
        members = draft.members(gpu)
        host = members[0]
        if len(members) > 1 or host.record.order in seen or host.record.shape.gpus != gpus:
            continue
        seen.add(host.record.order)
        where = draft.gpus_of(host.record)
        if host.record.status is not Status.CANCELLING and all(len(draft.members(other)) == 1 for other in where):
            yield where, host


def beside(draft: Draft, guest: JobRecord, host: Member, gpus: tuple[GpuId, ...]) -> Pair | None:
    """The pair at the largest sub-batch of the guest that the rules allow there, or None."""
    perf, job = draft.view.perf, host.record.job
    for size in guest.shape.sizes:
        if all(draft.accepts(gpu, guest, size) for gpu in gpus):
            guest_xi = perf.slowdown(guest.job, size.accum, [(job, host.accum)])
            host_xi = perf.slowdown(job, host.accum, [(guest.job, size.accum)])
            return Pair(guest_xi + host_xi, host.record.order, gpus, size, job.id, guest_xi, host_xi)
    return None
