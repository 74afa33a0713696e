"""Where could a guest join, best place first? The search behind SJF-BSBF.

Hosts of one kind differ only in the time they have left, and both Theorem 1's verdict and its t_share are monotone in
it: sharing pays from some time left on, and costs more the more is left. So a kind's hosts, sorted by time left,
are cut at one point and then come in the right order, and a guest looks at few of them, however many run.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from math import inf
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import GpuId, Job
from carpool.core.perf import PerformanceModel
from carpool.core.rules import Resident
from carpool.core.shapes import Shape
from carpool.core.view import HostKind, JobView, View
from carpool.policies.sharing.pair import Option, Verdict, best, option_at, options

SLACK = 1.0 - 1e-9
"""Cut a little early: the exact test on each host has the last word."""


class Candidate(NamedTuple):
    """GPUs on which the guest gains by joining; sorts by the paper's t_share, then by how many are there."""

    together: float
    crowd: int
    seq: int
    gpus: tuple[GpuId, ...]
    hosts: tuple[str, ...]
    option: Option
    members: tuple[Resident, ...]
    left: float
    """The time left alone of the host; of the first, where there are several."""

    @property
    def cost(self) -> float:
        """What a guest's sharing with a lone host costs: the guest's completion time and the host's delay."""
        return self.together - self.left

    @property
    def delay(self) -> float:
        """What a lone host loses of that, at least: what it does not get done while the guest is there."""
        if self.crowd > 1:
            return 0.0
        speed = 1.0 / self.option.host_xi
        return min(self.cost * (1.0 - speed) / (2.0 - speed), self.left * (self.option.host_xi - 1.0))


class Host(NamedTuple):
    """A job with room beside it; sorts by its time left alone."""

    left: float
    seq: int
    gpus: tuple[GpuId, ...]
    member: Resident


class Choices(NamedTuple):
    """The sub-batches at which guests of a shape fit beside hosts of a kind."""

    options: list[Option]
    needs: float
    """Sharing pays with no host that has less than this times the guest's time left."""


class OptionCache:
    """Choices by guest shape and host kind, for what one performance model believes and one size of the largest GPU."""

    def __init__(self) -> None:
        self._perf: PerformanceModel | None = None
        self._version = 0
        self._memory = 0
        self._known: dict[tuple[Shape, int], dict[HostKind, Choices]] = {}

    def beside(self, view: View, guest: JobView, at_least: int) -> dict[HostKind, Choices]:
        """What is known for guests of this shape and an accumulation of at least so much."""
        perf, version, memory = view.perf, view.belief_version, view.topology.largest_memory
        if perf is not self._perf or version != self._version or memory != self._memory:
            self._perf, self._version, self._memory = perf, version, memory
            self._known.clear()
        known = self._known.get((guest.shape, at_least))
        if known is None:
            known = self._known[guest.shape, at_least] = {}
        return known


