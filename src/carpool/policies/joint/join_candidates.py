"""The joint rule's candidates that are open now: where a waiting job, the guest, could join running jobs.

A *cell* is the GPUs that hold one and the same set of jobs. For cells of one job Theorem 1 is the filter: it keeps long
guests out of the second place, which short ones pass through quickly. `shared_candidates` finds cells of several
jobs. A guest takes one cell, or a union of cells and free GPUs.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from math import inf
from operator import attrgetter

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.perf import Placement
from carpool.core.rules import Resident
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.moves import Join
from carpool.policies.joint.objective import CLOSE, Objective
from carpool.policies.joint.shared_candidates import SharedCandidates
from carpool.policies.joint.simulate_ends import Participant, simulate_ends
from carpool.policies.joint.slowed_elsewhere import SlowedElsewhere
from carpool.policies.sharing.candidates import Candidate, Candidates

PER_KIND = 6
"""Number of hosts of a kind that are looked at: the others cost the guest more."""
PRICED = 3
"""Number of the best single cells that are priced."""
GOOD_SPEED = 0.9
"""Total speed of a pair below which it is considered only where there is no better one."""
HIGH_SPEED = 1.1
"""Total speed of a pair from which it is considered although Theorem 1 does not hold, if many jobs wait."""
MAX_STRETCH = 3.0
"""Maximum of a job's time left while sharing, relative to its time left alone or to SHORT_S, whichever is more."""
SHORT_S = 600.0
ROUNDING = 1e-9
"""Share of its cost by which a host may seem cheaper than one of its kind that ends sooner."""

_cost = attrgetter("cost")


