"""The joint rule's candidates among cells of several jobs.

The kinds of cells are visited in the order of what they cost a guest that ends first; of each kind, few cells: those
whose first job ends about when the guest would. Only these are simulated, and only until enough of them are found.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.rules import Resident
from carpool.core.shared_cells import kind_of
from carpool.core.view import CellKind, JobView, SharedCell
from carpool.policies.joint.cell_speeds import CellSpeeds, CellSpeedsCache
from carpool.policies.joint.objective import Objective
from carpool.policies.sharing.candidates import Candidate, Candidates
from carpool.policies.sharing.pair import SharingOption

PER_KIND = 2
"""Number of cells of a kind, on either side of the guest's end, that are looked at."""
SIMULATED = 12
"""Number of cells that are simulated for a guest, or as many as it has workers."""


class SharedCandidates:
    """The cells of several jobs that a guest may join in one scheduling pass."""

    def __init__(self, draft: Draft, candidates: Candidates, objective: Objective, cache: CellSpeedsCache) -> None:
        self.draft = draft
        self.candidates = candidates
        self.objective = objective
        self._cache = cache
        self._known: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}  # by the residents' `seq`
        cache.validate(draft.view)

    def find(self, guest: JobView, limit: float) -> list[Candidate]:
        """Return cells that it pays to join now, for less than the budget and less than `limit`."""
        budget = self.objective.budget(guest)
        cells = chain(self._changed(guest), self._unchanged(guest, budget))
        most = max(SIMULATED, guest.shape.gpus)
        found = [self._judge(guest, *cell, min(limit, budget)) for cell in islice(cells, most)]
        return [cell for cell in found if cell is not None]

    def _unchanged(
        self, guest: JobView, budget: float
    ) -> Iterator[tuple[CellSpeeds, Sequence[Resident], tuple[GpuId, ...]]]:
        """Yield the cells that this draft has not touched, with the speeds beside the guest."""
        view, hosts = self.draft.view, self.draft.hosts
        left, changed = guest.whole_left(view.now), self.candidates.changed
        for cost, kind in self._cache.ranked(view, guest, hosts.cells, hosts.cell_kinds_version):
            if cost * left >= budget:
                return
            group = hosts.cells[kind]
            at_sizes = self._cache.at_sizes(view, guest, kind, group[0].in_order)
            for cell in _around(group, view.now + at_sizes[0].took * left):
                speeds = next((one for one in at_sizes if one.size.memory <= cell.memory_left), None)
                if speeds is not None and speeds.pays and changed.isdisjoint(cell.seqs):
                    residents = [Resident(record, record.accumulation, record.memory) for record in cell.in_order]
                    if self._may_join(guest, residents):
                        yield speeds, residents, cell.gpus

    def _changed(self, guest: JobView) -> Iterator[tuple[CellSpeeds, Sequence[Resident], tuple[GpuId, ...]]]:
        """Yield the cells that this draft has changed, with the speeds beside the guest."""
        for there, gpus in self.candidates.changed_cells():
            if not self._may_join(guest, there):
                continue
            in_order = sorted([(kind_of(r.record.job, r.accumulation), r.record.seq, r) for r in there])
            kind: CellKind = tuple([kind for kind, _, _ in in_order])
            residents = [resident for _, _, resident in in_order]
            for speeds in self._cache.at_sizes(self.draft.view, guest, kind, [r.record for r in residents]):
                fitting = tuple([gpu for gpu in gpus if self.draft.fits(gpu, speeds.size.memory)])
                if fitting:
                    if speeds.pays:
                        yield speeds, residents, fitting
                    break

    def _may_join(self, guest: JobView, residents: Sequence[Resident]) -> bool:
        return self.objective.may_join(guest, [resident.record for resident in residents])

    def _judge(
        self,
        guest: JobView,
        speeds: CellSpeeds,
        residents: Sequence[Resident],
        gpus: tuple[GpuId, ...],
        limit: float,
    ) -> Candidate | None:
        """Return a cell as a candidate; None where it costs `limit` or more, or where the guest had better wait for the
        first resident to end."""
        now, size = self.objective.now, speeds.size
        guest_left = guest.whole_left(now) * size.relative_time
        hosts_left, alone = self._without_guest(speeds, residents)
        left = [guest_left, *hosts_left]
        startup = guest.startup_s
        together, apart = sum(speeds.ends_after(left, startup)), sum(alone)
        if together - apart >= limit:
            return None
        if min(alone[1:]) > startup and together >= speeds.join_later(left, alone):
            return None
        own = guest.alone_left(now)
        relative_time = guest_left / own if own else 1.0  # a job that was stopped at its very end has none left
        option = SharingOption(size, speeds.host_xi, speeds.guest_xi, relative_time, 0.0)
        seq = min([resident.record.seq for resident in residents])
        return Candidate(together, len(residents), seq, gpus, option, tuple(residents), apart)

    def _without_guest(self, speeds: CellSpeeds, residents: Sequence[Resident]) -> tuple[list[float], list[float]]:
        """Return the residents' times left alone, and the ends of a cell without a guest. Many guests ask for them."""
        seqs = tuple([resident.record.seq for resident in residents])
        known = self._known.get(seqs)
        if known is None:
            left = [self.candidates.left(resident) for resident in residents]
            known = self._known[seqs] = left, speeds.ends([0.0, *left], speeds.hosts)
        return known


def _around(group: Sequence[SharedCell], end: float) -> list[SharedCell]:
    """Return the cells of a kind whose first job ends about then, the next to end after it first."""
    place = bisect_left(group, (end,))
    return [*group[place : place + PER_KIND], *reversed(group[max(0, place - PER_KIND) : place])]
