"""The joint rule's candidates for jobs that take time to start up: they do so beside residents that go on.

A job that starts up takes no GPU time. Once it is up, its turn comes when the residents have ended or are paused for
it; until then it is paused itself.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.rules import may_start_ahead
from carpool.core.shapes import Size
from carpool.core.view import JobView, View
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.displacements import SWITCH_S, Displacements
from carpool.policies.joint.moves import Displace
from carpool.policies.joint.objective import Objective
from carpool.policies.joint.places import PER_GROUP, Places, size_alone

LEAST_WAIT_S = 0.1
"""Smallest number of seconds between two looks at what should start up."""
SOON = 6.0
"""Number of start-ups within which the turn of a job must come for it to start up."""


class StartUpCandidates:
    """The moves of one scheduling pass that let a pending guest start up beside residents."""

    def __init__(self, draft: Draft, objective: Objective, displacements: Displacements, places: Places) -> None:
        self.draft = draft
        self.objective = objective
        self.displacements = displacements
        self.places = places
        self.topology = draft.view.topology

    def offer(self, guest: JobView, choice: Choice) -> None:
        """Offer ways to let a pending job start up beside residents."""
        size = size_alone(guest, self.topology.largest_memory)
        if guest.shape.exclusive or size is None or not may_start_ahead(self.draft.view, guest.job):
            return
        left = guest.whole_left(self.objective.now) * size.relative_time
        budget = self.objective.budget(guest) - choice.bar
        if left + guest.startup_s >= budget:
            return
        most = budget / max(left, 1.0)  # largest number of jobs that it may delay
        for gpus in dict.fromkeys([*self._ending_soon(guest, size), *self._places(guest, size, left, most)]):
            self._start_up(guest, gpus, size, left, choice)

    def _places(self, guest: JobView, size: Size, left: float, most: float) -> Iterator[tuple[GpuId, ...]]:
        """Yield sets of GPUs: those that hold only paused jobs, those of one host, and those of several."""
        need, until = guest.shape.gpus, self.objective.now + left + guest.startup_s
        idle = self.places.idle(size)
        if len(idle) >= need:
            yield tuple(self.topology.most_consolidated(idle, need))
        if most <= 1.0:
            return
        yield from self.places.of_one_host(guest, size, until)
        if need > 1:
            yield from self.places.of_several(guest, size, until, idle, most)

    def _ending_soon(self, guest: JobView, size: Size) -> Iterator[tuple[GpuId, ...]]:
        """Yield the GPUs of jobs that end while the guest starts up: those of one job, and the first of all."""
        need, until = guest.shape.gpus, self.objective.now + SOON * guest.startup_s
        ending = sorted(
            [
                entry
                for group in self.draft.view.end_times.running.values()
                for entry in islice(group, PER_GROUP)
                if entry[0] <= until
            ]
        )
        for _, _, host in ending:
            place = self.places.on(host.gpus, need, size)
            if place is not None:
                yield place
        if need > 1:
            free = self.draft.some_free(guest, need, size)
            union = self.places.union(free, iter([host for _, _, host in ending]), need, size)
            if len(union) == need:
                yield union

    def _start_up(self, guest: JobView, gpus: Sequence[GpuId], size: Size, left: float, choice: Choice) -> None:
        """Offer to let a guest start up beside the residents of these GPUs, unless its turn is far off.

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
                stays = not self.displacements.may_pause_later(record, guest)
                first = stays or record.alone_left(now) - startup <= left
            if first:
                turn = max(turn, objective.left(record))
            elif resident.active:
                delayed.append(record)
        if turn > SOON * startup:
            return
        cost = turn + left + sum([left + SWITCH_S for _ in delayed])
        ends = {guest.seq: now + turn + left, **{host.seq: objective.end(host) + left for host in delayed}}
        move = Displace(guest, tuple(gpus), ends, cost, size, tuple(delayed), (), starts_up=True)
        if objective.delay_paused(move, choice.most):
            choice.offer(move)


def next_start_up(view: View, startup: float) -> list[float]:
    """Return when a job should start up to be up when a running job ends; empty: none ends late enough."""
    soonest = view.now + startup
    ends = []
    for group in view.end_times.running.values():
        place = bisect_right(group, (soonest, inf))
        ends += [group[place][0]] if place < len(group) else []
    return [max(min(ends) - startup, view.now + LEAST_WAIT_S)] if ends else []
