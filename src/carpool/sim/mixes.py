"""What can run together on one GPU, and how fast: the ground on which the lower bound stands.

Jobs that behave alike (same slow-downs, memory and sub-batches) form a class. A *mix* is a set of at most C jobs, by
class, that fit on a GPU together; in it every member has a *seat* with a speed, relative to the fastest that it could
run alone. Where something is simplified, jobs become faster and more mixes possible, never the other way round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

from carpool.core.model import Job, Node, accumulations, sub_batch
from carpool.core.perf import Mate, PerformanceModel, Placement
from carpool.errors import InputError

MOST_MIXES = 400_000


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a mix for `count` jobs of one class, each at this speed."""

    group: int
    speed: float
    count: int


@dataclass(frozen=True, slots=True)
class Mixes:
    class_of: tuple[int, ...]
    """The class of every job, in the order in which they were given."""
    alone_s: tuple[float, ...]
    """The least time that every job can take."""
    mixes: tuple[tuple[Seat, ...], ...]
    """The first ones are those of one job of each class, alone."""

    @property
    def classes(self) -> int:
        return max(self.class_of) + 1


@dataclass(frozen=True, slots=True)
class SubBatchVariant:
    """Sub-batches of a job with the same slow-downs in pairs, taken together: the speed of the fastest of them, the
    memory of the smallest, and the accumulation of the one that crowds a GPU the least."""

    job: Job
    accumulation: int
    speed: float
    memory: int


def find_mixes(jobs: Sequence[Job], perf: PerformanceModel, nodes: Sequence[Node], jobs_per_gpu: int) -> Mixes:
    """The classes of these jobs and all mixes of up to `jobs_per_gpu` of them that are worth anything."""
    memory = max(node.memory for node in nodes)
    looks = {(job.model, job.batch, job.can_shrink, job.exclusive or jobs_per_gpu == 1): job for job in reversed(jobs)}
    sizes = {look: _sizes(job, perf, memory) for look, job in looks.items()}
    variants = _variants(looks, sizes, perf, jobs_per_gpu)
    classes: dict[tuple[object, ...], int] = {}
    members: list[list[SubBatchVariant]] = []
    class_of_look = {}
    for look in looks:
        signature = (look[3], *((name, v.speed, v.memory, *_crowding(v, jobs_per_gpu)) for name, v in variants[look]))
        if signature not in classes:
            classes[signature] = len(members)
            members.append([variant for _, variant in variants[look]])
        class_of_look[look] = classes[signature]
    exclusive = [bool(signature[0]) for signature in classes]
    class_of, alone_s = [], []
    for job in jobs:
        look = (job.model, job.batch, job.can_shrink, job.exclusive or jobs_per_gpu == 1)
        class_of.append(class_of_look[look])
        alone_s.append(job.iterations * _fastest(job, perf, [accumulation for accumulation, _, _ in sizes[look]]))
    found: list[tuple[Seat, ...]] = [(Seat(group, 1.0, 1),) for group in range(len(members))]
    sharing = [(group, v) for group, some in enumerate(members) if not exclusive[group] for v in some]
    found += _shared(sharing, perf, memory, jobs_per_gpu)
    return Mixes(tuple(class_of), tuple(alone_s), tuple(found))


def _sizes(job: Job, perf: PerformanceModel, memory: int) -> list[tuple[int, float, int]]:
    """Accumulation, speed relative to the fastest, and memory of the sub-batches that fit on a GPU."""
    possible = accumulations(job.batch) if job.can_shrink else (1,)
    fitting = [accumulation for accumulation in possible if perf.memory(job, accumulation) <= memory]
    if not fitting:
        needed = perf.memory(job, possible[-1]) / 2**30
        raise InputError(f"bound: job {job.id} needs {needed:.1f} GiB of every GPU; give a larger --gpu-memory")
    fastest = _fastest(job, perf, fitting)
    return [
        (accumulation, fastest / _fastest(job, perf, [accumulation]), perf.memory(job, accumulation))
        for accumulation in fitting
    ]


