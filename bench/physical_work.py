"""What the physical experiment runs: thirty jobs, the same in every case and in both worlds, and the cases.

Also what is known of their speed: the profile, and the box at hand as other runs on it found it.
"""

import argparse
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement

from carpool.core.model import Job
from carpool.core.perf import FittedModel, Placement
from carpool.gpu import mps
from carpool.profile.measure.examples import SCRIPTS
from carpool.profile.measure.noise import Noise
from carpool.profile.measure.plan import MPS, TIME_SLICING
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile
from carpool.sim.engine import Costs

LOGICAL = "logical"
TIRESIAS = "tiresias-11"
"""Its threshold is scaled with the jobs, so that the longest of them are pushed back."""
RETIRED = ("tiresias-18",)
"""A threshold that no job reached, so that it ran as FIFO. Its run says something of the machine, and no more."""
EXCLUSIVE = ("fifo", "sjf", TIRESIAS, *RETIRED)
GUESSED_LAUNCH_S = 8.0


@dataclass(frozen=True)
class Case:
    policy: str
    mechanism: str
    jobs_per_gpu: int = 2
    repeat: int = 0

    @property
    def kind(self) -> tuple[str, str, int]:
        return self.policy, self.mechanism, self.jobs_per_gpu

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.mechanism}-{self.jobs_per_gpu}-run{self.repeat + 1}"


@dataclass(frozen=True)
class Work:
    """One job."""

    name: str
    task: str
    batch: int
    iterations: int
    submitted: float

    @property
    def setting(self) -> Setting:
        return Setting(self.task, self.batch)

    @property
    def job(self) -> Job:
        """As the service submits it; it may not be cut, for nobody has checked the scripts for that."""
        return Job(self.name, self.submitted, self.task, 1, self.batch, self.iterations, can_shrink=False)


@dataclass(frozen=True)
class Box:
    """The machine's share in a run, which no profile tells: how fast its cores start processes and launch kernels."""

    alone_s: Mapping[Setting, float] = field(default_factory=dict)
    """An iteration of each job alone, where that is known better than from the profile: under MPS as without it."""
    overheads_s: Mapping[Setting, Sequence[float]] = field(default_factory=dict)
    """What processes took beyond their iterations: to start, to warm up and to end."""
    own_s: Mapping[str, float] = field(default_factory=dict)
    """The same of each job's first process in the run itself, where that is told."""
    exit_s: float = 0.0
    """How much of it comes after the last iteration."""
    stop_s: float = 0.0
    """How long a preempted job takes to save and leave."""

    def costs(self, draw: int) -> "BoxCosts":
        """One draw of what may happen."""
        return BoxCosts(0.0, self.stop_s, self, random.Random(draw))


@dataclass(frozen=True, slots=True)
class BoxCosts(Costs):
    """A start takes as long as the job's own did, or as long as one that was seen of the same kind of job."""

    box: Box = field(default_factory=Box)
    chance: random.Random = field(default_factory=random.Random)
    _started: set[str] = field(default_factory=set)

    def launch(self, job: Job) -> float:
        if job.id in self.box.own_s and job.id not in self._started:
            self._started.add(job.id)
            return self.box.own_s[job.id]
        return self.chance.choice(self.box.overheads_s.get(Setting(job.model, job.batch), [GUESSED_LAUNCH_S]))


class MeasuredModel(FittedModel):
    """The profile's slow-downs and fits; at a measured batch the measured time."""

    def __init__(self, profile: Profile, mechanism: str) -> None:
        super().__init__(profile.core_tasks(), profile.interference(mechanism), 1)
        self._noise, self._mechanism = Noise(profile.raw), mechanism

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        known = self._noise.alone(self._mechanism, Setting(job.model, job.batch, accumulation))
        return known if known is not None else super().iteration_time(job, accumulation, placement)

    def alone_s(self, work: Work) -> float:
        """The whole job, by itself."""
        return work.iterations * self.iteration_time(work.job, 1, Placement(1, 1))


class BoxModel(MeasuredModel):
    """As jobs run on the box, in one draw: each as much faster or slower as measurements of its task differ."""

    def __init__(self, profile: Profile, mechanism: str, box: Box, draw: int) -> None:
        super().__init__(profile, mechanism)
        self._alone_s, self._draw = box.alone_s, draw

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        luck = random.Random(f"{self._draw} {job.id}").gauss(0.0, self._noise.sigma(self._mechanism, job.model))
        usual, whole = super().iteration_time(job, accumulation, placement), super().iteration_time(job, 1, placement)
        return usual / whole * self._alone_s.get(Setting(job.model, job.batch), whole) * math.exp(luck)


