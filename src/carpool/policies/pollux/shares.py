"""How many GPUs each job gets, and which ones: the search behind Pollux.

Every job that asks has a cost for each number of GPUs, and the sum of costs should be small. `share_out` finds the
numbers as a knapsack is filled, by the steepest gain per GPU along each job's convex hull. `Placer` finds the nodes:
large jobs come first, a job that need not move stays, and a node holds at most one job that spans several nodes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from carpool.core.model import GpuId
from carpool.core.shapes import Shape
from carpool.core.view import JobView, TopologyView, View

Cost = Callable[[int, bool], float]
"""Cost of a number of GPUs, on several nodes or on one, if the job must be (re)started for them."""
GpusBySeq = dict[int, tuple[GpuId, ...]]
"""The GPUs of each job, by `seq`."""


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A job that asks for GPUs in this round."""

    record: JobView
    rank: tuple[float, ...]
    """Order among equals, smallest first."""
    sizes: tuple[int, ...]
    """Numbers of GPUs that it may have, ascending."""
    cost: Cost
    nothing: float
    """Cost if the job gets no GPU."""
    stay: float
    """Cost if the job stays where it is."""
    eligible: int
    """Nodes on which it fits, one bit each."""
    urgency: tuple[int, ...] = (0,)
    """Order in which jobs get their first GPUs, before any gain counts: −priority and the rank of the tenants."""

    @property
    def held(self) -> int:
        """Number of GPUs that it holds now."""
        return len(self.record.gpus)


class UserAllowance:
    """How many jobs and GPUs the users and groups of the contenders may still get in this round."""

    def __init__(self, view: View, contenders: Iterable[Contender]) -> None:
        self._left: dict[str, list[float]] = {}
        self._group_left: dict[str, float] = {}
        for contender in contenders:
            self._open_group(view, contender)
            user = contender.record.shape.user
            if user is None:
                continue
            left = self._left.get(user)
            if left is None:
                limits, held = view.limits_of(user), view.held_by(user)
                most = [float("inf") if limit is None else float(limit) for limit in (limits.jobs, limits.gpus)]
                left = self._left[user] = [most[0] - held[0], most[1] - held[1]]
            left[0] += contender.held > 0  # the round redistributes what contenders hold now
            left[1] += contender.held

    def _open_group(self, view: View, contender: Contender) -> None:
        group = contender.record.shape.group
        cap = None if group is None else view.cap_of(group)
        if group is not None and cap is not None:
            left = self._group_left.setdefault(group, float(cap - view.held_by_group(group)))
            self._group_left[group] = left + contender.held

    def allows(self, shape: Shape, jobs: int, gpus: int) -> bool:
        """Return whether the tenants of a job may get this much more."""
        user, group = shape.user, shape.group
        if group is not None and gpus > self._group_left.get(group, inf):
            return False
        return user is None or (jobs <= self._left[user][0] and gpus <= self._left[user][1])

    def take(self, shape: Shape, jobs: int, gpus: int) -> None:
        """Count jobs and GPUs as given to a job's tenants."""
        user, group = shape.user, shape.group
        if group in self._group_left:
            self._group_left[group] -= gpus
        if user is not None:
            self._left[user][0] -= jobs
            self._left[user][1] -= gpus


def share_out(contenders: Sequence[Contender], gpus: int, node_gpus: int, allowance: UserAllowance) -> dict[int, int]:
    """Return the number of GPUs for each job, by `seq`; jobs without any are left out."""
    steps = []
    curves = []
    for index, contender in enumerate(contenders):
        curve = [(0, contender.nothing)]
        for size in contender.sizes:
            cost = contender.stay if size == contender.held else contender.cost(size, size > node_gpus)
            curve.append((size, cost))
        curves.append(dict(curve))
        for (low, before), (high, after) in pairwise(_hull(curve)):
            first = low == 0
            urgency = contender.urgency if first else ()
            steps.append(((not first, urgency, (after - before) / (high - low), contender.rank), index, low, high))
    steps.sort()
    shares: dict[int, int] = {}
    for _, index, low, high in steps:
        contender, seq = contenders[index], contenders[index].record.seq
        if shares.get(seq, 0) != low:
            continue  # an earlier step of this job found no room
        shape = contender.record.shape
        for size in range(high, low, -1):  # where the whole step does not fit, a part of it may
            fits = size - low <= gpus and allowance.allows(shape, low == 0, size - low)
            if fits and curves[index].get(size, curves[index][low]) < curves[index][low]:
                shares[seq] = size
                gpus -= size - low
                allowance.take(shape, low == 0, size - low)
                break
    return shares


