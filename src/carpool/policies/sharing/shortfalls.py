"""Which waiting jobs still find too few hosts, without another search; SJF-BSBF keeps it from pass to pass.

A guest gains beside hosts that have some time left at least (`SharingOptions.needs`). A search that fails leaves the
number of GPUs that such hosts have to themselves. Time only makes it smaller, so the log of what hosts offer, and what
the draft has done, tell how large it can be later. A gang for which that and the free GPUs are too few has no place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Decision, GpuId, Job
from carpool.core.shapes import Shape
from carpool.core.view import HostKind, HostsView, JobView, Offer, OfferChange, View
from carpool.policies.sharing.candidates import SLACK, OptionCache, SharingOptions


@dataclass(slots=True)
class Shortfall:
    """What jobs that are alike, and have at least so much time left, find at most."""

    guest_left: float
    startup: float
    """Seconds that such jobs need to start up."""
    known: dict[HostKind, SharingOptions]
    least: dict[HostKind, float]
    """Seconds that a host of a kind must have left alone, of kinds looked at so far; inf: no such guest fits there."""
    gpus: int
    """Number of GPUs whose hosts last long enough, or more."""
    seen: int
    """Number of changes in the log of offers that `gpus` contains."""
    added: int
    """Number of GPUs that these changes added."""


class Shortfalls:
    """The shortfalls of waiting jobs, by shape. Call `begin` with the view of every pass."""

    def __init__(self, cache: OptionCache) -> None:
        self._cache = cache
        self._generation = -1
        self._hosts: HostsView | None = None
        self._known: dict[Shape, Shortfall] = {}

    def begin(self, view: View) -> set[Shape]:
        """Begin a pass. Return shapes whose jobs surely find too few free GPUs and hosts, whatever is placed."""
        self._view = view
        self._begun = False
        self._unclear = view.jobs_per_gpu != 2  # cells of several jobs are not counted
        self._decisions = 0  # number of the draft's decisions that `_changes` contains
        self._changes: list[OfferChange] = []
        self._added = self._taken = 0  # number of GPUs that these changes added and took away
        self._placed: dict[GpuId, Offer] = {}  # what jobs that the draft placed offer
        # a job that is placed uses up free GPUs and hosts, and offers no more than it used up; but if it leaves out the
        # smallest GPU of a host, more memory may be left on the others
        if self._unclear or not view.topology.equal_memory:
            return set()
        free, hopeless = view.free.count, set()
        for shape, bucket in view.queue.buckets.items():
            short = shape.gpus - free
            if short > 0:
                if not self._begun:
                    self._begin()
                noted = self._noted(bucket[0][3])
                if noted is not None and self._bound(bucket[0][3], noted, short) < short:
                    hopeless.add(shape)
        return hopeless

    def finds_too_few(self, draft: Draft, guest: JobView) -> bool:
        """Return whether a job surely finds too few free GPUs and hosts in the draft as it is."""
        short = guest.shape.gpus - draft.free_count
        if short <= 0:
            return False
        if not self._begun:
            self._begin()
        if self._decisions < len(draft.decisions):
            self._follow(draft.decisions)
        if self._unclear:
            return draft.shareable().bit_count() < short
        noted = self._noted(guest)
        if noted is not None and self._bound(guest, noted, short) < short:
            return True
        noted = self._count(guest, short + self._taken)
        if noted is None:
            return False
        self._known[guest.shape.general] = noted
        return noted.gpus + self._lasting(guest, noted, self._changes) < short

    def _noted(self, guest: JobView) -> Shortfall | None:
        """Return what is noted of jobs like this one that have no more time left."""
        noted = self._known.get(guest.shape.general)
        if noted is None or noted.guest_left > guest.alone_left(self._view.now):
            return None
        return noted if noted.startup == guest.startup_s and noted.seen >= self._offers.forgotten else None

    def _bound(self, guest: JobView, noted: Shortfall, enough: int) -> int:
        """Return the number of GPUs that a job finds at most beside hosts; it is exact enough to compare it."""
        bound = noted.gpus + self._offers.added - noted.added + self._added
        if bound < enough:
            return bound
        self._catch_up(guest, noted)
        return noted.gpus + self._lasting(guest, noted, self._changes) if self._changes else noted.gpus

    def _catch_up(self, guest: JobView, noted: Shortfall) -> None:
        """Add what changed in the log of offers since then."""
        offers = self._offers
        if noted.added < offers.added:
            noted.gpus += self._lasting(guest, noted, offers.changes[noted.seen - offers.forgotten :])
            noted.seen, noted.added = offers.forgotten + len(offers.changes), offers.added

    def _begin(self) -> None:
        """Ask for the hosts, and forget what was noted of others or with another belief."""
        view, hosts = self._view, self._view.hosts
        self._cache.renew(view)
        if hosts is not self._hosts or self._generation != self._cache.generation:
            self._hosts, self._generation = hosts, self._cache.generation
            self._known.clear()
        self._offers, self._begun = hosts.offers, True

    def _lasting(self, guest: JobView, noted: Shortfall, changes: Sequence[OfferChange]) -> int:
        """Return the sum of those changes whose hosts last long enough."""
        now, known, gpus = self._view.now, noted.least, 0
        for number, (kind, job, slowdown, end, _) in changes:
            least = known.get(kind)
            if least is None:
                least = known[kind] = self._least(noted.known, guest, noted.guest_left, kind, job)
            # as `Offer.lasts`, which would cost more here, where most of the answers come from
            if least <= 0.0 or end >= (now + least * slowdown if slowdown else least):
                gpus += number
        return gpus

    def _least(
        self, known: dict[HostKind, SharingOptions], guest: JobView, guest_left: float, kind: HostKind, host: Job
    ) -> float:
        """Return the seconds that a host of a kind must have left alone; inf: no such guest fits beside it."""
        choices = known.get(kind) or self._cache.learn(known, self._view, guest, kind, host)
        return choices.needs * guest_left * SLACK + guest.startup_s if choices.options else inf

    def _count(self, guest: JobView, enough: int) -> Shortfall | None:
        """Count the GPUs in the view whose hosts last long enough; None: there are at least `enough` of them."""
        view, offers, gpus = self._view, self._offers, 0
        known, now, guest_left = self._cache.beside(view, guest, 1), view.now, guest.alone_left(view.now)
        found: dict[HostKind, float] = {}
        for kind, sample, soonest_first in _alike(view.hosts):
            least = found[kind] = self._least(known, guest, guest_left, kind, sample)
            if least == inf:
                continue
            for _, seq, _ in reversed(soonest_first):
                offer = offers.by_seq[seq]
                if not offer.lasts(now, least):
                    break
                gpus += offer.gpus
                if gpus >= enough:
                    return None
        seen = offers.forgotten + len(offers.changes)
        return Shortfall(guest_left, guest.startup_s, known, found, gpus, seen, offers.added)

    def _follow(self, decisions: Sequence[Decision]) -> None:
        """Note what the draft's decisions changed since the last time."""
        view = self._view
        for decision in decisions[self._decisions :]:
            if decision.allocation is None:
                self._unclear = True
            else:
                self._place(view.jobs[decision.job], decision.allocation)
        self._decisions = len(decisions)
        self._unclear |= self._taken > 0 and not view.topology.equal_memory

    def _place(self, record: JobView, allocation: Allocation) -> None:
        """Note the GPUs that a job takes from hosts, and those that it offers itself."""
        view, by_seq, placed = self._view, self._offers.by_seq, self._placed
        alone: list[GpuId] = []
        for gpu in allocation.gpus:
            there = view.jobs_on(gpu)
            if not there and gpu not in placed:
                alone.append(gpu)
                continue
            offer = by_seq.get(there[0].seq) if there else placed.pop(gpu)
            if offer is None:
                self._unclear = True
                continue
            self._taken += 1
            if self._changes and self._changes[-1][1] is offer:
                self._changes[-1] = self._changes[-1][0] - 1, offer
            else:
                self._changes.append((-1, offer))
        if not alone or record.shape.exclusive:
            return
        size = next(size for size in record.shape.sizes if size.accumulation == allocation.accumulation)
        job, memory = record.job, min([view.topology.memory_of(gpu) for gpu in alone]) - size.memory
        kind = HostKind(job.model, job.batch, size.accumulation, job.max_slowdown, memory)
        left = record.whole_left(view.now) * size.relative_time + record.startup_s
        offer = Offer(kind, job, 0.0, left, len(alone))
        placed.update(dict.fromkeys(alone, offer))
        self._changes.append((len(alone), offer))
        self._added += len(alone)


def _alike(hosts: HostsView) -> Iterator[tuple[HostKind, Job, Sequence[tuple[float, int, object]]]]:
    """Yield hosts of one kind and one slow-down, with a job of that kind; those that end soonest come first."""
    for kind, lone in hosts.lone.items():
        yield kind, lone.sample, lone.entries
    for kind, partly in hosts.partly_free.items():
        for entries in partly.running.values():
            yield kind, partly.sample, entries
        for seq, host in partly.starting.items():
            yield kind, partly.sample, [(0.0, seq, host)]