class Candidates:
    """The places to join in one scheduling pass. Sees the draft: who was placed in this pass may be a host too."""

    def __init__(self, draft: Draft, cache: OptionCache) -> None:
        self.draft = draft
        self._cache = cache
        self._as_of = -1
        self._changed: set[int] = set()  # whom the draft placed, stopped or gave a mate
        self._single: dict[HostKind, list[Host]] = {}
        self._crowded: list[tuple[list[Resident], tuple[GpuId, ...]]] = []

    def for_guest(self, guest: JobView, at_least: int) -> Iterator[Candidate]:
        """All places at which sharing beats waiting, best first, with an accumulation of at least `at_least`."""
        streams = self.by_kind(guest, at_least)
        if self._crowded:
            streams.append(self._crowded_candidates(guest, guest.alone_left(self.draft.view.now), at_least))
        return merge(*streams) if len(streams) > 1 else iter(streams[0] if streams else ())

    def by_kind(self, guest: JobView, at_least: int) -> list[Iterator[Candidate]]:
        """The same among cells of one job, for each kind of host by itself: the soonest to end comes first."""
        self._look_again()
        view = self.draft.view
        now = view.now
        guest_left = guest.alone_left(now)
        known = self._cache.beside(view, guest, at_least)
        streams = []
        for kind, hosts in self._single.items():
            fitting, needs = known.get(kind) or self._learn(known, guest, kind, hosts[0].member.record.job, at_least)
            least = needs * guest_left * SLACK
            if hosts[-1].left >= least:
                streams.append(_judge(hosts[bisect_right(hosts, (least,)) :], fitting, guest_left))
        for kind, group in view.hosts.lone.items():
            fitting, needs = known.get(kind) or self._learn(known, guest, kind, group.sample, at_least)
            least = needs * guest_left * SLACK
            if group.entries[-1][0] - now >= least:
                streams.append(self._judge_lone(group.ending_after(now + least), fitting, guest_left))
        return streams

    def crowded(self) -> Sequence[tuple[list[Resident], tuple[GpuId, ...]]]:
        """The cells of several jobs that have room for one more."""
        self._look_again()
        return self._crowded

    def _learn(
        self, known: dict[HostKind, Choices], guest: JobView, kind: HostKind, host: Job, at_least: int
    ) -> Choices:
        found = options(self.draft.view.perf, guest, host, kind.accumulation, kind.memory_left, at_least)
        choices = known[kind] = Choices(found, min((option.needs for option in found), default=inf))
        return choices

    def _judge_lone(self, records: Iterable[JobView], choices: list[Option], guest_left: float) -> Iterator[Candidate]:
        now, changed = self.draft.view.now, self._changed
        for record in records:
            if record.seq not in changed:
                left = record.alone_left(now)
                verdict = best(choices, left, guest_left)
                if verdict is not None:
                    member = Resident(record, record.accumulation, record.memory)
                    yield _candidate(verdict, left, record.gpus, member)

    # ---- hosts that are not alone, and those that this draft changed ----------------------------------------------

    def _look_again(self) -> None:
        """Collect the cells of all jobs that the index of lone hosts does not describe, if the draft went on."""
        draft = self.draft
        if self._as_of == len(draft.decisions):
            return
        self._as_of = len(draft.decisions)
        self._single = {}
        self._crowded = []
        changed: dict[int, JobView] = {}
        for gpu in draft.entered:
            changed.update((record.seq, record) for record in draft.jobs_on(gpu))
        self._changed = changed.keys() | draft.stopped
        now = draft.view.now
        for seq, (record, kind, alone_on, crowds) in draft.view.hosts.others.items():
            if seq in self._changed:
                continue
            if alone_on:
                host = Host(record.alone_left(now), seq, alone_on, Resident(record, record.accumulation, record.memory))
                self._single.setdefault(kind, []).append(host)
            for residents, gpus in crowds:
                if not any(resident.seq in self._changed for resident in residents):
                    self._crowded.append(([Resident(r, r.accumulation, r.memory) for r in residents], gpus))
        self._add_changed(changed)
        for hosts in self._single.values():
            hosts.sort()

    def _add_changed(self, changed: dict[int, JobView]) -> None:
        """The same for jobs that this draft placed, and for those beside whom it placed somebody."""
        draft = self.draft
        cells: dict[tuple[int, ...], tuple[list[Resident], list[GpuId]]] = {}
        for gpu in sorted({gpu for record in changed.values() for gpu in draft.gpus_of(record)}):
            members = draft.residents(gpu)
            if 0 < len(members) < draft.view.jobs_per_gpu and not any(m.record.shape.exclusive for m in members):
                cells.setdefault(tuple([m.record.seq for m in members]), (members, []))[1].append(gpu)
        for members, gpus in cells.values():
            if len(members) == 1:
                self._single.setdefault(self._kind(members[0], gpus), []).append(self._host(members[0], gpus))
            else:
                self._crowded.append((members, tuple(gpus)))

    def _kind(self, member: Resident, gpus: list[GpuId]) -> HostKind:
        topology, job = self.draft.view.topology, member.record.job
        memory = min(topology.memory_of(gpu) for gpu in gpus)
        return HostKind(job.model, job.batch, member.accumulation, job.max_slowdown, memory - member.memory)

    def _host(self, member: Resident, gpus: list[GpuId]) -> Host:
        return Host(self.left(member), member.record.seq, tuple(gpus), member)

    def left(self, member: Resident) -> float:
        """The time left alone of a job that runs or was placed in this draft."""
        record, now = member.record, self.draft.view.now
        if record.gpus:
            return record.alone_left(now)
        relative_time = next(
            size.relative_time for size in record.shape.sizes if size.accumulation == member.accumulation
        )
        return record.whole_left(now) * relative_time

    def _crowded_candidates(self, guest: JobView, guest_left: float, at_least: int) -> Iterator[Candidate]:
        """Cells of several jobs: Theorem 1 must hold against each of them, and the worst pair ranks the cell."""
        draft, perf = self.draft, self.draft.view.perf
        found = []
        for members, gpus in self._crowded:
            for size in guest.shape.sizes:
                fitting = (
                    [gpu for gpu in gpus if draft.accepts(gpu, guest, size)] if size.accumulation >= at_least else []
                )
                if fitting:
                    pairs = [(m, option_at(perf, guest, size, m.record.job, m.accumulation)) for m in members]
                    verdicts = [best([option], self.left(member), guest_left) for member, option in pairs]
                    if all(verdicts):
                        worst = max(verdict for verdict in verdicts if verdict)
                        names = tuple(member.record.job.id for member in members)
                        seq = members[0].record.seq
                        found.append(
                            Candidate(
                                *(worst.together, len(names), seq, tuple(sorted(fitting)), names, worst.option),
                                *(tuple(members), self.left(members[0])),
                            )
                        )
                    break
        return iter(sorted(found))


def _judge(hosts: Iterable[Host], choices: list[Option], guest_left: float) -> Iterator[Candidate]:
    for left, _, gpus, member in hosts:
        verdict = best(choices, left, guest_left)
        if verdict is not None:
            yield _candidate(verdict, left, gpus, member)


def _candidate(verdict: Verdict, left: float, gpus: tuple[GpuId, ...], host: Resident) -> Candidate:
    record = host.record
    return Candidate(verdict.together, 1, record.seq, gpus, (record.job.id,), verdict.option, (host,), left)