def _fastest(job: Job, perf: PerformanceModel, accumulations: Sequence[int]) -> float:
    """Seconds of an iteration alone at the best placement: on one node or on several, whichever is faster."""
    fewest = perf.fewest_nodes(job.gpus)
    placements = [Placement(job.gpus, fewest)]
    if job.gpus > fewest == 1:
        placements.append(Placement(job.gpus, 2))
    return min(perf.iteration_time(job, accumulation, place) for accumulation in accumulations for place in placements)


Look = tuple[str, int, bool, bool]


def _variants(
    looks: dict[Look, Job], sizes: dict[Look, list[tuple[int, float, int]]], perf: PerformanceModel, jobs_per_gpu: int
) -> dict[Look, list[tuple[object, SubBatchVariant]]]:
    """For every kind of job its variants, each with a name that variants with the same slow-downs have in common."""
    items: dict[tuple[str, int], Mate] = {}  # one of each model and sub-batch: all that slow-downs depend on
    for look, job in looks.items():
        for accumulation, _, _ in sizes[look]:
            items.setdefault((job.model, sub_batch(job.batch, accumulation)), (job, accumulation))
    rows: dict[tuple[str, int], object] = dict.fromkeys(items)
    if jobs_per_gpu > 1:
        for item, (job, accumulation) in items.items():
            there = [perf.slowdown(job, accumulation, [mate]) for mate in items.values()]
            back = [perf.slowdown(mate, its_accum, [(job, accumulation)]) for mate, its_accum in items.values()]
            rows[item] = (job.model, *there, *back)
    found: dict[Look, list[tuple[object, SubBatchVariant]]] = {}
    for look, job in looks.items():
        by_name: dict[object, list[tuple[int, float, int]]] = {}
        for size in sizes[look]:
            by_name.setdefault(rows[job.model, sub_batch(job.batch, size[0])], []).append(size)
        found[look] = []
        for name, some in by_name.items():
            accumulations, speeds, memories = zip(*some, strict=True)
            if jobs_per_gpu > 2:
                least = min(
                    accumulations,
                    key=lambda accumulation: perf.slowdown(
                        job, accumulation, [(job, accumulation)] * (jobs_per_gpu - 1)
                    ),
                )
            else:
                least = accumulations[0]
            found[look].append((name, SubBatchVariant(job, least, max(speeds), min(memories))))
    return found


def _crowding(variant: SubBatchVariant, jobs_per_gpu: int) -> tuple[int, ...]:
    """What else distinguishes variants where three or more may meet."""
    return (sub_batch(variant.job.batch, variant.accumulation),) if jobs_per_gpu > 2 else ()


def _shared(
    variants: Sequence[tuple[int, SubBatchVariant]], perf: PerformanceModel, memory: int, jobs_per_gpu: int
) -> list[tuple[Seat, ...]]:
    """All mixes of two and more. What together is no faster than one job alone is left out: taking turns is as good."""
    number = sum(comb(len(variants) + size - 1, size) for size in range(2, jobs_per_gpu + 1))
    if number > MOST_MIXES:
        raise InputError(
            f"bound: {number:,} ways to mix jobs on a GPU are too many; give a smaller --jobs-per-gpu or fewer models"
        )
    found = []
    for size in range(2, jobs_per_gpu + 1):
        for some in combinations_with_replacement(variants, size):
            if sum(variant.memory for _, variant in some) > memory:
                continue
            mates = [(variant.job, variant.accumulation) for _, variant in some]
            seats: dict[tuple[int, float], int] = {}
            for index, (group, variant) in enumerate(some):
                xi = perf.slowdown(variant.job, variant.accumulation, mates[:index] + mates[index + 1 :])
                seat = (group, variant.speed / max(1.0, xi))
                seats[seat] = seats.get(seat, 0) + 1
            if sum(speed * count for (_, speed), count in seats.items()) > 1.0:
                found.append(tuple(Seat(group, speed, count) for (group, speed), count in seats.items()))
    return found
