"""The joint rule's candidates: where a waiting job could join running ones now.

A *cell* is the GPUs that hold one and the same set of jobs. For cells of one job Theorem 1 is the filter: it keeps long
guests out of the second place, which short ones pass through quickly. Cells of several jobs are played forward.
A guest takes one cell, or a union of cells and free GPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.outlook import Until, corrected
from carpool.core.perf import Mate, Placement
from carpool.core.record import JobRecord, Size
from carpool.core.rules import Member
from carpool.policies.candidates import Candidate, Candidates
from carpool.policies.joint_scene import Move, Scene
from carpool.policies.pair import Option
from carpool.policies.playout import Actor, pair_ends, play

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


class Places:
    def __init__(self, draft: Draft, candidates: Candidates, scene: Scene) -> None:
        self.draft = draft
        self.candidates = candidates
        self.scene = scene
        self.perf = draft.view.perf
        self.topology = draft.view.topology

    def now(self, guest: JobRecord) -> list[Move]:
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

    def _unions(self, guest: JobRecord, cells: Sequence[Candidate]) -> list[list[Candidate]]:
        """Several cells, and free GPUs where they do not suffice: by Theorem 1's rank, and by what a GPU costs."""
        if sum([len(cell.gpus) for cell in cells]) + self.draft.free_count < guest.shape.gpus:
            return []
        guest_left = guest.alone_left(self.scene.now)
        budget = self.scene.budget(guest)

        def price(cell: Candidate) -> tuple[float, int, tuple[GpuId, ...]]:
            return (cell.cost - guest_left) / len(cell.gpus), cell.order, cell.gpus

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

    def _single(self, guest: JobRecord) -> list[Candidate]:
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
                budget = self.scene.budget(guest)
            if first.cost < budget:
                found.append(first)
                found += islice(kind, most - 1)
        fast = [cell for cell in found if cell.option.total_speed >= GOOD_SPEED]
        return fast or found

    def _open(self, cells: Iterable[Candidate], guest: JobRecord) -> Iterator[Candidate]:
        for cell in cells:
            if self._may_join(guest, cell.members):
                yield cell

    def _may_join(self, guest: JobRecord, members: Sequence[Member]) -> bool:
        """Not where a job of this pass waits for their GPUs, and nobody of a higher priority."""
        claimed, priority = self.scene.claimed, guest.shape.priority
        for member in members:
            record = member.record
            if record.shape.priority > priority or record.order in claimed:
                return False
        return True

    def _crowded(self, guest: JobRecord) -> list[Candidate]:
        """The cells of several jobs that it pays to join now."""
        found = []
        for members, gpus in self.candidates.crowded():
            if self._may_join(guest, members):
                for size in guest.shape.sizes:
                    fitting = tuple([gpu for gpu in gpus if self.draft.accepts(gpu, guest, size)])
                    if fitting:
                        cell = self._crowd(guest, size, members, fitting)
                        if cell is not None and cell.cost < self.scene.budget(guest):
                            found.append(cell)
                        break
        return found

    def _crowd(
        self, guest: JobRecord, size: Size, members: Sequence[Member], gpus: tuple[GpuId, ...]
    ) -> Candidate | None:
        """A cell of several: to be joined where total speed rises, and not better when the first of them leaves."""
        there = [(member.record.job, member.accum) for member in members]
        everybody: list[Mate] = [(guest.job, size.accum), *there]
        xis = [self.perf.slowdown(*job, [*everybody[:n], *everybody[n + 1 :]]) for n, job in enumerate(everybody)]
        speed = sum(1.0 / self.perf.slowdown(*job, [*there[:n], *there[n + 1 :]]) for n, job in enumerate(there))
        if sum(1.0 / xi for xi in xis) <= speed:
            return None
        guest_left = guest.whole_left(self.scene.now) * size.pace
        actors = [Actor(guest_left, guest.job, size.accum), *(self._actor(m, [members]) for m in members)]
        together = sum(play(actors, [range(len(actors))], self.perf))
        if together >= self._join_later(actors):
            return None
        alone = guest.alone_left(self.scene.now)
        pace = guest_left / alone if alone else 1.0  # one that was stopped at its very end
        option = Option(size, max(xis[1:]), xis[0], pace, 0.0)
        names = tuple([member.record.job.id for member in members])
        left = sum(self.scene.left(member.record) for member in members)
        return Candidate(together, len(members), members[0].record.order, gpus, names, option, tuple(members), left)

    def _join_later(self, actors: Sequence[Actor]) -> float:
        """The sum of all ends if the first actor joins the others once the first of those has left."""
        guest, hosts = actors[0], actors[1:]
        alone = play(hosts, [range(len(hosts))], self.perf)
        wait = min(alone)
        rest = [guest]
        for index, host in enumerate(hosts):
            if alone[index] > wait:
                mates = [(other.job, other.accum) for other in hosts if other is not host]
                done = wait / self.perf.slowdown(host.job, host.accum, mates)
                rest.append(Actor(max(host.left - done, 0.0), host.job, host.accum))
        ends = play(rest, [range(len(rest))], self.perf)
        return sum(ends) + wait * len(rest) + wait * (len(actors) - len(rest))

    # ---- joining them ----------------------------------------------------------------------------------------------

    def _join(self, guest: JobRecord, cells: Sequence[Candidate]) -> Move | None:
        """The move that takes the cells' GPUs, cut to the gang's size or filled up with free ones, if it is allowed."""
        size = max((cell.option.size for cell in cells), key=lambda size: size.accum)
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
        hosts = list({member.record.order: member for cell in cells for member in cell.members}.values())
        number = {member.record.order: index for index, member in enumerate(hosts, start=1)}
        crowds = [cell.members for cell in cells]
        actors = [Actor(guest_left, guest.job, size.accum), *(self._actor(member, crowds) for member in hosts)]
        shared = [[0, *(number[member.record.order] for member in crowd)] for crowd in crowds]
        return self._move(guest, gpus, size, hosts, play(actors, shared, self.perf))

    def _left_on(self, guest: JobRecord, size: Size, gpus: Sequence[GpuId]) -> float:
        """The guest's time left alone on these GPUs."""
        nodes = self.topology.nodes_spanned(gpus)
        if nodes == guest.shape.placement.nodes:
            return guest.whole_left(self.scene.now) * size.pace
        placement = Placement(len(gpus), nodes)
        return guest.iterations_left(self.scene.now) * self.perf.iteration_time(guest.job, size.accum, placement)

    def _move(
        self,
        guest: JobRecord,
        gpus: Sequence[GpuId],
        size: Size,
        hosts: Sequence[Member],
        ends: Sequence[float],
        *,
        lone: bool = False,
    ) -> Move | None:
        """`ends` are those of the guest and its hosts, in seconds from now; None where somebody would run too long."""
        scene = self.scene
        if ends[0] > MOST_STRETCH * max(guest.alone_left(scene.now), SHORT_S):
            return None
        cost = ends[0]
        new_ends = {guest.order: scene.now + ends[0]}
        for host, end in zip(hosts, ends[1:], strict=True):
            if end > MOST_STRETCH * max(self.candidates.left(host), SHORT_S):
                return None
            cost += max(0.0, end - scene.left(host.record))
            new_ends[host.record.order] = scene.now + end
        return Move(guest, tuple(gpus), size, new_ends, cost, tuple([host.record for host in hosts]), lone=lone)

    def _actor(self, host: Member, crowds: Sequence[Sequence[Member]]) -> Actor:
        """A host as it takes part in a play about these cells."""
        return Actor(self.candidates.left(host), host.record.job, host.accum, self._elsewhere(host, crowds))

    def _elsewhere(self, host: Member, crowds: Sequence[Sequence[Member]]) -> list[Until]:
        """What slows a host down on GPUs whose cells are not part of the play."""
        record, scene, draft = host.record, self.scene, self.draft
        gpus = draft.gpus_of(record)
        if len(gpus) == 1:
            return []
        played = {tuple([member.record for member in crowd]) for crowd in crowds}
        cells = {there: gpu for gpu in gpus if len(there := draft.residents(gpu)) > 1 and there not in played}
        steps: list[Until] = []
        for gpu in cells.values():
            mates = [mate for mate in draft.members(gpu) if mate.record is not record]
            mates.sort(key=lambda mate: (scene.end(mate.record), mate.record.order))
            for index, mate in enumerate(mates):
                beside = [(m.record.job, m.accum) for m in mates[index:]]
                steps.append((scene.left(mate.record), self.perf.slowdown(record.job, host.accum, beside)))
        if record.gpus and steps:
            return corrected(steps, max(xi for _, xi in steps), record.slowdown)
        return steps
