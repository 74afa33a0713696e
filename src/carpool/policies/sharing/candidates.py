"""The search for places where a guest gains by joining running jobs, best first; SJF-BSBF and the joint rule use it.

Hosts of one kind differ only in the time they have left, and both Theorem 1's verdict and its t_share are monotone in
it: sharing pays from some time left on, and its cost grows with the time left. So the hosts of a kind, sorted by time
left, are cut at one point and then come in the right order. A guest looks at few of them, however many run.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from heapq import merge
from math import inf
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import GpuId, Job, JobId
from carpool.core.perf import PerformanceModel
from carpool.core.rules import Resident
from carpool.core.shapes import Shape, Size
from carpool.core.view import HostKind, JobView, OtherHost, PartlyFreeHostsView, View
from carpool.policies.sharing.pair import (
    SharingOption,
    SharingVerdict,
    best,
    host_delay,
    least_cost,
    option_at,
    options,
)

SLACK = 1.0 - 1e-9
"""Factor that cuts the hosts of a kind a little early: the exact test on each host decides."""

Cell = tuple[Sequence[Resident], tuple[GpuId, ...]]
"""GPUs that hold one and the same set of jobs, and these jobs."""


class Candidate(NamedTuple):
    """GPUs on which the guest gains by joining; sorts by the paper's t_share, then by the number of hosts."""

    together: float
    number: int
    """How many hosts there are on these GPUs."""
    seq: int
    gpus: tuple[GpuId, ...]
    option: SharingOption
    residents: tuple[Resident, ...]
    """The hosts."""
    host_left: float
    """Time left alone of the host; of the first, where there are several."""
    startup: float = 0.0
    """Seconds until the guest computes."""

    @property
    def names(self) -> list[JobId]:
        """The names of the hosts."""
        return [resident.record.job.id for resident in self.residents]

    @property
    def cost(self) -> float:
        """Cost of sharing with a lone host: the guest's completion time and the host's delay."""
        return self.together - self.host_left

    @property
    def delay(self) -> float:
        """Part of the cost that a lone host loses; 0 where there are several."""
        return 0.0 if self.number > 1 else self._host_delay()

    def _host_delay(self) -> float:
        both = self.host_left - self.startup
        return host_delay(self.cost - self.startup, both, self.option.host_xi) if both > 0.0 else 0.0


HostEntry = tuple[float, int, tuple[GpuId, ...], Resident]
"""A host that this draft changed: its time left alone, its `seq`, its GPUs that have room, and itself. A plain tuple,
because many are made."""


class SharingOptions(NamedTuple):
    """The sub-batches at which guests of a shape fit beside hosts of a kind."""

    options: list[SharingOption]
    needs: float
    """Ratio of the host's to the guest's time left, below which no option pays."""
    least_cost: float
    """Seconds that sharing costs at least where it pays, for a second of the guest's time left."""


class OptionCache:
    """Sharing options by guest shape and host kind, valid for one state of the belief and one largest GPU memory."""

    def __init__(self) -> None:
        self._perf: PerformanceModel | None = None
        self._version = 0
        self._memory = 0
        self._known: dict[tuple[Shape, int], dict[HostKind, SharingOptions]] = {}
        self.generation = 0
        """Number of times that everything was forgotten."""

    def renew(self, view: View) -> None:
        """Forget everything if the belief or the largest memory is another one now."""
        perf, version, memory = view.perf, view.belief_version, view.topology.largest_memory
        if perf is not self._perf or version != self._version or memory != self._memory:
            self._perf, self._version, self._memory = perf, version, memory
            self._known.clear()
            self.generation += 1

    def beside(self, view: View, guest: JobView, at_least: int) -> dict[HostKind, SharingOptions]:
        """Return what is known for guests of this shape with an accumulation of at least `at_least`."""
        self.renew(view)
        key = guest.shape.general, at_least
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = {}
        return known

    def learn(
        self,
        known: dict[HostKind, SharingOptions],
        view: View,
        guest: JobView,
        kind: HostKind,
        host: Job,
        at_least: int = 1,
    ) -> SharingOptions:
        """Find out the options of a guest beside hosts of a kind, and add them to what `beside` returned."""
        found = options(view.perf, guest, host, kind.accumulation, kind.memory_left, at_least)
        needs = min((option.needs for option in found), default=inf)
        choices = known[kind] = SharingOptions(found, needs, least_cost(found, needs))
        return choices