def settings(profile: Profile) -> list[Setting]:
    """Every example at every batch at which pairs of it were measured."""
    found = {Setting(pair.a, pair.batch_a) for pair in profile.pairs}
    found |= {Setting(pair.b, pair.batch_b) for pair in profile.pairs}
    return sorted(kind for kind in found if kind.task in profile.tasks and kind.task in SCRIPTS)


def table(mechanism: str, profile: Profile) -> str:
    """On logical slots, whatever the profile holds stands for the way they share."""
    known = profile.pair_mechanisms()
    return known[0] if mechanism == LOGICAL and known else mechanism


def check(profile: Profile, called: str, jobs: Iterable[Work], mechanisms: Iterable[str]) -> None:
    """Refuses a profile that does not know these jobs, alone and beside each other."""
    tasks = sorted({job.task for job in jobs})
    for task in tasks:
        if task not in profile.tasks:
            raise SystemExit(f"{called}: has no times of {task}; measure it with carpool profile --example {task}")
    for mechanism in mechanisms:
        known = profile.interference(table(mechanism, profile)).cells
        for a, b in combinations_with_replacement(tasks, 2):
            if (a, b) not in known:
                both = " ".join(f"--example {task}" for task in sorted({a, b}))
                raise SystemExit(f"{called}: has no pair of {a} and {b}; measure them with carpool profile {both}")


def workload(profile: Profile, options: argparse.Namespace) -> list[Work]:
    """Tasks and batches by turns in random order; lengths lognormal; arrivals Poisson, `load` times too fast."""
    drawn = random.Random(options.seed)
    kinds = settings(profile)
    if not kinds:
        raise SystemExit(f"{options.profile}: has no pairs of the examples; measure some with carpool profile")
    chosen = [kinds[i % len(kinds)] for i in drawn.sample(range(options.jobs), options.jobs)]
    model, now, jobs = MeasuredModel(profile, table(_plain(options), profile)), 0.0, []
    for number, setting in enumerate(chosen, 1):
        length = options.mean * min(3.0, max(0.3, math.exp(drawn.gauss(-0.25, 0.7))))
        one = Work(f"{setting.task}-{number}", setting.task, setting.batch, 1, round(now, 2))
        jobs.append(replace(one, iterations=max(5, round(length / model.alone_s(one)))))
        now += drawn.expovariate(options.load / (options.mean + GUESSED_LAUNCH_S))
    return jobs


def _plain(options: argparse.Namespace) -> str:
    return LOGICAL if options.gpus else TIME_SLICING


def cases(options: argparse.Namespace) -> list[Case]:
    """What matters most first; the whole set once before anything is repeated, then backwards: machines drift."""
    plain = _plain(options)
    shared = [plain] if options.gpus or mps.available() is not None else [MPS, plain]
    kinds = [Case("sjf", plain)]
    kinds += [Case("sjf-bsbf", mechanism) for mechanism in shared]
    kinds += [Case("fifo", plain), Case(TIRESIAS, plain)]
    kinds += [Case("sjf-ffs", mechanism) for mechanism in shared]
    kinds += [Case(policy, shared[0], crowd) for crowd in options.crowds for policy in ("sjf-bsbf", "carpool")]
    orders = [kinds[::-1] if repeat % 2 else kinds for repeat in range(options.repeats)]
    every = [replace(kind, repeat=repeat) for repeat, order in enumerate(orders) for kind in order]
    only = set(options.only or ())
    unknown = only - {name for case in every for name in (case.policy, case.name)}
    if unknown:
        known = ", ".join(dict.fromkeys(case.policy for case in every))
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such case; give some of {known}, or names of cases")
    return [case for case in every if not only or case.policy in only or case.name in only]


def policy(name: str) -> str:
    """`tiresias-11`: a threshold of 11 GPU-seconds. The cost of a restart is the launch, which both worlds have."""
    threshold = name.removeprefix("tiresias-")
    return name if threshold == name else f"tiresias:threshold_gpu_s={threshold},restart_s=0"
