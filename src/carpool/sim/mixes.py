"""The sets of jobs that can run together on one GPU, and their speeds, from which `bound.py` computes lower bounds.

Jobs that behave alike (same slow-downs, memory and sub-batches) form a class. A *mix* is a set of at most C jobs, by
class, that fit on a GPU together. In a mix every job has a *seat* with a speed, relative to the fastest speed that it
reaches alone. Every simplification makes jobs faster or more mixes possible, so that the bound stays a bound.
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
    """Places in a mix for `count` jobs of one class, each at this speed."""

    job_class: int
    speed: float
    count: int


@dataclass(frozen=True, slots=True)
class Mixes:
    """The classes of some jobs, and all useful mixes of them."""

    class_of: tuple[int, ...]
    """Class of every job, in the order in which the jobs were given."""
    alone_s: tuple[float, ...]
    """Shortest run time of every job."""
    mixes: tuple[tuple[Seat, ...], ...]
    """All mixes. The first are those of a single job, one for each class."""

    @property
    def classes(self) -> int:
        return max(self.class_of) + 1


@dataclass(frozen=True, slots=True)
class SubBatchVariant:
    """Sub-batches of a job with the same slow-downs in pairs, merged into one that is at least as good as each.

    It has the speed of the fastest of them, the memory of the smallest, and the accumulation of the one that slows
    down others the least.
    """

    job: Job
    accumulation: int
    speed: float
    memory: int


def find_mixes(jobs: Sequence[Job], perf: PerformanceModel, nodes: Sequence[Node], jobs_per_gpu: int) -> Mixes:
    """Return the classes of these jobs and all useful mixes of up to `jobs_per_gpu` of them."""
    memory = max(node.memory for node in nodes)
    jobs_by_traits = {
        (job.model, job.batch, job.can_shrink, job.exclusive or jobs_per_gpu == 1): job for job in reversed(jobs)
    }
    sizes = {traits: _sizes(job, perf, memory) for traits, job in jobs_by_traits.items()}
    variants = _variants(jobs_by_traits, sizes, perf, jobs_per_gpu)
    classes: dict[tuple[object, ...], int] = {}
    variants_by_class: list[list[SubBatchVariant]] = []
    class_of_traits = {}
    for traits in jobs_by_traits:
        signature = (
            traits[3],
            *((name, v.speed, v.memory, *_crowding(v, jobs_per_gpu)) for name, v in variants[traits]),
        )
        if signature not in classes:
            classes[signature] = len(variants_by_class)
            variants_by_class.append([variant for _, variant in variants[traits]])
        class_of_traits[traits] = classes[signature]
    exclusive = [bool(signature[0]) for signature in classes]
    class_of, alone_s = [], []
    for job in jobs:
        traits = (job.model, job.batch, job.can_shrink, job.exclusive or jobs_per_gpu == 1)
        class_of.append(class_of_traits[traits])
        alone_s.append(job.iterations * _fastest(job, perf, [accumulation for accumulation, _, _ in sizes[traits]]))
    found: list[tuple[Seat, ...]] = [(Seat(job_class, 1.0, 1),) for job_class in range(len(variants_by_class))]
    sharing = [
        (job_class, v) for job_class, some in enumerate(variants_by_class) if not exclusive[job_class] for v in some
    ]
    found += _shared(sharing, perf, memory, jobs_per_gpu)
    return Mixes(tuple(class_of), tuple(alone_s), tuple(found))


def _sizes(job: Job, perf: PerformanceModel, memory: int) -> list[tuple[int, float, int]]:
    """Return accumulation, speed relative to the fastest, and memory of each sub-batch that fits on a GPU."""
    possible = accumulations(job.batch) if job.can_shrink else (1,)
    fitting = [accumulation for accumulation in possible if perf.memory(job, accumulation) <= memory]
    if not fitting:
        needed = perf.memory(job, possible[-1]) / 2**30
        raise InputError(f"bound: job {job.id} needs {needed:.1f} GiB on each GPU; give a larger --gpu-memory")
    fastest = _fastest(job, perf, fitting)
    return [
        (accumulation, fastest / _fastest(job, perf, [accumulation]), perf.memory(job, accumulation))
        for accumulation in fitting
    ]


def _fastest(job: Job, perf: PerformanceModel, accumulations: Sequence[int]) -> float:
    """Iteration time alone at the best placement: on one node or on several, whichever is faster."""
    fewest = perf.fewest_nodes(job.gpus)
    placements = [Placement(job.gpus, fewest)]
    if job.gpus > fewest == 1:
        placements.append(Placement(job.gpus, 2))
    return min(perf.iteration_time(job, accumulation, place) for accumulation in accumulations for place in placements)


JobTraits = tuple[str, int, bool, bool]
"""Model, batch, whether the batch can be split, and whether the job must have its GPUs for itself."""


def _variants(
    jobs_by_traits: dict[JobTraits, Job],
    sizes: dict[JobTraits, list[tuple[int, float, int]]],
    perf: PerformanceModel,
    jobs_per_gpu: int,
) -> dict[JobTraits, list[tuple[object, SubBatchVariant]]]:
    """Return the variants of every kind of job, each with a name that variants with the same slow-downs share."""
    items: dict[tuple[str, int], Mate] = {}  # one for each model and sub-batch, on which alone slow-downs depend
    for traits, job in jobs_by_traits.items():
        for accumulation, _, _ in sizes[traits]:
            items.setdefault((job.model, sub_batch(job.batch, accumulation)), (job, accumulation))
    rows: dict[tuple[str, int], object] = dict.fromkeys(items)
    if jobs_per_gpu > 1:
        for item, (job, accumulation) in items.items():
            there = [perf.slowdown(job, accumulation, [mate]) for mate in items.values()]
            back = [
                perf.slowdown(mate, mate_accumulation, [(job, accumulation)])
                for mate, mate_accumulation in items.values()
            ]
            rows[item] = (job.model, *there, *back)
    found: dict[JobTraits, list[tuple[object, SubBatchVariant]]] = {}
    for traits, job in jobs_by_traits.items():
        by_name: dict[object, list[tuple[int, float, int]]] = {}
        for size in sizes[traits]:
            by_name.setdefault(rows[job.model, sub_batch(job.batch, size[0])], []).append(size)
        found[traits] = []
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
            found[traits].append((name, SubBatchVariant(job, least, max(speeds), min(memories))))
    return found


def _crowding(variant: SubBatchVariant, jobs_per_gpu: int) -> tuple[int, ...]:
    """Return what else distinguishes variants if three or more jobs may share a GPU."""
    return (sub_batch(variant.job.batch, variant.accumulation),) if jobs_per_gpu > 2 else ()


def _shared(
    variants: Sequence[tuple[int, SubBatchVariant]], perf: PerformanceModel, memory: int, jobs_per_gpu: int
) -> list[tuple[Seat, ...]]:
    """Return all mixes of two or more jobs, except those with a total speed of at most 1 (no better than taking
    turns)."""
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
            for index, (job_class, variant) in enumerate(some):
                xi = perf.slowdown(variant.job, variant.accumulation, mates[:index] + mates[index + 1 :])
                seat = (job_class, variant.speed / max(1.0, xi))
                seats[seat] = seats.get(seat, 0) + 1
            if sum(speed * count for (_, speed), count in seats.items()) > 1.0:
                found.append(tuple(Seat(job_class, speed, count) for (job_class, speed), count in seats.items()))
    return found
