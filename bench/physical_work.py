"""What the physical experiment runs: thirty jobs, the same in every case and in both worlds, and the cases.

Also what is known of their speed: the profile, and the box at hand as its probe found it.
"""

import argparse
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from carpool.core.model import Job
from carpool.core.perf import FittedModel, Placement
from carpool.gpu import mps
from carpool.profile.measure.conclude import Noise
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile
from carpool.sim.engine import Costs

MPS, TIME_SLICING, LOGICAL = "mps", "time-slicing", "logical"
EXCLUSIVE = ("fifo", "sjf", "tiresias")
GUESSED_LAUNCH_S = 8.0
PROBE_S = 2.0
"""A job of the probe iterates so long."""


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


@dataclass(frozen=True)
class Box:
    """What the probe found on a machine, before any case ran there: a profile says nothing of its processor cores."""

    alone_s: Mapping[Setting, float] = field(default_factory=dict)
    """An iteration of each job alone. Where the cores launch kernels too slowly, they set the pace and not the GPU."""
    overhead_s: Mapping[Setting, float] = field(default_factory=dict)
    """What a process takes beyond its iterations: to start, to warm up and to end."""
    exit_s: float = 0.0
    """How much of it comes after the last iteration."""

    def costs(self, stop_s: float = 0.0) -> Costs:
        """A preempted job leaves once more than it ends, which `stop_s` includes."""
        return BoxCosts(stop_s=max(0.0, stop_s - self.exit_s), overhead_s=self.overhead_s)


@dataclass(frozen=True, slots=True)
class BoxCosts(Costs):
    """Every job pays what its own process took on that box."""

    overhead_s: Mapping[Setting, float] = field(default_factory=dict)

    def launch(self, job: Job) -> float:
        return self.overhead_s.get(Setting(job.model, job.batch), GUESSED_LAUNCH_S)


class MeasuredModel(FittedModel):
    """The profile's slow-downs and fits; at a measured batch the measured time, on the box itself if it was probed."""

    def __init__(self, profile: Profile, mechanism: str, box: Box | None = None) -> None:
        super().__init__(profile.core_tasks(), profile.interference(mechanism), 1)
        self._noise, self._mechanism, self._box = Noise(profile.raw), mechanism, box or Box()

    def iteration_time(self, job: Job, accum: int, placement: Placement) -> float:
        setting = Setting(job.model, job.batch, accum)
        known = self._box.alone_s.get(setting) or self._noise.alone(self._mechanism, setting)
        return known if known is not None else super().iteration_time(job, accum, placement)


def settings(profile: Profile) -> list[Setting]:
    """Every task at every batch at which pairs of it were measured."""
    found = {Setting(pair.a, pair.batch_a) for pair in profile.pairs}
    return sorted(found | {Setting(pair.b, pair.batch_b) for pair in profile.pairs})


def table(mechanism: str, profile: Profile) -> str:
    """On logical slots, whatever the profile holds stands for the way they share."""
    known = profile.pair_mechanisms()
    return mechanism if mechanism in known else known[0]


def workload(profile: Profile, options: argparse.Namespace) -> list[Work]:
    """Tasks and batches by turns in random order; lengths lognormal; arrivals Poisson, `load` times too fast."""
    drawn = random.Random(options.seed)
    kinds = settings(profile)
    chosen = [kinds[i % len(kinds)] for i in drawn.sample(range(options.jobs), options.jobs)]
    model, now, jobs = MeasuredModel(profile, table(TIME_SLICING, profile)), 0.0, []
    for number, setting in enumerate(chosen, 1):
        length = options.mean * min(3.0, max(0.3, math.exp(drawn.gauss(-0.25, 0.7))))
        name = f"{setting.task}-{number}"
        jobs.append(Work(name, setting.task, setting.batch, _iterations(model, setting, length), round(now, 2)))
        now += drawn.expovariate(options.load / (options.mean + GUESSED_LAUNCH_S))
    return jobs


def probe_work(profile: Profile) -> list[Work]:
    """One job of each kind, for a few seconds, one after the other; before them one that is not looked at, since the
    first process on a machine reads everything from its disk."""
    model, kinds = MeasuredModel(profile, table(TIME_SLICING, profile)), settings(profile)
    return [
        Work(f"{number}-{one.task}", one.task, one.batch, _iterations(model, one, PROBE_S), 0.0)
        for number, one in enumerate([kinds[0], *kinds])
    ]


def _iterations(model: MeasuredModel, setting: Setting, seconds: float) -> int:
    job = Job("probe", 0.0, setting.task, 1, setting.batch, 1)
    return max(5, round(seconds / model.iteration_time(job, 1, Placement(1, 1))))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What matters most first; the whole set once before anything is repeated."""
    plain = LOGICAL if options.gpus else TIME_SLICING
    shared = [plain] if options.gpus or mps.available() is not None else [MPS, plain]
    kinds = [Case("sjf", plain)]
    kinds += [Case("sjf-bsbf", mechanism) for mechanism in shared]
    kinds += [Case("fifo", plain), Case("tiresias", plain)]
    kinds += [Case("sjf-ffs", mechanism) for mechanism in shared]
    kinds += [Case(policy, shared[0], crowd) for crowd in options.crowds for policy in ("sjf-bsbf", "carpool")]
    for repeat in range(options.repeats):
        for kind in kinds:
            case = replace(kind, repeat=repeat)
            if not options.only or case.policy in options.only or case.name in options.only:
                yield case


def policy(name: str, options: argparse.Namespace) -> str:
    """Tiresias' threshold is scaled with the jobs; the cost of a restart is the launch, which both worlds have."""
    threshold = options.threshold or 1.5 * (options.mean + GUESSED_LAUNCH_S)
    return f"tiresias:threshold_gpu_s={threshold:g},restart_s=0" if name == "tiresias" else name
