"""The joint rule's objective: the sum of completion times of the guest, of every host, and of everybody who waits.

A `Scene` is a scheduling pass as the rule sees it: when the running jobs will end, when their GPUs will be free,
and who waits. It prices a `Move` before it is made, and takes note of it afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.outlook import Availability
from carpool.core.record import JobRecord, Size
from carpool.policies.lineup import LEFT, ORDER, PRIORITY, Lineup, Waiting, line_up

FREE = 0.0
"""The moment from which free GPUs are free."""
CLOSE = 1e-6
"""Seconds that count as nothing."""


@dataclass(slots=True)
class Move:
    """Something that could be done for a waiting job."""

    guest: JobRecord
    gpus: tuple[GpuId, ...]
    size: Size | None
    """None: claim these GPUs and wait."""
    ends: dict[int, float]
    """The end of the guest and the new ends of its hosts, by order of submission."""
    cost: float
    """The guest's completion time, counted from now, and what its hosts lose."""
    hosts: tuple[JobRecord, ...] = ()
    victims: tuple[JobRecord, ...] = ()
    lone: bool = False
    """Its only host has all of its GPUs to itself."""
    gain: float = 0.0
    """By how much the objective falls."""


class Scene:
    def __init__(self, draft: Draft, look_ahead: int, restart_s: float, first: Sequence[JobRecord] = ()) -> None:
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
        self._ends: dict[int, float] | None = None  # not asked for before it is needed
        self._new_ends: dict[int, float] = {}
        self._made: list[Move] = []  # before anything had to be weighed: many passes end without
        self._available: Availability | None = None
        self._line: list[Waiting] = []
        self._lineup: Lineup | None = None  # of the first of those who wait
        self._neighbours: dict[int, tuple[int, list[Waiting]]] = {}  # by order of submission
        self._present: dict[int, float] = {}  # by priority
        self._budgets: dict[int, float] = {}  # by order of submission

    # ---- when jobs end, and who waits ------------------------------------------------------------------------------

    def end(self, record: JobRecord) -> float:
        """The predicted end of a job that runs or was placed in this pass."""
        end = self._new_ends.get(record.order)
        if end is None:
            if self._ends is None:
                self._ends = self.draft.view.outlook.ends
            end = self._ends[record.order]
        return end

    def left(self, record: JobRecord) -> float:
        """Seconds until the predicted end."""
        return max(0.0, self.end(record) - self.now)

    @property
    def available(self) -> Availability:
        """When GPUs will be free, as things stand in this pass."""
        if self._available is None:
            view = self.draft.view
            self._available = view.outlook.lent.copy()
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
        line: list[Waiting] = []
        for _, _, order, job in view.queue.in_order[: self._look_ahead]:
            shape = job.shape
            if shape.gpus <= total and (shape.user is None or draft.may_start(job)):
                left = (job.job.iterations - job.done) * job.alone_iteration_s  # alone_left of a job that waits
                line.append((shape.gpus, left, order, shape.priority))
        if self._first:
            orders = {job.order for job in self._first}
            line = [*map(self._entry, self._first), *(job for job in line if job[ORDER] not in orders)]
            line.sort(key=lambda job: -job[PRIORITY])
        return line

    def _entry(self, job: JobRecord) -> Waiting:
        return job.shape.gpus, job.alone_left(self.now), job.order, job.shape.priority

    def _suspended(self, victim: JobRecord) -> Waiting:
        left = victim.alone_left(self.now) + self.restart_s
        return victim.shape.gpus, left, victim.order, victim.shape.priority

    # ---- what a move is worth --------------------------------------------------------------------------------------

    def price(self, move: Move) -> float | None:
        """By how much the objective falls with a move; None where somebody of a higher priority would be delayed.

        Jobs that wait with a lower priority do not count: they must not hold up a higher one.
        """
        guest = move.guest
        before, after = self.available.moments, self.after(move).moments
        others = self._others(guest)
        if others and others[0][PRIORITY] > guest.shape.priority:
            higher = [job for job in others if job[PRIORITY] > guest.shape.priority]
            if line_up(after, higher, self.now) > line_up(before, higher, self.now) + CLOSE:
                return None
        if move.victims:
            others = _sorted([*others, *map(self._suspended, move.victims)])
        lost = sum(self.left(victim) for victim in move.victims)
        move.gain = self._present_sum(guest) + lost - move.cost - line_up(after, others, self.now)
        return move.gain

    def budget(self, guest: JobRecord) -> float:
        """The most that a move may cost: what the guest takes itself, and what it takes from those behind it.

        No move makes GPUs free sooner, unless it suspends somebody; so those who wait gain nothing beyond that.
        """
        known = self._budgets.get(guest.order)
        if known is None:
            present = self._present_sum(guest)
            ahead, behind = self._around(guest)
            without = self._front(ahead).copy().add(behind) if behind else self._front(ahead)
            known = self._budgets[guest.order] = present - without.sum
        return known

    def _around(self, guest: JobRecord) -> tuple[int, list[Waiting]]:
        """Who waits with the guest's priority or a higher one: how many before it, and those behind it.

        All of them are before a guest that is too far down the queue to be in the line.
        """
        order, waiting = guest.order, self._waiting
        known = self._neighbours.get(order)
        if known is None:
            number = self._number(guest.shape.priority)
            index = next((index for index in range(number) if waiting[index][ORDER] == order), number)
            known = self._neighbours[order] = index, waiting[index + 1 : number]
        return known

    def _number(self, priority: int) -> int:
        """How many wait with this priority or a higher one; they are the first in the line."""
        waiting = self._waiting
        number = len(waiting)
        while number and waiting[number - 1][PRIORITY] < priority:
            number -= 1
        return number

    def _front(self, number: int) -> Lineup:
        """The first so many in the line, on the GPUs as things stand; guests come in its order, so it mostly grows."""
        front = self._lineup
        if front is None or len(front) > number:
            front = self._lineup = Lineup(self.available.moments, self.now)
        return front.add(self._waiting[len(front) : number])

    def _others(self, guest: JobRecord) -> list[Waiting]:
        """Who waits besides the guest, with its priority or a higher one."""
        ahead, behind = self._around(guest)
        return self._waiting[:ahead] + behind

    def _present_sum(self, guest: JobRecord) -> float:
        """The completion times of the guest and of who waits with it, if nothing is done for it now."""
        priority = guest.shape.priority
        number = self._number(priority)
        ahead, _ = self._around(guest)
        if ahead == number:
            return self._front(number).copy().add([self._entry(guest)]).sum
        known = self._present.get(priority)
        if known is None:
            known = self._present[priority] = self._front(ahead).copy().add(self._waiting[ahead:number]).sum
        return known

    def after(self, move: Move) -> Availability:
        """When GPUs will be free if a move is made."""
        available = self.available.copy()
        guest_end = move.ends[move.guest.order]
        if move.lone and len(move.gpus) <= len(self.draft.gpus_of(move.hosts[0])):
            host, number = move.hosts[0], len(move.gpus)
            there = len(self.draft.gpus_of(host))
            end = move.ends.get(host.order, self.end(host))
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
        residents, changed, stopped = draft.view.residents, draft.entered, bool(draft.stopped)
        joined = set(move.gpus)
        cells: dict[tuple[bool, Sequence[JobRecord]], int] = {}
        for gpu in joined.union(*(draft.gpus_of(host) for host in move.hosts)):
            there = residents(gpu)
            if stopped or gpu in changed:
                there = tuple([member.record for member in draft.members(gpu)])
            cell = (gpu in joined, there)
            cells[cell] = cells.get(cell, 0) + 1
        for (is_joined, records), gpus in cells.items():
            before = max([self.end(record) for record in records], default=FREE)
            after = max([ends.get(record.order, self.end(record)) for record in records], default=FREE)
            if is_joined:
                after = max(after, ends[move.guest.order])
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
        self.moved.update(move.ends, [host.order for host in move.hosts], [victim.order for victim in move.victims])
        self._new_ends.update(move.ends)
        if move.size is None:
            self.claimed.update(host.order for host in move.hosts)

    def _enter(self, move: Move) -> None:
        self._available = self.after(move)
        self._line = [job for job in self._waiting if job[ORDER] != move.guest.order]
        if move.victims:
            self._line = _sorted([*self._waiting, *map(self._suspended, move.victims)])
        self._lineup = None
        self._neighbours.clear()
        self._present.clear()
        self._budgets.clear()


def _sorted(line: Sequence[Waiting]) -> list[Waiting]:
    return sorted(line, key=lambda job: (-job[PRIORITY], job[LEFT], job[ORDER]))


def names(records: Sequence[JobRecord]) -> str:
    shown = ", ".join(record.job.id for record in records[:3])
    return shown + (f" and {len(records) - 3} more" if len(records) > 3 else "")
