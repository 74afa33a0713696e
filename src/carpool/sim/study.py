"""The robustness study: every scenario changes one property of the simulated world, and all policies get the same jobs.

`scenarios` is the design: a base world, variations of one factor at a time, at the paper's load and at twice that load,
and some factors crossed. Completed runs are kept in a file, so that an interrupted study resumes where it stopped. A
run is used again only if neither its world nor our code has changed. `carpool study` calls `run_study`, and
`carpool.report.study` makes tables and the picture from what it returns.
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
from carpool.fields import read_json_text
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
"""Policies that every scenario compares."""
ALL_POLICIES = (*CORE, "fifo", "backfill", "tiresias", "las", "srtf", "srsf", "lucid", "tesserae", "sjf-ffs")
"""Policies that the base scenarios compare."""
JOBS = 240
"""Number of jobs at load 1: eight hours of arrivals."""
BASE = Setup(truth="gavel", ignore_placement=True, memory_limit=False, fairness=True)
LOADS = (1.0, 2.0)


@dataclass(frozen=True)
class Scenario:
    """One world of the study, and the policies to compare in it."""

    group: str
    name: str
    load: float
    setup: Setup
    policies: tuple[str, ...] = CORE
    bound: bool = False
    """Whether the lower bound is computed as well."""


@dataclass(frozen=True, slots=True)
class StudyRun:
    """What the study keeps of one policy on one workload in one scenario. Times are in seconds."""

    scenario: str
    group: str
    load: float
    policy: str
    seed: int
    mean_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    large_jct_s: float
    makespan_s: float
    host_slowdown_max: float
    """Largest slow-down of a job that others joined: its run time divided by its run time alone."""
    preemptions_per_job: float
    worst_rho: float | None = field(default=None)
    """Finish-time fairness of the user that gains least from sharing the cluster."""
    bound_s: float | None = field(default=None)
    """Lower bound on the mean completion time, if the scenario asks for it."""


def scenarios() -> list[Scenario]:
    """Return all scenarios of the study."""
    found = [_scenario("base", "base", load, policies=ALL_POLICIES, bound=True) for load in LOADS]
    found += [_scenario("load", f"load {load:g}", load, bound=True) for load in (0.5, 1.5)]
    for load in LOADS:
        for sigma in (0.5, 1.0):
            found.append(_scenario("durations", f"durations wrong by σ {sigma:g}", load, duration_error=sigma))
        for sigma in (0.1, 0.3, 0.5):
            found.append(_scenario("slow-downs", f"ξ wrong by σ {sigma:g}", load, interference_error=sigma))
        for xi in ("1.5", "2"):
            found.append(_scenario("slow-downs", f"ξ believed to be {xi}", load, belief=xi))
        found.append(_scenario("slow-downs", "ξ learned", load, belief="learned"))
        found += _strangers(load)
        found.append(_scenario("world", "memory limits", load, memory_limit=True))
        found.append(_scenario("world", "placement counts", load, ignore_placement=False))
        found.append(_scenario("world", "memory and placement", load, memory_limit=True, ignore_placement=False))
        for jobs in (1, 3, 4):
            found.append(_scenario("jobs per GPU", f"C = {jobs}", load, jobs_per_gpu=jobs))
        for xi in ("1", "1.25", "1.5", "1.75", "2", "2.5", "3"):
            found.append(_scenario("tables", f"ξ = {xi}", load, truth=xi))
        for table in ("h200:mps", "h200:mps:small", "h200:mps:large", "h200:time-slicing", "h200:time-slicing:large"):
            found.append(_scenario("tables", table, load, truth=table))
    return [*found, *_crossed()]


def _strangers(load: float) -> Iterator[Scenario]:
    """Yield the scenarios in which nothing is known of the jobs, with trials and without them."""
    policies = (*ALL_POLICIES, "carpool:trials=false")
    for name, belief in (("unknown jobs", "unknown"), ("unknown jobs, no two alike", "unknown:unique")):
        yield _scenario("unknown jobs", name, load, policies=policies, belief=belief)
        wrong = f"{name}, durations wrong by σ 0.35"  # mostly within a factor of 2 either way
        yield _scenario("unknown jobs", wrong, load, policies=policies, belief=belief, duration_error=0.35)


def _crossed() -> Iterator[Scenario]:
    """Yield the scenarios that cross factors, because one may change the effect of another."""
    for load in LOADS:
        for table in ("h200:mps", "h200:mps:small", "h200:mps:large"):
            for jobs in (3, 4):
                yield _scenario("crossed", f"{table}, C = {jobs}", load, truth=table, jobs_per_gpu=jobs)
        real: dict[str, Any] = {"memory_limit": True, "ignore_placement": False}
        wrong: dict[str, Any] = {"duration_error": 0.5, "interference_error": 0.3}
        yield _scenario("crossed", "memory, placement, all wrong", load, **real, **wrong)
        yield _scenario("crossed", "memory, placement, C = 4", load, **real, jobs_per_gpu=4)
        yield _scenario("crossed", "memory, placement, h200:mps", load, **real, truth="h200:mps")
        yield _scenario("crossed", "ξ wrong by σ 0.3, h200:mps", load, truth="h200:mps", interference_error=0.3)


def _scenario(
    group: str, name: str, load: float, *, policies: tuple[str, ...] = CORE, bound: bool = False, **change: Any
) -> Scenario:
    return Scenario(group, name, load, replace(BASE, **change), policies, bound)


class RunCache:
    """Completed runs, one line of JSON each, by a digest of everything that they depend on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # an interruption may have cut off the last line
            for line in whole.splitlines():
                entry = read_json_text(line)
                self._known[entry["key"]] = entry["run"]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not the cache of a study; remove it or give another --cache") from None

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
    """Return a digest of all our code and shipped data that a run can depend on."""
    root = Path(carpool.__file__).parent
    digest = hashlib.sha256()
    for part in ("core", "policies", "sim", "belief", "profile"):
        for path in sorted((root / part).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _key(what: str, scenario: Scenario, seed: int) -> str:
    facts = [what, asdict(scenario.setup), scenario.load, JOBS, seed, code_digest()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


PlannedStudyRun = tuple[Scenario, str, int]
"""A scenario, a policy and a seed."""


def plan(chosen: Iterable[Scenario], seeds: Sequence[int], policies: Sequence[str] | None) -> list[PlannedStudyRun]:
    """Return all runs of a study. The reference is always among the policies."""
    planned: list[PlannedStudyRun] = []
    for scenario in chosen:
        names = scenario.policies if policies is None else dict.fromkeys((REFERENCE, *policies))
        planned += [(scenario, name, seed) for seed in seeds for name in names]
    return planned


def steps(planned: Sequence[PlannedStudyRun]) -> int:
    """Return the number of progress steps of a study: runs and bounds."""
    return len(planned) + len(_bounded(planned))


def _bounded(planned: Sequence[PlannedStudyRun]) -> list[tuple[Scenario, int]]:
    return list({(id(scenario), seed): (scenario, seed) for scenario, _, seed in planned if scenario.bound}.values())


def run_study(
    planned: Sequence[PlannedStudyRun],
    cache: RunCache,
    *,
    workers: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[StudyRun]:
    """Simulate the runs that the cache does not hold, and return all. `progress` is called `steps(planned)` times."""
    missing = [one for one in planned if cache.find(_key(one[1], one[0], one[2])) is None]
    for _ in range(len(planned) - len(missing)):
        progress()
    tasks = [(policy, _case(scenario, seed), scenario.setup) for scenario, policy, seed in missing]
    with closing(run_each(tasks, workers)) as results:
        for number, outcome in results:
            scenario, policy, seed = missing[number]
            cache.add(_key(policy, scenario, seed), _kept(outcome.summary))
            progress()
    bounds: dict[tuple[int, int], float] = {}
    for scenario, seed in _bounded(planned):
        bounds[id(scenario), seed] = _bound(scenario, seed, cache)
        progress()
    runs = []
    for scenario, policy, seed in planned:
        values = cache.find(_key(policy, scenario, seed))
        assert values is not None
        bound = bounds.get((id(scenario), seed))
        runs.append(StudyRun(scenario.name, scenario.group, scenario.load, policy, seed, **values, bound_s=bound))
    return runs


@lru_cache(maxsize=256)
def _workload(load: float, seed: int) -> Workload:
    return load_workload(generate.NAME, {}, round(JOBS * load), load, seed, BASE.profile)


def _case(scenario: Scenario, seed: int) -> SweepCase:
    return SweepCase(scenario.name, str(seed), _workload(scenario.load, seed), seed)


def _kept(summary: Summary) -> dict[str, float | None]:
    return {
        "mean_jct_s": summary.mean_jct_s,
        "p95_jct_s": summary.p95_jct_s,
        "p99_jct_s": summary.p99_jct_s,
        "large_jct_s": summary.large.mean_jct_s,
        "makespan_s": summary.makespan_s,
        "host_slowdown_max": summary.host_slowdown_max,
        "preemptions_per_job": summary.preemptions / summary.jobs,
        "worst_rho": summary.fairness.worst_rho if summary.fairness is not None else None,
    }


def _bound(scenario: Scenario, seed: int, cache: RunCache) -> float:
    from carpool.sim.bound import lower_bound

    key = _key("lower bound", scenario, seed)
    known = cache.find(key)
    if known is None:
        known = {"bound_s": lower_bound(_workload(scenario.load, seed), replace(scenario.setup, seed=seed)).sharing_s}
        cache.add(key, known)
    return float(known["bound_s"])
