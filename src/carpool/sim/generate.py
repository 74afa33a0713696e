"""The workload generator `philly-like`: jobs such as a busy multi-tenant cluster sees, without any download.

All distributions stand in the tables below. Model mix, gang sizes, run times and the busy hours follow what the paper's
tables imply about its workload (a mean run of 0.69 h, one job in eight larger than 4 GPUs; see docs/workloads.md);
the batches are ones that a single 16 GB GPU can hold. The same seed gives the same jobs, on every machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from random import Random

from carpool.core.model import Job
from carpool.core.perf import Placement, Task
from carpool.sim.workload import Workload

NAME = "philly-like"
JOBS_PER_HOUR = 30.0
"""Arrivals at load 1: 240 jobs in eight hours, meant for 64 GPUs."""
HALF_HOURS = (0.95, 0.95, 0.90, 0.70, 0.60, 0.60, 0.80, 1.00, 1.30, 1.30, 1.80, 1.70, 0.90, 0.90, 0.90, 0.70)
"""Arrival rate over an eight-hour day, relative to its mean: a busy period from the fifth to the sixth hour."""
SPREAD = 0.25
"""Sigma of the lognormal factor on a job's run time."""
USERS = 12
NODE_GPUS = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """Jobs of one model on one gang size: their share of all jobs, batch per GPU, and mean run time alone."""

    model: str
    gpus: int
    share: float
    batch: int
    mean_s: float


KINDS = (
    Kind("ncf", 1, 0.396, 32768, 65),
    Kind("cifar10", 2, 0.099, 512, 1200),
    Kind("cifar10", 4, 0.198, 512, 980),
    Kind("cifar10", 8, 0.090, 512, 630),
    Kind("bert", 2, 0.015, 24, 4300),
    Kind("bert", 4, 0.029, 24, 2850),
    Kind("bert", 8, 0.020, 24, 1880),
    Kind("deepspeech2", 2, 0.029, 40, 5850),
    Kind("deepspeech2", 4, 0.061, 40, 4250),
    Kind("yolov3", 2, 0.045, 16, 18100),
    Kind("imagenet", 8, 0.007, 100, 44300),
    Kind("imagenet", 16, 0.011, 100, 32500),
)


def philly_like(tasks: Mapping[str, Task], *, jobs: int = 240, load: float = 1.0, seed: int = 1) -> Workload:
    """`jobs` jobs at `load` times 30 an hour. `tasks` turn run times into iterations."""
    random = Random(f"{NAME} {seed}")
    made = []
    shares = [kind.share for kind in KINDS]
    for number, submitted in enumerate(_arrivals(random, jobs, load), start=1):
        kind = random.choices(KINDS, shares)[0]
        duration = kind.mean_s * exp(random.gauss(0.0, SPREAD) - SPREAD**2 / 2)
        placement = Placement(kind.gpus, -(-kind.gpus // NODE_GPUS))
        iterations = max(1, round(duration / tasks[kind.model].iteration(kind.batch, 1, placement)))
        user = f"user{1 + int(USERS * random.random() ** 2)}"  # a few users submit most
        job = Job(f"{kind.model}-{number}", submitted, kind.model, kind.gpus, kind.batch, iterations, user, duration)
        made.append(job)
    return Workload(tuple(made), f"{NAME} (jobs={jobs}, load={load:g}, seed={seed})")


def _arrivals(random: Random, jobs: int, load: float) -> list[float]:
    """Submission times in whole seconds: a Poisson process, conditioned on its count, whose rate follows the day."""
    days = jobs / (load * JOBS_PER_HOUR * 0.5 * len(HALF_HOURS))
    slots = max(1, round(days * len(HALF_HOURS)))
    rates = [HALF_HOURS[slot % len(HALF_HOURS)] for slot in range(slots)]
    length = days * len(HALF_HOURS) * 1800.0 / slots
    chosen = random.choices(range(slots), rates, k=jobs)
    return sorted(round((slot + random.random()) * length, 0) for slot in chosen)
