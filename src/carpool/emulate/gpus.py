"""The emulated GPUs of a service: which profile, how many, how fast, and the performance model that follows from it.

`carpool serve --emulate` makes an `EmulatedGpus` from what the operator writes and stores it in the service's home. The
executor reads the GPUs from that file, and so does the first worker of every gang, which needs the model.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from carpool.channel import read_json
from carpool.core.perf import AllReduce, FittedModel, Interference, Task, UnknownPair
from carpool.errors import InputError
from carpool.profile.interference import read_interference
from carpool.profile.schema import Profile, load, shipped
from carpool.units import parse_bytes

METAVAR = "PROFILE:NODESxGPUS[:SPEED]"
FILE = "gpus.json"
"""Name of the file in the directory of the emulation."""
NO_PAIRS = "gavel"
"""Interference table of a profile that has no pairs itself."""
PREFERRED = "mps"
"""Mechanism whose pairs are taken where a profile has several."""
UNKNOWN_SLOWDOWN = 1.5
"""Slow-down of pairs that the table does not contain."""
MOST_NODES, MOST_GPUS, MOST_SPEED = 64, 4096, 10_000.0
_SPEC = re.compile(r"(?P<profile>.+?):(?P<nodes>\d{1,4})[x×](?P<gpus>\d{1,4})(:(?P<speed>\d{1,6}(\.\d{1,9})?))?")


@dataclass(frozen=True, slots=True)
class EmulatedGpus:
    """What is emulated."""

    profile: str
    """Shipped name or absolute path of a profile."""
    nodes: int
    gpus: int
    """Number of GPUs on each node."""
    speed: float
    """How many times as fast as the profile's GPU an emulated one is, so that long trainings fit into minutes."""
    interference: str
    """The slow-down of sharing, as `--interference` of the simulator takes it."""
    memory: int
    """Bytes on each GPU."""
    device: str
    """Product name of the emulated GPU."""

    @property
    def label(self) -> str:
        """Name of the GPUs as users see it."""
        return f"emulated {self.device}" + (f" at {self.speed:g}× speed" if self.speed != 1.0 else "")

    def model(self) -> FittedModel:
        """Return the speed, memory and slow-downs of jobs on these GPUs."""
        tasks = {name: faster(task, self.speed) for name, task in load(self.profile).core_tasks().items()}
        return FittedModel(tasks, EmulatedInterference(read_interference(self.interference)), self.gpus)

    def write(self, directory: Path) -> Path:
        """Write the description into a directory, which is made if it is missing, and return the file's path."""
        mode = 0o1777 if os.getuid() == 0 else 0o700  # workers of all users write there
        for path in (directory, directory / "gpus", directory / "gangs"):
            path.mkdir(mode=mode, exist_ok=True)
            path.chmod(mode)
        path = directory / FILE
        partial = path.with_name(f".{FILE}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(self)))
        partial.chmod(0o644 if os.getuid() == 0 else 0o600)
        partial.replace(path)
        return path


class EmulatedInterference:
    """A table of slow-downs that also answers for models that it does not contain."""

    def __init__(self, table: Interference) -> None:
        self._table = table

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        try:
            return self._table.pair(model, samples, mate, mate_samples)
        except UnknownPair:
            return UNKNOWN_SLOWDOWN

    def demand(self, model: str, samples: int) -> float:
        return self._table.demand(model, samples)


def faster(task: Task, speed: float) -> Task:
    """Return a task on a GPU and a network that are `speed` times as fast."""
    intra, inter = (AllReduce(one.base_s / speed, one.per_gpu_s / speed) for one in (task.intra, task.inter))
    return replace(task, alpha_s=task.alpha_s / speed, beta_s=task.beta_s / speed, intra=intra, inter=inter)


def parse_gpus(text: str) -> EmulatedGpus:
    """Return the GPUs that a text such as `t4:4x4:60,memory=11GB` describes. Raise `InputError`."""
    head, *settings = (part.strip() for part in text.split(","))
    found = _SPEC.fullmatch(head)
    if found is None:
        raise InputError(f"--emulate {ascii(text)[:80]}: write {METAVAR}, such as t4:4x4 or t4:1x4:60")
    nodes, gpus = int(found["nodes"]), int(found["gpus"])
    speed = float(found["speed"] or 1.0)
    if not (1 <= nodes <= MOST_NODES and 1 <= gpus <= MOST_GPUS and 0.0 < speed <= MOST_SPEED):
        raise InputError(
            f"--emulate {head}: give 1 to {MOST_NODES} nodes, 1 to {MOST_GPUS} GPUs and a speed up to {MOST_SPEED:g}"
        )
    name = found["profile"] if found["profile"] in shipped() else str(Path(found["profile"]).expanduser().absolute())
    profile = load(found["profile"])
    chosen = _settings(settings)
    interference = chosen.get("interference") or _own_interference(name, profile)
    read_interference(interference)
    device = profile.gpu.name if profile.gpu else profile.name
    memory = profile.gpu.memory_bytes if profile.gpu else None
    if "memory" in chosen:
        memory = parse_bytes(chosen["memory"], f"--emulate {head}: memory")
    if not profile.tasks:
        raise InputError(f"--emulate {head}: profile {profile.name} has no tasks; choose another one")
    if not memory:
        raise InputError(f"--emulate {head}: profile {profile.name} does not state its GPU's memory; add memory=")
    return EmulatedGpus(name, nodes, gpus, speed, interference, memory, device)


def _settings(parts: Iterable[str]) -> dict[str, str]:
    found = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in ("interference", "memory") or not equals or not value:
            raise InputError(f"--emulate: setting {ascii(part)[:80]}: write interference=TABLE or memory=SIZE")
        if key in found:
            raise InputError(f"--emulate: {key}= is there twice; give one")
        found[key] = value
    return found


def _own_interference(name: str, profile: Profile) -> str:
    """Return the table that goes with a profile: its own pairs, else those of another GPU."""
    known = profile.pair_mechanisms()
    if not known:
        return NO_PAIRS
    return f"{name}:{PREFERRED if PREFERRED in known else known[0]}"


def read_gpus(path: str | os.PathLike[str]) -> EmulatedGpus:
    """Read the description that a service wrote. Raise `InputError` if it cannot be read."""
    data: Any = read_json(path)
    names = {one.name for one in fields(EmulatedGpus)}
    if not isinstance(data, dict) or not names <= data.keys():
        raise InputError(f"{os.fspath(path)}: no description of emulated GPUs; the node must see the service's home")
    return EmulatedGpus(**{name: data[name] for name in names})
