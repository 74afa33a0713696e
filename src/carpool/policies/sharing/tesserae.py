"""Packing as a matching, after Tesserae (Bian et al., arXiv 2508.04953, 2025).

All waiting jobs are paired with running jobs at once, so that the total speed of all pairs is as large as possible.
After the shortest jobs have taken the free GPUs, waiting jobs and running jobs of the same gang size are matched; the
weight of a pair is how much faster both together are than one alone. Simplifications: Tesserae works in rounds on the
order of another scheduler (Tiresias, for example), preempts, and matches a second time to keep migrations few. Here the
shortest job comes first, no job is moved or stopped, and the matching is solved exactly (Hungarian method) among the
first `window` waiting jobs.
"""

from dataclasses import dataclass
from math import inf

from carpool.core.draft import Draft
from carpool.core.model import Decision
from carpool.core.shapes import Shape
from carpool.core.view import HostKind, JobView, View
from carpool.policies.base import BasePolicy, Explanation, option, shortest_first
from carpool.policies.sharing.explain import ASKED_NOT_TO_SHARE
from carpool.policies.sharing.whole_gang_hosts import GangFit, WholeGangHosts


@dataclass
class Tesserae(BasePolicy):
    """Shortest job first; jobs that find no free GPUs are matched with running jobs for the highest total speed."""

    name = "tesserae"
    floor: float = option(1.0, "total speed, relative to one job alone, that a pair must exceed to share")
    window: int = option(64, "maximum number of waiting jobs that are matched at a time")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        waiting: dict[int, list[JobView]] = {}
        seen = 0
        for job in draft.pending():
            if draft.start(job, "it is the shortest job in the queue that fits"):
                continue
            if not job.shape.exclusive and draft.may_start(job) and seen < self.window:
                waiting.setdefault(job.shape.gpus, []).append(job)
                seen += 1
            elif seen >= self.window and not draft.free_count:
                break
        if view.jobs_per_gpu > 1:
            for gpus, guests in sorted(waiting.items()):
                while guests and self._match(draft, gpus, guests):  # again for jobs that a user's limit left out
                    guests = [guest for guest in guests if not draft.gpus_of(guest) and draft.may_start(guest)]
        return draft.decisions

    def explain(self, view: View, job: JobView) -> Explanation | None:
        if view.jobs_per_gpu == 1:
            return None
        if job.shape.exclusive:
            return ASKED_NOT_TO_SHARE
        fits = WholeGangHosts(Draft(view)).fits(job, inf)
        if not fits:
            return Explanation("no running job of its gang size has room for it")
        speed, host = max((fit.speed, host.record.job.id) for fit, host in fits)
        pair = f"with job {host}, the best of its gang size, both together would be {speed:.2f}× as fast as one alone"
        if speed <= self.floor:
            return Explanation(f"{pair}, and more than {self.floor:.2f}× is required (option floor)")
        return Explanation(f"{pair}, but other waiting jobs gain more from the hosts that it could join")

    def _match(self, draft: Draft, gpus: int, guests: list[JobView]) -> bool:
        """Let guests join hosts, and return whether one did."""
        index = WholeGangHosts(draft)
        hosts = [(kind, sample, h) for kind, sample in index.kinds() for h in index.hosts(kind, gpus)]
        if not hosts:
            return False
        fits: dict[tuple[Shape, HostKind], GangFit | None] = {}
        for guest in guests:
            for kind, sample, _ in hosts:
                if (guest.shape, kind) not in fits:
                    fits[guest.shape, kind] = index.fit(guest, kind, sample, inf)
        gains = [[self._gain(fits[guest.shape, kind]) for kind, _, _ in hosts] for guest in guests]
        joined = False
        for guest, column in zip(guests, best_matching(gains), strict=True):
            if column is None or not draft.may_start(guest):
                continue
            kind, _, host = hosts[column]
            fit = fits[guest.shape, kind]
            at = index.admits(guest, fit.size, host) if fit is not None else None
            if fit is not None and at is not None:
                speed = f"both together are {fit.speed:.2f}× as fast as one alone, in the best matching"
                draft.assign(guest, at, fit.size, f"it shares with job {host.record.job.id}: {speed}")
                joined = True
        return joined

    def _gain(self, fit: GangFit | None) -> float:
        return 0.0 if fit is None else max(0.0, fit.speed - self.floor)


def best_matching(gains: list[list[float]]) -> list[int | None]:
    """Return for each row its column in a matching of the largest total gain; None where a row gains nothing.

    This is the Hungarian method with potentials (Kuhn 1955, Munkres 1957), one row at a time. Gains are not negative.
    """
    useful = [column for column in range(len(gains[0])) if any(row[column] > 0.0 for row in gains)]
    if not useful:
        return [None] * len(gains)
    rows, columns = len(gains), len(useful) + len(gains)  # one more column for each row, where it gains nothing
    cost = [[-row[column] for column in useful] + [0.0] * rows for row in gains]
    row_price, column_price = [0.0] * rows, [0.0] * columns
    owner: list[int] = [-1] * columns
    for new in range(rows):
        _assign(new, cost, row_price, column_price, owner)
    found: list[int | None] = [None] * rows
    for column, row in enumerate(owner):
        if row >= 0 and column < len(useful) and gains[row][useful[column]] > 0.0:
            found[row] = useful[column]
    return found


def _assign(
    new: int, cost: list[list[float]], row_price: list[float], column_price: list[float], owner: list[int]
) -> None:
    """Give one more row a column along the cheapest path of exchanges."""
    columns = len(owner)
    slack, via = [inf] * columns, [-1] * columns
    reached: list[int] = []  # columns whose owners may move, in order of discovery
    done = [False] * columns
    row, last = new, -1
    while True:
        step, following = inf, -1
        for column in range(columns):
            if done[column]:
                continue
            reduced = cost[row][column] - row_price[row] - column_price[column]
            if reduced < slack[column]:
                slack[column], via[column] = reduced, last
            if slack[column] < step:
                step, following = slack[column], column
        row_price[new] += step
        for column in reached:
            row_price[owner[column]] += step
            column_price[column] -= step
        for column in range(columns):
            if not done[column]:
                slack[column] -= step
        done[following] = True
        last = following
        if owner[last] < 0:
            break
        reached.append(last)
        row = owner[last]
    while last >= 0:  # exchange along the path
        before = via[last]
        owner[last] = owner[before] if before >= 0 else new
        last = before
