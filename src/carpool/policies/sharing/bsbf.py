"""SJF-BSBF: shortest job first with best sharing benefit first, the paper's policy (Algorithms 1 and 2, corrected)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from carpool.core.draft import Draft
from carpool.core.model import Decision, GpuId
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option, shortest_first
from carpool.policies.sharing.candidates import Candidate, Candidates, OptionCache


class Outcome(Enum):
    """What became of a job that finds no free GPUs."""

    JOINED = auto()
    WAITS = auto()
    """Its hosts cannot agree on a sub-batch; a longer job may find others."""
    HOPELESS = auto()
    """Too few hosts gain. A longer job of this shape gains with fewer still: it need not be tried."""


@dataclass
class SjfBsbf(BasePolicy):
    """Shortest job first; what finds no free GPUs joins running jobs where, by Theorem 1, sharing beats waiting."""

    name = "sjf-bsbf"
    floor: float = option(0.0, "share only in pairs whose total speed, 1/ξ + 1/ξ, is at least this; 0.95 is wise")
    single_host: bool = option(False, "prefer one host with GPUs enough to a union of better pairs")

    def __post_init__(self) -> None:
        self._options = OptionCache()

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        candidates = Candidates(draft, self._options)
        pending = draft.pending(draft.free_count + draft.shareable().bit_count())
        for job in pending:  # Alg. 1, l. 2
            if draft.start(job, "shortest in the queue that fits"):  # l. 6–7
                continue
            if self._join(draft, job, candidates) is Outcome.HOPELESS:
                pending.skip_alike()
        return draft.decisions

    def _join(self, draft: Draft, job: JobView, candidates: Candidates) -> Outcome:
        """Share with the hosts that make the best pairs (Alg. 1, l. 9–17), or wait."""
        shape = job.shape
        if shape.exclusive or not draft.may_start(job):
            return Outcome.HOPELESS
        if draft.free_count + draft.shareable().bit_count() < shape.gpus:
            return Outcome.HOPELESS
        at_least = 1
        while True:
            gpus, hosts = self._gather(draft, job, candidates, at_least)
            if not hosts or len(gpus) + draft.free_count < shape.gpus:
                return Outcome.HOPELESS if at_least == 1 else Outcome.WAITS
            finest = max((host.option.size for host in hosts), key=lambda size: size.accumulation)
            if any(host.option.size.accumulation != finest.accumulation for host in hosts):
                at_least = finest.accumulation  # one sub-batch for the whole gang: every pair is checked again with it
                continue
            gpus += draft.some_free(shape.gpus - len(gpus), finest)
            if len(gpus) < shape.gpus:
                return Outcome.WAITS
            draft.assign(job, gpus, finest, _why(hosts))
            return Outcome.JOINED

    def _gather(
        self, draft: Draft, job: JobView, candidates: Candidates, at_least: int
    ) -> tuple[list[GpuId], list[Candidate]]:
        """The best hosts' GPUs until the gang is whole, or as many as there are."""
        gpus: list[GpuId] = []
        hosts: list[Candidate] = []
        found: Iterable[Candidate] = candidates.for_guest(job, at_least)
        if self.floor:
            found = (host for host in found if host.option.total_speed >= self.floor)
        if self.single_host:
            found = list(found)
            found.sort(key=lambda host: len(host.gpus) < job.shape.gpus)  # stable: the best pair among those
        for host in found:
            short = job.shape.gpus - len(gpus)
            hosts.append(host)
            cut = len(host.gpus) > short
            gpus += draft.view.topology.most_consolidated(host.gpus, short) if cut else host.gpus
            if len(host.gpus) >= short:
                break
        return gpus, hosts


def _why(hosts: list[Candidate]) -> str:
    names = [name for host in hosts for name in host.hosts]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    guest_xi = max(host.option.guest_xi for host in hosts)
    host_xi = max(host.option.host_xi for host in hosts)
    cut = f", batch cut in {hosts[0].option.size.accumulation}" if hosts[0].option.size.accumulation > 1 else ""
    return f"shares with {shown}: {guest_xi:.2f} times slower (they {host_xi:.2f}){cut}, yet sooner than by waiting"
