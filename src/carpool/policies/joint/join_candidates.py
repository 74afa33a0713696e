"""The joint rule's candidates: where a waiting job could join running ones now.

A *cell* is the GPUs that hold one and the same set of jobs. For cells of one job Theorem 1 is the filter: it keeps long
guests out of the second place, which short ones pass through quickly. Cells of several jobs are played forward.
A guest takes one cell, or a union of cells and free GPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from carpool.core.availability import Until, corrected
from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.perf import Mate, Placement
from carpool.core.rules import Resident
from carpool.core.shapes import Size
from carpool.core.view import JobView
from carpool.policies.joint.objective import Move, Objective
from carpool.policies.joint.simulate_ends import Participant, pair_ends, simulate_ends
from carpool.policies.sharing.candidates import Candidate, Candidates
from carpool.policies.sharing.pair import Option

PER_KIND = 6
"""So many hosts of a kind are looked at: the others cost the guest more."""
CHOICES = 3
"""So many of the best single cells are priced."""
GOOD_SPEED = 0.9
"""A pair whose total speed is below this is considered only where there is no better one."""
MOST_STRETCH = 3.0
SHORT_S = 600.0
"""Nobody may run longer than MOST_STRETCH times its time left alone, or times this, where it has less left."""

_cost = attrgetter("cost")


class JoinCandidates:
    def __init__(self, draft: Draft, candidates: Candidates, objective: Objective) -> None:
        self.draft = draft
        self.candidates = candidates
        self.objective = objective
        self.perf = draft.view.perf
        self.topology = draft.view.topology

    def now(self, guest: JobView) -> list[Move]:
        """Ways to join running jobs at once."""
        jobs_per_gpu = self.draft.view.jobs_per_gpu
        if guest.shape.exclusive or jobs_per_gpu == 1:
            return []
        cells = self._single(guest)
        if jobs_per_gpu > 2:
            cells += self._crowded(guest)
        if not cells:
            return []
        large = [cell for cell in cells if len(cell.gpus) >= guest.shape.gpus]
        unions = [[cell] for cell in sorted(large, key=_cost)[:CHOICES]]
        if guest.shape.gpus > 1:
            unions += self._unions(guest, cells)
        moves = [self._join(guest, union) for union in unions]
        return [move for move in moves if move is not None]

    def _unions(self, guest: JobView, cells: Sequence[Candidate]) -> list[list[Candidate]]:
        """Several cells, and free GPUs where they do not suffice: by Theorem 1's rank, and by what a GPU costs."""
        if sum([len(cell.gpus) for cell in cells]) + self.draft.free_count < guest.shape.gpus:
            return []
        guest_left = guest.alone_left(self.objective.now)
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

    def _single(self, guest: JobView) -> list[Candidate]:
        """The hosts with which, by Theorem 1, sharing beats waiting, and which cost less than the budget.

        Few of each kind: the sooner a host of a kind ends, the less it costs, so where the first is too dear all are.
        """
        most = CHOICES if guest.shape.gpus == 1 else max(PER_KIND, guest.shape.gpus)
        budget = None
        found: list[Candidate] = []
        for stream in self.candidates.by_kind(guest, 1):
            kind = self._open(stream, guest)
            first = next(kind, None)
            if first is None:
                continue
            if budget is None:
                budget = self.objective.budget(guest)
            if first.cost < budget:
                found.append(first)
                found += islice(kind, most - 1)
        fast = [cell for cell in found if cell.option.total_speed >= GOOD_SPEED]
        return fast or found

    def _open(self, cells: Iterable[Candidate], guest: JobView) -> Iterator[Candidate]:
        for cell in cells:
            if self._may_join(guest, cell.members):
                yield cell

    def _may_join(self, guest: JobView, members: Sequence[Resident]) -> bool:
        """Not where a job of this pass waits for their GPUs, and nobody of a higher priority."""
        claimed, priority = self.objective.claimed, guest.shape.priority
        for member in members:
            record = member.record
            if record.shape.priority > priority or record.seq in claimed:
                return False
        return True

    def _crowded(self, guest: JobView) -> list[Candidate]:
        """The cells of several jobs that it pays to join now."""
        found = []
        for members, gpus in self.candidates.crowded():
            if self._may_join(guest, members):
                for size in guest.shape.sizes:
                    fitting = tuple([gpu for gpu in gpus if self.draft.accepts(gpu, guest, size)])
                    if fitting:
                        cell = self._crowd(guest, size, members, fitting)
                        if cell is not None and cell.cost < self.objective.budget(guest):
                            found.append(cell)
                        break
        return found

    def _crowd(
        self, guest: JobView, size: Size, members: Sequence[Resident], gpus: tuple[GpuId, ...]
    ) -> Candidate | None:
        """A cell of several: to be joined where total speed rises, and not better when the first of them leaves."""
        there = [(member.record.job, member.accumulation) for member in members]
        everybody: list[Mate] = [(guest.job, size.accumulation), *there]
        xis = [self.perf.slowdown(*job, [*everybody[:n], *everybody[n + 1 :]]) for n, job in enumerate(everybody)]
        speed = sum(1.0 / self.perf.slowdown(*job, [*there[:n], *there[n + 1 :]]) for n, job in enumerate(there))
        if sum(1.0 / xi for xi in xis) <= speed:
            return None
        guest_left = guest.whole_left(self.objective.now) * size.relative_time
        participants = [
            Participant(guest_left, guest.job, size.accumulation),
            *(self._participant(m, [members]) for m in members),
        ]
        together = sum(simulate_ends(participants, [range(len(participants))], self.perf))
        if together >= self._join_later(participants):
            return None
        alone = guest.alone_left(self.objective.now)
        relative_time = guest_left / alone if alone else 1.0  # one that was stopped at its very end
        option = Option(size, max(xis[1:]), xis[0], relative_time, 0.0)
        names = tuple([member.record.job.id for member in members])
        left = sum(self.objective.left(member.record) for member in members)
        return Candidate(together, len(members), members[0].record.seq, gpus, names, option, tuple(members), left)

    def _join_later(self, participants: Sequence[Participant]) -> float:
        """The sum of all ends if the first actor joins the others once the first of those has left."""
        guest, hosts = participants[0], participants[1:]
        alone = simulate_ends(hosts, [range(len(hosts))], self.perf)
        wait = min(alone)
        rest = [guest]
        for index, host in enumerate(hosts):
            if alone[index] > wait:
                mates = [(other.job, other.accumulation) for other in hosts if other is not host]
                done = wait / self.perf.slowdown(host.job, host.accumulation, mates)
                rest.append(Participant(max(host.left - done, 0.0), host.job, host.accumulation))
        ends = simulate_ends(rest, [range(len(rest))], self.perf)
        return sum(ends) + wait * len(rest) + wait * (len(participants) - len(rest))

    # ---- joining them ----------------------------------------------------------------------------------------------

    def _join(self, guest: JobView, cells: Sequence[Candidate]) -> Move | None:
        """The move that takes the cells' GPUs, cut to the gang's size or filled up with free ones, if it is allowed."""
        size = max((cell.option.size for cell in cells), key=lambda size: size.accumulation)
        gpus: list[GpuId] = []
        for cell in cells:
            short = guest.shape.gpus - len(gpus)
            gpus += self.topology.most_consolidated(cell.gpus, short) if len(cell.gpus) > short else cell.gpus
        if len(gpus) < guest.shape.gpus:
            gpus += self.draft.some_free(guest.shape.gpus - len(gpus), size)
        if len(gpus) < guest.shape.gpus:
            return None
        cut = any(cell.option.size is not size for cell in cells)  # one sub-batch for the whole gang
        if cut and not all(self.draft.accepts(gpu, guest, size) for gpu in gpus):
            return None
        guest_left = self._left_on(guest, size, gpus)
        first = cells[0]
        host = first.members[0]
        if len(cells) == first.crowd == 1 and len(self.draft.gpus_of(host.record)) == len(first.gpus):
            ends = pair_ends(self.candidates.left(host), guest_left, first.option.host_xi, first.option.guest_xi)
            return self._move(guest, gpus, size, [host], ends, lone=True)
        hosts = list({member.record.seq: member for cell in cells for member in cell.members}.values())
        number = {member.record.seq: index for index, member in enumerate(hosts, start=1)}
        crowds = [cell.members for cell in cells]
        participants = [
            Participant(guest_left, guest.job, size.accumulation),
            *(self._participant(member, crowds) for member in hosts),
        ]
        shared = [[0, *(number[member.record.seq] for member in crowd)] for crowd in crowds]
        return self._move(guest, gpus, size, hosts, simulate_ends(participants, shared, self.perf))

    def _left_on(self, guest: JobView, size: Size, gpus: Sequence[GpuId]) -> float:
        """The guest's time left alone on these GPUs."""
        nodes = self.topology.nodes_spanned(gpus)
        if nodes == guest.shape.placement.nodes:
            return guest.whole_left(self.objective.now) * size.relative_time
        placement = Placement(len(gpus), nodes)
        return guest.iterations_left(self.objective.now) * self.perf.iteration_time(
            guest.job, size.accumulation, placement
        )

    def _move(
        self,
        guest: JobView,
        gpus: Sequence[GpuId],
        size: Size,
        hosts: Sequence[Resident],
        ends: Sequence[float],
        *,
        lone: bool = False,
    ) -> Move | None:
        """`ends` are those of the guest and its hosts, in seconds from now; None where somebody would run too long."""
        objective = self.objective
        if ends[0] > MOST_STRETCH * max(guest.alone_left(objective.now), SHORT_S):
            return None
        cost = ends[0]
        new_ends = {guest.seq: objective.now + ends[0]}
        for host, end in zip(hosts, ends[1:], strict=True):
            if end > MOST_STRETCH * max(self.candidates.left(host), SHORT_S):
                return None
            cost += max(0.0, end - objective.left(host.record))
            new_ends[host.record.seq] = objective.now + end
        return Move(guest, tuple(gpus), size, new_ends, cost, tuple([host.record for host in hosts]), lone=lone)

    def _participant(self, host: Resident, crowds: Sequence[Sequence[Resident]]) -> Participant:
        """A host as it takes part in a play about these cells."""
        return Participant(
            self.candidates.left(host), host.record.job, host.accumulation, self._elsewhere(host, crowds)
        )

    def _elsewhere(self, host: Resident, crowds: Sequence[Sequence[Resident]]) -> list[Until]:
        """What slows a host down on GPUs whose cells are not part of the play."""
        record, objective, draft = host.record, self.objective, self.draft
        gpus = draft.gpus_of(record)
        if len(gpus) == 1:
            return []
        played = {tuple([member.record for member in crowd]) for crowd in crowds}
        cells = {there: gpu for gpu in gpus if len(there := draft.jobs_on(gpu)) > 1 and there not in played}
        steps: list[Until] = []
        for gpu in cells.values():
            mates = [mate for mate in draft.residents(gpu) if mate.record is not record]
            mates.sort(key=lambda mate: (objective.end(mate.record), mate.record.seq))
            for index, mate in enumerate(mates):
                beside = [(m.record.job, m.accumulation) for m in mates[index:]]
                steps.append((objective.left(mate.record), self.perf.slowdown(record.job, host.accumulation, beside)))
        if record.gpus and steps:
            return corrected(steps, max(xi for _, xi in steps), record.slowdown)
        return steps
