"""Pollux: co-adaptive scheduling of elastic jobs for goodput (Qiao et al., OSDI 2021).

Every round redistributes the GPUs among all jobs and gives each elastic job the batch that suits its GPUs and the phase
of its training. The objective is Pollux's: the power mean of the jobs' speed-ups over a fair share, with its penalty
for restarts. The search (`shares`) is deterministic, where Pollux's is genetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

from carpool.core.elastic import Scaling
from carpool.core.model import Allocation, Decision, GpuId, Job
from carpool.core.perf import Placement
from carpool.core.shapes import Size
from carpool.core.tenants import Entitlement
from carpool.core.view import JobView, View
from carpool.errors import InputError
from carpool.policies.base import BasePolicy, next_round, option
from carpool.policies.pollux.goodput import NOTHING, BatchChoice, ElasticKind, Goodputs
from carpool.policies.pollux.shares import Contender, GpusBySeq, Placer, UserAllowance, share_out

LEAST = 1e-3
"""Summand of every speed-up, so that a job without GPUs counts as very slow, not infinitely slow; Pollux's value."""
FAIREST = 50.0
"""Largest exponent: greater ones decide the same, and 0.001 to their power overflows."""
YOUNGEST_S = 1.0
"""Minimum age of a job in seconds: at age 0, Pollux's penalty would make it worth nothing."""


@dataclass
class Pollux(BasePolicy):
    """Every round chooses the GPUs and batches of elastic jobs anew, for the best goodput that is fair to all."""

    name = "pollux"
    entitlement = Entitlement(far_below=False, held_exponent=2.0)  # a gang takes the place of several small jobs here
    round_s: float = option(60.0, "interval of decisions in seconds; 0: decide whenever something happens")
    restart_s: float = option(30.0, "seconds that the simulator charges when a job starts again on other GPUs")  # type: ignore[misc]
    start_s: float = option(30.0, "seconds that the simulator charges when a job starts for the first time")  # type: ignore[misc]
    fairness: float = option(1.0, "minus the exponent of the power mean: 0 is the geometric mean, more is fairer")

    def __post_init__(self) -> None:
        if self.fairness > FAIREST:
            raise InputError(
                f"option fairness of policy pollux: {self.fairness:g} must be a number from 0 to {FAIREST:g}"
            )
        if 0.0 < self.round_s < 1.0:
            raise InputError(f"option round_s of policy pollux: {self.round_s:g} must be 0 or at least 1")
        self._goodputs = Goodputs()

    @property
    def in_rounds(self) -> bool:
        return self.round_s > 0.0

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.service(now), job.job.submitted)

    def wake(self, view: View) -> float | None:
        busy = len(view.queue) or any(True for _ in view.running)
        return next_round(view.now, self.round_s) if busy and self.round_s else None

    def decide(self, view: View) -> list[Decision]:
        self._goodputs.under(view.perf, view.belief_version)
        this = PolluxRound(self, view, self._goodputs)
        return this.decisions(this.best_gpus()) if this.contenders else []