def _hull(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the falling part of the lower convex hull of the points."""
    hull: list[tuple[int, float]] = []
    for x, y in curve:
        while len(hull) > 1 and (y - hull[-2][1]) * (hull[-1][0] - hull[-2][0]) <= (hull[-1][1] - hull[-2][1]) * (
            x - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    falling = 1
    while falling < len(hull) and hull[falling][1] < hull[falling - 1][1]:
        falling += 1
    return hull[:falling]


class Placer:
    """Finds GPUs for the contenders, the largest first.

    With `displace`, GPUs of a smaller job that could stay may be taken, and that job must move.
    """

    def __init__(self, topology: TopologyView, closed: Mapping[GpuId, bool], displace: bool) -> None:
        """`closed` are GPUs that cannot be given; true: a job there spans several nodes."""
        self.topology = topology
        self.displace = displace
        self.gpus_by_seq: GpusBySeq = {}
        self.cost = 0.0
        self._free = {
            n: [gpu for gpu in topology.nodes[n].gpus if gpu not in closed] for n in topology.present.values()
        }
        self._reserved: set[GpuId] = set()  # GPUs of jobs that may stay and are still to be placed
        self._kept = dict.fromkeys(self._free, 0)  # number of these on each node
        self._spanned = {topology.node_of[gpu] for gpu, spans in closed.items() if spans}  # nodes with a part of a job

    def place(self, contenders: Sequence[Contender], shares: dict[int, int]) -> None:
        """Find GPUs for all shares; `gpus_by_seq` and `cost` hold the result."""
        stays = {c.record.seq for c in contenders if c.held and shares.get(c.record.seq) == c.held}
        for contender in contenders:
            if contender.record.seq in stays:
                self._reserve(contender.record.gpus, 1)
                self._spanned |= self._nodes(contender.record.gpus) if self._spans(contender.record.gpus) else set()
        waiting = sorted(contenders, key=lambda c: (-shares.get(c.record.seq, 0), c.record.seq not in stays, c.rank))
        for contender in waiting:
            seq = contender.record.seq
            if seq in stays:
                self._keep_in_place(contender)
            else:
                self._move(contender, shares.get(seq, 0))

    def _keep_in_place(self, contender: Contender) -> None:
        gpus = contender.record.gpus
        self._reserve(gpus, -1)
        if all(gpu in self._free[self.topology.node_of[gpu]] for gpu in gpus):
            self._take(contender, gpus)
        else:
            if self._spans(gpus):
                self._spanned -= self._nodes(gpus)
            self._move(contender, len(gpus))

    def _move(self, contender: Contender, size: int) -> None:
        gpus = self._find(contender, size) if size else ()
        if gpus:
            self._take(contender, gpus)
        else:
            self.cost += contender.nothing

    def _find(self, contender: Contender, size: int) -> tuple[GpuId, ...]:
        """Return GPUs for the job at its size; otherwise at the size that has room and costs the job least."""
        nodes = [number for number in self._free if contender.eligible >> number & 1]
        number = self._best_node(nodes, size)
        if number is not None:
            return self._pick(contender, number, size)
        options = []
        largest = max((self._room(number) for number in nodes), default=0)
        for smaller in contender.sizes:
            if smaller <= min(largest, size):
                options.append((contender.cost(smaller, False), smaller, False))
        open_nodes = [number for number in nodes if number not in self._spanned]
        together = sum(self._room(number) for number in open_nodes)
        for smaller in contender.sizes:
            if 1 < smaller <= min(together, size):
                options.append((contender.cost(smaller, True), smaller, True))
        cost, smaller, several = min(options, default=(contender.nothing, 0, False))
        if cost >= contender.nothing:
            return ()
        if not several:
            number = self._best_node(nodes, smaller)
            assert number is not None
            return self._pick(contender, number, smaller)
        return self._span(contender, open_nodes, smaller)

    def _best_node(self, nodes: Iterable[int], size: int) -> int | None:
        """Return the node where the fewest jobs that could stay must move, and then the one that fits best."""
        best, found = None, None
        for number in nodes:
            room = self._room(number)
            if room >= size:
                rating = (max(0, size - self._unreserved(number)), room - size, number)
                if best is None or rating < best:
                    best, found = rating, number
        return found

    def _span(self, contender: Contender, nodes: Iterable[int], size: int) -> tuple[GpuId, ...]:
        """Return GPUs on several nodes, the emptiest first."""
        picked: list[GpuId] = []
        for number in sorted(nodes, key=lambda n: (-self._unreserved(n), -self._room(n), n)):
            picked += self._pick(contender, number, min(size - len(picked), self._room(number)))
            if len(picked) == size:
                break
        return tuple(picked)

    def _room(self, number: int) -> int:
        return len(self._free[number]) if self.displace else self._unreserved(number)

    def _unreserved(self, number: int) -> int:
        return len(self._free[number]) - self._kept[number]

    def _reserve(self, gpus: tuple[GpuId, ...], sign: int) -> None:
        for gpu in gpus:
            number = self.topology.node_of[gpu]
            if sign > 0:
                self._reserved.add(gpu)
                self._kept[number] += 1
            elif gpu in self._reserved:
                self._reserved.remove(gpu)
                self._kept[number] -= 1

    def _pick(self, contender: Contender, number: int, size: int) -> tuple[GpuId, ...]:
        """Return GPUs of a node: first those that the job already has, then those that no other job could keep."""
        own, reserved = contender.record.gpus, self._reserved
        return tuple(sorted(self._free[number], key=lambda gpu: (gpu in reserved, gpu not in own, gpu))[:size])

    def _take(self, contender: Contender, gpus: tuple[GpuId, ...]) -> None:
        record = contender.record
        several = self._spans(gpus)
        if several:
            self._spanned |= self._nodes(gpus)
        for gpu in gpus:
            number = self.topology.node_of[gpu]
            self._free[number].remove(gpu)
            if gpu in self._reserved:  # the job that could have kept it must move
                self._reserved.remove(gpu)
                self._kept[number] -= 1
        stays = set(gpus) == set(record.gpus)
        self.gpus_by_seq[record.seq] = record.gpus if stays else gpus
        self.cost += contender.stay if stays else contender.cost(len(gpus), several)

    def _nodes(self, gpus: Iterable[GpuId]) -> set[int]:
        return {self.topology.node_of[gpu] for gpu in gpus}

    def _spans(self, gpus: Sequence[GpuId]) -> bool:
        return len(gpus) > 1 and self.topology.nodes_spanned(gpus) > 1
