"""The joint rule's objective: the sum of completion times of the guest, of every host, and of everybody who waits.

A `Objective` is a scheduling pass as the rule sees it: when the running jobs will end, when their GPUs will be free,
and who waits. It prices a `Move` before it is made, and takes note of it afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.core.availability import Availability
from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.queue_estimate import LEFT, ORDER, PRIORITY, QueueEstimate, Waiting, line_up

FREE = 0.0
"""The moment from which free GPUs are free."""
CLOSE = 1e-6
"""Seconds that count as nothing."""


@dataclass(slots=True)
class Move:
    """Something that could be done for a waiting job."""

    guest: JobView
    gpus: tuple[GpuId, ...]
    size: Size | None
    """None: claim these GPUs and wait."""
    ends: dict[int, float]
    """The end of the guest and the new ends of its hosts, by order of submission."""
    cost: float
    """The guest's completion time, counted from now, and what its hosts lose."""
    hosts: tuple[JobView, ...] = ()
    victims: tuple[JobView, ...] = ()
    lone: bool = False
    """Its only host has all of its GPUs to itself."""
    gain: float = 0.0
    """By how much the objective falls."""
    then: Availability | None = None
    """When GPUs will be free if it is made; known once it was priced."""


Prospect = tuple[list[Waiting], float, float]
"""What is in store for a waiting job and for the others who wait with its priority or a higher one: those others, the
completion times of all if nothing is done for it now, and those of the others if it were not there."""