class PolluxRound:
    """One round: which jobs ask for GPUs, what each number of GPUs costs each of them, and what is decided."""

    def __init__(self, policy: Pollux, view: View, goodputs: Goodputs) -> None:
        self.policy = policy
        self.view = view
        self.goodputs = goodputs
        topology = view.topology
        self.node_gpus = max((len(topology.nodes[n].gpus) for n in topology.present.values()), default=1)
        asking, self.closed = list(view.queue), dict[GpuId, bool]()
        for job in view.running:
            if self._may_move(job):
                asking.append(job)
            else:
                spans = topology.nodes_spanned(job.gpus) > 1
                self.closed.update({gpu: spans or self.closed.get(gpu, False) for gpu in job.gpus})
        if topology.closed_gpus:
            for gpu in topology.node_of:
                if topology.is_closed(gpu):
                    self.closed.setdefault(gpu, False)
        self.gpus = topology.total() - len(self.closed)
        self.fair = max(1, -(-self.gpus // max(1, len(asking))))
        self.node_share = len(topology.present) / max(1, topology.total())
        self.scaled: dict[int, ScaledJob] = {}  # by seq
        self.tenant_ranks = view.ranks_of_holders() if view.shares_count else {}
        self.contenders = [found for job in asking if (found := self._contender(job)) is not None]
        self.ranks_differ = len({contender.urgency[1:] for contender in self.contenders}) > 1
        """Whether the tenants of some jobs come before those of others."""

    def _may_move(self, job: JobView) -> bool:
        """Return whether a job may be moved: it runs, has no mates, can be suspended, and its node is open."""
        topology = self.view.topology
        alone = all(len(self.view.jobs_on(gpu)) == 1 and not topology.is_closed(gpu) for gpu in job.gpus)
        return job.computing and job.job.can_suspend and alone

    # ---- what GPUs are worth to a job ------------------------------------------------------------------------------

    def _contender(self, record: JobView) -> Contender | None:
        """Return the job with its costs; None where no open GPUs suffice for it."""
        now, spanned = self.view.now, self.view.topology.nodes_spanned
        scaled = ScaledJob.of(record, self.view, self.goodputs)
        if scaled is not None:
            self.scaled[record.seq] = scaled
            sizes, eligible = self._sizes(scaled, record), scaled.eligible
        else:
            size = self._own_size(record)
            sizes, eligible = (record.shape.gpus,), self.view.topology.wholly_with_memory(size.memory) if size else 0
        if not eligible or not sizes:
            return None
        fair = self._fair_goodput(scaled) if scaled else float(self.fair)
        age, delay = max(YOUNGEST_S, now - record.job.submitted), self.policy.restart_s
        # the share of its speed-up that one more restart leaves
        kept = max(0.0, age - max(0, record.attempt - 1) * delay) / (age + delay)
        known: dict[tuple[int, bool], float] = {}

        def cost(gpus: int, several: bool) -> float:
            found = known.get((gpus, several))
            if found is None:
                goodput = scaled.goodput(gpus, several) if scaled else gpus
                found = known[gpus, several] = self._cost(kept * goodput / fair)
            return found

        stay = self._cost(0.0)
        if record.gpus:
            several = spanned(record.gpus) > 1
            stay = self._cost((scaled.goodput(len(record.gpus), several) if scaled else len(record.gpus)) / fair)
        rank = (-record.shape.priority, record.service(now), record.job.submitted, record.seq)
        return Contender(record, rank, sizes, cost, self._cost(0.0), stay, eligible, self._urgency(record))

    def _urgency(self, record: JobView) -> tuple[int, ...]:
        view = self.view
        if not view.shares_count:
            return (-record.shape.priority,)
        return (-record.shape.priority, *(self.tenant_ranks.get(record.seq) or view.rank_of(record)))

    def _fair_goodput(self, scaled: "ScaledJob") -> float:
        gpus = min(self.fair, scaled.most)
        return scaled.goodput(gpus, gpus > self.node_gpus) or scaled.goodput(1, False)

    def _cost(self, speedup: float) -> float:
        """Return a job's part of the power mean, which is best where the sum of costs is least."""
        value = speedup * self.node_share + LEAST
        return -log(value) if self.policy.fairness == 0.0 else value**-self.policy.fairness

    def _sizes(self, scaled: "ScaledJob", record: JobView) -> tuple[int, ...]:
        """Return the numbers of GPUs to try: at most twice as many as the job ever had, half nodes beyond the first."""
        most = min(scaled.most, max(1, 2 * record.most_gpus), self.gpus)
        half = max(1, self.node_gpus // 2)
        sizes = {*range(1, min(most, self.node_gpus) + 1), *range(self.node_gpus, most + 1, half), len(record.gpus)}
        return tuple(size for size in sorted(sizes) if size and scaled.goodput(size, size > self.node_gpus) > 0.0)

    def _own_size(self, record: JobView) -> Size | None:
        """Return the size at which a job that is not elastic may start: the largest sub-batch that enough GPUs hold."""
        topology = self.view.topology
        for size in record.shape.sizes:
            if topology.total(topology.wholly_with_memory(size.memory)) >= record.shape.gpus:
                return size
        return None

    # ---- what is decided -------------------------------------------------------------------------------------------

    def best_gpus(self) -> GpusBySeq:
        """Return the best of three plans: new shares with and without moving small jobs, and no job moved at all.

        Where tenants' ranks differ, new shares may be refused again and again: they give the first GPUs to jobs that
        cost more than those that they displace. Jobs must not wait beside free GPUs meanwhile, so that the last of the
        plans gives these to them.
        """
        contenders, view = self.contenders, self.view
        anew = share_out(contenders, self.gpus, self.node_gpus, UserAllowance(view, contenders))
        same = {c.record.seq: c.held for c in contenders if c.held}
        if anew == same:
            return {c.record.seq: c.record.gpus for c in contenders if c.held}
        if self.ranks_differ:
            same |= self._shares_of_free_gpus(self.gpus - sum(same.values()))
        plans = []
        for shares, displace in ((anew, False), (anew, True), (same, False)):
            placer = Placer(view.topology, self.closed, displace)
            placer.place(contenders, shares)
            plans.append(placer)
        return min(plans, key=lambda plan: (-self._entitled_in(plan), plan.cost)).gpus_by_seq

    def _shares_of_free_gpus(self, free: int) -> dict[int, int]:
        """Return the numbers of GPUs of waiting jobs, by `seq`, if no other job gets fewer or more than it has."""
        allowance = UserAllowance(self.view, self.contenders)
        for contender in self.contenders:
            if contender.held:
                allowance.take(contender.record.shape, 1, contender.held)
        waiting = [contender for contender in self.contenders if not contender.held]
        return share_out(waiting, free, self.node_gpus, allowance)

    def _entitled_in(self, plan: Placer) -> int:
        """Return how many jobs get GPUs that their groups are entitled to. It goes before the cost of a plan: a group
        that must displace others to get its part would never get it otherwise."""
        if not self.ranks_differ:
            return 0
        return sum(
            contender.urgency[1] == 0 for contender in self.contenders if contender.record.seq in plan.gpus_by_seq
        )

    def decisions(self, gpus_by_seq: GpusBySeq) -> list[Decision]:
        """Return what changes; a job that stays as it is now is not mentioned."""
        stops, starts = [], []
        for contender in self.contenders:
            record = contender.record
            gpus = gpus_by_seq.get(record.seq, ())
            if not gpus:
                if record.gpus:
                    stops.append(Decision(record.job.id, None, "other jobs gain more from its GPUs"))
                continue
            allocation = self._allocation(record, gpus)
            if allocation != Allocation(record.gpus, record.accumulation, record.batch):
                starts.append(Decision(record.job.id, allocation, _why(record, allocation)))
        return stops + starts

    def _allocation(self, record: JobView, gpus: tuple[GpuId, ...]) -> Allocation:
        scaled = self.scaled.get(record.seq)
        choice = scaled.choice(len(gpus), self.view.topology.nodes_spanned(gpus) > 1) if scaled else NOTHING
        if choice.batch:
            return Allocation(gpus, choice.accumulation, choice.batch)
        if gpus == record.gpus:
            return Allocation(gpus, record.accumulation, record.batch)
        size = self._own_size(record)
        assert size is not None
        return Allocation(gpus, size.accumulation)


@dataclass(frozen=True, slots=True)
class ScaledJob:
    """An elastic job, and its goodput on any number of GPUs."""

    job: Job
    kind: ElasticKind
    scaling: Scaling
    most: int
    """Maximum number of GPUs that the task can use."""
    eligible: int
    """Nodes on which it fits, one bit each."""
    goodputs: Goodputs
    fewest_nodes: Callable[[int], int]

    @classmethod
    def of(cls, record: JobView, view: View, goodputs: Goodputs) -> "ScaledJob | None":
        """Return None where its GPUs and batch must not change, or where its smallest micro-step fits nowhere."""
        job, topology = record.job, view.topology
        scaling = view.perf.scaling(job)
        if scaling is None:
            return None
        eligible = topology.wholly_with_memory(goodputs.least_memory(job, scaling))
        memory = topology.smallest_memory(eligible)
        samples = goodputs.max_sub_batch(job, scaling, memory)
        noise = view.perf.noise(job, job.iterations - record.iterations_left(view.now))
        kind = ElasticKind(job.model, noise, samples, job.can_shrink)
        most = scaling.max_batch // scaling.min_sub_batch
        if scaling.max_gpus is not None:
            most = min(most, scaling.max_gpus)
        found = cls(job, kind, scaling, most, eligible, goodputs, view.perf.fewest_nodes)
        return found if found.goodput(1, False) > 0.0 else None

    def choice(self, gpus: int, several: bool) -> BatchChoice:
        nodes = max(2, self.fewest_nodes(gpus)) if several else 1
        return self.goodputs.best(self.kind, self.job, self.scaling, Placement(gpus, nodes))

    def goodput(self, gpus: int, several: bool) -> float:
        return self.choice(gpus, several).goodput


def _why(record: JobView, allocation: Allocation) -> str:
    gpus = f"{len(allocation.gpus)} GPU{'s' * (len(allocation.gpus) > 1)}"
    batch = "" if allocation.batch is None else f", batch {allocation.batch * len(allocation.gpus)} in all"
    if not record.gpus:
        return f"it starts on {gpus}{batch}: its share for the best goodput of all jobs"
    if record.gpus == allocation.gpus:
        return f"this phase of its training runs better with another batch{batch}"
    return f"moves from {len(record.gpus)} to {gpus}{batch}: the best goodput of all jobs, restart included"