class JoinCandidates:
    """The moves of one scheduling pass with which a guest joins running jobs."""

    def __init__(self, draft: Draft, candidates: Candidates, objective: Objective, shared: SharedCandidates) -> None:
        self.draft = draft
        self.candidates = candidates
        self.objective = objective
        self.shared = shared
        self.perf = draft.view.perf
        self.topology = draft.view.topology
        self.elsewhere = SlowedElsewhere(draft, objective)
        self.simulated = 0
        """Number of hosts that were simulated in this pass; one that was simulated for several guests counts again."""

    def offer(self, guest: JobView, choice: Choice) -> None:
        """Offer ways to join running jobs at once."""
        jobs_per_gpu = self.draft.view.jobs_per_gpu
        if guest.shape.exclusive or jobs_per_gpu == 1:
            return
        cells = self._single(guest)
        if jobs_per_gpu > 2:
            cells += self.shared.find(guest, self._limit(guest, cells))
        if not cells:
            return
        large = [cell for cell in cells if len(cell.gpus) >= guest.shape.gpus]
        for cell in sorted(large, key=_cost)[:PRICED]:
            self._join(guest, [cell], choice)
        if guest.shape.gpus > 1:
            for union in self._unions(guest, cells):
                self._join(guest, union, choice)

    def _unions(self, guest: JobView, cells: Sequence[Candidate]) -> list[list[Candidate]]:
        """Return sets of cells, to be filled up with free GPUs: by Theorem 1's rank, and by the cost of one GPU."""
        if sum([len(cell.gpus) for cell in cells]) + self.draft.free_count < guest.shape.gpus:
            return []
        guest_left = guest.alone_left(self.objective.now) + guest.startup_s
        budget = self.objective.budget(guest)

        def price(cell: Candidate) -> tuple[float, int, tuple[GpuId, ...]]:
            return (cell.cost - guest_left) / len(cell.gpus), cell.seq, cell.gpus

        unions: list[list[Candidate]] = []
        for order in (sorted(cells), sorted(cells, key=price)):
            union, short, least = [], guest.shape.gpus, guest_left
            for cell in order:
                union.append(cell)
                short -= len(cell.gpus)
                least += cell.delay
                if short <= 0 or least >= budget:
                    break
            several = len(union) > 1 or (short > 0 and union)
            if several and short <= self.draft.free_count and least < budget and union not in unions:
                unions.append(union)
        return unions

    # ---- cells -----------------------------------------------------------------------------------------------------

    def _limit(self, guest: JobView, cells: Sequence[Candidate]) -> float:
        """Return a cost above which a cell is not looked at. A gang looks at all: it may need a union of them."""
        if guest.shape.gpus > 1 or len(cells) < PRICED:
            return inf
        return sorted([cell.cost for cell in cells])[PRICED - 1]

    def _single(self, guest: JobView) -> list[Candidate]:
        """Return the hosts with which, by Theorem 1, sharing beats waiting, and which cost less than the budget.

        Few of each kind: the sooner a host of a kind ends, the less it costs. Where the first costs too much, all do.
        """
        budget = self.objective.budget(guest)
        kinds = [self._open(stream, guest) for stream in self.candidates.by_kind(guest, 1, budget)]
        firsts = [(first, kind) for kind in kinds if (first := next(kind, None)) is not None]
        cheapest = [(first, kind) for first, kind in firsts if first.cost < budget]
        limit = self._limit(guest, _fast([first for first, _ in cheapest])) * (1.0 + ROUNDING)
        most = PRICED if guest.shape.gpus == 1 else max(PER_KIND, guest.shape.gpus)
        found: list[Candidate] = []
        for first, kind in cheapest:
            found.append(first)
            if first.cost <= limit:
                found += islice(kind, most - 1)
        return _fast(found) or found or self._for_throughput(guest)

    def _for_throughput(self, guest: JobView) -> list[Candidate]:
        """Return the hosts that end soonest and with which total speed is high: even if the two finish later in sum,
        as Theorem 1 counts, the jobs behind them may gain more."""
        if len(self.draft.view.queue) <= 1:
            return []  # nobody is behind the guest
        return sorted(self._open(self.candidates.fast(guest, HIGH_SPEED), guest), key=_cost)[:PRICED]

    def _open(self, cells: Iterable[Candidate], guest: JobView) -> Iterator[Candidate]:
        for cell in cells:
            if self.objective.may_join(guest, [resident.record for resident in cell.residents]):
                yield cell

    # ---- joining them ----------------------------------------------------------------------------------------------

    def _join(self, guest: JobView, cells: Sequence[Candidate], choice: Choice) -> None:
        """Offer to take the cells' GPUs, trimmed to the gang or filled up with free ones, if allowed."""
        first = cells[0]
        host = first.residents[0]
        is_pair = len(cells) == first.number == 1 and len(self.draft.gpus_of(host.record)) == len(first.gpus)
        least = first.cost if is_pair else guest.alone_left(self.objective.now)
        if least - CLOSE >= choice.most:
            return
        size = max((cell.option.size for cell in cells), key=lambda size: size.accumulation)
        gpus = self._gpus(guest, cells, size)
        if gpus is None:
            return
        guest_left = self._left_on(guest, size, gpus)
        if is_pair:
            ends = first.option.ends(self.candidates.left(host), guest_left, guest.startup_s)
            self._offer(guest, gpus, size, [host], ends, choice)
        else:
            hosts = list({resident.record.seq: resident for cell in cells for resident in cell.residents}.values())
            self._offer(guest, gpus, size, hosts, self._simulate(guest, guest_left, size, cells, hosts), choice)

    def _gpus(self, guest: JobView, cells: Sequence[Candidate], size: Size) -> list[GpuId] | None:
        """Return the GPUs of cells, trimmed to the gang or filled up with free ones; None: that is not allowed."""
        gpus: list[GpuId] = []
        for cell in cells:
            short = guest.shape.gpus - len(gpus)
            gpus += self.topology.most_consolidated(cell.gpus, short) if len(cell.gpus) > short else cell.gpus
        if len(gpus) < guest.shape.gpus:
            gpus += self.draft.some_free(guest, guest.shape.gpus - len(gpus), size)
        if len(gpus) < guest.shape.gpus:
            return None
        resized = any(cell.option.size is not size for cell in cells)  # one sub-batch for the whole gang
        return None if resized and not all(self.draft.accepts(gpu, guest, size) for gpu in gpus) else gpus

    def _simulate(
        self, guest: JobView, guest_left: float, size: Size, cells: Sequence[Candidate], hosts: Sequence[Resident]
    ) -> list[float]:
        """Return the seconds until the guest and its hosts end if it joins these cells."""
        self.simulated += len(hosts)
        number = {resident.record.seq: index for index, resident in enumerate(hosts, start=1)}
        simulated = {tuple([resident.record for resident in cell.residents]) for cell in cells}
        participants = [
            Participant(guest_left, guest.job, size.accumulation),
            *(self._participant(resident, simulated) for resident in hosts),
        ]
        shared = [[0, *(number[resident.record.seq] for resident in cell.residents)] for cell in cells]
        return simulate_ends(participants, shared, self.perf, guest.startup_s)

    def _left_on(self, guest: JobView, size: Size, gpus: Sequence[GpuId]) -> float:
        """Return the guest's time left alone on these GPUs."""
        nodes = self.topology.nodes_spanned(gpus)
        if nodes == guest.shape.placement.nodes:
            return guest.whole_left(self.objective.now) * size.relative_time
        placement = Placement(len(gpus), nodes)
        seconds = self.perf.iteration_time(guest.job, size.accumulation, placement) * guest.stretch
        return guest.iterations_left(self.objective.now) * seconds

    def _offer(
        self,
        guest: JobView,
        gpus: Sequence[GpuId],
        size: Size,
        hosts: Sequence[Resident],
        ends: Sequence[float],
        choice: Choice,
    ) -> None:
        """Offer the move, unless a job would run too long.

        `ends` are those of the guest and of its hosts, in seconds from now.
        """
        objective = self.objective
        if ends[0] - guest.startup_s > MAX_STRETCH * max(guest.alone_left(objective.now), SHORT_S):
            return
        cost = ends[0]
        new_ends = {guest.seq: objective.now + ends[0]}
        for host, end in zip(hosts, ends[1:], strict=True):
            if end > MAX_STRETCH * max(self.candidates.left(host), SHORT_S):
                return
            cost += max(0.0, end - objective.left(host.record))
            new_ends[host.record.seq] = objective.now + end
        if cost >= choice.most:
            return
        records = tuple([host.record for host in hosts])
        lone = len(hosts) == 1 and self.draft.only_resident(records[0])
        move = Join(guest, tuple(gpus), new_ends, cost, size, records, lone=lone)
        if objective.delay_paused(move, choice.most):
            choice.offer(move)

    def _participant(self, host: Resident, simulated: Set[tuple[JobView, ...]]) -> Participant:
        """Return a host as it takes part in a simulation of these cells, each given by its residents."""
        elsewhere = self.elsewhere.of(host, simulated)
        return Participant(self.candidates.left(host), host.record.job, host.accumulation, elsewhere)


def _fast(cells: Sequence[Candidate]) -> list[Candidate]:
    return [cell for cell in cells if cell.option.total_speed >= GOOD_SPEED]
