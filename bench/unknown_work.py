"""The jobs of `bench/unknown.py`: trainings that no profile knows, in three workloads of fifteen."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "unknown_jobs"
MEDIAN_S, SPREAD, SHORTEST_S, LONGEST_S = 7.0, 0.7, 4.0, 40.0
"""Run times alone: lognormal, within bounds."""
GAP_S = 3.0
"""Mean seconds between two submissions."""
GUESS = 2.0
"""Users misjudge a run time by up to this factor, either way."""


@dataclass(frozen=True)
class Kind:
    """A script with its arguments, and arguments for a CPU."""

    script: str
    arguments: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()

    def command(self, steps: int, tiny: bool) -> list[str]:
        """Return the command after `python`."""
        return [str(SCRIPTS / f"{self.script}.py"), "--steps", str(steps), *(self.tiny if tiny else self.arguments)]


KINDS = {
    "gpt": Kind("gpt", (), ("--width", "64", "--depth", "1", "--length", "16", "--batch", "2", "--words", "100")),
    "vit": Kind("vit", (), ("--width", "64", "--depth", "1", "--size", "32", "--batch", "2")),
    "vit-large": Kind(
        "vit", ("--width", "1024", "--depth", "16", "--batch", "48"), ("--width", "64", "--depth", "2", "--size", "32")
    ),
    "diffusion": Kind("diffusion", (), ("--width", "8", "--size", "16", "--batch", "2")),
    "diffusion-small": Kind(
        "diffusion", ("--width", "32", "--batch", "32"), ("--width", "4", "--size", "16", "--batch", "2")
    ),
    "recurrent": Kind("recurrent", (), ("--width", "8", "--frames", "5", "--batch", "2")),
    "tabular": Kind("tabular", (), ("--width", "32")),
    "gan": Kind("gan", (), ("--width", "8", "--batch", "4")),
    "autoencoder": Kind("autoencoder", (), ("--width", "8", "--size", "16", "--batch", "4")),
    "finetune": Kind("finetune", (), ("--width", "64", "--depth", "1", "--batch", "2")),
}
SATURATING = ("gpt", "vit-large", "diffusion", "vit")
LIGHT = ("tabular", "gan", "recurrent", "finetune", "diffusion-small", "autoencoder")
WORKLOADS = {"saturating": 11, "mixed": 7, "light": 4}
"""Number of saturating jobs among the fifteen of each workload."""
JOBS = 15


@dataclass(frozen=True)
class UnknownJob:
    """One job of a workload."""

    name: str
    kind: str
    steps: int
    submitted_s: float
    guess_s: float
    """What its user believes that it takes."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def draw(workload: str, step_s: Mapping[str, float], seed: int) -> list[UnknownJob]:
    """Draw a workload for a machine on which a step of each kind takes `step_s` alone."""
    chance = random.Random(f"{workload} {seed}")
    kinds = _kinds(WORKLOADS[workload], chance)
    now, jobs = 0.0, []
    for number, kind in enumerate(kinds, 1):
        length = min(LONGEST_S, max(SHORTEST_S, MEDIAN_S * math.exp(chance.gauss(0.0, SPREAD))))
        guess = length * GUESS ** chance.uniform(-1.0, 1.0)
        steps = max(1, round(length / step_s[kind]))
        jobs.append(UnknownJob(f"{workload}-{number}-{chance.randrange(16**6):06x}", kind, steps, now, guess))
        now += chance.expovariate(1.0 / GAP_S)
    return jobs


def _kinds(saturating: int, chance: random.Random) -> Sequence[str]:
    heavy = [SATURATING[number % len(SATURATING)] for number in range(saturating)]
    light = [LIGHT[number % len(LIGHT)] for number in range(JOBS - saturating)]
    return chance.sample(heavy + light, JOBS)
