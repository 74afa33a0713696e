"""Running jobs that have all their GPUs to themselves, by kind: hosts that a guest of the same gang size could join.

`lucid` and `tesserae` share whole gangs only, so a place is a host, and hosts of a kind differ only in their gang size.
The search uses the state's index of hosts: for a guest that suits no kind, its cost grows with the number of kinds, not
of jobs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import GpuId, Job
from carpool.core.rules import Resident
from carpool.core.shapes import Shape, Size
from carpool.core.view import HostKind, JobView
from carpool.policies.sharing.pair import total_speed


class GangFit(NamedTuple):
    """The largest sub-batch with which a guest may join hosts of a kind, and both slow-downs with it."""

    size: Size
    guest_xi: float
    host_xi: float

    @property
    def speed(self) -> float:
        """Speed of both jobs while they share, relative to one job alone."""
        return total_speed(self.guest_xi, self.host_xi)


class WholeGangHosts:
    """The lone hosts as a draft has left them. Make a new one after every job that is placed."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.none_for: set[Shape] = set()
        """The general shapes for which a policy found no host: other jobs of them need no search."""
        self._changed = {resident.record.seq for gpu in draft.touched for resident in draft.residents(gpu)}
        self._not_indexed: dict[HostKind, list[Resident]] = {}  # hosts that the index of lone hosts does not have
        for seq, (record, kind, alone_on) in draft.view.hosts.others.items():
            if seq not in self._changed and len(alone_on) == len(record.gpus):
                self._not_indexed.setdefault(kind, []).append(Resident(record, record.accumulation, record.memory))
        self._add_changed()

    def _add_changed(self) -> None:
        """Add the jobs that this draft placed and that have no mates so far."""
        draft, topology = self.draft, self.draft.view.topology
        seen: set[int] = set()
        for gpu in draft.touched:
            residents = draft.residents(gpu)
            host = residents[0]
            gpus = draft.gpus_of(host.record)
            if len(residents) > 1 or host.record.seq in seen or host.record.shape.exclusive:
                continue
            seen.add(host.record.seq)
            if all(len(draft.residents(other)) == 1 for other in gpus):
                memory = min(topology.memory_of(other) for other in gpus)
                job = host.record.job
                kind = HostKind(job.model, job.batch, host.accumulation, job.max_slowdown, memory - host.memory)
                self._not_indexed.setdefault(kind, []).append(host)

    def kinds(self) -> Iterator[tuple[HostKind, Job]]:
        """Yield every kind of lone host, with a job of that kind."""
        lone = self.draft.view.hosts.lone
        for kind, group in lone.items():
            yield kind, group.sample
        for kind, hosts in self._not_indexed.items():
            if kind not in lone:
                yield kind, hosts[0].record.job

    def hosts(self, kind: HostKind, gpus: int) -> Iterator[Resident]:
        """Yield the hosts of a kind whose gang has this number of GPUs."""
        group = self.draft.view.hosts.lone.get(kind)
        for _, seq, record in group.entries if group else ():
            if record.shape.gpus == gpus and seq not in self._changed:
                yield Resident(record, record.accumulation, record.memory)
        for resident in self._not_indexed.get(kind, ()):
            if resident.record.shape.gpus == gpus:
                yield resident

    def admits(self, guest: JobView, size: Size, host: Resident) -> tuple[GpuId, ...] | None:
        """Return the host's GPUs, if the rules let the guest in on all of them."""
        gpus = self.draft.gpus_of(host.record)
        return gpus if all(self.draft.accepts(gpu, guest, size) for gpu in gpus) else None

    def fit(self, guest: JobView, kind: HostKind, host: Job, cap: float) -> GangFit | None:
        """Return the largest sub-batch with which neither job slows down by more than the cap, if there is one."""
        perf = self.draft.view.perf
        for size in guest.shape.sizes:
            if size.memory > kind.memory_left:
                continue
            guest_xi = perf.slowdown(guest.job, size.accumulation, [(host, kind.accumulation)])
            host_xi = perf.slowdown(host, kind.accumulation, [(guest.job, size.accumulation)])
            if guest_xi <= min(cap, guest.job.max_slowdown or cap) and host_xi <= min(cap, kind.max_slowdown or cap):
                return GangFit(size, guest_xi, host_xi)
        return None

    def fits(self, guest: JobView, cap: float) -> list[tuple[GangFit, Resident]]:
        """Return the fit with every host of the guest's gang size, kind by kind, where neither job exceeds the cap."""
        found = []
        for kind, sample in self.kinds():
            fit = self.fit(guest, kind, sample, cap)
            if fit is not None:
                found += [(fit, host) for host in self.hosts(kind, guest.shape.gpus)]
        return found
