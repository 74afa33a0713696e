"""SJF-BSBF: shortest job first with best sharing benefit first, the paper's policy (Algorithms 1 and 2, corrected)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from carpool.core.draft import Draft
from carpool.core.model import Decision, GpuId
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, Explanation, option, shortest_first
from carpool.policies.sharing.candidates import Candidate, Candidates, OptionCache
from carpool.policies.sharing.explain import ASKED_NOT_TO_SHARE, FITS_BESIDE_NO_JOB, compare_hosts
from carpool.policies.sharing.pair import WAITING_WINS, total_speed
from carpool.policies.sharing.shortfalls import SearchChance, Shortfalls


class JoinOutcome(Enum):
    """What came of the attempt to let a job join running jobs."""

    JOINED = auto()
    WAITS = auto()
    """Its hosts cannot agree on a sub-batch. A longer job may find other hosts."""
    HOPELESS = auto()
    """Too few hosts gain. A longer job of this shape gains with even fewer and need not be tried."""


@dataclass
class SjfBsbf(BasePolicy):
    """Shortest job first; a job that finds no free GPUs joins running jobs where sharing beats waiting (Theorem 1)."""

    name = "sjf-bsbf"
    floor: float = option(0.0, "minimum total speed, 1/ξ + 1/ξ, of a pair that may share; 0.95 is a good choice")
    single_host: bool = option(False, "prefer one host with enough GPUs to several hosts that make better pairs")

    def __post_init__(self) -> None:
        self._options = OptionCache()
        self._shortfalls = Shortfalls(self._options, self.floor)

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        if not len(view.queue):
            return []
        hopeless = self._shortfalls.begin(view)
        if len(hopeless) == len(view.queue.buckets):
            return []
        draft = Draft(view)
        candidates = Candidates(draft, self._options)
        pending = draft.pending(without=hopeless)
        for job in pending:  # Alg. 1, l. 2
            chance = self._shortfalls.chance(draft, job)
            if chance is not SearchChance.OPEN:
                if chance is SearchChance.NONE:
                    pending.skip_alike()
                continue
            if draft.start(job, "it is the shortest job in the queue that fits"):  # l. 6–7
                continue
            if self._join(draft, job, candidates) is JoinOutcome.HOPELESS:
                pending.skip_alike()
        return draft.decisions

    def explain(self, view: View, job: JobView) -> Explanation | None:
        if view.jobs_per_gpu == 1:
            return None
        if job.shape.exclusive:
            return ASKED_NOT_TO_SHARE
        compared = tuple(compare_hosts(view, job))
        if not compared:
            return FITS_BESIDE_NO_JOB
        fast = tuple(c for c in compared if total_speed(c.guest_slowdown, c.host_slowdown) >= self.floor)
        if not fast:
            return Explanation(f"and no pair reaches a total speed of {self.floor:g} (option floor)", compared)
        if fast[0].pays:
            return Explanation("but too few GPUs have such a host for the whole gang", fast)
        return Explanation(WAITING_WINS, fast)

    def _join(self, draft: Draft, job: JobView, candidates: Candidates) -> JoinOutcome:
        """Share with the hosts that make the best pairs (Alg. 1, l. 9–17), or wait."""
        shape = job.shape
        if shape.exclusive or candidates.too_few_for(job) or not draft.may_start(job):
            return JoinOutcome.HOPELESS
        at_least = 1
        while True:
            gpus, hosts = self._gather(draft, job, candidates, at_least)
            if not hosts or len(gpus) + draft.free_count < shape.gpus:
                if at_least > 1:
                    return JoinOutcome.WAITS
                candidates.note_too_few(job)
                return JoinOutcome.HOPELESS
            accumulations = {host.option.size.accumulation for host in hosts}
            if len(accumulations) > 1:
                at_least = max(accumulations)  # one sub-batch for the whole gang: every pair is checked again with it
                continue
            size = hosts[0].option.size
            if len(gpus) < shape.gpus:
                gpus += draft.some_free(job, shape.gpus - len(gpus), size)
                if len(gpus) < shape.gpus:
                    return JoinOutcome.WAITS
            draft.assign(job, gpus, size, _why(hosts))
            return JoinOutcome.JOINED

    def _gather(
        self, draft: Draft, job: JobView, candidates: Candidates, at_least: int
    ) -> tuple[list[GpuId], list[Candidate]]:
        """Return the GPUs of the best hosts until the gang is whole, or as many as there are, and these hosts."""
        gpus: list[GpuId] = []
        hosts: list[Candidate] = []
        found: Iterable[Candidate] = candidates.for_guest(job, at_least)
        if self.floor:
            found = (host for host in found if host.option.total_speed >= self.floor)
        if self.single_host:
            found = list(found)
            found.sort(key=lambda host: len(host.gpus) < job.shape.gpus)  # stable: the best pairs stay in front
        for host in found:
            short = job.shape.gpus - len(gpus)
            hosts.append(host)
            too_many = len(host.gpus) > short
            gpus += draft.view.topology.most_consolidated(host.gpus, short) if too_many else host.gpus
            if len(host.gpus) >= short:
                break
        return gpus, hosts


def _why(hosts: list[Candidate]) -> str:
    names = [name for host in hosts for name in host.names]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    guest_xi = max(host.option.guest_xi for host in hosts)
    host_xi = max(host.option.host_xi for host in hosts)
    accumulation = hosts[0].option.size.accumulation
    split = f", batch split into {accumulation}" if accumulation > 1 else ""
    shown, take = (f"job {shown}", f"job {shown} takes") if len(names) == 1 else (f"jobs {shown}", "they take up to")
    slower = f"it takes {guest_xi:.2f}× as long{split}, {take} {host_xi:.2f}× as long"
    return f"it shares with {shown}: {slower}, and it still ends sooner than if it waited"
