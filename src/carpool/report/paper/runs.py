"""The cache of runs: every result is one small file, named by a hash of everything that it depends on.

The hash covers the jobs, the policy, the world and the source of everything that simulates. So a second call finds all
results, an interrupted call resumes where it stopped, and a change of code or configuration runs them again.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import carpool
from carpool.files import whole_file
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.jobs import workload_of
from carpool.report.paper.plan import PlannedRun
from carpool.sim.metrics import SubsetSummary, Summary
from carpool.sim.sweep import CaseResult, SweepCase, run_each
from carpool.sim.workload import Workload, write


class RunProgress(NamedTuple):
    """Progress of `execute`: completed runs, and jobs in the runs that had to be simulated."""

    runs: int
    of_runs: int
    jobs: int
    of_jobs: int


SIMULATES = ("belief", "core", "policies", "sim", "profile")
"""Packages on which a run's result depends."""


@cache
def code_digest(*packages: str) -> str:
    """Return a hash of the sources and tables of some of our packages."""
    root = Path(carpool.__file__).parent
    digest = sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".json", ".toml", ".css"):
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def named_files(*texts: str) -> list[Path]:
    """Return the files that texts name: a user's policy, a profile, a matrix of slow-downs, `mine.json:mps`."""
    parts = [text.split(":") for text in texts]
    names = {":".join(some[:number]) for some in parts for number in range(1, len(some) + 1)}
    return [path for name in sorted(names) if (path := Path(name)).is_file()]


def key(config: PaperConfig, run: PlannedRun, workload: Workload) -> str:
    """Return the name of a run's file in the cache."""
    spec = config.policy(run.policy).spec
    text = StringIO()
    write(workload, text)
    setup = run.setting.setup
    parts = [spec, json.dumps(asdict(setup), sort_keys=True), text.getvalue(), code_digest(*SIMULATES)]
    digest = sha256("\0".join(parts).encode())
    for path in named_files(spec, setup.profile, setup.truth):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def execute(
    config: PaperConfig,
    runs: Iterable[PlannedRun],
    folder: Path,
    *,
    workers: int | None = None,
    progress: Callable[[RunProgress], None] = lambda standing: None,
) -> dict[PlannedRun, CaseResult]:
    """Return the result of every run, from `folder` or by simulation. `progress` is called after every run."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[PlannedRun, CaseResult] = {}
    missing: list[tuple[PlannedRun, SweepCase, Path]] = []
    for run in runs:
        workload = workload_of(config, run)
        path = folder / f"{key(config, run, workload)}.json"
        outcome = _kept(path)
        if outcome is not None:
            found[run] = outcome
        else:
            missing.append((run, SweepCase(workload.source, str(run.seed), workload), path))
    total = len(found) + len(missing)
    jobs = sum(run.setting.jobs for run, *_ in missing)
    standing = RunProgress(len(found), total, 0, jobs)
    progress(standing)
    tasks = [(config.policy(run.policy).spec, case, run.setting.setup) for run, case, _ in missing]
    with closing(run_each(tasks, workers)) as results:
        for number, outcome in results:
            run, _, path = missing[number]
            _keep(path, outcome)
            found[run] = outcome
            standing = RunProgress(len(found), total, standing.jobs + run.setting.jobs, jobs)
            progress(standing)
    return found


def _keep(path: Path, outcome: CaseResult) -> None:
    with whole_file(path) as file:
        json.dump(asdict(outcome), file)


def _kept(path: Path) -> CaseResult | None:
    """Return the result in a file; None if there is no file, or if it cannot be read."""
    try:
        value = json.loads(path.read_text("utf-8"))
        return CaseResult(**{**value, "summary": _summary(value["summary"]), "jcts_s": tuple(value["jcts_s"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _summary(value: Mapping[str, Any]) -> Summary:
    groups = {name: SubsetSummary(**value[name]) for name in ("large", "small")}
    return Summary(
        **{**value, **groups, "models": {name: SubsetSummary(**part) for name, part in value["models"].items()}}
    )
