"""The contents of a profile as frozen values: the GPU, fitted tasks, measured pairs and groups, raw points.

`schema.py` reads and writes them, `fit.py` computes them, and `Profile` converts them to the core's types: tasks and
one interference table per sharing mechanism.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from carpool.core.elastic import Scaling
from carpool.core.perf import AllReduce, MeasuredPair, TableInterference, Task
from carpool.profile.fields import ProfileError
from carpool.profile.measure.raw import Measurement

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU model of a profile; `memory_bytes` is the memory that jobs can use."""

    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative error of t_iter over all points of a task, and medians by placement."""

    median: float
    p90: float
    points: int
    left_out: int = 0
    why_left_out: str | None = None
    median_one_gpu: float | None = None
    median_one_node: float | None = None
    median_several_nodes: float | None = None
    held_out_median: float | None = None
    """Median error of points that were left out of the fit."""
    held_out_points: int | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """How busy a task keeps the GPU: an iteration takes t(b) = (α⁴ + (β·b)⁴)^¼, and the GPU works for β·b of it."""

    alpha_s: float
    beta_s: float

    def share(self, samples: int) -> float:
        """Return u in (0, 1], the share of an iteration in which the GPU works."""
        working = self.beta_s * samples
        return working / math.pow(self.alpha_s**4 + working**4, 0.25)


@dataclass(frozen=True, slots=True)
class Kappa:
    """κ of ξ = 1 + κ·u_a·u_b for pairs that were not measured, with its median relative error on measured pairs."""

    kappa: float
    median_error: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory mem(b) = static + per sample · b. The static part includes the context and the gradients listed here."""

    static_bytes: int
    bytes_per_sample: float
    source: str
    context_bytes: int | None = None
    gradient_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """The share of a GPU that a task needs at a batch. In a group, ξ is at least the sum of all demands."""

    mechanism: str
    batch: int
    demand: float


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """One training task: the constants of `core.perf.Task` and their quality."""

    alpha_s: float
    beta_s: float
    intra: AllReduce
    inter: AllReduce
    delta: float
    memory: Memory | None = None
    batch_norm: bool | None = None
    error: FitError | None = None
    source: str | None = None
    busy: Busy | None = None
    demands: tuple[Demand, ...] = ()
    scaling: Scaling | None = None
    """Limits and statistical efficiency of other batches, if known."""
    scaling_error: FitError | None = None
    """Absolute error of the efficiency: 0.01 is one hundredth."""
    knee: float | None = None
    """Exponent of the bend of eq. 3; None for a straight line."""

    def core(self) -> Task:
        static, slope = (self.memory.static_bytes, self.memory.bytes_per_sample) if self.memory else (0, 0.0)
        constants = (self.alpha_s, self.beta_s, self.intra, self.inter, self.delta)
        return Task(*constants, static, slope, self.scaling, self.knee or 1.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs on one GPU: ξ of each at the measured batches (0: any), with the expected interval of a repetition."""

    a: str
    batch_a: int
    b: str
    batch_b: int
    mechanism: str
    xi_a: float
    xi_b: float
    interval_a: Interval | None = None
    interval_b: Interval | None = None
    runs: int = 1
    source: str | None = None

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        return self.mechanism, self.a, self.batch_a, self.b, self.batch_b

    def turned(self) -> "Pair":
        """Return the same pair with the second job first."""
        swapped = replace(self, a=self.b, batch_a=self.batch_b, b=self.a, batch_b=self.batch_a)
        return replace(swapped, xi_a=self.xi_b, xi_b=self.xi_a, interval_a=self.interval_b, interval_b=self.interval_a)

    def rounded(self, decimals: int) -> "Pair":
        """Return the pair with rounded values. The rounding is much finer than the difference between two runs."""

        def ends(interval: Interval | None) -> Interval | None:
            return interval and (round(interval[0], decimals), round(interval[1], decimals))

        xi_a, xi_b = round(self.xi_a, decimals), round(self.xi_b, decimals)
        return replace(self, xi_a=xi_a, xi_b=xi_b, interval_a=ends(self.interval_a), interval_b=ends(self.interval_b))


@dataclass(frozen=True, slots=True)
class GroupJob:
    task: str
    batch: int


@dataclass(frozen=True, slots=True)
class Group:
    """Three jobs or more on one GPU, with the ξ of each."""

    jobs: tuple[GroupJob, ...]
    mechanism: str
    xi: tuple[float, ...]
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One raw measurement of a task that runs alone."""

    task: str
    batch: int
    iter_s: float
    accumulation: int = 1
    gpus: int = 1
    nodes: int = 1
    memory_bytes: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    description: str
    gpu: Gpu | None = None
    mechanisms: dict[str, str] = field(default_factory=dict)
    noise: str | None = None
    notes: tuple[str, ...] = ()
    tasks: dict[str, TaskProfile] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    groups: tuple[Group, ...] = ()
    points: tuple[Point, ...] = ()
    kappa: dict[str, Kappa] = field(default_factory=dict)
    """κ by mechanism."""
    measured: str | None = None
    """Date and software of the measurement."""
    raw: tuple[Measurement, ...] = ()

    def core_tasks(self) -> dict[str, Task]:
        return {name: task.core() for name, task in self.tasks.items()}

    def pair_mechanisms(self) -> list[str]:
        return sorted({pair.mechanism for pair in self.pairs})

    def interference(self, mechanism: str | None = None, batches: str | None = None) -> TableInterference:
        """Return the table of one mechanism's pairs. The mechanism may be omitted if there is only one.

        `batches` ("small" or "large") takes the pairs of the smallest or largest batches for jobs of any batch.
        """
        known = self.pair_mechanisms()
        if not known:
            raise ProfileError(
                f"profile {self.name}: it has no pairs; name a profile that does, or give a number like 1.5"
            )
        if mechanism is None and len(known) > 1:
            choices = " or ".join(f"{self.name}:{one}" for one in known)
            raise ProfileError(f"profile {self.name}: pairs of several mechanisms; choose {choices}")
        if mechanism is not None and mechanism not in known:
            raise ProfileError(f"profile {self.name}: no pairs for {mechanism!r}; it has {', '.join(known)}")
        wanted = mechanism or known[0]
        pairs = [pair for pair in self.pairs if pair.mechanism == wanted]
        demands = {
            name: [(demand.batch, demand.demand) for demand in task.demands if demand.mechanism == wanted]
            for name, task in self.tasks.items()
        }
        if batches is not None:
            pairs, demands = _at_one_batch(pairs, demands, min if batches == "small" else max)
        return _table(pairs, demands)


Demands = dict[str, list[tuple[int, float]]]


def _at_one_batch(
    pairs: Sequence[Pair], demands: Demands, choose: Callable[[int, int], int]
) -> tuple[list[Pair], Demands]:
    """Keep what was measured at each task's smallest or largest batch, and let it stand for any batch."""
    batch: dict[str, int] = {}
    for pair in pairs:
        for task, measured in ((pair.a, pair.batch_a), (pair.b, pair.batch_b)):
            batch[task] = choose(batch.get(task, measured), measured)
    kept = [pair for pair in pairs if (pair.batch_a, pair.batch_b) == (batch[pair.a], batch[pair.b])]
    at_batch = {task: [(0, u) for at, u in known if at == batch.get(task)] for task, known in demands.items()}
    return [replace(pair, batch_a=0, batch_b=0) for pair in kept], at_batch


def _table(pairs: list[Pair], demands: Demands) -> TableInterference:
    """Build a table with both directions of every pair. Two values for a job beside its like are averaged."""
    found: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = {}
    for p in pairs:
        found.setdefault((p.a, p.b), {}).setdefault((p.batch_a, p.batch_b), []).append(p.xi_a)
        found.setdefault((p.b, p.a), {}).setdefault((p.batch_b, p.batch_a), []).append(p.xi_b)
    cells = {
        models: [MeasuredPair(sum(xis) / len(xis), *batches) for batches, xis in measured.items()]
        for models, measured in found.items()
    }
    return TableInterference(cells, demands)
