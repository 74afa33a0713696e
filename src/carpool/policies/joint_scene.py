"""The joint rule's objective: the sum of completion times of the guest, of every host, and of everybody who waits.

A `Scene` is a scheduling pass as the rule sees it: when the running jobs will end, when their GPUs will be free,
and who waits. It prices a `Move` before it is made, and takes note of it afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.outlook import Availability
from carpool.core.record import JobRecord, Size
from carpool.policies.lineup import Waiting, line_up

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
    slowest: tuple[float, float] = (1.0, 1.0)
    """The guest's slow-down and the worst of its hosts'."""
    victims: tuple[JobRecord, ...] = ()
    lone: bool = False
    """Its only host has all of its GPUs to itself."""
    gain: float = 0.0
    """By how much the objective falls."""


class Scene:
    def __init__(self, draft: Draft, look_ahead: int, restart_s: float) -> None:
        view = draft.view
        self.draft = draft
        self.now = view.now
        self.restart_s = restart_s
        self.claimed: set[int] = set()
        """The hosts for whose GPUs a job of this pass waits, by order of submission."""
        self.moved: set[int] = set()
        """All jobs that a move of this pass concerned."""
        outlook = view.outlook
        self.available = outlook.lent.copy()
        self.available.add(FREE, view.free.count)
        self._ends = outlook.ends
        self._new_ends: dict[int, float] = {}
        self._present: dict[int, float] = {}  # by priority
        total = view.topology.total()
        first = islice((job for job in view.queue.scan() if job.shape.gpus <= total), look_ahead)
        self.waiting = [self._waiting(job) for job in first]

    def _waiting(self, job: JobRecord) -> Waiting:
        return Waiting(job.shape.gpus, job.alone_left(self.now), job.order, job.shape.priority)

    def end(self, record: JobRecord) -> float:
        """The predicted end of a job that runs or was placed in this pass."""
        end = self._new_ends.get(record.order)
        return self._ends[record.order] if end is None else end

    def left(self, record: JobRecord) -> float:
        """Seconds until the predicted end."""
        return max(0.0, self.end(record) - self.now)

    # ---- what a move is worth --------------------------------------------------------------------------------------

    def price(self, move: Move) -> float | None:
        """By how much the objective falls with a move; None where somebody of a higher priority would be delayed.

        Jobs that wait with a lower priority do not count: they must not hold up a higher one.
        """
        guest, priority = move.guest, move.guest.shape.priority
        after = self.after(move).blocks
        victims = [self._suspended(victim) for victim in move.victims]
        others = [job for job in self.waiting if job.order != guest.order and job.priority >= priority]
        if others and others[0].priority > priority:
            higher = [job for job in others if job.priority > priority]
            if line_up(after, higher, self.now) > line_up(self.available.blocks, higher, self.now) + CLOSE:
                return None
        if victims:
            others = sorted([*others, *victims], key=lambda job: (-job.priority, job.left, job.order))
        lost = sum(self.left(victim) for victim in move.victims)
        move.gain = self._present_sum(guest) + lost - move.cost - line_up(after, others, self.now)
        return move.gain

    def _present_sum(self, guest: JobRecord) -> float:
        """The completion times of the guest and of who waits with it, if nothing is done for it now."""
        priority = guest.shape.priority
        listed = any(job.order == guest.order for job in self.waiting)
        known = self._present.get(priority) if listed else None
        if known is None:
            jobs = [job for job in self.waiting if job.priority >= priority]
            if not listed:
                jobs.append(self._waiting(guest))
            known = line_up(self.available.blocks, jobs, self.now)
            if listed:
                self._present[priority] = known
        return known

    def _suspended(self, victim: JobRecord) -> Waiting:
        left = victim.alone_left(self.now) + self.restart_s
        return Waiting(victim.shape.gpus, left, victim.order, victim.shape.priority)

    def after(self, move: Move) -> Availability:
        """When GPUs will be free if a move is made."""
        available = self.available.copy()
        guest_end = move.ends[move.guest.order]
        if not move.hosts:
            for victim in move.victims:
                available.remove(self.end(victim), len(victim.gpus))
                available.add(FREE, len(victim.gpus))
            available.remove(FREE, len(move.gpus))
            available.add(guest_end, len(move.gpus))
            return available
        host = move.hosts[0]
        gpus = self.draft.gpus_of(host)
        if not move.lone or len(move.gpus) > len(gpus):
            return self._exactly(move, available)
        end = move.ends.get(host.order, self.end(host))
        available.remove(self.end(host), len(gpus))
        available.add(end, len(gpus) - len(move.gpus))
        available.add(max(end, guest_end), len(move.gpus))
        return available

    def _exactly(self, move: Move, available: Availability) -> Availability:
        """GPU by GPU: hosts may have other mates."""
        guest_end = move.ends[move.guest.order]
        joined = set(move.gpus)
        for gpu in joined.union(*(self.draft.gpus_of(host) for host in move.hosts)):
            records = [member.record for member in self.draft.members(gpu)]
            before = max((self.end(record) for record in records), default=FREE)
            after = max((move.ends.get(record.order, self.end(record)) for record in records), default=FREE)
            if gpu in joined:
                after = max(after, guest_end)
            if after != before:
                available.remove(before, 1)
                available.add(after, 1)
        return available

    # ---- what has been done ----------------------------------------------------------------------------------------

    def note(self, move: Move) -> None:
        """A move is made: see the world as it is then. To be called before the draft knows."""
        self.available = self.after(move)
        self._new_ends.update(move.ends)
        self.moved.update(move.ends, [host.order for host in move.hosts], [victim.order for victim in move.victims])
        if move.size is None:
            self.claimed.update(host.order for host in move.hosts)
        self.waiting = [job for job in self.waiting if job.order != move.guest.order]
        if move.victims:
            suspended = [self._suspended(victim) for victim in move.victims]
            self.waiting = sorted([*self.waiting, *suspended], key=lambda job: (-job.priority, job.left, job.order))
        self._present = {}


def names(records: Sequence[JobRecord]) -> str:
    shown = ", ".join(record.job.id for record in records[:3])
    return shown + (f" and {len(records) - 3} more" if len(records) > 3 else "")
