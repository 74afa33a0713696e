"""Which waiting jobs still find too few hosts, without another search; SJF-BSBF keeps it from pass to pass.

A guest gains beside hosts that have some time left at least (`SharingOptions.needs`). A search that fails leaves the
number of GPUs that such hosts have to themselves. Time only makes it smaller, so the log of what hosts offer, and what
the draft has done, tell how large it can be later. A gang for which that and the free GPUs are too few has no place.

A gang has one sub-batch on all its GPUs. A search joins hosts with the batch as whole as possible, where there are
enough of these. Otherwise it asks again with a sub-batch that suits all hosts, at least as small as the largest that
one of them needs. So two numbers count: the GPUs beside whose hosts the gang gains with the whole batch, and those
beside whose hosts it gains with a sub-batch that one of them needs. Both must be too few. Free GPUs may complete a gang
with the whole batch only where no host needs another sub-batch; so while one surely does, they do not count for it.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Decision, GpuId, Job
from carpool.core.shapes import Shape
from carpool.core.view import HostKind, HostsView, JobView, Offer, OfferChange, View
from carpool.policies.sharing.candidates import SLACK, OptionCache, SharingOptions
from carpool.policies.sharing.pair import SharingOption

CLEARLY, CLEARLY_S = 1.0 + 1e-6, 1e-3
"""Factor and seconds by which a host must have more left than it needs, so that rounding plays no part."""


class SearchChance(Enum):
    """Whether a job may find a place in the draft as it is."""

    OPEN = auto()
    """A search must tell."""
    NONE_NOW = auto()
    """It surely finds none. A longer job of its shape may, once the draft has placed other jobs."""
    NONE = auto()
    """It surely finds none, and no longer job of its shape does, whatever else is placed."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Seconds that a host of one kind must have left alone; inf: a guest gains beside no such host."""

    whole: float
    """For a guest with the smallest accumulation that it allows."""
    between: float
    """With a larger one, but smaller than `Shortfall.split_into`, where the host needs that."""
    split: float
    """With an accumulation of at least `Shortfall.split_into`."""


class SplitHost(NamedTuple):
    """A host beside which jobs surely gain, and only with a sub-batch."""

    seq: int
    offer: Offer
    needs: float
    """Ratio of the host's to the guest's time left above which sharing pays."""


@dataclass(slots=True)
class Shortfall:
    """What jobs that are alike, and have at least so much time left, find at most."""

    guest_left: float
    startup: float
    """Seconds that such jobs need to start up."""
    options: dict[HostKind, SharingOptions]
    """The options of such jobs, as the cache has them."""
    split_into: float = inf
    """The smallest accumulation but the first that a host needed; inf: none did."""
    split_options: dict[HostKind, SharingOptions] = field(default_factory=dict)
    """The options with at least this accumulation."""
    needed: dict[HostKind, Needed] = field(default_factory=dict)
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
    split_host: SplitHost | None = None
    """The host that will be one for the longest time."""


