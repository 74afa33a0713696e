"""The GPUs on which a pending guest could take the place of running jobs.

Running jobs are looked at by their number of GPUs and of mates, those that end last first: they lose least. Used by
`pause_candidates` and `start_up_candidates`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.displacements import Displacements

PRICED = 3
"""Number of single hosts that are considered for a pending guest."""
PER_GROUP = 8
"""Number of hosts with as many GPUs and mates that are looked at: those that end last, because they lose least."""

Group = tuple[int, int]
"""The number of GPUs and of mates of a host."""


def few_mates_first(need: int, group: Group) -> tuple[int, ...]:
    """Rank of a group for a gang that takes the place of one host."""
    return group[0] < need, group[1], group[0]


def large_first(need: int, group: Group) -> tuple[int, ...]:
    """Rank of a group for a gang that takes the place of few hosts."""
    return group[0] > need, -group[0], group[1]


def small_first(_need: int, group: Group) -> tuple[int, ...]:
    """Rank of a group for a gang that takes the place of small hosts."""
    return group


def size_alone(guest: JobView, largest_memory: int) -> Size | None:
    """Return the largest sub-batch that fits a GPU of the cluster; None: none does."""
    return next((size for size in guest.shape.sizes if size.memory <= largest_memory), None)


class Places:
    """The sets of GPUs for guests of one scheduling pass."""

    def __init__(self, draft: Draft, displacements: Displacements) -> None:
        self.draft = draft
        self.displacements = displacements
        self.topology = draft.view.topology
        self._orders: dict[tuple[Callable[[int, Group], tuple[int, ...]], int], list[Group]] = {}
        self._idle: list[GpuId] = []  # as last asked: after how many decisions, and for how much memory
        self._idle_for = (-1, -1)

    def idle(self, size: Size) -> list[GpuId]:
        """Return the GPUs that hold only paused jobs and on which the size fits."""
        asked = (len(self.draft.decisions), size.memory)
        if asked != self._idle_for:
            self._idle_for = asked
            self._idle = [gpu for gpu in self.draft.idle() if self.draft.fits(gpu, size.memory)]
        return self._idle

    def of_one_host(self, guest: JobView, size: Size, until: float) -> Iterator[tuple[GpuId, ...]]:
        """Yield the GPUs of one host, host by host; each of them ends after `until`."""
        need = guest.shape.gpus
        return islice(self._single(self.hosts(guest, until, few_mates_first), need, size), PRICED)

    def of_several(
        self, guest: JobView, size: Size, until: float, idle: Sequence[GpuId], most: float
    ) -> list[tuple[GpuId, ...]]:
        """Return unions of free and idle GPUs and of those of hosts: of fewer than `most`, which end after `until`."""
        need = guest.shape.gpus
        free = (*self.draft.some_free(guest, need, size), *idle)[:need]
        number = ceil(min(float(need), most))
        unions = {
            self.union(free, islice(self.hosts(guest, until, order), number), need, size)
            for order in (large_first, small_first)
        }
        return sorted(gpus for gpus in unions if len(gpus) == need)

    def hosts(self, guest: JobView, until: float, order: Callable[[int, Group], tuple[int, ...]]) -> Iterator[JobView]:
        """Yield running jobs that may be paused and end after `until`: group by group, the last to end first."""
        groups, may_pause = self.draft.view.end_times.running, self.displacements.may_pause
        for group in self._in_order(order, guest.shape.gpus):
            for end, _, host in islice(reversed(groups[group]), PER_GROUP):
                if end <= until:
                    break
                if may_pause(host, guest):
                    yield host

    def union(self, gpus: Sequence[GpuId], hosts: Iterator[JobView], need: int, size: Size) -> tuple[GpuId, ...]:
        """Fill up a set of GPUs with those of hosts."""
        union = list(gpus)
        while len(union) < need and (host := next(hosts, None)) is not None:
            short = need - len(union)
            fitting = [gpu for gpu in host.gpus if gpu not in union and self.draft.fits(gpu, size.memory)]
            union += self.topology.most_consolidated(fitting, short) if len(fitting) > short else fitting
        return tuple(union)

    def on(self, gpus: Sequence[GpuId], need: int, size: Size) -> tuple[GpuId, ...] | None:
        """Return the most consolidated of some GPUs on which the size fits; None: there are too few."""
        fitting = [gpu for gpu in gpus if self.draft.fits(gpu, size.memory)]
        return tuple(self.topology.most_consolidated(fitting, need)) if len(fitting) >= need else None

    def _single(self, hosts: Iterator[JobView], need: int, size: Size) -> Iterator[tuple[GpuId, ...]]:
        for host in hosts:
            if len(host.gpus) < need:
                return
            place = self.on(host.gpus, need, size)
            if place is not None:
                yield place

    def _in_order(self, order: Callable[[int, Group], tuple[int, ...]], need: int) -> list[Group]:
        """Return the groups of running jobs in the order in which a gang of `need` workers looks at them."""
        known = self._orders.get((order, need))
        if known is None:
            groups = [group for group, jobs in self.draft.view.end_times.running.items() if jobs]
            known = self._orders[order, need] = sorted(groups, key=lambda group: order(need, group))
        return known
