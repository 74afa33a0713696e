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
DAY_S = 8 * 3600.0
HALF_HOURS = (0.95, 0.95, 0.90, 0.70, 0.60, 0.60, 0.80, 1.00, 1.30, 1.30, 1.80, 1.70, 0.90, 0.90, 0.90, 0.70)
"""Arrival rate over an eight-hour day at load 1, relative to its mean: busy in the fifth and sixth hour."""
LONG_S = 10_000.0
"""Kinds that run longer than this on average come at all hours alike."""
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
    """`jobs` jobs at `load` times 30 an hour. `tasks` turn run times into iterations.

    Another load is the same jobs arriving so many times as fast, busy hours and all, so that loads can be compared.
    """
    random = Random(f"{NAME} {seed}")
    span = jobs / JOBS_PER_HOUR * 3600.0
    drawn = []
    for kind in random.choices(KINDS, [kind.share for kind in KINDS], k=jobs):
        submitted = float(round(span * random.random() if kind.mean_s > LONG_S else _busy_time(random, span)))
        duration = kind.mean_s * exp(random.gauss(0.0, SPREAD) - SPREAD**2 / 2)
        user = f"user{1 + int(USERS * random.random() ** 2)}"  # a few users submit most
        drawn.append((submitted, kind, duration, user))
    drawn.sort(key=lambda entry: entry[0])
    made = []
    for number, (submitted, kind, duration, user) in enumerate(drawn, start=1):
        placement = Placement(kind.gpus, -(-kind.gpus // NODE_GPUS))
        iterations = max(1, round(duration / tasks[kind.model].iteration(kind.batch, 1, placement)))
        name, at = f"{kind.model}-{number}", float(round(submitted / load))
        made.append(Job(name, at, kind.model, kind.gpus, kind.batch, iterations, user, duration, elastic=True))
    return Workload(tuple(made), f"{NAME} (jobs={jobs}, load={load:g}, seed={seed})")


def _busy_time(random: Random, span: float) -> float:
    """A moment within the span, as dense as the time of day is busy; found by rejection."""
    while True:
        moment = span * random.random()
        slot = int(moment % DAY_S / DAY_S * len(HALF_HOURS))
        if random.random() * max(HALF_HOURS) < HALF_HOURS[slot]:
            return moment
