"""Pollux: co-adaptive scheduling of elastic jobs for goodput (Qiao et al., OSDI 2021).

Every round the GPUs are shared out anew among all jobs, and each elastic job gets the batch that suits its GPUs and the
phase of its training. The objective is Pollux's: the power mean of the jobs' speed-ups over a fair share, with its
penalty for restarts. The search (`shares.py`) is our own and draws no lots, where Pollux's is genetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

from carpool.core.elastic import Scaling
from carpool.core.model import Allocation, Decision, GpuId, Job, Status
from carpool.core.perf import Placement
from carpool.core.shapes import Size
from carpool.core.view import JobView, View
from carpool.errors import InputError
from carpool.policies.base import BasePolicy, next_round, option
from carpool.policies.pollux.goodput import NOTHING, Choice, Goodputs, Kind
from carpool.policies.pollux.shares import Allowance, Contender, JoinCandidates, Placer, share_out

LEAST = 1e-3
"""Added to every speed-up, so that a job without GPUs counts as very slow, not infinitely slow; Pollux's constant."""
FAIREST = 50.0
"""A greater exponent cannot be told from it, and 0.001 to its power is no number any more."""
YOUNGEST_S = 1.0
"""A job counts as at least this old: at age 0, Pollux's penalty would make it worth nothing."""


@dataclass
class Pollux(BasePolicy):
    """Every round, GPUs and batches of elastic jobs are chosen anew for the best goodput that is fair to all."""

    name = "pollux"
    round_s: float = option(60.0, "decide only at multiples of so many seconds; 0: whenever something happens")
    restart_s: float = option(30.0, "seconds the simulator charges when a job starts again on other GPUs")  # type: ignore[misc]
    start_s: float = option(30.0, "seconds the simulator charges when a job starts for the first time")  # type: ignore[misc]
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
        self._goodputs.under(view.perf)
        this = Round(self, view, self._goodputs)
        return this.decisions(this.best_places()) if this.contenders else []