class Shortfalls:
    """The shortfalls of waiting jobs, by shape. Call `begin` with the view of every pass."""

    def __init__(self, cache: OptionCache, floor: float = 0.0) -> None:
        """`floor`: the minimum total speed of a pair that may share."""
        self._cache = cache
        self._floor = floor
        self._generation = -1
        self._hosts: HostsView | None = None
        self._known: dict[Shape, Shortfall] = {}
        self._passed: tuple[View, int] | None = None
        """The view of the last pass, and the number of its openings."""
        self._stuck: dict[Shape, JobView] = {}
        """The first jobs of their shapes that found no place in that pass, whatever else was placed."""

    def begin(self, view: View) -> Set[Shape]:
        """Begin a pass. Return shapes whose jobs surely find too few free GPUs and hosts, whatever is placed."""
        stuck, self._stuck = self._stuck, {}
        passed, self._passed = self._passed, (view, view.openings)
        if self._passed != passed:
            stuck = {}
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
            return self._stuck.keys()
        free = view.free.count
        for shape, bucket in view.queue.buckets.items():
            short = shape.gpus - free
            if short > 0:
                guest = bucket[0][3]
                if stuck.get(shape) is guest:  # nothing has happened since but submissions
                    self._stuck[shape] = guest
                    continue
                if not self._begun:
                    self._begin()
                noted = self._valid(guest)
                if noted is None:
                    continue
                # first, whatever jobs the GPUs are beside that were added since it was noted
                if noted.between > 0 or noted.whole + noted.split + self._offers.added - noted.added >= short:
                    self._update(guest, noted)
                    # as in `_chance`, without the draft, which is empty so far
                    if noted.between > 0 or noted.whole >= short or noted.split >= short:
                        continue
                self._stuck[shape] = guest
        return self._stuck.keys()

    def chance(self, draft: Draft, guest: JobView) -> SearchChance:
        """Return whether a job may find enough free GPUs and hosts in the draft as it is."""
        short = guest.shape.gpus - draft.free_count
        if short <= 0:
            return SearchChance.OPEN
        if not self._begun:
            self._begin()
        if self._decisions < len(draft.decisions):
            self._follow(draft.decisions)
        if self._unclear:
            return SearchChance.NONE if draft.shareable().bit_count() < short else SearchChance.OPEN
        found, noted = SearchChance.OPEN, self._valid(guest)
        if noted is not None:
            self._update(guest, noted)
            found = self._chance(guest, noted, short)
        if found is SearchChance.OPEN:
            noted = self._count(guest, short)
            if noted is None:
                return SearchChance.OPEN
            self._known[guest.shape.general] = noted
            found = self._chance(guest, noted, short)
        if found is SearchChance.NONE and not draft.decisions:
            self._stuck[guest.shape] = guest
        return found

    def _valid(self, guest: JobView) -> Shortfall | None:
        """Return what is noted of jobs like this one that have no more time left, as of when it was noted."""
        noted = self._known.get(guest.shape.general)
        if noted is None or noted.startup != guest.startup_s or noted.seen < self._offers.forgotten:
            return None
        return None if noted.guest_left > guest.alone_left(self._view.now) else noted

    def _update(self, guest: JobView, noted: Shortfall) -> None:
        """Bring what is noted up to date."""
        offers = self._offers
        if noted.added < offers.added:  # where GPUs were only taken away, there are still no more
            changes = offers.changes[noted.seen - offers.forgotten :]
            noted.whole, noted.between, noted.split = self._lasting(guest, noted, changes)
            noted.seen, noted.added = offers.forgotten + len(offers.changes), offers.added

    def _chance(self, guest: JobView, noted: Shortfall, short: int) -> SearchChance:
        """Return whether a job that needs so many GPUs beside hosts may find them, by what is noted."""
        whole, between, split = noted.whole, noted.between, noted.split
        if self._changes:
            whole, between, split = self._lasting(guest, noted, self._changes)
        if between > 0 or split >= short:  # with some in between, another sub-batch may suit all
            return SearchChance.OPEN
        if whole < short:
            return SearchChance.NONE
        if whole < guest.shape.gpus and self._has_split_host(guest, noted):
            return SearchChance.NONE_NOW
        return SearchChance.OPEN

    def _has_split_host(self, guest: JobView, noted: Shortfall) -> bool:
        """Return whether a host surely needs a sub-batch: it still offers what it did, and has clearly enough left."""
        if noted.split_host is None:
            return False
        seq, offer, needs = noted.split_host
        if self._offers.by_seq.get(seq) is not offer or any(changed is offer for _, changed in self._changes):
            return False
        now = self._view.now
        least = needs * guest.alone_left(now) + guest.startup_s
        return (offer.end - now) / offer.slowdown > CLEARLY * least + CLEARLY_S

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
        for number, offer in changes:
            try:
                needed = known[offer.kind]
            except KeyError:
                needed = known[offer.kind] = self._needed(guest, noted, offer.kind, offer.job)
            # as `Offer.lasts`, which would cost more here, where most of the answers come from
            slowdown, end = offer.slowdown, offer.end
            least = needed.whole
            if least < inf and (least <= 0.0 or end >= (now + least * slowdown if slowdown else least)):
                whole += number
            least = needed.split
            if least < inf and (least <= 0.0 or end >= (now + least * slowdown if slowdown else least)):
                split += number
            least = needed.between
            if least < inf and (least <= 0.0 or end >= (now + least * slowdown if slowdown else least)):
                between += number
        return whole, between, split

    def _needed(self, guest: JobView, noted: Shortfall, kind: HostKind, host: Job) -> Needed:
        """Return what hosts of a kind must have left alone."""
        first = guest.shape.sizes[0].accumulation
        whole = between = split = inf
        choices = noted.options.get(kind) or self._learn(noted.options, guest, kind, host, first)
        for option in choices.options:
            least = option.needs * noted.guest_left * SLACK + noted.startup
            if option.size.accumulation == first:
                whole = least
            elif option.size.accumulation < noted.split_into:
                between = min(between, least)
        if noted.split_into < inf:
            choices = noted.split_options.get(kind) or self._learn(
                noted.split_options, guest, kind, host, int(noted.split_into)
            )
            split = choices.needs * noted.guest_left * SLACK + noted.startup if choices.options else inf
        return Needed(whole, between, split)

    def _learn(
        self, known: dict[HostKind, SharingOptions], guest: JobView, kind: HostKind, host: Job, at_least: int
    ) -> SharingOptions:
        return self._cache.learn(known, self._view, guest, kind, host, at_least)

    def _count(self, guest: JobView, short: int) -> Shortfall | None:
        """Count the GPUs in the view whose hosts last long enough; None: a search may find `short` or more of them."""
        view, offers, first = self._view, self._offers, guest.shape.sizes[0].accumulation
        guest_left, startup = guest.alone_left(view.now), guest.startup_s
        noted = Shortfall(guest_left, startup, self._cache.beside(view, guest, first))
        noted.seen, noted.added = offers.forgotten + len(offers.changes), offers.added
        known, enough = noted.options, guest.shape.gpus + self._taken
        lasting: dict[int, int] = {}  # numbers of GPUs by the accumulation that their hosts need
        for kind, sample, soonest_first in _alike(view.hosts):
            choices = (known.get(kind) or self._learn(known, guest, kind, sample, first)).options
            for option in choices:
                least, accumulation = option.needs * guest_left * SLACK + startup, option.size.accumulation
                before = lasting.get(accumulation, 0)
                gpus = lasting[accumulation] = self._count_entries(soonest_first, least, before, enough)
                if gpus >= enough:
                    return None
            if choices and choices[0].size.accumulation > first and gpus > before:
                self._consider_split_host(noted, choices, soonest_first[-1][1])
        noted.whole = lasting.get(first, 0)
        noted.split_into = min([split for split, gpus in lasting.items() if split > first and gpus], default=inf)
        if noted.whole >= short + self._taken and noted.split_host is None:
            return None
        enough = short + self._taken
        if noted.split_into < inf:
            noted.split_options = known = self._cache.beside(view, guest, int(noted.split_into))
            for kind, sample, soonest_first in _alike(view.hosts):
                fitting = known.get(kind) or self._learn(known, guest, kind, sample, int(noted.split_into))
                if fitting.options:
                    least = fitting.needs * guest_left * SLACK + startup
                    noted.split = self._count_entries(soonest_first, least, noted.split, enough)
                    if noted.split >= enough:
                        return None
        return noted

    def _consider_split_host(self, noted: Shortfall, choices: Sequence[SharingOption], seq: int) -> None:
        """Note a host beside which the whole batch does not fit, if it lasts longer than the one that is noted."""
        offer = self._offers.by_seq[seq]
        if not offer.slowdown or any(option.total_speed < self._floor for option in choices):
            return
        if noted.split_host is None or offer.end > noted.split_host.offer.end:
            noted.split_host = SplitHost(seq, offer, min([option.needs for option in choices]))

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
