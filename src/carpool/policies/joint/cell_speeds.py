"""What a guest of some shape does to cells of some kind: slow-downs, and the ends that follow from them.

`CellSpeeds` is a guest at one sub-batch beside residents of certain kinds. It keeps the slow-downs of every part of
this group, so that simulating a cell costs a few additions. `CellSpeedsCache` keeps them from pass to pass, and ranks
the kinds of cells for each shape of guest.
"""

from collections.abc import Mapping, Sequence
from math import inf

from carpool.core.model import Job
from carpool.core.perf import Mate, PerformanceModel
from carpool.core.shapes import Shape, Size
from carpool.core.view import CellKind, JobView, SharedCell, View
from carpool.policies.joint.simulate_ends import DONE

GUEST = 1
"""The guest's bit in a set of jobs; the residents follow in the order of the cell's kind."""


class CellSpeeds:
    """A guest at one sub-batch and the residents of a cell, all on the same GPUs."""

    def __init__(
        self, guest: Job, size: Size, kind: CellKind, residents: Sequence[Job], perf: PerformanceModel
    ) -> None:
        self.size = size
        self._jobs: list[Mate] = [(guest, size.accumulation)]
        self._jobs += [(job, one.accumulation) for job, one in zip(residents, kind, strict=True)]
        self._perf = perf
        self._slowdowns: dict[int, tuple[tuple[int, float], ...]] = {}  # by the set of jobs that are still there
        self.all = (1 << len(self._jobs)) - 1
        self.hosts = self.all - GUEST
        with_guest, before = dict(self.slowdowns(self.all)), dict(self.slowdowns(self.hosts))
        self.guest_xi = with_guest.pop(0)
        self.host_xi = max(with_guest.values())
        self.pays = 1.0 / self.guest_xi + sum([1.0 / xi for xi in with_guest.values()]) > sum(
            [1.0 / xi for xi in before.values()]
        )
        """Whether total speed rises."""
        self.accepted = all(with_guest[n] <= one.max_slowdown for n, one in enumerate(kind, start=1)) and (
            guest.max_slowdown is None or self.guest_xi <= guest.max_slowdown
        )
        """Whether no job is slowed down more than it accepts."""
        self.took = size.relative_time * self.guest_xi
        """Seconds that a guest takes here for a second of its time left alone, if it ends first."""
        self.cost = self.took * (1.0 + sum([1.0 - before[n] / xi for n, xi in with_guest.items()]))
        """Seconds that the guest takes and the residents lose in that time."""

    def slowdowns(self, jobs: int) -> tuple[tuple[int, float], ...]:
        """Return the slow-downs of a set of jobs beside each other, with the number of each job."""
        known = self._slowdowns.get(jobs)
        if known is None:
            there = [n for n in range(len(self._jobs)) if jobs >> n & 1]
            found = []
            for n in there:
                mates = [self._jobs[other] for other in there if other != n]
                found.append((n, self._perf.slowdown(*self._jobs[n], mates) if mates else 1.0))
            known = self._slowdowns[jobs] = tuple(found)
        return known

    def ends(self, left: Sequence[float], jobs: int) -> list[float]:
        """Return the seconds until each job of a set is done, by its time left alone; 0 for jobs that are not there."""
        ends = [0.0] * len(left)
        self._run(left, list(left), jobs, ends)
        return ends

    def ends_after(self, left: Sequence[float], startup: float) -> list[float]:
        """Return the seconds until each job is done if the guest computes after `startup` seconds."""
        if not startup:
            return self.ends(left, self.all)
        rest, ends = list(left), [0.0] * len(left)
        jobs = self._run(left, rest, self.hosts, ends, until=startup)
        joined = self.ends(rest, jobs | GUEST)
        return [end or startup + later for end, later in zip(ends, joined, strict=True)]

    def _run(self, left: Sequence[float], rest: list[float], jobs: int, ends: list[float], until: float = inf) -> int:
        """Let a set of jobs run beside each other until all are done, or up to `until`. Return those that are not done.

        `rest` is what each of them has left of `left`, and `ends` gets the ends.
        """
        now = 0.0
        while jobs and now < until:
            slowdowns = self.slowdowns(jobs)
            step = min([until - now, *[rest[n] * xi for n, xi in slowdowns]])
            now += step
            for n, xi in slowdowns:
                rest[n] -= step / xi
                if rest[n] <= DONE * left[n]:
                    ends[n] = now
                    jobs ^= 1 << n
        return jobs

    def join_later(self, left: Sequence[float], alone: Sequence[float]) -> float:
        """Return the sum of all ends if the guest joins once the first resident has left.

        `alone` are the residents' ends without the guest.
        """
        wait = min(alone[1:])
        rest, jobs = list(left), GUEST
        for n, xi in self.slowdowns(self.hosts):
            if alone[n] > wait:
                rest[n] = max(rest[n] - wait / xi, 0.0)
                jobs |= 1 << n
        return sum(self.ends(rest, jobs)) + wait * len(left)


class CellSpeedsCache:
    """`CellSpeeds` by shape of guest and kind of cell, valid for one state of the belief."""

    def __init__(self) -> None:
        self._perf: PerformanceModel | None = None
        self._version = -1
        self._known: dict[Shape, dict[CellKind, list[CellSpeeds]]] = {}
        self._ranked: dict[Shape, tuple[int, list[tuple[float, CellKind]]]] = {}

    def validate(self, view: View) -> None:
        """Forget everything if the belief changed. Call it when a pass begins."""
        if view.perf is not self._perf or view.belief_version != self._version:
            self._perf, self._version = view.perf, view.belief_version
            self._known.clear()
            self._ranked.clear()

    def at_sizes(self, view: View, guest: JobView, kind: CellKind, residents: Sequence[JobView]) -> list[CellSpeeds]:
        """Return the speeds for each size of the guest that all jobs of such a cell accept, the largest first."""
        known = self._known.get(guest.shape)
        if known is None:
            known = self._known[guest.shape] = {}
        speeds = known.get(kind)
        if speeds is None:
            jobs = [record.job for record in residents]
            every = [CellSpeeds(guest.job, size, kind, jobs, view.perf) for size in guest.shape.sizes]
            speeds = known[kind] = [one for one in every if one.accepted]
        return speeds

    def ranked(
        self, view: View, guest: JobView, cells: Mapping[CellKind, Sequence[SharedCell]], version: int
    ) -> list[tuple[float, CellKind]]:
        """Return the kinds of cells where total speed rises, with what they cost a guest that ends first.

        The cheapest come first. `version` changes whenever kinds appear or disappear.
        """
        known = self._ranked.get(guest.shape)
        if known is None or known[0] != version:
            found = []
            for kind, group in cells.items():
                speeds = self.at_sizes(view, guest, kind, group[0].in_order)
                if speeds and speeds[0].pays:
                    found.append((speeds[0].cost, kind))
            known = self._ranked[guest.shape] = version, sorted(found)
        return known[1]
