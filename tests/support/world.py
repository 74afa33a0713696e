"""A small vocabulary for tests: describe a cluster with jobs, ask a policy, and read its plan as words.

given(cluster("1x4"), running("a", gpus=4), pending("b", gpus=2)).expect(SjfBsbf(), b="shares a")
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from carpool.core import events as ev
from carpool.core.elastic import NoisePhase, Scaling
from carpool.core.model import Allocation, Decision, Job, Limits, Node
from carpool.core.perf import AllReduce, ConstantInterference, FittedModel, Interference, Task
from carpool.core.rules import check
from carpool.core.state import State

GIB = 2**30
NO_COMM = AllReduce(0.0, 0.0)


def task(
    alpha: float = 0.1,
    beta: float = 0.01,
    memory_gib: float = 1.0,
    per_sample_gib: float = 0.1,
    scaling: Scaling | None = None,
) -> Task:
    return Task(alpha, beta, NO_COMM, NO_COMM, 1.0, round(memory_gib * GIB), per_sample_gib * GIB, scaling)


SCALING = Scaling(8, 512, 2, 64, (NoisePhase(0.25, 32.0), NoisePhase(1.0, 512.0)))
TASKS = {
    "plain": task(scaling=SCALING),
    "thin": task(memory_gib=0.5, per_sample_gib=0.01),
    "fat": task(memory_gib=6.0, scaling=Scaling(4, 64, 1, 256, (NoisePhase(1.0, 100.0),), max_gpus=3)),
}


def model(
    xi: float | Interference = 1.5, node_gpus: int = 4, *, ignore_placement: bool = False, ignore_memory: bool = False
) -> FittedModel:
    table = ConstantInterference(xi) if isinstance(xi, int | float) else xi
    return FittedModel(TASKS, table, node_gpus, ignore_placement=ignore_placement, ignore_memory=ignore_memory)


def nodes(shape: str, memory_gib: float = 16.0) -> list[Node]:
    number, size = (int(part) for part in shape.split("x"))
    return [Node(f"n{n}", tuple(range(n * size, (n + 1) * size)), round(memory_gib * GIB)) for n in range(number)]


def job(name: str, gpus: int = 1, left: float = 1000.0, submitted: float = 0.0, **attributes: object) -> Job:
    """Return a job that takes `left` seconds alone, one second per iteration.

    `submitted` sorts the job. It does not move the clock: situations are at time 0.
    """
    iterations = max(1, round(left))
    plain = Job(name, submitted, "plain", gpus, 8, iterations, duration_s=left)
    return replace(plain, **attributes)


@dataclass
class Part:
    """One job of a situation and where it runs."""

    job: Job
    on: tuple[int, ...] | None = None
    accumulation: int = 1
    runs: bool = False
    starting: bool = False


def running(
    name: str, gpus: int = 1, on: Sequence[int] | None = None, accumulation: int = 1, **attributes: object
) -> Part:
    if on is not None:
        gpus = len(on)
    return Part(job(name, gpus, **attributes), None if on is None else tuple(on), accumulation, runs=True)


def starting(name: str, gpus: int = 1, **attributes: object) -> Part:
    return replace(running(name, gpus, **attributes), starting=True)


def pending(name: str, gpus: int = 1, **attributes: object) -> Part:
    return Part(job(name, gpus, **attributes))


@dataclass
class cluster:  # noqa: N801 - reads as a word
    shape: str = "1x4"
    memory_gib: float = 16.0
    jobs_per_gpu: int = 2
    resident_per_gpu: int = 8
    limits: dict[str, Limits] = field(default_factory=dict)


class Situation:
    """A cluster with jobs, from which states are made."""

    def __init__(self, where: cluster, parts: Sequence[Part], xi: float | Interference) -> None:
        self.cluster = where
        self.parts = parts
        self.model = model(xi, int(where.shape.split("x")[1]))

    def state(self, sort_key: Callable[..., tuple[float, ...]]) -> State:
        state = State(self.model, sort_key, self.cluster.jobs_per_gpu, self.cluster.resident_per_gpu)
        for node in nodes(self.cluster.shape, self.cluster.memory_gib):
            state.apply(ev.NodeJoined(0.0, node))
        for user, limits in self.cluster.limits.items():
            state.apply(ev.LimitsChanged(0.0, user, limits))
        for part in self.parts:
            state.apply(ev.Submitted(0.0, part.job))
        for part in self.parts:
            if part.runs:
                gpus = part.on or state.free.pick(part.job.gpus)
                assert gpus is not None, f"no room for {part.job.id}"
                plan = (Decision(part.job.id, Allocation(gpus, part.accumulation), "given"),)
                check(state, plan)
                state.apply(ev.Planned(0.0, plan))
        for part in self.parts:
            if part.runs and not part.starting:
                state.apply(ev.Started(0.0, part.job.id, 1))
        return state

    def plan(self, policy) -> dict[str, str]:
        """Return what the policy does with each job, in words; jobs without a decision wait or run on."""
        state = self.state(policy.key)
        decisions = policy.decide(state)
        check(state, decisions)
        return {**{p.job.id: "runs" if p.runs else "waits" for p in self.parts}, **describe(state, decisions)}

    def expect(self, policy, **outcome: str) -> None:
        plan = self.plan(policy)
        assert {name: plan[name] for name in outcome} == outcome


def describe(state: State, decisions: Sequence[Decision]) -> dict[str, str]:
    """Return each decision in words: "starts", "stops" or "shares a b", with the accumulation where it is above 1."""
    stopped = {d.job for d in decisions if d.allocation is None}
    on: dict[int, list[str]] = {}
    for decision in decisions:
        for gpu in decision.allocation.gpus if decision.allocation else ():
            on.setdefault(gpu, []).append(decision.job)
    words = {}
    for decision in decisions:
        if decision.allocation is None:
            words[decision.job] = "stops"
            continue
        mates = set()
        for gpu in decision.allocation.gpus:
            mates |= {r.job.id for r in state.jobs_on(gpu)} | set(on[gpu][: on[gpu].index(decision.job)])
        mates -= stopped
        split = f" in {decision.allocation.accumulation}" if decision.allocation.accumulation > 1 else ""
        words[decision.job] = (f"shares {' '.join(sorted(mates))}" if mates else "starts") + split
    return words


def given(where: cluster, *parts: Part, xi: float | Interference = 1.5) -> Situation:
    return Situation(where, parts, xi)
