"""Running jobs that have all their GPUs to themselves, by kind: where a guest of the same gang size could move in.

`lucid` and `tesserae` share whole gangs only, so a place is a host, and hosts of a kind are alike but for their size.
Uses the state's index of hosts, so that a guest who suits no kind costs as much as there are kinds, not jobs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import GpuId, Job
from carpool.core.rules import Resident
from carpool.core.shapes import Size
from carpool.core.view import HostKind, JobView


class Fit(NamedTuple):
    """How a guest gets on with hosts of a kind, at the largest sub-batch that suits both."""

    size: Size
    guest_xi: float
    host_xi: float

    @property
    def speed(self) -> float:
        """Of both together, relative to one alone."""
        return 1.0 / self.guest_xi + 1.0 / self.host_xi


class WholeGangHosts:
    """The lone hosts as a draft has left them. Make a new one after every job that was placed."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._changed = {member.record.seq for gpu in draft.entered for member in draft.residents(gpu)}
        self._apart: dict[HostKind, list[Resident]] = {}  # hosts that the index of lone ones does not know
        for seq, (record, kind, alone_on, _) in draft.view.hosts.others.items():
            if seq not in self._changed and len(alone_on) == len(record.gpus):
                self._apart.setdefault(kind, []).append(Resident(record, record.accumulation, record.memory))
        self._add_changed()

    def _add_changed(self) -> None:
        """Jobs that this draft placed and that nobody shares with so far."""
        draft, topology = self.draft, self.draft.view.topology
        seen: set[int] = set()
        for gpu in draft.entered:
            members = draft.residents(gpu)
            host = members[0]
            gpus = draft.gpus_of(host.record)
            if len(members) > 1 or host.record.seq in seen or host.record.shape.exclusive:
                continue
            seen.add(host.record.seq)
            if all(len(draft.residents(other)) == 1 for other in gpus):
                memory = min(topology.memory_of(other) for other in gpus)
                job = host.record.job
                kind = HostKind(job.model, job.batch, host.accumulation, job.max_slowdown, memory - host.memory)
                self._apart.setdefault(kind, []).append(host)

    def kinds(self) -> Iterator[tuple[HostKind, Job]]:
        """Every kind of lone host, with a job of that kind."""
        lone = self.draft.view.hosts.lone
        for kind, group in lone.items():
            yield kind, group.sample
        for kind, hosts in self._apart.items():
            if kind not in lone:
                yield kind, hosts[0].record.job

    def hosts(self, kind: HostKind, gpus: int) -> Iterator[Resident]:
        """The hosts of a kind on so many GPUs."""
        group = self.draft.view.hosts.lone.get(kind)
        for _, seq, record in group.entries if group else ():
            if record.shape.gpus == gpus and seq not in self._changed:
                yield Resident(record, record.accumulation, record.memory)
        for member in self._apart.get(kind, ()):
            if member.record.shape.gpus == gpus:
                yield member

    def admits(self, guest: JobView, size: Size, host: Resident) -> tuple[GpuId, ...] | None:
        """The host's GPUs, if the rules let the guest in on all of them."""
        gpus = self.draft.gpus_of(host.record)
        return gpus if all(self.draft.accepts(gpu, guest, size) for gpu in gpus) else None

    def fit(self, guest: JobView, kind: HostKind, host: Job, cap: float) -> Fit | None:
        """The largest sub-batch with which neither slows down by more than the cap, if there is one."""
        perf = self.draft.view.perf
        for size in guest.shape.sizes:
            if size.memory > kind.memory_left:
                continue
            guest_xi = perf.slowdown(guest.job, size.accumulation, [(host, kind.accumulation)])
            host_xi = perf.slowdown(host, kind.accumulation, [(guest.job, size.accumulation)])
            if guest_xi <= min(cap, guest.job.max_slowdown or cap) and host_xi <= min(cap, kind.max_slowdown or cap):
                return Fit(size, guest_xi, host_xi)
        return None
