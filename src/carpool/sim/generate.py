"""Workload generators: the jobs of a busy multi-tenant cluster, without any download.

The tables below say what is drawn: how many jobs are short, medium, long or huge, at which hours they arrive, which
models they train and on how many GPUs. They are statistics of Pollux's workload files, which sample the busiest eight
hours of the Philly trace (docs/explanation/workload-generators.md). `pollux-like` has Pollux's own gangs and run times,
`pollux-calibrated` those that the paper's tables imply, and `philly-like` the calibrated ones with batches that fit on
a 16 GB GPU. A seed gives the same jobs on every machine, and all three generators draw from the same sequence.
"""

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import exp
from random import Random
from typing import NamedTuple

from carpool.core.model import Job
from carpool.core.perf import Placement, Task
from carpool.sim.workload import Workload

NAME = "philly-like"
POLLUX, CALIBRATED = "pollux-like", "pollux-calibrated"
TENANTS = "three-tenants"
GENERATORS = (NAME, POLLUX, CALIBRATED, TENANTS)
JOBS_PER_HOUR = 30.0
"""Arrival rate at load 1: 240 jobs in eight hours, for 64 GPUs."""
DAY_S = 8 * 3600.0
SPREAD = 0.25
"""Sigma of the lognormal factor on run times of `philly-like`. In Pollux, jobs of one template take equally long."""
STRETCH = 1.41
"""Run time of the calibrated jobs divided by that of Pollux's (see `JobTemplate.calibrated`)."""
USERS = 12
NODE_GPUS = 4
FITTING_BATCHES = {"ncf": 32768, "cifar10": 512, "bert": 24, "deepspeech2": 40, "yolov3": 16, "imagenet": 100}
"""Samples per GPU of a job that fits alone on a 16 GB GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class JobTemplate:
    """Jobs of one model and gang size. `batch` is that of the whole gang, `run_s` the run time alone."""

    model: str
    gpus: int
    batch: int
    iterations: int
    run_s: float

    def calibrated(self) -> "JobTemplate":
        """The template that the paper's tables imply: half the gang, rounded down to a power of two, and run × 1.41."""
        gpus = 1 << max(self.gpus // 2, 1).bit_length() - 1
        return JobTemplate(self.model, gpus, self.batch, self.iterations, self.run_s * STRETCH)


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Jobs of similar length: their share, and their arrival rate in each of the eight hours (mean 1).

    All models of a class are equally likely, and so are all gang sizes of a model.
    """

    share: float
    hours: tuple[float, ...]
    models: tuple[tuple[JobTemplate, ...], ...]


LENGTHS = (
    LengthClass(  # up to a quarter of an hour
        0.784,
        (0.98, 0.90, 0.61, 0.92, 1.27, 1.74, 0.85, 0.74),
        (
            (JobTemplate("ncf", 1, 32768, 1548, 45.8),),
            (
                JobTemplate("cifar10", 6, 2048, 3178, 854.2),
                JobTemplate("cifar10", 8, 2048, 3178, 826.1),
                JobTemplate("cifar10", 12, 4096, 2011, 573.2),
                JobTemplate("cifar10", 16, 4096, 2011, 449.4),
            ),
        ),
    ),
    LengthClass(  # up to an hour or so
        0.153,
        (0.75, 0.40, 0.33, 0.67, 1.74, 2.22, 1.02, 0.87),
        (
            (
                JobTemplate("bert", 6, 384, 480, 3055.7),
                JobTemplate("bert", 8, 384, 480, 2480.3),
                JobTemplate("bert", 12, 384, 480, 1589.2),
                JobTemplate("bert", 16, 384, 480, 1334.9),
            ),
            (
                JobTemplate("deepspeech2", 6, 320, 2264, 4153.2),
                JobTemplate("deepspeech2", 8, 320, 2264, 3500.8),
                JobTemplate("deepspeech2", 12, 640, 1423, 2572.7),
            ),
        ),
    ),
    LengthClass(  # a few hours
        0.044,
        (0.67, 0.90, 1.10, 1.10, 1.38, 1.00, 1.00, 0.85),
        ((JobTemplate("yolov3", 4, 64, 14577, 12869.9),),),
    ),
    LengthClass(  # most of the day
        0.019,
        (1.62, 0.97, 0.43, 0.97, 0.86, 0.76, 0.98, 1.41),
        (
            (
                JobTemplate("imagenet", 24, 3200, 42123, 31395.6),
                JobTemplate("imagenet", 32, 6400, 23972, 26207.4),
                JobTemplate("imagenet", 48, 6400, 23972, 18879.6),
            ),
        ),
    ),
)
MODELS = sorted({kinds[0].model for length in LENGTHS for kinds in length.models})


class DrawnJob(NamedTuple):
    """One draw, from which each generator makes its own job. `factor` is lognormal with mean 1."""

    submitted: float
    kind: JobTemplate
    factor: float
    user: str


def philly_like(
    tasks: Mapping[str, Task], *, jobs: int = 240, load: float = 1.0, seed: int = 1, hours: float | None = None
) -> Workload:
    """Generate `jobs` jobs at `load` times 30 per hour, or over `hours` hours. `tasks` turn run times into iterations.

    Another load gives the same jobs with all submission times divided by it, so that loads can be compared.
    """

    @cache
    def fitting(template: JobTemplate) -> tuple[JobTemplate, int, float]:
        """Return a calibrated template, its batch and its iteration time."""
        kind = template.calibrated()
        batch = FITTING_BATCHES[kind.model]
        return kind, batch, tasks[kind.model].iteration(batch, 1, Placement(kind.gpus, -(-kind.gpus // NODE_GPUS)))

    def make(name: str, at: float, drawn: DrawnJob) -> Job:
        kind, batch, iteration_s = fitting(drawn.kind)
        run_s = kind.run_s * drawn.factor
        return Job(
            name, at, kind.model, kind.gpus, batch, max(1, round(run_s / iteration_s)), drawn.user, run_s, elastic=True
        )

    return _workload(NAME, make, _draw(jobs, seed, hours), load, seed)


def pollux_like(
    *, jobs: int = 240, load: float = 1.0, seed: int = 1, hours: float | None = None, calibrated: bool = False
) -> Workload:
    """Generate the same jobs with Pollux's gangs, batches and run times, or with calibrated gangs and run times."""

    def make(name: str, at: float, drawn: DrawnJob) -> Job:
        kind = drawn.kind.calibrated() if calibrated else drawn.kind
        batch = -(-kind.batch // kind.gpus)
        return Job(name, at, kind.model, kind.gpus, batch, kind.iterations, drawn.user, kind.run_s, elastic=True)

    return _workload(CALIBRATED if calibrated else POLLUX, make, _draw(jobs, seed, hours), load, seed)


FLOOD, TRICKLE, GANGS = "flood", "trickle", "gangs"
FLOOD_SHARE, TRICKLE_SHARE = 0.8, 0.08
"""Parts of the jobs of `three-tenants` that its first and its second group submit; the third has the rest."""


def three_tenants(
    tasks: Mapping[str, Task], *, jobs: int = 240, load: float = 1.0, seed: int = 1, hours: float | None = None
) -> Workload:
    """Generate jobs of three groups.

    One floods the cluster at the beginning with jobs of up to four GPUs, one submits a small job now and then, and one
    submits only gangs of eight GPUs.
    """
    random = Random(f"{TENANTS} {seed}")
    span = 3600.0 * (jobs / JOBS_PER_HOUR if hours is None else hours) / load
    kinds = [kind.calibrated() for length in LENGTHS for model in length.models for kind in model]
    weights = [
        length.share / len(length.models) / len(model) for length in LENGTHS for model in length.models for _ in model
    ]
    small = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind.gpus <= 4]
    tiny = [kind for kind in kinds if kind.run_s < 3600.0 and kind.gpus <= 4]
    gangs = [kind for kind in kinds if kind.gpus == 8]
    number = {FLOOD: round(jobs * FLOOD_SHARE), TRICKLE: max(1, round(jobs * TRICKLE_SHARE))}
    number[GANGS] = max(1, jobs - number[FLOOD] - number[TRICKLE])
    drawn: list[tuple[float, JobTemplate, str]] = []
    for _ in range(number[FLOOD]):
        (kind,) = random.choices([kind for kind, _ in small], [weight for _, weight in small])
        drawn.append((0.25 * span * random.random(), kind, FLOOD))
    for group, choices in ((TRICKLE, tiny), (GANGS, gangs)):
        for index in range(number[group]):
            drawn.append((span * (index + random.random()) / number[group], random.choice(choices), group))
    made = []
    for index, (at, kind, group) in enumerate(sorted(drawn, key=lambda one: one[0]), start=1):
        run_s = kind.run_s * exp(random.gauss(0.0, SPREAD) - SPREAD**2 / 2)
        batch = FITTING_BATCHES[kind.model]
        iteration_s = tasks[kind.model].iteration(batch, 1, Placement(kind.gpus, -(-kind.gpus // NODE_GPUS)))
        iterations, user = max(1, round(run_s / iteration_s)), f"{group}{1 + index % 3}"
        gpus, at = kind.gpus, float(round(at))
        made.append(Job(f"{group}-{index}", at, kind.model, gpus, batch, iterations, user, run_s, group=group))
    return Workload(tuple(made), f"{TENANTS} (jobs={len(made)}, load={load:g}, seed={seed})")


def by_name(
    name: str, tasks: Mapping[str, Task], *, jobs: int, load: float = 1.0, seed: int = 1, hours: float | None = None
) -> Workload:
    """Generate the workload of one of the `GENERATORS`."""
    if name == TENANTS:
        return three_tenants(tasks, jobs=jobs, load=load, seed=seed, hours=hours)
    if name == NAME:
        return philly_like(tasks, jobs=jobs, load=load, seed=seed, hours=hours)
    return pollux_like(jobs=jobs, load=load, seed=seed, hours=hours, calibrated=name == CALIBRATED)


def _workload(
    name: str, make: Callable[[str, float, DrawnJob], Job], drawn: list[DrawnJob], load: float, seed: int
) -> Workload:
    made = [
        make(f"{one.kind.model}-{number}", float(round(one.submitted / load)), one)
        for number, one in enumerate(drawn, start=1)
    ]
    return Workload(tuple(made), f"{name} (jobs={len(made)}, load={load:g}, seed={seed})")


def _draw(jobs: int, seed: int, hours: float | None) -> list[DrawnJob]:
    """Draw jobs in the order of submission. With the same hours, fewer jobs are a prefix of the draws of more jobs."""
    random = Random(f"{NAME} {seed}")
    span = 3600.0 * (jobs / JOBS_PER_HOUR if hours is None else hours)
    return sorted(_jobs(random, span, jobs), key=lambda drawn: drawn.submitted)


def _jobs(random: Random, span: float, jobs: int) -> Iterator[DrawnJob]:
    shares = list(accumulate(length.share for length in LENGTHS))
    peaks = [max(length.hours) for length in LENGTHS]
    for _ in range(jobs):
        drawn = bisect(shares, random.random() * shares[-1], 0, len(LENGTHS) - 1)
        length = LENGTHS[drawn]
        kind = random.choice(random.choice(length.models))
        submitted = float(round(_moment(random, span, length.hours, peaks[drawn])))
        factor = exp(random.gauss(0.0, SPREAD) - SPREAD**2 / 2)
        user = f"user{1 + int(USERS * random.random() ** 2)}"  # a few users submit most of the jobs
        yield DrawnJob(submitted, kind, factor, user)


def _moment(random: Random, span: float, hours: tuple[float, ...], peak: float) -> float:
    """Draw a time within the span, by rejection, with the density that `hours` gives; `peak` is its largest value."""
    while True:
        moment = span * random.random()
        if random.random() * peak < hours[int(moment % DAY_S / DAY_S * len(hours))]:
            return moment
