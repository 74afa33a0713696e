"""The joint rule's candidates that change which residents of a GPU compute.

A guest runs while other residents of its GPUs are paused. A pending guest starts on GPUs of running jobs, a paused one
goes on where it is. Beside the guest, some residents may stay active; the others go on after it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil, inf

from carpool.core.draft import Draft
from carpool.core.model import SWAP_IN_S, SWAP_OUT_S, GpuId
from carpool.core.rules import Resident, sharing_problem
from carpool.core.shapes import Size
from carpool.core.view import JobView, View
from carpool.policies.joint.moves import Displace, Relocate
from carpool.policies.joint.objective import Objective
from carpool.policies.joint.simulate_ends import Participant, simulate_ends

SWITCH_S = 0.5
"""Seconds that a pause and the resume after it count in the sum: more than they take, so that small gains do not lead
to switches."""
PRICED = 3
"""Number of single hosts that are considered for a pending guest."""
PER_GROUP = 8
"""Number of hosts with as many GPUs and mates that are looked at: those that end last, because they lose least."""

LEAST_WAIT_S = 0.1
"""Smallest number of seconds between two looks at what should start up."""
MOST_DOUBLINGS = 20
"""Number of pauses after which the price of withdrawing a job stays as it is."""
SOON = 3.0
"""Number of start-ups within which the turn of a job must come for it to start up."""

Group = tuple[int, int]
"""The number of GPUs and of mates of a host."""


def few_mates_first(need: int, group: Group) -> tuple[int, ...]:
    """Rank of a group for a gang that takes the place of one host."""
    return group[0] < need, group[1], group[0]


def large_first(need: int, group: Group) -> tuple[int, ...]:
    """Rank of a group for a gang that takes the place of few hosts."""
    return group[0] > need, -group[0], group[1]


def small_first(_need: int, group: Group) -> tuple[int, ...]:
    """Rank of a group for a gang that takes the place of small hosts."""
    return group


class PauseCandidates:
    """The moves of one scheduling pass that pause, resume or relocate jobs."""

    def __init__(self, draft: Draft, objective: Objective, patience: float) -> None:
        self.draft = draft
        self.objective = objective
        self.view = draft.view
        self.topology = draft.view.topology
        self.patience = patience
        self._orders: dict[tuple[Callable[[int, Group], tuple[int, ...]], int], list[Group]] = {}
        self._pausable: dict[int, bool] = {}  # by `seq`

    # ---- for a pending job -----------------------------------------------------------------------------------------

    def displacing(self, guest: JobView, bar: float | None) -> list[Displace]:
        """Return ways to start a pending job in place of running ones, where that may gain more than the bar.

        If it takes time to start up, the others go on until it is up.
        """
        if guest.startup_s and guest.job.can_pause:
            return self.starting_up(guest, bar)
        left = guest.whole_left(self.objective.now)
        most = None if bar is None else (self.objective.budget(guest) - bar) / max(left, 1.0) - 1.0
        if most is not None and most <= 0.0:
            return []
        size = next((size for size in guest.shape.sizes if size.memory <= self.topology.largest_memory), None)
        if size is None:
            return []
        left *= size.relative_time
        moves = []
        for gpus in self._places(guest, size, left, most):
            active = self._active(gpus)
            for kept in self._kept(guest, active):
                if most is None or len(active) - len(kept) < most:  # each of the others loses what the guest takes
                    moves.append(self._displace(guest, gpus, size, left, active, kept))
        return [move for move in moves if move is not None]

    def starting_up(self, guest: JobView, bar: float | None) -> list[Displace]:
        """Return ways to let a pending job start up beside residents, where that may gain more than the bar.

        Once it is up, its turn comes when all residents have ended or are paused for it.
        """
        size = next((size for size in guest.shape.sizes if size.memory <= self.topology.largest_memory), None)
        if size is None or not guest.job.can_pause:
            return []
        left = guest.whole_left(self.objective.now) * size.relative_time
        budget = None if bar is None else self.objective.budget(guest) - bar
        if budget is not None and left + guest.startup_s >= budget:
            return []
        most = None if budget is None else budget / max(left, 1.0)  # no paused job: one start-up is worth it
        places = [*self._ending_soon(guest, size), *self._places(guest, size, left + guest.startup_s, most)]
        moves = [self._start_up(guest, gpus, size, left) for gpus in dict.fromkeys(places)]
        return [move for move in moves if move is not None]

    def _ending_soon(self, guest: JobView, size: Size) -> Iterator[tuple[GpuId, ...]]:
        """Yield the GPUs of jobs that end while the guest starts up: those of one job, and the first of all."""
        need, until = guest.shape.gpus, self.objective.now + SOON * guest.startup_s
        ending = sorted(
            [
                entry
                for group in self.view.end_times.running.values()
                for entry in islice(group, PER_GROUP)
                if entry[0] <= until
            ]
        )
        free = [*self.draft.some_free(need, size)] if need > 1 else []
        for _, _, host in ending:
            fitting = [gpu for gpu in host.gpus if self.draft.fits(gpu, size.memory)]
            if len(fitting) >= need:
                yield tuple(self.topology.most_consolidated(fitting, need))
        union = self._union(free, iter([host for _, _, host in ending]), need, size)
        if need > 1 and len(union) == need:
            yield union

    def _start_up(self, guest: JobView, gpus: Sequence[GpuId], size: Size, left: float) -> Displace | None:
        """Return the move that lets a guest start up beside the residents of these GPUs; None: its turn is far off.

        Residents that have less left than the guest, or that may not be paused, go first. The others are delayed by it.
        """
        objective = self.objective
        now, startup = objective.now, guest.startup_s
        turn, delayed = startup, []
        for resident in {r.record.seq: r for gpu in gpus for r in self.draft.residents(gpu)}.values():
            record = resident.record
            if not resident.active:
                first = not record.paused_by_owner and record.alone_left(now) <= left
            else:
                first = record.alone_left(now) - startup <= left or not self._may_pause(record, guest)
            if first:
                turn = max(turn, objective.left(record))
            elif resident.active:
                delayed.append(record)
        if turn > SOON * startup:
            return None
        cost = turn + left + sum([left + SWITCH_S for _ in delayed])
        ends = {guest.seq: now + turn + left, **{host.seq: objective.end(host) + left for host in delayed}}
        move = Displace(guest, tuple(gpus), ends, cost, size, tuple(delayed), (), starts_up=True)
        return move if objective.delay_paused(move) else None

    def _places(self, guest: JobView, size: Size, left: float, most: float | None) -> Iterator[tuple[GpuId, ...]]:
        """Yield sets of GPUs: those that hold only paused jobs, those of one host, and those of several.

        The guest may take the place of fewer than `most` jobs, and one more may stay active beside it.
        """
        need = guest.shape.gpus
        idle = [gpu for gpu in self.draft.idle() if self.draft.fits(gpu, size.memory)]
        if len(idle) >= need:
            yield tuple(self.topology.most_consolidated(idle, need))
        if most is not None and most <= 1.0:  # elsewhere, at least one job must wait
            return
        yield from islice(self._single(self._hosts(guest, left, few_mates_first), need, size), PRICED)
        if need == 1:
            return
        free = (*self.draft.some_free(need, size), *idle)[:need]
        hosts = need if most is None else min(need, ceil(most))
        unions = {
            self._union(free, islice(self._hosts(guest, left, order), hosts), need, size)
            for order in (large_first, small_first)
        }
        yield from sorted(gpus for gpus in unions if len(gpus) == need)

    def _hosts(self, guest: JobView, left: float, order: Callable[[int, Group], tuple[int, ...]]) -> Iterator[JobView]:
        """Yield running jobs that may be paused and end after the guest: group by group, the last to end first."""
        groups = self.view.end_times.running
        until = self.objective.now + left
        for group in self._in_order(order, guest.shape.gpus):
            for end, _, host in islice(reversed(groups[group]), PER_GROUP):
                if end <= until:
                    break
                if self._may_pause(host, guest):
                    yield host

    def _in_order(self, order: Callable[[int, Group], tuple[int, ...]], need: int) -> list[Group]:
        """Return the groups of running jobs in the order in which a gang of `need` workers looks at them."""
        known = self._orders.get((order, need))
        if known is None:
            groups = [group for group, jobs in self.view.end_times.running.items() if jobs]
            known = self._orders[order, need] = sorted(groups, key=lambda group: order(need, group))
        return known

    def _single(self, hosts: Iterator[JobView], need: int, size: Size) -> Iterator[tuple[GpuId, ...]]:
        for host in hosts:
            if len(host.gpus) < need:
                return
            fitting = [gpu for gpu in host.gpus if self.draft.fits(gpu, size.memory)]
            if len(fitting) >= need:
                yield tuple(self.topology.most_consolidated(fitting, need))

    def _union(self, gpus: Sequence[GpuId], hosts: Iterator[JobView], need: int, size: Size) -> tuple[GpuId, ...]:
        """Fill up a set of GPUs with those of hosts."""
        union = list(gpus)
        while len(union) < need and (host := next(hosts, None)) is not None:
            short = need - len(union)
            fitting = [gpu for gpu in host.gpus if gpu not in union and self.draft.fits(gpu, size.memory)]
            union += self.topology.most_consolidated(fitting, short) if len(fitting) > short else fitting
        return tuple(union)

    def swapping(self, guest: JobView) -> list[Displace]:
        """Return ways to start a pending job of one GPU in place of one beside which it does not fit: that one's memory
        is moved to main memory."""
        if not self.topology.can_swap or guest.shape.gpus > 1:
            return []
        size = next((size for size in guest.shape.sizes if size.memory <= self.topology.largest_memory), None)
        if size is None:
            return []
        left = guest.whole_left(self.objective.now) * size.relative_time
        hosts = self._hosts(guest, left, small_first)
        moves = []
        for host in islice((host for host in hosts if self._fits_instead(host, size)), PRICED):
            move = self._displace(guest, host.gpus, size, left, self._active(host.gpus), (), swapped=host)
            if move is not None:
                moves.append(move)
        return moves

    def _fits_instead(self, host: JobView, size: Size) -> bool:
        """Return whether a job fits on the one GPU of a host if the host's memory is moved away, and only then."""
        if len(host.gpus) > 1 or host.batch is not None:
            return False
        gpu = host.gpus[0]
        can_swap = self.topology.nodes[self.topology.node_of[gpu]].can_swap
        return can_swap and not self.draft.fits(gpu, size.memory) and self.draft.fits(gpu, size.memory - host.memory)

    def _kept(self, guest: JobView, active: Sequence[Resident]) -> list[tuple[Resident, ...]]:
        """Return the sets of residents that may stay active beside the guest: none of them, one, or those with least
        left."""
        if guest.shape.exclusive or len(active) < 2 or self.view.jobs_per_gpu == 1:
            return [()]
        return [(), *((resident,) for resident in active), *self._least_left(active)]

    def _least_left(self, active: Sequence[Resident]) -> list[tuple[Resident, ...]]:
        """Return the residents without the one that has most left, without the two, and so on, down to two of them."""
        now = self.objective.now
        order = sorted(active, key=lambda resident: (resident.record.alone_left(now), resident.record.seq))
        return [tuple(order[:count]) for count in range(len(order) - 1, 1, -1)]

    # ---- for a paused job ------------------------------------------------------------------------------------------

    def resuming(self, guest: JobView) -> list[Displace]:
        """Return ways to let a paused job go on where it is: alone, or beside one of the active jobs there, those with
        least left, or all."""
        if guest.swapped and not all(self.draft.fits(gpu, self._memory(guest)) for gpu in guest.gpus):
            return []
        size = next(size for size in guest.shape.sizes if size.accumulation == guest.accumulation)
        active = self._active(guest.gpus)
        choices: list[tuple[Resident, ...]] = [()]
        if active and not guest.shape.exclusive:
            choices += [(resident,) for resident in active]
            choices += [*self._least_left(active), tuple(active)] if len(active) > 1 else []
        left = guest.alone_left(self.objective.now)
        moves = [self._displace(guest, guest.gpus, size, left, active, kept) for kept in choices]
        return [move for move in moves if move is not None]

    def _memory(self, guest: JobView) -> int:
        return self.view.perf.memory(guest.job, guest.accumulation)

    def relocation(self, guest: JobView) -> Relocate | None:
        """Return the move of a job to free GPUs, if there are enough; its mates speed up."""
        place = self.draft.place_alone(guest)
        if place is None or not guest.job.can_checkpoint or guest.batch is not None:
            return None
        gpus, size = place
        objective = self.objective
        now = objective.now
        cost = guest.whole_left(now) * size.relative_time + objective.restart_s
        ends = {guest.seq: now + cost}
        mates = [r.record for r in self._active(guest.gpus) if r.record is not guest] if guest.active else []
        for mate in mates:
            if mate.seq in objective.moved or not mate.gpus:
                return None
            if len(self._active(mate.gpus)) == 2:  # it will be the only one
                ends[mate.seq] = now + mate.alone_left(now)
                cost -= objective.end(mate) - ends[mate.seq]
        return Relocate(guest, gpus, ends, cost, size, tuple(mates))

    # ---- for a job that shares --------------------------------------------------------------------------------------

    def withdrawal(self, job: JobView) -> Displace | None:
        """Return the pause of the job with most left among a job that shares and its mates; None: it must not be.

        Its mates speed up, and it goes on after them.
        """
        objective, now = self.objective, self.objective.now
        beside = [resident.record for resident in self._active(job.gpus)]
        guest = max(beside, key=lambda record: (record.alone_left(now), record.seq))
        mates = [resident for resident in self._active(guest.gpus) if resident.record is not guest]
        if not mates or not all(resident.record.computing for resident in mates):
            return None
        for resident in mates:
            mate = resident.record
            if mate.seq in objective.moved or not self._may_pause(guest, mate):
                return None
            if mate.alone_left(now) >= guest.alone_left(now):
                return None
        # the price doubles with every pause, so that contradicting estimates cannot make it pause and resume in turn
        cost, ends = SWITCH_S * 2.0 ** min(guest.pauses, MOST_DOUBLINGS), {}
        for resident in mates:
            mate = resident.record
            ends[mate.seq] = now + mate.alone_left(now) * self._without(resident, guest)
            cost += ends[mate.seq] - objective.end(mate)
        ends[guest.seq] = max(ends.values()) + guest.alone_left(now)
        cost += ends[guest.seq] - now
        if sum(ends.values()) - now * len(ends) + SWITCH_S >= self._believed_sum(guest, mates):
            return None  # by the belief it would go on again at once
        size = next(size for size in guest.shape.sizes if size.accumulation == guest.accumulation)
        hosts = tuple([resident.record for resident in mates])
        move = Displace(guest, guest.gpus, ends, cost, size, hosts, (), withdraws=True)
        return move if objective.delay_paused(move) else None

    def _believed_sum(self, guest: JobView, mates: Sequence[Resident]) -> float:
        """Return the sum of the completion times, counted from now, of jobs that go on sharing, as believed."""
        beside = [Resident(guest, guest.accumulation, guest.memory), *mates]
        number = {resident.record.seq: index for index, resident in enumerate(beside)}
        cells = {
            tuple([number[r.record.seq] for r in self.draft.active_on(gpu) if r.record.seq in number])
            for resident in beside
            for gpu in resident.record.gpus
        }
        participants = [
            Participant(r.record.alone_left(self.objective.now), r.record.job, r.accumulation) for r in beside
        ]
        return sum(simulate_ends(participants, sorted(cells), self.view.perf))

    def _without(self, resident: Resident, gone: JobView) -> float:
        """Return the slow-down of a resident without one of its mates."""
        worst = 1.0
        for gpu in resident.record.gpus:
            beside = [r for r in self.draft.active_on(gpu) if r.record is not resident.record and r.record is not gone]
            if beside:
                mates = [(r.record.job, r.accumulation) for r in beside]
                worst = max(worst, self.view.perf.slowdown(resident.record.job, resident.accumulation, mates))
        return worst

    # ---- the move --------------------------------------------------------------------------------------------------

    def _active(self, gpus: Sequence[GpuId]) -> list[Resident]:
        """Return the active residents of some GPUs, each once."""
        found = {resident.record.seq: resident for gpu in gpus for resident in self.draft.active_on(gpu)}
        return list(found.values())

    def _displace(
        self,
        guest: JobView,
        gpus: Sequence[GpuId],
        size: Size,
        left: float,
        active: Sequence[Resident],
        kept: Sequence[Resident],
        *,
        swapped: JobView | None = None,
    ) -> Displace | None:
        """Return the move that lets a guest run beside the residents in `kept`; None where a rule forbids it.

        A job is paused only for one that has less left, so that no two jobs displace each other in turn. `swapped`: the
        job that gives up its memory; the guest starts once that is free.
        """
        objective = self.objective
        now = objective.now
        victims = [resident.record for resident in active if resident not in kept]
        if not all(self._may_pause(victim, guest) and victim.alone_left(now) > left for victim in victims):
            return None
        if kept and not self._may_share(guest, gpus, size, kept):
            return None
        took, *kept_left = self._simulate(guest, gpus, size, left, kept)
        gib = swapped.memory / 2**30 if swapped is not None else 0.0
        took += gib * SWAP_OUT_S
        ends = {guest.seq: now + took}
        cost = took
        for resident, end in zip(kept, kept_left, strict=True):
            record = resident.record
            ends[record.seq] = max(objective.end(record), now + end)
            cost += ends[record.seq] - objective.end(record)
        for victim in victims:
            ends[victim.seq] = objective.end(victim) + took
            cost += took + SWITCH_S
        cost += gib * SWAP_IN_S
        hosts = (*(resident.record for resident in kept), *victims)
        move = Displace(guest, tuple(gpus), ends, cost, size, hosts, tuple(victims), swapped=swapped)
        return move if objective.delay_paused(move) else None

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
        cells = {
            (0, *(number[r.record.seq] for r in self.draft.active_on(gpu) if r.record.seq in number)) for gpu in gpus
        }
        return simulate_ends(participants, sorted(cells), self.view.perf)

    def _may_pause(self, host: JobView, guest: JobView) -> bool:
        """Return whether a job may be paused for a guest in this pass."""
        if host.seq in self.objective.moved or host.shape.priority > guest.shape.priority:
            return False
        known = self._pausable.get(host.seq)
        if known is None:
            known = self._pausable[host.seq] = (
                host.computing
                and host.job.can_pause
                and host.batch is None
                and not is_overdue(host, self.objective.now, self.patience, self.view.mean_jct_s)
            )
        return known

    def _may_share(self, guest: JobView, gpus: Sequence[GpuId], size: Size, kept: Sequence[Resident]) -> bool:
        """Return whether the rules and the priorities let a guest run beside these residents."""
        if not self.objective.may_join(guest, [resident.record for resident in kept]):
            return False
        new = Resident(guest, size.accumulation, 0)
        cells = {tuple([r for r in self.draft.active_on(gpu) if r in kept]) for gpu in gpus}
        return all(
            sharing_problem([new, *(r._replace(memory=0) for r in cell)], self.view, 0) is None for cell in cells
        )


def next_start_up(view: View, startup: float) -> list[float]:
    """Return when a job should start up that is to be up when a running job ends; empty: none ends later than that."""
    soonest = view.now + startup
    ends = []
    for group in view.end_times.running.values():
        place = bisect_right(group, (soonest, inf))
        ends += [group[place][0]] if place < len(group) else []
    return [max(min(ends) - startup, view.now + LEAST_WAIT_S)] if ends else []


def is_overdue(job: JobView, now: float, patience: float, mean_jct_s: float) -> bool:
    """Return whether a job has lost more than `patience` times its time left and the mean JCT to waits and pauses."""
    if not patience:
        return False
    lost = job.waited(now) + job.paused(now)
    return lost > patience * mean_jct_s and lost > patience * job.alone_left(now)
