"""The joint rule's objective: the sum of completion times of the guest, of its hosts and of all jobs that wait.

Of the jobs that wait, the first ones count one by one. The many behind them count together: each GPU second that a move
saves lets all of them start a little sooner.

`Objective` is a scheduling pass as the rule sees it: when the running jobs will end, when their GPUs will be free, and
which jobs wait. It prices a move before it is made and notes it afterwards.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from carpool.core.availability import Availability, Change
from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.shapes import Shape
from carpool.core.view import JobView, WaitingJob
from carpool.policies.joint.moves import ClaimGpus, Displace, FillIn, Join, Move, Relocate, StartAlone, Suspend
from carpool.policies.joint.queue_estimate import GPUS, LEFT, PRIORITY, SEQ, QueueEstimate, queue_sum

FREE = 0.0
"""Moment from which free GPUs are free."""
CLOSE = 1e-6
"""Difference in seconds that counts as none."""


class Prospect(NamedTuple):
    """What is expected for a waiting job and for the other jobs that wait with its priority or a higher one."""

    others: list[WaitingJob]
    present: float
    """Sum of the completion times of all of them if nothing is done for the job now."""
    without: float
    """Sum of the completion times of the others if the job were not there."""
    horizon: float
    """The latest start of the others in that case."""
    gpus: int
    """Number of GPUs that the others want in all."""


class Objective:
    """The objective in one scheduling pass, kept up to date move by move."""

    def __init__(self, draft: Draft, look_ahead: int, restart_s: float, first: Sequence[JobView] = ()) -> None:
        """`look_ahead` is the number of waiting jobs that count; jobs in `first` go before others of their priority."""
        self.draft = draft
        self.now = draft.view.now
        self._view = draft.view
        self._weighs = draft.view.shares_count
        self.restart_s = restart_s
        self.claimed: set[int] = set()
        """Hosts for whose GPUs a job of this pass waits, by `seq`."""
        self._claimed_gpus: set[GpuId] = set()  # when they are free follows from the claim alone
        self.closed: set[int] = set()
        """Jobs that no other job may join in this pass: they are part of a trial or fill in, by `seq`."""
        self.moved: set[int] = set()
        """Jobs that a move of this pass concerned, by `seq`."""
        self._look_ahead = look_ahead
        self._first = first
        self._ends: Mapping[int, float] | None = None  # fetched when first needed
        self._new_ends: dict[int, float] = {}
        self._made: list[StartAlone] = []  # moves made before anything had to be priced: many passes price none
        self._available: Availability | None = None
        self._line: list[WaitingJob] = []
        self._front: QueueEstimate | None = None  # of the first jobs in the line
        self._present: dict[int, QueueEstimate] = {}  # by priority
        self._prospects: dict[int, Prospect] = {}  # by seq
        self._waits: dict[int, float] = {}  # see `_end_if_it_waits`; by seq
        self._weights: dict[Shape, float] = {}
        self._gpu_seconds: dict[int, float] = {}  # see `_gpu_second`; by priority

    # ---- when jobs end, and which jobs wait ------------------------------------------------------------------------

    def end(self, record: JobView) -> float:
        """Return the predicted end of a job that runs or was placed in this pass."""
        end = self._new_ends.get(record.seq)
        if end is None:
            if self._ends is None:
                self._ends = self.draft.view.end_times.ends
            end = self._ends[record.seq]
        return end

    def left(self, record: JobView) -> float:
        """Return the seconds until the predicted end."""
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
    def _waiting(self) -> list[WaitingJob]:
        """The jobs that wait, in order, as things stand in this pass."""
        if self._available is None:
            _ = self.available
        return self._line

    def _first_waiting(self) -> list[WaitingJob]:
        """Return the waiting jobs that count, in order. One that cannot start does not: since a node was lost, a job
        may fit on no GPU."""
        view, draft = self.draft.view, self.draft
        total, largest = len(view.topology.node_of), view.topology.largest_memory
        line = [job for job in view.queue.first_waiting(self._look_ahead) if job[GPUS] <= total]
        if view.limits or view.caps or any(shape.sizes[-1].memory > largest for shape in view.queue.buckets):
            allowed = {
                seq
                for _, _, seq, job in view.queue.first(self._look_ahead)
                if job.shape.sizes[-1].memory <= largest and draft.may_start(job)
            }
            line = [job for job in line if job[SEQ] in allowed]
        if self._first:
            moved_up = {job.seq for job in self._first}
            line = [*map(self._entry, self._first), *(job for job in line if job[SEQ] not in moved_up)]
            line.sort(key=lambda job: -job[PRIORITY])
        return line

    def _entry(self, job: JobView) -> WaitingJob:
        return job.shape.gpus, job.alone_left(self.now) + job.startup_s, job.seq, job.shape.priority

    def _suspended(self, victim: JobView) -> WaitingJob:
        left = victim.alone_left(self.now) + self.restart_s + victim.startup_s
        return victim.shape.gpus, left, victim.seq, victim.shape.priority

    def delay_paused(self, move: Join | Displace, most: float = inf) -> bool:
        """Add to a move what it costs the paused jobs on its GPUs. Return False where one of them has a higher
        priority, or where the move costs `most` or more.

        A paused job goes on after the guest and after all jobs there whose ends the move delays.
        """
        draft, ends, guest = self.draft, move.ends, move.guest
        joined = set(move.gpus)
        concerned = joined.union(*(draft.gpus_of(host) for host in move.hosts))
        there = [r.record for gpu in draft.with_paused(concerned) for r in draft.residents(gpu) if not r.active]
        if not there:
            return True
        waiting = {record.seq: record for record in there if record.seq not in ends}
        delayed = []
        for paused in sorted(waiting.values(), key=lambda job: (self.end(job), job.seq)):
            if paused.paused_by_owner:
                continue
            start = 0.0 if joined.isdisjoint(paused.gpus) else ends[guest.seq]
            for jobs in {draft.jobs_on(gpu) for gpu in paused.gpus}:
                start = max([start, *[ends.get(job.seq, 0.0) for job in jobs if job is not guest]])
            late = start + paused.alone_left(self.now) - self.end(paused)
            if late > CLOSE:
                move.cost += late
                if paused.shape.priority > guest.shape.priority or move.cost >= most:
                    return False
                ends[paused.seq] = self.end(paused) + late
                delayed.append(paused)
        move.hosts += tuple(delayed)
        return True

    def may_join(self, guest: JobView, hosts: Sequence[JobView]) -> bool:
        """Return whether no host has a higher priority, and neither a job of this pass waits for their GPUs nor a trial
        needs them for itself."""
        claimed, closed, priority = self.claimed, self.closed, guest.shape.priority
        for host in hosts:  # noqa: SIM110 (a generator costs more, and this is asked often)
            if host.shape.priority > priority or host.seq in claimed or host.seq in closed:
                return False
        return True

    # ---- what a move is worth --------------------------------------------------------------------------------------

    def price(self, move: Move) -> float | None:
        """Return by how much the objective falls with a move; None where it would delay a job of a higher priority.

        Waiting jobs of a lower priority do not count: they must not hold up a higher one.
        """
        gain = self._price(move)
        if gain is not None and self._weighs:
            gain = move.gain = gain + self._more_for_weights(move)
        return gain

    def _price(self, move: Move) -> float | None:
        guest = move.guest
        others, present, without, horizon, wanted = self._prospect(guest)
        changes = move.changes = self._changes(move)
        saved = present + self._gain_behind(move, changes)
        if isinstance(move, Suspend):
            others = _sorted([*others, *map(self._suspended, move.victims)])
            wanted += sum([victim.shape.gpus for victim in move.victims])
            saved += sum(self.left(victim) for victim in move.victims)
        elif min([min(before, after) for before, after, _ in changes], default=inf) > horizon:
            move.gain = saved - move.cost - without  # the usual case: no waiting job gets these GPUs
            return move.gain
        after = self.available.first_after(changes, wanted)
        if others and others[0][PRIORITY] > guest.shape.priority:
            higher = [job for job in others if job[PRIORITY] > guest.shape.priority]
            if queue_sum(after, higher, self.now) > queue_sum(self.available.moments, higher, self.now) + CLOSE:
                return None
        move.gain = saved - move.cost - queue_sum(after, others, self.now)
        return move.gain

    def budget(self, guest: JobView) -> float:
        """Return the most that a move may cost: the guest's completion time, and what it costs the jobs behind it.

        No move frees GPUs sooner, unless it suspends a job, so the waiting jobs gain no more than that.
        """
        _, present, without, _, _ = self._prospect(guest)
        present += self.work_behind(guest)
        if self._weighs and (weight := self.weight_of(guest)) > 1.0:
            return present - without + (weight - 1.0) * self._end_if_it_waits(guest)
        return present - without

    def work_behind(self, guest: JobView) -> float:
        """Return what a job that waits costs the jobs behind the line, because it has to run alone at some time.

        A paused one costs them nothing more: when its GPUs will be free depends on it already.
        """
        return 0.0 if guest.gpus else self._gpu_second(guest.shape.priority) * _work(self._entry(guest))

    def _gain_behind(self, move: Move, changes: Sequence[Change]) -> float:
        """Return what a move gains the jobs behind the line: they start sooner if it takes fewer GPU seconds than its
        guest does alone."""
        second = self._gpu_second(move.guest.shape.priority)
        if not second:
            return 0.0
        now = self.now
        taken = sum([(max(now, after) - max(now, before)) * gpus for before, after, gpus in changes])
        if isinstance(move, Suspend):
            taken += sum([_work(self._suspended(victim)) for victim in move.victims])
        return self.work_behind(move.guest) - second * taken

    def _gpu_second(self, priority: int) -> float:
        """Return what a GPU second costs the jobs behind the line that have at least this priority: each of them is
        late by the time in which all GPUs together make up for it."""
        second = self._gpu_seconds.get(priority)
        if second is None:
            queue, behind = self._view.queue, 0
            if len(queue) > self._look_ahead:
                buckets = queue.buckets.items()
                counting = sum([len(bucket) for shape, bucket in buckets if shape.priority >= priority])
                behind = max(0, counting - self._look_ahead)
            second = self._gpu_seconds[priority] = behind / len(self._view.topology.node_of)
        return second

    def _more_for_weights(self, move: Move) -> float:
        """Return what a move gains beyond its price, because a second of some jobs counts for more or less than one:
        their tenants are below or above their shares."""
        guest, weight_of, more = move.guest, self.weight_of, 0.0
        if weight_of(guest) != 1.0:
            more = (weight_of(guest) - 1.0) * (self._end_if_it_waits(guest) - (move.ends[guest.seq] - self.now))
        for host in move.hosts if isinstance(move, (Join, ClaimGpus, Displace)) else ():
            if host.seq in move.ends:
                more += (weight_of(host) - 1.0) * (self.end(host) - move.ends[host.seq])
        return more

    def weight_of(self, job: JobView) -> float:
        """Return what a second of a job's completion time counts for."""
        weight = self._weights.get(job.shape)
        if weight is None:
            weight = self._weights[job.shape] = self._view.weight_of(job)
        return weight

    def _end_if_it_waits(self, guest: JobView) -> float:
        """Return the seconds until the end of a job that waits, if nothing is done for it now."""
        if guest.gpus:
            return self.left(guest)
        seconds = self._waits.get(guest.seq)
        if seconds is None:
            front = self._estimate_of_first(self._place_in_line(guest, len(self._waiting)))
            seconds = self._waits[guest.seq] = front.copy().add([self._entry(guest)]).sum - front.sum
        return seconds

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
        if guest.gpus:  # it is paused: it waits for its own GPUs, not in the queue
            queue = self._present_estimate(number, priority)
            return _prospect(waiting[:number], self.left(guest) + queue.sum, queue)
        place = self._place_in_line(guest, number)
        front = self._estimate_of_first(place)
        if place == number:  # it is too far down the queue to be in the line: all of them are before it
            present = front.copy().add([self._entry(guest)]).sum
            return _prospect(waiting[:number], present, front)
        present = self._present_estimate(number, priority).sum
        behind = waiting[place + 1 : number]
        return _prospect(waiting[:place] + behind, present, front.copy().add(behind))

    def _place_in_line(self, guest: JobView, number: int) -> int:
        """Return the place of a job among the first `number` jobs of the line; `number`: it is not among them."""
        seqs = [job[SEQ] for job in self._waiting[:number]]
        return seqs.index(guest.seq) if guest.seq in seqs else number

    def _present_estimate(self, number: int, priority: int) -> QueueEstimate:
        """Return the estimate for the first `number` jobs of the line, which are those with at least this priority."""
        present = self._present.get(priority)
        if present is None:
            front = self._front
            if front is None or len(front) > number:
                front = QueueEstimate(self.available.moments, self.now)
            present = self._present[priority] = front.copy().add(self._waiting[len(front) : number])
        return present

    def _estimate_of_first(self, number: int) -> QueueEstimate:
        """Return the estimate for the first jobs of the line. Guests come in its order, so it mostly grows."""
        front = self._front
        if front is None or len(front) > number:
            front = self._front = QueueEstimate(self.available.moments, self.now)
        return front.add(self._waiting[len(front) : number])

    # ---- when GPUs will be free ------------------------------------------------------------------------------------

    def _changes(self, move: Move) -> list[Change]:
        """Return which GPUs will be free at another time if a move is made."""
        if isinstance(move, FillIn):
            more = len(set(move.gpus) - self._claimed_gpus)
            return [(FREE, move.ends[move.guest.seq], more)] if more else []
        if isinstance(move, Displace):
            return self._changes_by_cell(move)
        if isinstance(move, (Join, ClaimGpus)):
            if move.lone and len(move.gpus) <= len(self.draft.gpus_of(move.hosts[0])):
                return self._changes_of_lone_host(move)
            return self._changes_by_cell(move)
        vacated: list[Change] = []
        if isinstance(move, Suspend):
            vacated = [(self.end(victim), FREE, len(victim.gpus)) for victim in move.victims]
        elif isinstance(move, Relocate):
            vacated = self._changes_where_left(move)
        return [*vacated, (FREE, move.ends[move.guest.seq], len(move.gpus))]

    def _changes_of_lone_host(self, move: Join | ClaimGpus) -> list[Change]:
        host, number = move.hosts[0], len(move.gpus)
        present = self.end(host)
        end = move.ends.get(host.seq, present)
        rest = len(self.draft.gpus_of(host)) - number
        joined = (present, max(end, move.ends[move.guest.seq]), number)
        return [joined, (present, end, rest)] if rest else [joined]

    def _changes_where_left(self, move: Relocate) -> list[Change]:
        """Return the changes on the GPUs that a job leaves, and on the other GPUs of its mates."""
        ends, changes = move.ends, []
        left = set(move.guest.gpus).union(*(self.draft.gpus_of(host) for host in move.hosts))
        for gpu in left - self._claimed_gpus:
            records = self.draft.jobs_on(gpu)
            before = max([self.end(record) for record in records])
            stay = [record for record in records if record is not move.guest]
            after = max([ends.get(record.seq, self.end(record)) for record in stay], default=FREE)
            if after != before:
                changes.append((before, after, 1))
        return changes

    def _changes_by_cell(self, move: Join | ClaimGpus | Displace) -> list[Change]:
        """Return the changes cell by cell, because hosts may have other mates."""
        draft, ends, changes = self.draft, move.ends, []
        joined = set(move.gpus)
        cells: dict[tuple[bool, Sequence[JobView]], int] = {}
        for gpu in joined.union(*(draft.gpus_of(host) for host in move.hosts)) - self._claimed_gpus:
            cell = (gpu in joined, draft.jobs_on(gpu))
            cells[cell] = cells.get(cell, 0) + 1
        for (is_joined, records), gpus in cells.items():
            before = max([self.end(record) for record in records], default=FREE)
            after = max([ends.get(record.seq, self.end(record)) for record in records], default=FREE)
            if is_joined:
                after = max(after, ends[move.guest.seq])
            if after != before:
                changes.append((before, after, gpus))
        return changes

    # ---- what has been done ----------------------------------------------------------------------------------------

    def note(self, move: Move) -> None:
        """Take into account a move that is about to be made. Call it before the draft changes."""
        if self._available is None and isinstance(move, StartAlone):
            self._made.append(move)
        else:
            self._enter(move)
        self.moved.update(move.ends)
        self._new_ends.update(move.ends)
        if isinstance(move, (Join, ClaimGpus, Displace)):
            hosts = [host.seq for host in move.hosts]
            self.moved.update(hosts)
            if isinstance(move, ClaimGpus):
                self.claimed.update(hosts)
                self._claimed_gpus.update(move.gpus)
        elif isinstance(move, FillIn):
            self.closed.add(move.guest.seq)  # its GPUs are free when the claimant ends, whenever it ends itself
        elif isinstance(move, Suspend):
            self.moved.update(victim.seq for victim in move.victims)

    def _enter(self, move: Move) -> None:
        self.available.change(self._changes(move) if move.changes is None else move.changes)
        self._line = [job for job in self._waiting if job[SEQ] != move.guest.seq]
        if isinstance(move, Suspend):
            self._line = _sorted([*self._waiting, *map(self._suspended, move.victims)])
        self._front = None
        self._present.clear()
        self._prospects.clear()
        self._waits.clear()


def _prospect(others: list[WaitingJob], present: float, without: QueueEstimate) -> Prospect:
    """Return what is expected for a job; `present` and `without` are as in `Prospect`."""
    return Prospect(others, present, without.sum, without.horizon, sum([gpus for gpus, _, _, _ in others]))


def _work(job: WaitingJob) -> float:
    """Return the GPU seconds that a waiting job takes alone."""
    return job[GPUS] * job[LEFT]


def _sorted(line: Sequence[WaitingJob]) -> list[WaitingJob]:
    return sorted(line, key=lambda job: (-job[PRIORITY], _work(job), job[SEQ]))
