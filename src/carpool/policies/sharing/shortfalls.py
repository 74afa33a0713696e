"""Which waiting jobs still find too few hosts, without another search; SJF-BSBF keeps it from pass to pass.

A guest gains beside hosts that have some time left at least (`SharingOptions.needs`). A search that fails leaves the
number of GPUs that such hosts have to themselves. Time only makes it smaller, so the log of what hosts offer, and what
the draft has done, tell how large it can be later. A gang for which that and the free GPUs are too few has no place.

A gang has one sub-batch on all its GPUs. A search joins hosts with the batch as whole as possible, where there are
enough of these. Otherwise it asks again with a sub-batch that suits all hosts, at least as small as the largest that
one of them needs. So two numbers count: the GPUs beside whose hosts the gang gains with the whole batch, and those
beside whose hosts it gains with a sub-batch that one of them needs. Both must be too few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Decision, GpuId, Job
from carpool.core.shapes import Shape
from carpool.core.view import HostKind, HostsView, JobView, Offer, OfferChange, View
from carpool.policies.sharing.candidates import SLACK, OptionCache, SharingOptions


class Needed(NamedTuple):
    """Seconds that a host of one kind must have left alone; inf: a guest gains beside no such host."""

    whole: float
    """For a guest with the smallest accumulation that it allows."""
    between: float
    """With a larger one, but smaller than `Shortfall.split_into`, where the host needs that."""
    split: float
    """With an accumulation of at least `Shortfall.split_into`."""


@dataclass(slots=True)
class Shortfall:
    """What jobs that are alike, and have at least so much time left, find at most."""

    guest_left: float
    startup: float
    """Seconds that such jobs need to start up."""
    split_into: float
    """The smallest accumulation but the first that a host needed; inf: none did."""
    needed: dict[HostKind, Needed]
    """What hosts must have left, of kinds looked at so far."""
    whole: int = 0
    """Number of GPUs whose hosts last long enough for the whole batch, or more."""
    between: int = 0
    """The same for sub-batches between the whole one and `split_into`. If there are some, all must be counted again."""
    split: int = 0
    """The same for accumulations of at least `split_into`."""
    seen: int = 0
    """Number of changes in the log of offers that these numbers contain."""
    added: int = 0
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
                if noted is not None and self._finds_at_most(bucket[0][3], noted) < short:
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
        if noted is not None and self._finds_at_most(guest, noted) < short:
            return True
        noted = self._count(guest, short + self._taken)
        if noted is None:
            return False
        self._known[guest.shape.general] = noted
        return self._finds_at_most(guest, noted) < short

    def _noted(self, guest: JobView) -> Shortfall | None:
        """Return what is noted of jobs like this one that have no more time left."""
        noted = self._known.get(guest.shape.general)
        if noted is None or noted.guest_left > guest.alone_left(self._view.now):
            return None
        return noted if noted.startup == guest.startup_s and noted.seen >= self._offers.forgotten else None

    def _finds_at_most(self, guest: JobView, noted: Shortfall) -> float:
        """Return the number of GPUs that a job finds at most beside hosts; inf: they must be counted again."""
        offers = self._offers
        if noted.added < offers.added:  # where GPUs were only taken away, there are still no more
            changes = offers.changes[noted.seen - offers.forgotten :]
            noted.whole, noted.between, noted.split = self._lasting(guest, noted, changes)
            noted.seen, noted.added = offers.forgotten + len(offers.changes), offers.added
        whole, between, split = noted.whole, noted.between, noted.split
        if self._changes:
            whole, between, split = self._lasting(guest, noted, self._changes)
        return inf if between > 0 else max(whole, split)

    def _begin(self) -> None:
        """Ask for the hosts, and forget what was noted of others or with another belief."""
        view, hosts = self._view, self._view.hosts
        self._cache.renew(view)
        if hosts is not self._hosts or self._generation != self._cache.generation:
            self._hosts, self._generation = hosts, self._cache.generation
            self._known.clear()
        self._offers, self._begun = hosts.offers, True

    def _lasting(self, guest: JobView, noted: Shortfall, changes: Sequence[OfferChange]) -> tuple[int, int, int]:
        """Return what is noted with those changes whose hosts last long enough: whole, between, split."""
        now, known = self._view.now, noted.needed
        whole, between, split = noted.whole, noted.between, noted.split
        for number, (kind, job, slowdown, end, _) in changes:
            needed = known.get(kind)
            if needed is None:
                needed = known[kind] = self._needed(guest, noted, kind, job)
            # as `Offer.lasts`, which would cost more here, where most of the answers come from
            for_whole, for_between, for_split = needed
            if for_whole <= 0.0 or end >= (now + for_whole * slowdown if slowdown else for_whole):
                whole += number
            if for_split <= 0.0 or end >= (now + for_split * slowdown if slowdown else for_split):
                split += number
            if for_between <= 0.0 or end >= (now + for_between * slowdown if slowdown else for_between):
                between += number
        return whole, between, split

    def _needed(self, guest: JobView, noted: Shortfall, kind: HostKind, host: Job) -> Needed:
        """Return what hosts of a kind must have left alone."""
        first = guest.shape.sizes[0].accumulation
        whole = between = split = inf
        for option in self._options(guest, kind, host, first).options:
            least = option.needs * noted.guest_left * SLACK + noted.startup
            if option.size.accumulation == first:
                whole = least
            elif option.size.accumulation < noted.split_into:
                between = min(between, least)
        if noted.split_into < inf:
            choices = self._options(guest, kind, host, int(noted.split_into))
            split = choices.needs * noted.guest_left * SLACK + noted.startup if choices.options else inf
        return Needed(whole, between, split)

    def _options(self, guest: JobView, kind: HostKind, host: Job, at_least: int) -> SharingOptions:
        known = self._cache.beside(self._view, guest, at_least)
        return known.get(kind) or self._cache.learn(known, self._view, guest, kind, host, at_least)

    def _count(self, guest: JobView, enough: int) -> Shortfall | None:
        """Count the GPUs in the view whose hosts last long enough; None: there are at least `enough` of them."""
        offers, guest_left, first = self._offers, guest.alone_left(self._view.now), guest.shape.sizes[0].accumulation
        lasting: dict[int, int] = {}  # numbers of GPUs by the accumulation that their hosts need
        for kind, sample, soonest_first in _alike(self._view.hosts):
            for option in self._options(guest, kind, sample, first).options:
                least = option.needs * guest_left * SLACK + guest.startup_s
                accumulation = option.size.accumulation
                gpus = lasting.get(accumulation, 0)
                gpus = lasting[accumulation] = self._count_entries(soonest_first, least, gpus, enough)
                if gpus >= enough:
                    return None
        split_into = min((a for a, gpus in lasting.items() if a > first and gpus), default=inf)
        noted = Shortfall(guest_left, guest.startup_s, split_into, {}, lasting.get(first, 0))
        noted.seen, noted.added = offers.forgotten + len(offers.changes), offers.added
        if split_into == inf:
            return noted
        for kind, sample, soonest_first in _alike(self._view.hosts):
            needed = noted.needed.get(kind)
            if needed is None:
                needed = noted.needed[kind] = self._needed(guest, noted, kind, sample)
            if needed.split < inf:
                noted.split = self._count_entries(soonest_first, needed.split, noted.split, enough)
                if noted.split >= enough:
                    return None
        return noted

    def _count_entries(
        self, soonest_first: Sequence[tuple[float, int, object]], least: float, gpus: int, enough: int
    ) -> int:
        """Return `gpus` and the GPUs of those hosts that have so much left alone; counting stops at `enough`."""
        now, by_seq = self._view.now, self._offers.by_seq
        for _, seq, _ in reversed(soonest_first):
            offer = by_seq[seq]
            if gpus >= enough or not offer.lasts(now, least):
                break
            gpus += offer.gpus
        return gpus

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
