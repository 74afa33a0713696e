"""The jobs and the cases of the physical experiment; every case runs the same jobs, for real and simulated.

Also the models of their speed: from the profile alone, and with the effects of the machine as seen in other runs.
"""

import argparse
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations_with_replacement

from carpool.core.model import Job
from carpool.core.perf import FittedModel, Placement
from carpool.gpu import mps
from carpool.profile.measure.examples import SCRIPTS
from carpool.profile.measure.noise import Noise
from carpool.profile.measure.plan import MPS, TIME_SLICING
from carpool.profile.measure.raw import Measurement, Setting
from carpool.profile.schema import Profile
from carpool.sim.engine import Costs

LOGICAL = "logical"
TIRESIAS = "tiresias-11"
"""Tiresias with a threshold that is scaled with the jobs, so that the longest of them are preempted."""
RETIRED = ("tiresias-18",)
"""Policies that are no longer compared. No job reached this threshold, so its run only informs about the machine."""
EXCLUSIVE = ("fifo", "sjf", TIRESIAS, *RETIRED)
GUESSED_LAUNCH_S = 8.0


@dataclass(frozen=True)
class ExperimentCase:
    """One policy, sharing mechanism and limit of jobs per GPU; `repeat` counts its runs."""

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
class ExperimentJob:
    """One job of the experiment."""

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
        """The job as the service sees it. Its batch cannot be split, because the scripts are not certified for that."""
        return Job(self.name, self.submitted, self.task, 1, self.batch, self.iterations, can_shrink=False)


@dataclass(frozen=True)
class MachineEffects:
    """Effects of the machine that no profile contains: how fast its cores start processes and launch kernels."""

    alone_s: Mapping[Setting, float] = field(default_factory=dict)
    """Iteration times alone, where other runs give better values than the profile; the same under MPS as without."""
    overheads_s: Mapping[Setting, Sequence[float]] = field(default_factory=dict)
    """Times of processes beyond their iterations: to start, to warm up and to end."""
    own_s: Mapping[str, float] = field(default_factory=dict)
    """Overhead of each job's first process in the run itself, where it is known."""
    exit_s: float = 0.0
    """Part of the overhead that comes after the last iteration."""
    stop_s: float = 0.0
    """Time that a preempted job takes to save and exit."""

    def costs(self, draw: int) -> "MachineCosts":
        """Return the costs of one random draw."""
        return MachineCosts(stop_s=self.stop_s, effects=self, chance=random.Random(draw))


@dataclass(frozen=True, slots=True)
class MachineCosts(Costs):
    """Launch costs: the job's own start time where it is known, or one that was seen for the same kind of job."""

    effects: MachineEffects = field(default_factory=MachineEffects)
    chance: random.Random = field(default_factory=random.Random)
    _started: set[str] = field(default_factory=set)

    def launch(self, job: Job) -> float:
        if job.id in self.effects.own_s and job.id not in self._started:
            self._started.add(job.id)
            return self.effects.own_s[job.id]
        return self.chance.choice(self.effects.overheads_s.get(Setting(job.model, job.batch), [GUESSED_LAUNCH_S]))


@lru_cache(maxsize=8)
def noise_of(raw: tuple[Measurement, ...]) -> Noise:
    """Return the noise of measurements. Every draw of a run asks for that of the same profile."""
    return Noise(raw)


class MeasuredModel(FittedModel):
    """A model with the profile's slow-downs and fits, and with the measured time at a measured batch."""

    def __init__(self, profile: Profile, mechanism: str) -> None:
        super().__init__(profile.core_tasks(), profile.interference(mechanism), 1)
        self._noise, self._mechanism = noise_of(profile.raw), mechanism

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        known = self._noise.alone(self._mechanism, Setting(job.model, job.batch, accumulation))
        return known if known is not None else super().iteration_time(job, accumulation, placement)

    def alone_s(self, work: ExperimentJob) -> float:
        """Run time of the whole job alone."""
        return work.iterations * self.iteration_time(work.job, 1, Placement(1, 1))


