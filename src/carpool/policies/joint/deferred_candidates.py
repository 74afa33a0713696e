"""The joint rule's candidates that use GPUs that are still busy: wait for them, keep them, or suspend their jobs.

`offer_later` finds hosts whose end is worth waiting for, `reservation` keeps the next GPUs for a job that starves, and
`offer_suspensions` finds long jobs that could make room. `join_candidates` has the places that are open now.
"""

from collections.abc import Iterator
from heapq import nsmallest
from itertools import groupby, islice, takewhile

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.moves import ClaimGpus, Suspend
from carpool.policies.joint.objective import Objective

PRICED = 3
"""Number of the best candidates of each sort that are priced."""
PER_KIND = 32
"""Number of hosts of a kind, or victims of a gang size, that are looked at."""


class DeferredCandidates:
    """The moves of one scheduling pass for which GPUs must first become free."""

    def __init__(self, draft: Draft, objective: Objective) -> None:
        self.draft = draft
        self.objective = objective
        self.topology = draft.view.topology
        self._lone: dict[int, list[JobView]] | None = None  # as the pass began

    def offer_later(self, guest: JobView, choice: Choice) -> None:
        """Offer claims on the GPUs of the lone hosts that end soonest."""
        objective, need = self.objective, guest.shape.gpus
        own = guest.alone_left(objective.now) + guest.startup_s
        until = objective.now + choice.most - own
        soonest: list[JobView] = []
        for group in self.draft.hosts.lone.values():
            most = len(soonest) + PRICED
            for end, seq, host in group.entries[:PER_KIND]:
                if end >= until or len(soonest) == most:
                    break
                if len(host.gpus) >= need and seq not in objective.moved and self.draft.only_resident(host):
                    soonest.append(host)
        for host in nsmallest(PRICED, soonest, key=lambda host: (objective.end(host), host.seq)):
            cost = objective.left(host) + own
            if cost >= choice.most:
                break
            gpus = tuple(self.topology.most_consolidated(host.gpus, need))
            choice.offer(ClaimGpus(guest, gpus, {guest.seq: objective.now + cost}, cost, (host,), lone=True))

    # ---- for a job that starves ------------------------------------------------------------------------------------

    def reservation(self, guest: JobView) -> ClaimGpus | None:
        """Return a claim on the GPUs that will be free soonest; None where there will never be enough."""
        objective, need = self.objective, guest.shape.gpus
        size = self._size_alone(guest)
        gpus: list[GpuId] = list(self.draft.some_free(guest, need, size))
        hosts: dict[int, JobView] = {}
        moment = objective.now
        for end, gpu in self._next_gpus(size):
            if len(gpus) == need:
                break
            gpus.append(gpu)
            hosts.update((resident.record.seq, resident.record) for resident in self.draft.residents(gpu))
            moment = max(moment, end)
        if len(gpus) < need:
            return None
        cost = moment - objective.now + guest.alone_left(objective.now) + guest.startup_s
        return ClaimGpus(guest, tuple(gpus), {guest.seq: objective.now + cost}, cost, tuple(hosts.values()))

    def _next_gpus(self, size: Size) -> Iterator[tuple[float, GpuId]]:
        """Yield the GPUs in use that have enough memory, by the moment at which the last of their jobs ends."""
        objective, memory_of = self.objective, self.topology.memory_of
        for end, seq, job in self.draft.view.end_times.soonest_first:
            if seq in objective.moved:
                continue
            for gpu in job.gpus:
                last = max((objective.end(r.record), r.record.seq) for r in self.draft.residents(gpu))
                if last == (end, seq) and memory_of(gpu) >= size.memory:
                    yield end, gpu

    def _size_alone(self, guest: JobView) -> Size:
        """Return the largest sub-batch that fits a GPU of the cluster."""
        sizes, largest = guest.shape.sizes, self.topology.largest_memory
        return next((size for size in sizes if size.memory <= largest), sizes[-1])

    # ---- suspension ------------------------------------------------------------------------------------------------

    def offer_suspensions(self, guest: JobView, choice: Choice) -> None:
        """Offer to suspend sets of running jobs so that the guest can start alone.

        Of each gang size, those that end last are tried alone: a large one may have much more left than the small ones,
        and what it leaves free is worth something to the jobs that wait. Several are taken from the smallest on.
        """
        objective = self.objective
        size = self._size_alone(guest)
        short = guest.shape.gpus - len(self.draft.some_free(guest, guest.shape.gpus, size))
        if short <= 0:
            return
        left = guest.whole_left(objective.now) * size.relative_time
        victims = sorted(self._victims(guest, size, left + objective.restart_s), key=self._victim_rank)
        large = [job for job in victims if len(job.gpus) >= short]
        sets = [[job] for _, alike in groupby(large, key=lambda job: len(job.gpus)) for job in islice(alike, PRICED)]
        several: list[JobView] = []
        for job in victims:
            if short > 0:
                several.append(job)
                short -= len(job.gpus)
        if short <= 0 and len(several) > 1:
            sets.append(several)
        left += guest.startup_s
        ends = {guest.seq: objective.now + left}
        gpus = (0,) * guest.shape.gpus  # only their number counts: the draft picks them once the victims are gone
        for chosen in sets:
            choice.offer(Suspend(guest, gpus, ends, left, size, tuple(chosen)))

    def _victim_rank(self, job: JobView) -> tuple[int, float, int]:
        return len(job.gpus), -self.objective.end(job), job.seq

    def _victims(self, guest: JobView, size: Size, least: float) -> Iterator[JobView]:
        """Yield lone jobs that may be suspended and have more than `least` seconds left, per gang size the longest."""
        if self._lone is None:
            self._lone = self._lone_by_gang()
        for jobs in self._lone.values():
            long = takewhile(lambda job: self.objective.left(job) > least, jobs)
            yield from islice((job for job in long if self._may_stop(job, guest, size)), PER_KIND)

    def _lone_by_gang(self) -> dict[int, list[JobView]]:
        """Return the running jobs without mates, exclusive ones too, by number of GPUs; the last to end comes first."""
        view, objective = self.draft.view, self.objective
        found: dict[int, list[JobView]] = {}
        for job in view.running:
            own_batch = job.batch is None
            if job.computing and own_batch and all(len(view.jobs_on(gpu)) == 1 for gpu in job.gpus):
                found.setdefault(len(job.gpus), []).append(job)
        for jobs in found.values():
            jobs.sort(key=lambda job: (objective.end(job), job.seq), reverse=True)
        return found

    def _may_stop(self, job: JobView, guest: JobView, size: Size) -> bool:
        """Return whether a job may be suspended for this guest in this pass."""
        return (
            job.job.can_suspend
            and job.seq not in self.objective.moved
            and job.shape.priority <= guest.shape.priority
            and all(self.topology.memory_of(gpu) >= size.memory for gpu in job.gpus)
        )
