"""The robustness study: every cell is a world in which one thing is different, and every policy plays the same jobs.

`CELLS` is the design: a base world, and around it one factor at a time, at the paper's load and at twice of it; factors
that may depend on each other are crossed at the end. Runs are kept in a file as they get done, so that a study that
was interrupted goes on where it stopped; a run is used again only if neither its world nor our code has changed.
`carpool study` calls `run_study`; `carpool.report.study` makes tables and the picture of what it returns.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import carpool
from carpool.errors import InputError
from carpool.sim import generate
from carpool.sim.metrics import Summary
from carpool.sim.run import Setup
from carpool.sim.sources import load_workload
from carpool.sim.sweep import SweepCase, run_each
from carpool.sim.workload import Workload

REFERENCE = "sjf-bsbf"
REPAIR = "sjf-bsbf:floor=0.95,single_host=true"
OURS = ("carpool", "carpool:suspend=true")
CORE = ("sjf", REFERENCE, REPAIR, *OURS)
EVERYBODY = (*CORE, "fifo", "backfill", "tiresias", "las", "srtf", "srsf", "lucid", "tesserae", "sjf-ffs")
"""Whom the base cells compare; the others compare `CORE`."""
JOBS = 240
"""At load 1: eight hours of arrivals."""
BASE = Setup(truth="gavel", ignore_placement=True, memory_limit=False)
LOADS = (1.0, 2.0)


@dataclass(frozen=True)
class Scenario:
    """A world of the study."""

    group: str
    name: str
    load: float
    setup: Setup
    policies: tuple[str, ...] = CORE
    bound: bool = False
    """Is the lower bound of interest here?"""

    @property
    def jobs(self) -> int:
        return round(JOBS * self.load)


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One policy on one workload in one cell: what the study keeps of it. Times in seconds."""

    cell: str
    group: str
    load: float
    policy: str
    seed: int
    mean_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    large_jct_s: float
    makespan_s: float
    worst_host: float
    """The largest slow-down of a job that others joined: its run time over what it takes alone."""
    preemptions_per_job: float
    bound_s: float | None = field(default=None)
    """The lower bound on the mean, where it was asked for."""


def cells() -> list[Scenario]:
    """The whole design."""
    found = [_cell("base", "base", load, policies=EVERYBODY, bound=True) for load in LOADS]
    found += [_cell("load", f"load {load:g}", load, bound=True) for load in (0.5, 1.5)]
    for load in LOADS:
        for sigma in (0.5, 1.0):
            found.append(_cell("durations", f"durations wrong by σ {sigma:g}", load, duration_error=sigma))
        for sigma in (0.1, 0.3, 0.5):
            found.append(_cell("slow-downs", f"ξ wrong by σ {sigma:g}", load, interference_error=sigma))
        for xi in ("1.5", "2"):
            found.append(_cell("slow-downs", f"ξ believed to be {xi}", load, belief=xi))
        found.append(_cell("slow-downs", "ξ learned", load, belief="learned"))
        found.append(_cell("world", "memory limits", load, memory_limit=True))
        found.append(_cell("world", "placement counts", load, ignore_placement=False))
        found.append(_cell("world", "memory and placement", load, memory_limit=True, ignore_placement=False))
        for jobs in (1, 3, 4):
            found.append(_cell("jobs per GPU", f"C = {jobs}", load, jobs_per_gpu=jobs))
        for xi in ("1", "1.25", "1.5", "1.75", "2", "2.5", "3"):
            found.append(_cell("tables", f"ξ = {xi}", load, truth=xi))
        for table in ("h200:mps", "h200:mps:small", "h200:mps:large", "h200:time-slicing", "h200:time-slicing:large"):
            found.append(_cell("tables", table, load, truth=table))
    return [*found, *_crossed()]


def _crossed() -> Iterator[Scenario]:
    """Where one factor may change what another does."""
    for load in LOADS:
        for table in ("h200:mps", "h200:mps:small", "h200:mps:large"):
            for jobs in (3, 4):
                yield _cell("crossed", f"{table}, C = {jobs}", load, truth=table, jobs_per_gpu=jobs)
        real: dict[str, Any] = {"memory_limit": True, "ignore_placement": False}
        wrong: dict[str, Any] = {"duration_error": 0.5, "interference_error": 0.3}
        yield _cell("crossed", "memory, placement, all wrong", load, **real, **wrong)
        yield _cell("crossed", "memory, placement, C = 4", load, **real, jobs_per_gpu=4)
        yield _cell("crossed", "memory, placement, h200:mps", load, **real, truth="h200:mps")
        yield _cell("crossed", "ξ wrong by σ 0.3, h200:mps", load, truth="h200:mps", interference_error=0.3)