class MachineModel(MeasuredModel):
    """A model of the machine in one random draw: each job's speed varies as much as measurements of its task do."""

    def __init__(self, profile: Profile, mechanism: str, effects: MachineEffects, draw: int) -> None:
        super().__init__(profile, mechanism)
        self._alone_s, self._draw = effects.alone_s, draw

    def iteration_time(self, job: Job, accumulation: int, placement: Placement) -> float:
        luck = random.Random(f"{self._draw} {job.id}").gauss(0.0, self._noise.sigma(self._mechanism, job.model))
        usual, whole = super().iteration_time(job, accumulation, placement), super().iteration_time(job, 1, placement)
        return usual / whole * self._alone_s.get(Setting(job.model, job.batch), whole) * math.exp(luck)


def settings(profile: Profile) -> list[Setting]:
    """Return every example at every batch at which pairs of it were measured."""
    found = {Setting(pair.a, pair.batch_a) for pair in profile.pairs}
    found |= {Setting(pair.b, pair.batch_b) for pair in profile.pairs}
    return sorted(kind for kind in found if kind.task in profile.tasks and kind.task in SCRIPTS)


def table(mechanism: str, profile: Profile) -> str:
    """Return the mechanism whose pairs to use; on logical slots, the first one that the profile has."""
    known = profile.pair_mechanisms()
    return known[0] if mechanism == LOGICAL and known else mechanism


def check(profile: Profile, called: str, jobs: Iterable[ExperimentJob], mechanisms: Iterable[str]) -> None:
    """Refuse a profile that lacks one of these jobs, alone or as a pair."""
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


def workload(profile: Profile, options: argparse.Namespace) -> list[ExperimentJob]:
    """Draw the jobs: tasks and batches in turn, in random order; lognormal run times; Poisson arrivals at `load`."""
    drawn = random.Random(options.seed)
    kinds = settings(profile)
    if not kinds:
        raise SystemExit(f"{options.profile}: has no pairs of the examples; measure some with carpool profile")
    chosen = [kinds[i % len(kinds)] for i in drawn.sample(range(options.jobs), options.jobs)]
    model, now, jobs = MeasuredModel(profile, table(_plain(options), profile)), 0.0, []
    for number, setting in enumerate(chosen, 1):
        length = options.mean * min(3.0, max(0.3, math.exp(drawn.gauss(-0.25, 0.7))))
        one = ExperimentJob(f"{setting.task}-{number}", setting.task, setting.batch, 1, round(now, 2))
        jobs.append(replace(one, iterations=max(5, round(length / model.alone_s(one)))))
        now += drawn.expovariate(options.load / (options.mean + GUESSED_LAUNCH_S))
    return jobs


def _plain(options: argparse.Namespace) -> str:
    return LOGICAL if options.gpus else TIME_SLICING


def cases(options: argparse.Namespace) -> list[ExperimentCase]:
    """Return the cases, the most important first. Every second repeat is in reverse order, because machines drift."""
    plain = _plain(options)
    shared = [plain] if options.gpus or mps.available() is not None else [MPS, plain]
    kinds = [ExperimentCase("sjf", plain)]
    kinds += [ExperimentCase("sjf-bsbf", mechanism) for mechanism in shared]
    kinds += [ExperimentCase("fifo", plain), ExperimentCase(TIRESIAS, plain)]
    kinds += [ExperimentCase("sjf-ffs", mechanism) for mechanism in shared]
    kinds += [
        ExperimentCase(policy, shared[0], limit)
        for limit in options.more_jobs_per_gpu
        for policy in ("sjf-bsbf", "carpool")
    ]
    orders = [kinds[::-1] if repeat % 2 else kinds for repeat in range(options.repeats)]
    every = [replace(kind, repeat=repeat) for repeat, order in enumerate(orders) for kind in order]
    only = set(options.only or ())
    unknown = only - {name for case in every for name in (case.policy, case.name)}
    if unknown:
        known = ", ".join(dict.fromkeys(case.policy for case in every))
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such case; give some of {known}, or names of cases")
    return [case for case in every if not only or case.policy in only or case.name in only]


def policy(name: str) -> str:
    """Return the policy of a case; `tiresias-11` has a threshold of 11 GPU-seconds, and a restart costs a launch."""
    threshold = name.removeprefix("tiresias-")
    return name if threshold == name else f"tiresias:threshold_gpu_s={threshold},restart_s=0"