class Candidates:
    """The places to join in one scheduling pass. It includes the draft: a job placed in this pass may be a host too."""

    def __init__(self, draft: Draft, cache: OptionCache) -> None:
        self.draft = draft
        self._cache = cache
        self._as_of = -1
        self._changed: Set[int] = set()  # jobs that the draft placed, stopped or gave a mate
        self._added: dict[HostKind, list[HostEntry]] = {}  # hosts that the draft placed or gave a mate
        self._changed_cells: list[Cell] = []  # cells of several such hosts
        self._too_few: dict[tuple[Shape, float], float] = {}  # see `too_few_for`

    def for_guest(self, guest: JobView, at_least: int) -> Iterator[Candidate]:
        """Yield all places at which sharing beats waiting, best first, with an accumulation of at least `at_least`."""
        streams = [stream for kind in self._streams(guest, at_least) for stream in kind]
        if self.draft.view.jobs_per_gpu > 2:
            streams.append(self._shared_candidates(guest, guest.alone_left(self.draft.view.now), at_least))
        return merge(*streams) if len(streams) > 1 else iter(streams[0] if streams else ())

    def too_few_for(self, guest: JobView) -> bool:
        """Return whether a guest like this one with no more time left found too few hosts in the draft as it is."""
        self._look_again()
        shortest = self._too_few.get((guest.shape.general, guest.startup_s))
        return shortest is not None and shortest <= guest.alone_left(self.draft.view.now)

    def note_too_few(self, guest: JobView) -> None:
        """Note that too few hosts gain for a guest: for one that has more time left, even fewer do."""
        self._too_few[guest.shape.general, guest.startup_s] = guest.alone_left(self.draft.view.now)

    def by_kind(self, guest: JobView, at_least: int, below: float = inf) -> list[Iterator[Candidate]]:
        """Return one stream for each kind of host, among cells of one job: the host that ends soonest comes first.

        Kinds of which every host costs `below` or more are left out, as far as the kind alone tells that.
        """
        kinds = self._streams(guest, at_least, below)
        return [merge(*streams) if len(streams) > 1 else streams[0] for streams in kinds]

    def _streams(self, guest: JobView, at_least: int, below: float = inf) -> Iterator[list[Iterator[Candidate]]]:
        """Yield the streams of each kind of host, each sorted; there is at least one."""
        self._look_again()
        view = self.draft.view
        now = view.now
        guest_left, startup = guest.alone_left(now), guest.startup_s
        most = below / (guest_left * SLACK) if guest_left and not startup else inf
        known = self._cache.beside(view, guest, at_least)
        index = self.draft.hosts
        for kind, partly in index.partly_free.items():
            fitting, needs, cost = known.get(kind) or self._learn(known, guest, kind, partly.sample, at_least)
            if fitting and cost < most:
                least = needs * guest_left * SLACK + startup
                found = self._partly_free(partly, least, fitting, guest_left, startup)
                if kind in self._added:
                    found.append(_judge(self._added[kind], least, fitting, guest_left, startup))
                if found:
                    yield found
        for kind, entries in self._added.items():
            if kind not in index.partly_free:
                sample = entries[0][3].record.job
                fitting, needs, cost = known.get(kind) or self._learn(known, guest, kind, sample, at_least)
                if fitting and cost < most:
                    yield [_judge(entries, needs * guest_left * SLACK + startup, fitting, guest_left, startup)]
        for kind, group in index.lone.items():
            fitting, needs, cost = known.get(kind) or self._learn(known, guest, kind, group.sample, at_least)
            if cost >= most:
                continue
            least = needs * guest_left * SLACK
            if group.entries[-1][0] - now >= least + startup:
                yield [self._judge_lone(group.ending_after(now + (least + startup)), fitting, guest_left, startup)]

    def fast(self, guest: JobView, least: float) -> Iterator[Candidate]:
        """Yield the lone host of each kind that ends first, where total speed is at least this; Theorem 1 aside."""
        self._look_again()
        view = self.draft.view
        known, guest_left = self._cache.beside(view, guest, 1), guest.alone_left(view.now)
        first: list[tuple[HostKind, Job, HostEntry]] = []
        for kind, group in self.draft.hosts.lone.items():
            hosts = (host for host in group.ending_after(view.now) if host.seq not in self._changed)
            if (host := next(hosts, None)) is not None:
                resident = Resident(host, host.accumulation, host.memory)
                first.append((kind, group.sample, (host.alone_left(view.now), host.seq, host.gpus, resident)))
        first += [(kind, entries[0][3].record.job, min(entries)) for kind, entries in self._added.items()]
        for kind, sample, (left, seq, gpus, resident) in first:
            fitting, _, _ = known.get(kind) or self._learn(known, guest, kind, sample, 1)
            option = max(fitting, key=lambda option: option.total_speed, default=None)
            if option is not None and option.total_speed >= least:
                ends = option.ends(left, guest_left * option.relative_time, guest.startup_s)
                yield Candidate(sum(ends), 1, seq, gpus, option, (resident,), left, guest.startup_s)

    def _partly_free(
        self,
        group: PartlyFreeHostsView,
        least: float,
        choices: list[SharingOption],
        guest_left: float,
        startup: float,
    ) -> list[Iterator[Candidate]]:
        """Return the hosts of a kind that are not lone and have at least so much left: a stream for each slow-down."""
        now = self.draft.view.now
        streams = []
        for slowdown, entries in group.running.items():
            first = now + least * slowdown
            if least <= 0.0:
                streams.append(self._judge_partly_free(entries, 0, choices, guest_left, startup))
            elif entries[-1][0] >= first:
                place = bisect_left(entries, (first,))
                streams.append(self._judge_partly_free(entries, place, choices, guest_left, startup))
        if group.starting:
            changed = self._changed
            starting: list[HostEntry] = [
                (
                    record.alone_left(now) + record.startup_left(now),
                    seq,
                    alone_on,
                    Resident(record, record.accumulation, record.memory),
                )
                for seq, (record, _, alone_on) in group.starting.items()
                if seq not in changed
            ]
            starting.sort()
            streams.append(_judge(starting, least, choices, guest_left, startup))
        return streams

    @property
    def changed(self) -> Set[int]:
        """The `seq` of the jobs that the draft placed, stopped, paused, resumed or gave a mate."""
        self._look_again()
        return self._changed

    def changed_cells(self) -> Sequence[Cell]:
        """Return the cells of several jobs that the draft changed and that have room for one more."""
        self._look_again()
        return self._changed_cells

    def _shared_cells(self) -> Iterator[Cell]:
        """Yield all cells of several jobs that have room for one more."""
        changed = self.changed
        for group in self.draft.hosts.cells.values():
            for cell in group:
                if changed.isdisjoint(cell.seqs):
                    yield [Resident(r, r.accumulation, r.memory) for r in cell.residents], cell.gpus
        yield from self._changed_cells

    def _learn(
        self, known: dict[HostKind, SharingOptions], guest: JobView, kind: HostKind, host: Job, at_least: int
    ) -> SharingOptions:
        return self._cache.learn(known, self.draft.view, guest, kind, host, at_least)

    def _judge_partly_free(
        self,
        entries: Sequence[tuple[float, int, OtherHost]],
        first: int,
        choices: list[SharingOption],
        guest_left: float,
        startup: float,
    ) -> Iterator[Candidate]:
        now, changed = self.draft.view.now, self._changed
        for index in range(first, len(entries)):
            _, seq, (record, _, alone_on) = entries[index]
            if seq not in changed:
                left = record.alone_left(now)
                verdict = best(choices, left, guest_left, startup)
                if verdict is not None:
                    host = Resident(record, record.accumulation, record.memory)
                    yield Candidate(verdict.together, 1, seq, alone_on, verdict.option, (host,), left, startup)

    def _judge_lone(
        self, records: Iterable[JobView], choices: list[SharingOption], guest_left: float, startup: float
    ) -> Iterator[Candidate]:
        now, changed = self.draft.view.now, self._changed
        for record in records:
            if record.seq not in changed:
                left = record.alone_left(now)
                verdict = best(choices, left, guest_left, startup)
                if verdict is not None:
                    host, seq = Resident(record, record.accumulation, record.memory), record.seq
                    yield Candidate(verdict.together, 1, seq, record.gpus, verdict.option, (host,), left, startup)

    # ---- hosts that are not alone, and hosts that this draft changed -----------------------------------------------

    def _look_again(self) -> None:
        """Collect the cells of all jobs that the index of lone hosts does not describe, if the draft has grown."""
        draft = self.draft
        if self._as_of == len(draft.decisions):
            return
        self._as_of = len(draft.decisions)
        self._too_few = {}
        self._added = {}
        self._changed_cells = []
        changed: dict[int, JobView] = {}
        for gpu in draft.touched:
            changed.update((resident.record.seq, resident.record) for resident in draft.active_on(gpu))
        self._changed = changed.keys() | draft.inactive
        if changed:
            self._add_changed(changed)

    def _add_changed(self, changed: dict[int, JobView]) -> None:
        """Add the cells of the jobs that this draft placed or gave a mate."""
        draft = self.draft
        cells: dict[tuple[int, ...], tuple[Sequence[Resident], list[GpuId]]] = {}
        for gpu in sorted({gpu for record in changed.values() for gpu in draft.gpus_of(record)}):
            if len(draft.jobs_on(gpu)) >= draft.view.resident_per_gpu:
                continue
            there = draft.active_on(gpu)
            closed = any(record.shape.exclusive for record in draft.jobs_on(gpu))
            if 0 < len(there) < draft.view.jobs_per_gpu and not closed:
                cells.setdefault(tuple([r.record.seq for r in there]), (there, []))[1].append(gpu)
        for there, gpus in cells.values():
            if len(there) == 1:
                self._added.setdefault(self._kind(there[0], gpus), []).append(self._entry(there[0], gpus))
            else:
                self._changed_cells.append((there, tuple(gpus)))
        for entries in self._added.values():
            entries.sort()

    def _kind(self, host: Resident, gpus: list[GpuId]) -> HostKind:
        topology, job = self.draft.view.topology, host.record.job
        memory = min(topology.memory_of(gpu) - sum(r.memory for r in self.draft.residents(gpu)) for gpu in gpus)
        return HostKind(job.model, job.batch, host.accumulation, job.max_slowdown, memory)

    def _entry(self, host: Resident, gpus: list[GpuId]) -> HostEntry:
        return self.left(host), host.record.seq, tuple(gpus), host

    def left(self, host: Resident) -> float:
        """Return the time left alone of a job that runs or was placed in this draft."""
        record, now = host.record, self.draft.view.now
        if record.gpus:
            return record.alone_left(now) + record.startup_left(now)
        sizes, accumulation = record.shape.sizes, host.accumulation
        left = record.whole_left(now) * next(s.relative_time for s in sizes if s.accumulation == accumulation)
        return left + record.startup_s

    def _shared_candidates(self, guest: JobView, guest_left: float, at_least: int) -> Iterator[Candidate]:
        """Yield the cells of several jobs: Theorem 1 must hold against each of them, and the worst pair ranks them."""
        found = []
        for residents, gpus in self._shared_cells():
            for size in guest.shape.sizes:
                if size.accumulation < at_least:
                    continue
                fitting = [gpu for gpu in gpus if self.draft.accepts(gpu, guest, size)]
                if fitting:
                    worst = self._worst_pair(guest, guest_left, size, residents)
                    if worst is not None:
                        number, seq, host_left = len(residents), residents[0].record.seq, self.left(residents[0])
                        at = tuple(sorted(fitting))
                        found.append(
                            Candidate(worst.together, number, seq, at, worst.option, tuple(residents), host_left)
                        )
                    break
        return iter(sorted(found))

    def _worst_pair(
        self, guest: JobView, guest_left: float, size: Size, residents: Sequence[Resident]
    ) -> SharingVerdict | None:
        """Return the verdict with the largest `together` over all residents; None where one pair does not pay."""
        perf = self.draft.view.perf
        verdicts = []
        for resident in residents:
            option = option_at(perf, guest, size, resident.record.job, resident.accumulation)
            verdicts.append(best([option], self.left(resident), guest_left, guest.startup_s))
        paying = [verdict for verdict in verdicts if verdict is not None]
        return max(paying, key=_cost_and_slowdowns) if len(paying) == len(verdicts) else None


def _cost_and_slowdowns(verdict: SharingVerdict) -> tuple[float, float, float]:
    return verdict.together, verdict.option.host_xi, verdict.option.guest_xi


def _judge(
    hosts: Sequence[HostEntry], least: float, choices: list[SharingOption], guest_left: float, startup: float
) -> Iterator[Candidate]:
    """Yield the hosts that have at least so much left, of a list sorted by it."""
    for left, seq, gpus, host in hosts:
        if left >= least:
            verdict = best(choices, left, guest_left, startup)
            if verdict is not None:
                yield Candidate(verdict.together, 1, seq, gpus, verdict.option, (host,), left, startup)