def _cell(
    group: str, name: str, load: float, *, policies: tuple[str, ...] = CORE, bound: bool = False, **change: Any
) -> Scenario:
    return Scenario(group, name, load, replace(BASE, **change), policies, bound)


class RunCache:
    """Runs that were made before, one line of JSON each, by a digest of all that they depend on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a line that was cut off by an interruption is made again
            for line in whole.splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry["run"]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: is not the cache of a study; remove it or give another --cache") from None

    def find(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def add(self, key: str, values: dict[str, Any]) -> None:
        self._known[key] = values
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "run": values}) + "\n")
        except OSError as error:
            raise InputError(f"{self.path}: cannot write there: {error.strerror}; choose another --cache") from None


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Of all our code and shipped data that a run can depend on."""
    root = Path(carpool.__file__).parent
    digest = hashlib.sha256()
    for part in ("core", "policies", "sim", "belief", "profile"):
        for path in sorted((root / part).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _key(what: str, cell: Scenario, seed: int) -> str:
    facts = [what, asdict(cell.setup), cell.load, JOBS, seed, code_digest()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


Job = tuple[Scenario, str, int]
"""A cell, a policy and a seed."""


def plan(chosen: Iterable[Scenario], seeds: Sequence[int], policies: Sequence[str] | None) -> list[Job]:
    """All runs. The reference is always among the policies."""
    jobs: list[Job] = []
    for cell in chosen:
        names = cell.policies if policies is None else dict.fromkeys((REFERENCE, *policies))
        jobs += [(cell, name, seed) for seed in seeds for name in names]
    return jobs


def steps(jobs: Sequence[Job]) -> int:
    """Of progress in a study: runs and bounds."""
    return len(jobs) + len(_bounded(jobs))


def _bounded(jobs: Sequence[Job]) -> list[tuple[Scenario, int]]:
    return list({(id(cell), seed): (cell, seed) for cell, _, seed in jobs if cell.bound}.values())


def run_study(
    jobs: Sequence[Job], cache: RunCache, *, workers: int | None = None, progress: Callable[[], None] = lambda: None
) -> list[StudyRun]:
    """Make the runs that the cache does not hold, and return all. `progress` is called `steps(jobs)` times."""
    missing = [job for job in jobs if cache.find(_key(job[1], job[0], job[2])) is None]
    for _ in range(len(jobs) - len(missing)):
        progress()
    tasks = [(policy, _case(cell, seed), cell.setup) for cell, policy, seed in missing]
    with closing(run_each(tasks, workers)) as results:
        for number, outcome in results:
            cell, policy, seed = missing[number]
            cache.add(_key(policy, cell, seed), _kept(outcome.summary))
            progress()
    bounds: dict[tuple[int, int], float] = {}
    for cell, seed in _bounded(jobs):
        bounds[id(cell), seed] = _bound(cell, seed, cache)
        progress()
    runs = []
    for cell, policy, seed in jobs:
        values = cache.find(_key(policy, cell, seed))
        assert values is not None
        bound = bounds.get((id(cell), seed))
        runs.append(StudyRun(cell.name, cell.group, cell.load, policy, seed, **values, bound_s=bound))
    return runs


@lru_cache(maxsize=256)
def _workload(load: float, seed: int) -> Workload:
    return load_workload(generate.NAME, {}, round(JOBS * load), load, seed, BASE.profile)


def _case(cell: Scenario, seed: int) -> SweepCase:
    return SweepCase(cell.name, str(seed), _workload(cell.load, seed), seed)


def _kept(summary: Summary) -> dict[str, float]:
    return {
        "mean_jct_s": summary.mean_jct_s,
        "p95_jct_s": summary.p95_jct_s,
        "p99_jct_s": summary.p99_jct_s,
        "large_jct_s": summary.large.mean_jct_s,
        "makespan_s": summary.makespan_s,
        "worst_host": summary.host_slowdown_max,
        "preemptions_per_job": summary.preemptions / summary.jobs,
    }


def _bound(cell: Scenario, seed: int, cache: RunCache) -> float:
    from carpool.sim.bound import lower_bound

    key = _key("lower bound", cell, seed)
    known = cache.find(key)
    if known is None:
        known = {"bound_s": lower_bound(_workload(cell.load, seed), replace(cell.setup, seed=seed)).sharing_s}
        cache.add(key, known)
    return float(known["bound_s"])
