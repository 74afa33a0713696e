"""The joint rule's candidates: where a waiting job could join running ones now, or which GPUs it could wait for.

A *cell* is the GPUs that hold one and the same set of jobs. For cells of one job Theorem 1 is the filter: it keeps long
guests out of the second place, which short ones pass through quickly. Cells of several jobs are played forward.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from operator import attrgetter

from carpool.core.draft import Draft
from carpool.core.model import GpuId, Status
from carpool.core.outlook import Until, corrected
from carpool.core.perf import Placement
from carpool.core.record import JobRecord, Size
from carpool.core.rules import Member
from carpool.policies.candidates import Candidate, Candidates
from carpool.policies.joint_scene import Move, Scene
from carpool.policies.pair import option_at
from carpool.policies.playout import Actor, pair_ends, play

PER_KIND = 6
"""So many hosts of a kind are looked at: the others cost the guest more."""
SINGLE_CELLS = 3
"""So many of the best single cells are priced."""
GOOD_SPEED = 0.9
"""A pair whose total speed is below this is considered only where there is no better one."""
MOST_STRETCH = 3.0
SHORT_S = 600.0
"""Nobody may run longer than MOST_STRETCH times its time left alone, or times this, where it has less left."""


class Places:
    def __init__(self, draft: Draft, scene: Scene, candidates: Candidates) -> None:
        self.draft = draft
        self.scene = scene
        self.candidates = candidates
        self.perf = draft.view.perf
        self.topology = draft.view.topology

    def now(self, guest: JobRecord) -> list[Move]:
        """Ways to join running jobs at once."""
        if guest.shape.exclusive or self.draft.view.jobs_per_gpu == 1:
            return []
        cells = self._single(guest)
        moves = [move for cell in cells for move in self._join(guest, [cell]) if len(cell.gpus) >= guest.shape.gpus]
        moves = nsmallest(SINGLE_CELLS, moves, key=attrgetter("cost"))
        if guest.shape.gpus > 1:
            moves += self._unions(guest, cells)
        if self.draft.view.jobs_per_gpu > 2:
            moves += self._crowded(guest)
        return moves

    def later(self, guest: JobRecord) -> list[Move]:
        """GPUs worth waiting for: those of the hosts that end soonest."""
        scene, need = self.scene, guest.shape.gpus
        soonest: list[JobRecord] = []
        for group in self.draft.view.hosts.lone.values():
            large = (entry[2] for entry in group.entries if len(entry[2].gpus) >= need)
            unchanged = (host for host in large if host.order not in scene.moved)
            soonest += islice(unchanged, SINGLE_CELLS)
        moves = []
        for host in nsmallest(SINGLE_CELLS, soonest, key=lambda host: (scene.end(host), host.order)):
            gpus = tuple(self.topology.most_consolidated(host.gpus, need))
            cost = scene.left(host) + guest.alone_left(scene.now)
            moves.append(Move(guest, gpus, None, {guest.order: scene.now + cost}, cost, (host,), lone=True))
        return moves

    def suspensions(self, guest: JobRecord) -> list[Move]:
        """Running jobs to suspend so that the guest can start alone: those that have much more left than it has."""
        scene, draft = self.scene, self.draft
        short = guest.shape.gpus - draft.free_count
        least = guest.alone_left(scene.now) + scene.restart_s
        if short <= 0:
            return []
        victims = sorted(self._victims(guest, least), key=lambda job: (len(job.gpus), -scene.end(job), job.order))
        sets = [[job] for job in victims if len(job.gpus) >= short][:SINGLE_CELLS]
        several: list[JobRecord] = []
        for job in victims:
            several.append(job)
            short -= len(job.gpus)
            if short <= 0:
                sets.append(several)
                break
        end = scene.now + guest.alone_left(scene.now)
        gpus = (0,) * guest.shape.gpus
        return [
            Move(guest, gpus, guest.shape.sizes[0], {guest.order: end}, end - scene.now, victims=tuple(chosen))
            for chosen in sets
        ]

    def _victims(self, guest: JobRecord, least: float) -> Iterator[JobRecord]:
        """Of each kind of lone hosts, those with the most time left."""
        scene, priority = self.scene, guest.shape.priority
        for job in self.draft.view.running:
            if (
                job.status is Status.RUNNING
                and job.job.can_checkpoint
                and job.order not in scene.moved
                and job.shape.priority <= priority
                and scene.left(job) > least
                and all(len(self.draft.view.residents(gpu)) == 1 for gpu in job.gpus)
            ):
                yield job

    # ---- cells of one job ------------------------------------------------------------------------------------------

    def _single(self, guest: JobRecord) -> list[Candidate]:
        """The hosts with which, by Theorem 1, sharing beats waiting; few of each kind, by t_share."""
        found = [
            cell
            for stream in self.candidates.by_kind(guest, 1)
            for cell in islice(self._open(stream, guest), max(PER_KIND, guest.shape.gpus))
        ]
        fast = [cell for cell in found if 1.0 / cell.option.guest_xi + 1.0 / cell.option.host_xi >= GOOD_SPEED]
        return sorted(fast or found)

    def _open(self, cells: Iterable[Candidate], guest: JobRecord) -> Iterator[Candidate]:
        """Without hosts that a job of this pass waits for, and without hosts of a higher priority."""
        claimed, priority = self.scene.claimed, guest.shape.priority
        for cell in cells:
            if all(m.record.order not in claimed and m.record.shape.priority <= priority for m in cell.members):
                yield cell

    def _unions(self, guest: JobRecord, cells: Sequence[Candidate]) -> list[Move]:
        """Several hosts, and free GPUs where they do not suffice: by Theorem 1's rank, and by what a GPU costs."""
        orders = [cells, sorted(cells, key=lambda cell: (self._delay(guest, cell) / len(cell.gpus), cell))]
        moves = []
        tried = set()
        for order in orders:
            union, short = [], guest.shape.gpus
            for cell in order:
                union.append(cell)
                short -= len(cell.gpus)
                if short <= 0:
                    break
            key = frozenset(cell.order for cell in union)
            if union and short <= self.draft.free_count and key not in tried and (len(union) > 1 or short > 0):
                tried.add(key)
                moves += self._join(guest, union)
        return moves

    def _delay(self, guest: JobRecord, cell: Candidate) -> float:
        """What the host of a cell loses."""
        option, host_left = cell.option, self.candidates.left(cell.members[0])
        guest_left = guest.alone_left(self.scene.now) * option.pace
        return pair_ends(host_left, guest_left, option.host_xi, option.guest_xi)[1] - host_left

    def _join(self, guest: JobRecord, cells: Sequence[Candidate]) -> list[Move]:
        """The move that takes the cells' GPUs, cut to the gang's size or filled up with free ones, if it is allowed."""
        size = max((cell.option.size for cell in cells), key=lambda size: size.accum)
        gpus: list[GpuId] = []
        for cell in cells:
            short = guest.shape.gpus - len(gpus)
            gpus += self.topology.most_consolidated(cell.gpus, short) if len(cell.gpus) > short else cell.gpus
        gpus += self.draft.some_free(guest.shape.gpus - len(gpus), size)
        if len(gpus) < guest.shape.gpus:
            return []
        if any(cell.option.size.accum != size.accum for cell in cells) and not self._accepted(guest, gpus, size):
            return []
        guest_left = self.left_on(guest, size, gpus)
        hosts = [cell.members[0] for cell in cells]
        lone = len(cells) == 1 and self._is_lone(cells[0])
        if lone:
            option, host_left = cells[0].option, self.candidates.left(hosts[0])
            ends = pair_ends(host_left, guest_left, option.host_xi, option.guest_xi)
        else:
            actors = [Actor(guest_left, guest.job, size.accum), *(self._actor(host, ()) for host in hosts)]
            ends = tuple(play(actors, [(0, number) for number in range(1, len(actors))], self.perf))
        return self._move(guest, gpus, size, hosts, ends, lone)

    def _accepted(self, guest: JobRecord, gpus: Sequence[GpuId], size: Size) -> bool:
        return all(self.draft.accepts(gpu, guest, size) for gpu in gpus)

    def _is_lone(self, cell: Candidate) -> bool:
        return len(cell.members) == 1 and len(self.draft.gpus_of(cell.members[0].record)) == len(cell.gpus)

    def left_on(self, guest: JobRecord, size: Size, gpus: Sequence[GpuId]) -> float:
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
        lone: bool = False,
    ) -> list[Move]:
        """`ends` are those of the guest and its hosts, in seconds from now."""
        scene = self.scene
        if ends[0] > MOST_STRETCH * max(guest.alone_left(scene.now), SHORT_S):
            return []
        cost = ends[0]
        new_ends = {guest.order: scene.now + ends[0]}
        for host, end in zip(hosts, ends[1:], strict=True):
            before = self.candidates.left(host)
            if end > MOST_STRETCH * max(before, SHORT_S):
                return []
            cost += max(0.0, end - scene.left(host.record))
            new_ends[host.record.order] = scene.now + end
        guest_xi, host_xi = self._slowest(guest, size, hosts)
        records = tuple([host.record for host in hosts])
        return [Move(guest, tuple(gpus), size, new_ends, cost, records, (guest_xi, host_xi), lone=lone)]

    def _slowest(self, guest: JobRecord, size: Size, hosts: Sequence[Member]) -> tuple[float, float]:
        options = [option_at(self.perf, guest, size, host.record.job, host.accum) for host in hosts]
        return max(o.guest_xi for o in options), max(o.host_xi for o in options)

    def _actor(self, host: Member, together: Sequence[JobRecord]) -> Actor:
        """A host as it takes part in a play; `together` are its mates there."""
        return Actor(self.candidates.left(host), host.record.job, host.accum, self._elsewhere(host, together))

    def _elsewhere(self, host: Member, together: Sequence[JobRecord]) -> list[Until]:
        """What slows a host down on GPUs that hold other mates."""
        record, scene = host.record, self.scene
        if self.candidates.draft.gpus_of(record) and len(self.draft.gpus_of(record)) == 1:
            return []
        shared = {other.order for other in together}
        cells: dict[tuple[int, ...], list[Member]] = {}
        for gpu in self.draft.gpus_of(record):
            mates = [member for member in self.draft.members(gpu) if member.record is not record]
            if mates and {m.record.order for m in mates} != shared:
                cells[tuple([mate.record.order for mate in mates])] = mates
        steps: list[Until] = []
        for mates in cells.values():
            mates.sort(key=lambda mate: (scene.end(mate.record), mate.record.order))
            for index, mate in enumerate(mates):
                there = [(m.record.job, m.accum) for m in mates[index:]]
                steps.append((scene.left(mate.record), self.perf.slowdown(record.job, host.accum, there)))
        if record.gpus and steps:
            return corrected(steps, max(xi for _, xi in steps), record.slowdown)
        return steps

    # ---- cells of several jobs -------------------------------------------------------------------------------------

    def _crowded(self, guest: JobRecord) -> list[Move]:
        """Join a cell of several where that beats joining when the first of them leaves, and total speed rises."""
        moves: list[Move] = []
        claimed, priority = self.scene.claimed, guest.shape.priority
        for members, gpus in self.candidates.crowded():
            if len(gpus) < guest.shape.gpus:
                continue
            if any(m.record.order in claimed or m.record.shape.priority > priority for m in members):
                continue
            chosen = self.topology.most_consolidated(gpus, guest.shape.gpus)
            size = next((s for s in guest.shape.sizes if self._accepted(guest, chosen, s)), None)
            if size is not None and self._faster_together(guest, size, members):
                moves += self._join_crowd(guest, size, members, chosen)
        return nsmallest(SINGLE_CELLS, moves, key=attrgetter("cost"))

    def _faster_together(self, guest: JobRecord, size: Size, members: Sequence[Member]) -> bool:
        jobs = [(member.record.job, member.accum) for member in members]
        return self._speed([*jobs, (guest.job, size.accum)]) > self._speed(jobs)

    def _speed(self, jobs: Sequence[tuple[object, int]]) -> float:
        total = 0.0
        for index, (job, accum) in enumerate(jobs):
            total += 1.0 / self.perf.slowdown(job, accum, [*jobs[:index], *jobs[index + 1 :]])  # type: ignore[arg-type,list-item]
        return total

    def _join_crowd(self, guest: JobRecord, size: Size, members: Sequence[Member], gpus: list[GpuId]) -> list[Move]:
        guest_left = self.left_on(guest, size, gpus)
        records = [member.record for member in members]
        actors = [Actor(guest_left, guest.job, size.accum)]
        actors += [self._actor(m, [r for r in records if r is not m.record]) for m in members]
        together = play(actors, [range(len(actors))], self.perf)
        wait = min(self.scene.left(record) for record in records)
        stay = [m for m in members if self.scene.left(m.record) > wait]
        later = wait + guest_left
        if stay:
            alone = play(
                [Actor(a.left, a.job, a.accum, a.elsewhere) for a in actors[1:]], [range(len(members))], self.perf
            )
            rest = [actors[0]]
            for actor, end in zip(actors[1:], alone, strict=True):
                if end > wait:
                    rest.append(Actor(self._left_after(actor, actors[1:], wait), actor.job, actor.accum))
            ends = play(rest, [range(len(rest))], self.perf)
            before = [end - wait for end in alone if end > wait]
            later = wait + ends[0] + sum(max(0.0, e - b) for e, b in zip(ends[1:], before, strict=True))
        moves = self._move(guest, gpus, size, members, together)
        return [move for move in moves if move.cost < later]

    def _left_after(self, actor: Actor, crowd: Sequence[Actor], wait: float) -> float:
        mates = [(other.job, other.accum) for other in crowd if other is not actor]
        return max(1e-9, actor.left - wait / self.perf.slowdown(actor.job, actor.accum, mates))
