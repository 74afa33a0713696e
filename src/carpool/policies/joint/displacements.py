"""What it takes to let a guest run while other residents of its GPUs are paused: the move and its rules.

`pause_candidates` and `resume_candidates` choose the GPUs. This module says which residents may be paused for the
guest, which may stay active beside it, and when all of them end.
"""

from collections.abc import Sequence

from carpool.core.draft import Draft
from carpool.core.model import SWAP_IN_S, SWAP_OUT_S, GpuId
from carpool.core.rules import Resident, computing_problem
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.moves import Displace
from carpool.policies.joint.objective import CLOSE, Objective
from carpool.policies.joint.patience import is_overdue
from carpool.policies.joint.simulate_ends import Participant, simulate_ends

SWITCH_S = 0.5
"""Seconds that a pause and the resume after it count in the sum: more than they take, so that small gains do not lead
to switches."""


class Displacements:
    """The moves of one scheduling pass that pause residents for a guest."""

    def __init__(self, draft: Draft, objective: Objective, patience: float) -> None:
        self.draft = draft
        self.objective = objective
        self.view = draft.view
        self.patience = patience
        self._pausable: dict[int, bool] = {}  # by `seq`
        self._known_cells: dict[tuple[GpuId, ...], Sequence[Sequence[Resident]]] = {}
        self._as_of = -1  # number of decisions at which they were known

    def active(self, gpus: Sequence[GpuId]) -> list[Resident]:
        """Return the active residents of some GPUs, each once."""
        cells = self._cells(gpus)
        if len(cells) == 1:
            return list(cells[0])
        return list({resident.record.seq: resident for cell in cells for resident in cell}.values())

    def _cells(self, gpus: Sequence[GpuId]) -> Sequence[Sequence[Resident]]:
        """Return the sets of active residents that share some of these GPUs, each once. They are asked for again and
        again, and most workers of a gang have the same mates."""
        if len(gpus) == 1:
            return [self.draft.active_on(gpus[0])]
        if self._as_of != len(self.draft.decisions):
            self._as_of = len(self.draft.decisions)
            self._known_cells.clear()
        key = tuple(gpus)
        known = self._known_cells.get(key)
        if known is None:
            there = {self.draft.jobs_on(gpu): gpu for gpu in gpus}
            active = map(self.draft.active_on, there.values())
            cells = {tuple([resident.record.seq for resident in cell]): cell for cell in active}
            known = self._known_cells[key] = list(cells.values())
        return known

    def may_pause(self, host: JobView, guest: JobView) -> bool:
        """Return whether a job may be paused for a guest in this pass. One that is to be alone on its GPUs may not: it
        stays there, and so would the guest."""
        if host.seq in self.objective.moved or host.shape.priority > guest.shape.priority:
            return False
        known = self._pausable.get(host.seq)
        if known is None:
            known = self._pausable[host.seq] = (
                host.computing
                and host.job.can_pause
                and not host.shape.exclusive
                and host.batch is None
                and not is_overdue(host, self.objective.now, self.patience, self.view.mean_jct_s)
            )
        return known

    def may_pause_later(self, host: JobView, guest: JobView) -> bool:
        """Return whether a job may be paused for a guest once both have started up."""
        can_pause = host.job.can_pause and not host.shape.exclusive and host.batch is None
        can_pause = can_pause and host.shape.priority <= guest.shape.priority
        return self.may_pause(host, guest) or (not host.computing and can_pause)

    def kept(
        self, guest: JobView, gpus: Sequence[GpuId], active: Sequence[Resident], left: float, *, several: bool
    ) -> list[tuple[Resident, ...]]:
        """Return the sets of residents that may stay active while the others are paused: none of them and, where the
        guest may have mates, one, or those with least left.

        A job is paused only for one that has less left, so that no two jobs displace each other in turn.
        """
        now = self.objective.now
        order = sorted(active, key=lambda resident: (resident.record.alone_left(now), resident.record.seq))
        stay = [r for r in order if not (self.may_pause(r.record, guest) and r.record.alone_left(now) > left)]
        if not several:
            return [] if stay else [()]
        alone_or_one = [(), *((resident,) for resident in active)]
        sets = [kept for kept in alone_or_one if len(kept) >= len(stay) and (not stay or kept[0] is stay[0])]
        least = max(2, order.index(stay[-1]) + 1 if stay else 0)
        most = min(len(order) - 1, self.room_beside(gpus, order)) if len(order) > least else 0
        return [*sets, *(tuple(order[:count]) for count in range(most, least - 1, -1))]

    def room_beside(self, gpus: Sequence[GpuId], residents: Sequence[Resident]) -> int:
        """Return how many of the first of these residents may compute beside a guest on these GPUs."""
        room = dict.fromkeys(gpus, self.view.jobs_per_gpu - 1)
        for index, resident in enumerate(residents):
            for gpu in self.draft.gpus_of(resident.record):
                if gpu in room:
                    room[gpu] -= 1
                    if room[gpu] < 0:
                        return index
        return len(residents)

    def offer(
        self,
        guest: JobView,
        gpus: Sequence[GpuId],
        size: Size,
        left: float,
        kept: Sequence[Resident],
        choice: Choice,
        *,
        starting: Sequence[Resident] = (),
        swapped: JobView | None = None,
    ) -> None:
        """Offer the move that lets a guest run beside the residents in `kept`, unless a rule forbids it.

        The other active residents are paused, except for those in `starting`: they start up, and slow no job down.
        `swapped`: the one that gives up its memory; the guest starts once that is free.
        """
        objective, mates = self.objective, [*kept, *starting]
        victims = [resident.record for resident in self.active(gpus) if resident not in mates]
        least = left + len(victims) * (left + SWITCH_S) - CLOSE
        if least >= choice.most or (mates and not self._may_share(guest, gpus, size, mates)):
            return
        took, *kept_left = self._simulate(guest, gpus, size, left, kept)
        gib = swapped.memory / 2**30 if swapped is not None else 0.0
        took += gib * SWAP_OUT_S
        ends = {guest.seq: objective.now + took}
        cost = took
        for resident, end in zip(kept, kept_left, strict=True):
            record = resident.record
            ends[record.seq] = max(objective.end(record), objective.now + end)
            cost += ends[record.seq] - objective.end(record)
        for victim in victims:
            ends[victim.seq] = objective.end(victim) + took
            cost += took + SWITCH_S
        cost += gib * SWAP_IN_S
        hosts = (*(resident.record for resident in kept), *victims)
        move = Displace(guest, tuple(gpus), ends, cost, size, hosts, tuple(victims), swapped=swapped)
        if objective.delay_paused(move, choice.most):
            choice.offer(move)

    def _simulate(
        self, guest: JobView, gpus: Sequence[GpuId], size: Size, left: float, kept: Sequence[Resident]
    ) -> list[float]:
        """Return the seconds until the guest and the residents beside it are done."""
        if not kept:
            return [left]
        objective = self.objective
        participants = [Participant(left, guest.job, size.accumulation)]
        for resident in kept:
            record = resident.record
            alone = record.alone_left(objective.now) if record.gpus else objective.left(record)
            participants.append(Participant(alone, record.job, resident.accumulation))
        number = {resident.record.seq: index for index, resident in enumerate(kept, start=1)}
        cells = {(0, *[number[r.record.seq] for r in cell if r.record.seq in number]) for cell in self._cells(gpus)}
        return simulate_ends(participants, sorted(cells), self.view.perf)

    def _may_share(self, guest: JobView, gpus: Sequence[GpuId], size: Size, kept: Sequence[Resident]) -> bool:
        """Return whether the rules and the priorities let a guest run beside these residents."""
        if not self.objective.may_join(guest, [resident.record for resident in kept]):
            return False
        new = Resident(guest, size.accumulation, 0)
        cells = [[new, *[resident for resident in cell if resident in kept]] for cell in self._cells(gpus)]
        return all(computing_problem(cell, self.view) is None for cell in cells)


def starts_up(job: JobView, now: float) -> bool:
    """Return whether a job that has or gets GPUs does not compute so far, so that it slows no job down."""
    return job.warming_up or job.startup_left(now) > 0.0
