"""The joint rule's candidates that pause running jobs for a pending guest.

The guest runs on GPUs that hold only paused jobs, on those of one host, or on a union of those of several. Beside it
residents may stay active; the others go on after it.
"""

from collections.abc import Iterator
from itertools import islice

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.displacements import SWITCH_S, Displacements
from carpool.policies.joint.objective import CLOSE, Objective
from carpool.policies.joint.places import PRICED, Places, size_alone, small_first


class PauseCandidates:
    """The moves of one scheduling pass that start a pending guest in place of running jobs."""

    def __init__(self, draft: Draft, objective: Objective, displacements: Displacements, places: Places) -> None:
        self.draft = draft
        self.objective = objective
        self.displacements = displacements
        self.places = places
        self.topology = draft.view.topology

    def offer(self, guest: JobView, choice: Choice) -> None:
        """Offer ways to start a pending job in place of running ones. Fewer than `most` of them are paused, because
        each loses the time that the guest takes. A job that is to be alone on its GPUs has no place where others are
        paused."""
        if guest.shape.exclusive:
            return
        size = size_alone(guest, self.topology.largest_memory)
        left = guest.whole_left(self.objective.now)
        most = (self.objective.budget(guest) - self.objective.work_behind(guest) - choice.bar) / max(left, 1.0) - 1.0
        if size is None or most <= 0.0:
            return
        left *= size.relative_time
        several = self.draft.view.jobs_per_gpu > 1
        for gpus in self._places(guest, size, left, most, choice):
            active = self.displacements.active(gpus)
            for kept in self.displacements.kept(guest, gpus, active, left, several=several and len(active) > 1):
                if len(active) - len(kept) < most:
                    self.displacements.offer(guest, gpus, size, left, kept, choice)

    def _places(
        self, guest: JobView, size: Size, left: float, most: float, choice: Choice
    ) -> Iterator[tuple[GpuId, ...]]:
        """Yield sets of GPUs: those that hold only paused jobs, those of one host, and those of several."""
        need, until = guest.shape.gpus, self.objective.now + left
        idle = self.places.idle(size)
        if len(idle) >= need:
            yield tuple(self.topology.most_consolidated(idle, need))
        if most <= 1.0:  # elsewhere, at least one job must wait
            return
        at_least = 2.0 * left + SWITCH_S - CLOSE
        of_one = self.places.of_one_host(guest, size, until)
        while at_least < choice.most and (gpus := next(of_one, None)) is not None:
            yield gpus
        if need > 1:
            yield from self.places.of_several(guest, size, until, idle, most)

    def offer_swaps(self, guest: JobView, choice: Choice) -> None:
        """Offer to start a job of one GPU in place of one beside which it does not fit: that one's memory is moved to
        main memory."""
        if not self.topology.can_swap or guest.shape.gpus > 1 or guest.shape.exclusive:
            return
        size = size_alone(guest, self.topology.largest_memory)
        if size is None:
            return
        left = guest.whole_left(self.objective.now) * size.relative_time
        hosts = self.places.hosts(guest, self.objective.now + left, small_first)
        for host in islice((host for host in hosts if self._fits_instead(host, size)), PRICED):
            active = self.displacements.active(host.gpus)
            if self.displacements.kept(guest, host.gpus, active, left, several=False):
                self.displacements.offer(guest, host.gpus, size, left, (), choice, swapped=host)

    def _fits_instead(self, host: JobView, size: Size) -> bool:
        """Return whether a job fits on the one GPU of a host if the host's memory is moved away, and only then."""
        if len(host.gpus) > 1 or host.batch is not None:
            return False
        gpu = host.gpus[0]
        can_swap = self.topology.nodes[self.topology.node_of[gpu]].can_swap
        return can_swap and not self.draft.fits(gpu, size.memory) and self.draft.fits(gpu, size.memory - host.memory)