class Objective:
    def __init__(self, draft: Draft, look_ahead: int, restart_s: float, first: Sequence[JobView] = ()) -> None:
        """`first` are jobs that go before all others of their priority."""
        self.draft = draft
        self.now = draft.view.now
        self.restart_s = restart_s
        self.claimed: set[int] = set()
        """The hosts for whose GPUs a job of this pass waits, by order of submission."""
        self.moved: set[int] = set()
        """All jobs that a move of this pass concerned, likewise."""
        self._look_ahead = look_ahead
        self._first = first
        self._ends: Mapping[int, float] | None = None  # not asked for before it is needed
        self._new_ends: dict[int, float] = {}
        self._made: list[Move] = []  # before anything had to be weighed: many passes end without
        self._available: Availability | None = None
        self._line: list[Waiting] = []
        self._lineup: QueueEstimate | None = None  # of the first of those who wait
        self._present: dict[int, float] = {}  # by priority
        self._prospects: dict[int, Prospect] = {}  # by order of submission

    # ---- when jobs end, and who waits ------------------------------------------------------------------------------

    def end(self, record: JobView) -> float:
        """The predicted end of a job that runs or was placed in this pass."""
        end = self._new_ends.get(record.seq)
        if end is None:
            if self._ends is None:
                self._ends = self.draft.view.end_times.ends
            end = self._ends[record.seq]
        return end

    def left(self, record: JobView) -> float:
        """Seconds until the predicted end."""
        return max(0.0, self.end(record) - self.now)

    @property
    def available(self) -> Availability:
        """When GPUs will be free, as things stand in this pass."""
        if self._available is None:
            view = self.draft.view
            self._available = view.end_times.lent.copy()
            self._available.add(FREE, view.free.count)
            self._line = self._first_waiting()
            for move in self._made:
                self._enter(move)
        return self._available

    @property
    def _waiting(self) -> list[Waiting]:
        """Who waits, in order, as things stand in this pass."""
        if self._available is None:
            _ = self.available
        return self._line

    def _first_waiting(self) -> list[Waiting]:
        """Those who wait, in order, as far as they are looked at."""
        view, draft = self.draft.view, self.draft
        total = len(view.topology.node_of)
        line = [
            (shape.gpus, (job.job.iterations - job.done) * job.alone_iteration_s, seq, shape.priority)  # as _entry
            for _, _, seq, job in view.queue.in_order[: self._look_ahead]
            if (shape := job.shape).gpus <= total and (shape.user is None or draft.may_start(job))
        ]
        if self._first:
            orders, largest = {job.seq for job in self._first}, view.topology.largest_memory
            possible = [
                job
                for job in self._first  # since a node was lost, one may wait in vain, and would hold up all others
                if job.shape.gpus <= total and job.shape.sizes[-1].memory <= largest and draft.may_start(job)
            ]
            line = [*map(self._entry, possible), *(job for job in line if job[ORDER] not in orders)]
            line.sort(key=lambda job: -job[PRIORITY])
        return line

    def _entry(self, job: JobView) -> Waiting:
        return job.shape.gpus, job.alone_left(self.now), job.seq, job.shape.priority

    def _suspended(self, victim: JobView) -> Waiting:
        left = victim.alone_left(self.now) + self.restart_s
        return victim.shape.gpus, left, victim.seq, victim.shape.priority

    # ---- what a move is worth --------------------------------------------------------------------------------------

    def price(self, move: Move) -> float | None:
        """By how much the objective falls with a move; None where somebody of a higher priority would be delayed.

        Jobs that wait with a lower priority do not count: they must not hold up a higher one.
        """
        guest = move.guest
        others, present, _ = self._prospect(guest)
        move.then = self.after(move)
        after = move.then.moments
        if others and others[0][PRIORITY] > guest.shape.priority:
            higher = [job for job in others if job[PRIORITY] > guest.shape.priority]
            if line_up(after, higher, self.now) > line_up(self.available.moments, higher, self.now) + CLOSE:
                return None
        if move.victims:
            others = _sorted([*others, *map(self._suspended, move.victims)])
        lost = sum(self.left(victim) for victim in move.victims)
        move.gain = present + lost - move.cost - line_up(after, others, self.now)
        return move.gain

    def budget(self, guest: JobView) -> float:
        """The most that a move may cost: what the guest takes itself, and what it takes from those behind it.

        No move makes GPUs free sooner, unless it suspends somebody; so those who wait gain nothing beyond that.
        """
        _, present, without = self._prospect(guest)
        return present - without

    def _prospect(self, guest: JobView) -> Prospect:
        known = self._prospects.get(guest.seq)
        if known is None:
            known = self._prospects[guest.seq] = self._foresee(guest)
        return known

    def _foresee(self, guest: JobView) -> Prospect:
        waiting, priority = self._waiting, guest.shape.priority
        number = len(waiting)
        while number and waiting[number - 1][PRIORITY] < priority:
            number -= 1
        place = next((index for index in range(number) if waiting[index][ORDER] == guest.seq), number)
        front = self._front(place)
        if place == number:  # it is too far down the queue to be in the line: all of them are before it
            return waiting[:number], front.copy().add([self._entry(guest)]).sum, front.sum
        present = self._present.get(priority)
        if present is None:
            present = self._present[priority] = front.copy().add(waiting[place:number]).sum
        behind = waiting[place + 1 : number]
        return waiting[:place] + behind, present, front.copy().add(behind).sum

    def _front(self, number: int) -> QueueEstimate:
        """The first so many in the line, on the GPUs as things stand; guests come in its order, so it mostly grows."""
        front = self._lineup
        if front is None or len(front) > number:
            front = self._lineup = QueueEstimate(self.available.moments, self.now)
        return front.add(self._waiting[len(front) : number])

    def after(self, move: Move) -> Availability:
        """When GPUs will be free if a move is made."""
        available = self.available.copy()
        guest_end = move.ends[move.guest.seq]
        if move.lone and len(move.gpus) <= len(self.draft.gpus_of(move.hosts[0])):
            host, number = move.hosts[0], len(move.gpus)
            there = len(self.draft.gpus_of(host))
            end = move.ends.get(host.seq, self.end(host))
            available.remove(self.end(host), there)
            available.add(end, there - number)
            available.add(max(end, guest_end), number)
        elif move.hosts or move.size is None:
            self._change_gpus(move, available)
        else:
            for victim in move.victims:
                available.remove(self.end(victim), len(victim.gpus))
                available.add(FREE, len(victim.gpus))
            available.remove(FREE, len(move.gpus))
            available.add(guest_end, len(move.gpus))
        return available

    def _change_gpus(self, move: Move, available: Availability) -> None:
        """Cell by cell: hosts may have other mates."""
        draft, ends = self.draft, move.ends
        joined = set(move.gpus)
        cells: dict[tuple[bool, Sequence[JobView]], int] = {}
        for gpu in joined.union(*(draft.gpus_of(host) for host in move.hosts)):
            cell = (gpu in joined, draft.jobs_on(gpu))
            cells[cell] = cells.get(cell, 0) + 1
        for (is_joined, records), gpus in cells.items():
            before = max([self.end(record) for record in records], default=FREE)
            after = max([ends.get(record.seq, self.end(record)) for record in records], default=FREE)
            if is_joined:
                after = max(after, ends[move.guest.seq])
            if after != before:
                available.remove(before, gpus)
                available.add(after, gpus)

    # ---- what has been done ----------------------------------------------------------------------------------------

    def note(self, move: Move) -> None:
        """A move is made: see the world as it is then. To be called before the draft knows."""
        if self._available is None and not move.hosts and move.size is not None:
            self._made.append(move)
        else:
            self._enter(move)
        self.moved.update(move.ends, [host.seq for host in move.hosts], [victim.seq for victim in move.victims])
        self._new_ends.update(move.ends)
        if move.size is None:
            self.claimed.update(host.seq for host in move.hosts)

    def _enter(self, move: Move) -> None:
        self._available = move.then or self.after(move)
        self._line = [job for job in self._waiting if job[ORDER] != move.guest.seq]
        if move.victims:
            self._line = _sorted([*self._waiting, *map(self._suspended, move.victims)])
        self._lineup = None
        self._present.clear()
        self._prospects.clear()


def _sorted(line: Sequence[Waiting]) -> list[Waiting]:
    return sorted(line, key=lambda job: (-job[PRIORITY], job[LEFT], job[ORDER]))


def names(records: Sequence[JobView]) -> str:
    shown = ", ".join(record.job.id for record in records[:3])
    return shown + (f" and {len(records) - 3} more" if len(records) > 3 else "")