class Round:
    """One round: who asks, what it would cost each to get so much, and what is decided."""

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
        self.gpus = topology.total() - len(self.closed)
        self.fair = max(1, -(-self.gpus // max(1, len(asking))))
        self.node_share = len(topology.present) / max(1, topology.total())
        self.scaled: dict[int, Scaled] = {}  # by order of submission
        self.contenders = [found for job in asking if (found := self._contender(job)) is not None]

    def _may_move(self, job: JobView) -> bool:
        """Who is just starting, is being cancelled, shares GPUs or cannot be suspended is left alone."""
        alone = all(len(self.view.jobs_on(gpu)) == 1 for gpu in job.gpus)
        return job.status is Status.RUNNING and job.job.can_checkpoint and alone

    # ---- what GPUs are worth to a job ------------------------------------------------------------------------------

    def _contender(self, record: JobView) -> Contender | None:
        """None: no open GPUs suffice for the job."""
        now, spanned = self.view.now, self.view.topology.nodes_spanned
        scaled = Scaled.of(record, self.view, self.goodputs)
        if scaled is not None:
            self.scaled[record.seq] = scaled
            sizes, eligible = self._sizes(scaled, record), scaled.eligible
        else:
            size = self._cut(record)
            sizes, eligible = (record.shape.gpus,), self.view.topology.wholly_with_memory(size.memory) if size else 0
        if not eligible or not sizes:
            return None
        fair = self._fair_goodput(scaled) if scaled else float(self.fair)
        age, delay = max(YOUNGEST_S, now - record.job.submitted), self.policy.restart_s
        kept = max(0.0, age - max(0, record.attempt - 1) * delay) / (age + delay)  # what a restart leaves of it
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
        return Contender(record, rank, sizes, cost, self._cost(0.0), stay, eligible)

    def _fair_goodput(self, scaled: "Scaled") -> float:
        gpus = min(self.fair, scaled.most)
        return scaled.goodput(gpus, gpus > self.node_gpus) or scaled.goodput(1, False)

    def _cost(self, speedup: float) -> float:
        """A job's part of the power mean, which is best where the sum of costs is least."""
        value = speedup * self.node_share + LEAST
        return -log(value) if self.policy.fairness == 0.0 else value**-self.policy.fairness

    def _sizes(self, scaled: "Scaled", record: JobView) -> tuple[int, ...]:
        """At most twice the GPUs that the job ever had; half nodes beyond the first."""
        most = min(scaled.most, max(1, 2 * record.most_gpus), self.gpus)
        half = max(1, self.node_gpus // 2)
        sizes = {*range(1, min(most, self.node_gpus) + 1), *range(self.node_gpus, most + 1, half), len(record.gpus)}
        return tuple(size for size in sorted(sizes) if size and scaled.goodput(size, size > self.node_gpus) > 0.0)

    def _cut(self, record: JobView) -> Size | None:
        """The size at which a job that is not elastic may start: the largest sub-batch that enough GPUs hold."""
        topology = self.view.topology
        for size in record.shape.sizes:
            if topology.total(topology.wholly_with_memory(size.memory)) >= record.shape.gpus:
                return size
        return None

    # ---- what is decided -------------------------------------------------------------------------------------------

    def best_places(self) -> JoinCandidates:
        """The best of three plans: all shared out anew, with and without moving small jobs, and nobody moved at all."""
        contenders, view = self.contenders, self.view
        anew = share_out(contenders, self.gpus, self.node_gpus, Allowance(view, contenders))
        same = {c.record.seq: c.held for c in contenders if c.held}
        if anew == same:
            return {c.record.seq: c.record.gpus for c in contenders if c.held}
        plans = []
        for shares, displace in ((anew, False), (anew, True), (same, False)):
            seating = Placer(view.topology, self.closed, displace)
            seating.seat(contenders, shares)
            plans.append(seating)
        return min(plans, key=lambda plan: plan.cost).places

    def decisions(self, places: JoinCandidates) -> list[Decision]:
        """What changes; whoever is to be where and as it is now is not mentioned."""
        stops, starts = [], []
        for contender in self.contenders:
            record = contender.record
            gpus = places.get(record.seq, ())
            if not gpus:
                if record.gpus:
                    stops.append(Decision(record.job.id, None, "others gain more from its GPUs"))
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
        size = self._cut(record)
        assert size is not None
        return Allocation(gpus, size.accumulation)


@dataclass(frozen=True, slots=True)
class Scaled:
    """An elastic job, and what the goodput of other GPUs would be."""

    job: Job
    kind: Kind
    scaling: Scaling
    most: int
    """GPUs that the task can use."""
    eligible: int
    """The nodes on which it fits, one bit each."""
    goodputs: Goodputs
    fewest_nodes: Callable[[int], int]

    @classmethod
    def of(cls, record: JobView, view: View, goodputs: Goodputs) -> "Scaled | None":
        """None: its GPUs and its batch are not to be changed, or its smallest micro-step fits nowhere."""
        job, topology = record.job, view.topology
        scaling = view.perf.scaling(job)
        if scaling is None:
            return None
        eligible = topology.wholly_with_memory(goodputs.least_memory(job, scaling))
        memory = topology.smallest_memory(eligible)
        samples = goodputs.max_sub_batch(job, scaling, memory)
        noise = view.perf.noise(job, job.iterations - record.iterations_left(view.now))
        kind = Kind(job.model, noise, samples, job.can_shrink)
        most = scaling.max_batch // scaling.min_sub_batch
        if scaling.max_gpus is not None:
            most = min(most, scaling.max_gpus)
        found = cls(job, kind, scaling, most, eligible, goodputs, view.perf.fewest_nodes)
        return found if found.goodput(1, False) > 0.0 else None

    def choice(self, gpus: int, several: bool) -> Choice:
        nodes = max(2, self.fewest_nodes(gpus)) if several else 1
        return self.goodputs.best(self.kind, self.job, self.scaling, Placement(gpus, nodes))

    def goodput(self, gpus: int, several: bool) -> float:
        return self.choice(gpus, several).goodput


def _why(record: JobView, allocation: Allocation) -> str:
    gpus = f"{len(allocation.gpus)} GPU{'s' * (len(allocation.gpus) > 1)}"
    batch = "" if allocation.batch is None else f", batch {allocation.batch * len(allocation.gpus)} in all"
    if not record.gpus:
        return f"starts on {gpus}{batch}: its share for the best goodput of all"
    if record.gpus == allocation.gpus:
        return f"another batch suits this phase of its training{batch}"
    return f"goes from {len(record.gpus)} to {gpus}{batch}: the best goodput of all, restart included"
