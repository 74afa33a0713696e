"""Estimates for submitted jobs: from a user's spec to the job that the scheduler knows, with its expected duration.

The duration comes from the profile of the job's model, else from the history of jobs of the same family, else from
`--time`, else from a fixed default. The family is what a job runs (`families`), whatever it is called.
The belief (`carpool.belief`) keeps the first two and learns from every report.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from carpool.belief.estimate import ASSUMED, model_name, run_time
from carpool.belief.model import Belief
from carpool.belief.prior import believe
from carpool.core.model import Guess, Job
from carpool.core.perf import GENERIC, ConstantInterference, FittedModel, PerformanceModel
from carpool.live.foreign_files import with_rights_of
from carpool.live.service.families import Family, family_of, is_training
from carpool.live.service.warm_up import may_train
from carpool.live.spec import UNCOUNTED, Spec
from carpool.profile.schema import load

UNKNOWN_SLOWDOWN = 1.5
"""Slow-down that is assumed for tasks without a profile."""


@dataclass(frozen=True, slots=True)
class EstimateSource:
    """Where the estimate of a job's duration came from."""

    kind: str
    """measured, profile, history, time or default"""
    detail: str


class JobKind(NamedTuple):
    """What a job is, as its script says."""

    model: str
    """Model under which the belief keeps what it learns: the one that the user gave, else the family, else the name."""
    trains: bool = False
    """Its script is a training whose steps are seen."""


class JobEstimator:
    """Makes the scheduler's job from a spec."""

    def __init__(
        self,
        gpus: int,
        mechanism: str,
        gpu_names: Iterable[str] = (),
        perf: PerformanceModel | None = None,
        profile: str | None = None,
    ) -> None:
        """`perf`: a model that does not learn, for tests. `profile`: a shipped name or a file; None: the profile
        shipped for the GPU, else t4."""
        h200 = any("H200" in name for name in gpu_names)
        self.profile = load(profile or ("h200" if h200 else "t4"))
        self._tasks = self.profile.core_tasks()
        self._gpus = gpus
        self._mechanism = mechanism
        self._given = perf

    def initial_belief(self) -> PerformanceModel:
        """Return the belief before any observation."""
        if self._given is not None:
            return self._given
        fitted = FittedModel(self._tasks, ConstantInterference(UNKNOWN_SLOWDOWN), self._gpus)
        return believe(self.profile, fitted, self._mechanism)

    def kinds(self, specs: Iterable[Spec], uid: int | None) -> list[JobKind]:
        """Return what jobs are, from their scripts. Blocks: it reads the scripts with the rights of `uid`, None: of the
        service. Jobs of an array have one script, which is read once."""
        seen: dict[object, tuple[Family | None, bool]] = {}
        kinds = []
        for spec in specs:
            same = spec.command, spec.directory, tuple(sorted(spec.env.items())), bool(spec.model)
            if same not in seen:
                seen[same] = _look(spec, uid)
            family, trains = seen[same]
            model = family.model(spec.iterations is not None) if family else model_name(spec.model, spec.name)
            kinds.append(JobKind(model, trains))
        return kinds

    def job(
        self, perf: PerformanceModel, spec: Spec, kind: JobKind, name: str, user: str, now: float
    ) -> tuple[Job, EstimateSource]:
        """Return the job for a spec whose kind is known, and the source of its estimate. `perf`: the belief."""
        model = kind.model
        known = model in self._tasks
        if not known and not isinstance(perf, Belief):
            model = GENERIC
        profiled = known and spec.iterations is not None
        estimated = {
            "model": model,
            "iterations": spec.iterations or UNCOUNTED,
            "duration_s": None if profiled else spec.duration_s or self._default(model),
            "guess": _guess(spec, profiled),
            "can_shrink": spec.can_shrink is True,  # else the training library's verdict may allow it later
            "can_pause": spec.can_pause and spec.gpus == 1,  # a gang can where the training library says so later
            "saves": None,  # a job that uses the training library shows it
            # another script may later, once a job of its family reported when it was up
            "can_start_ahead": (kind.trains or None) if may_train(spec) else False,
        }
        job = Job(id=name, submitted=now, user=user, **{**spec.for_job(), **estimated})
        return job, self._source(perf, job, spec)

    def _default(self, model: str) -> float | None:
        """Return the default duration for a job that has neither a profile nor a family."""
        from carpool.belief.model import DEFAULT_RUN_S

        return DEFAULT_RUN_S if model == GENERIC or model in self._tasks else None

    def _source(self, perf: PerformanceModel, job: Job, spec: Spec) -> EstimateSource:
        if not isinstance(perf, Belief):
            return self._without_belief(job, spec)
        found = run_time(perf, job)
        if found.kind == "time" and spec.duration_s is None:
            return EstimateSource("default", ASSUMED)
        return EstimateSource(found.kind, found.source)

    @staticmethod
    def _without_belief(job: Job, spec: Spec) -> EstimateSource:
        """Return the source where the service does not learn: its profile, the owner, or nothing."""
        if job.duration_s is None:
            return EstimateSource("profile", f"the profile of {job.model}")
        if spec.duration_s is not None:
            return EstimateSource("time", "the duration that was given")
        return EstimateSource("default", f"no information; {job.duration_s:g} s is assumed")


def _guess(spec: Spec, profiled: bool) -> Guess:
    """Return what the owner of a job guessed of its length. A profile's durations are used instead."""
    if spec.duration_s is not None and not profiled:
        return Guess.DURATION
    return Guess.NOTHING if spec.iterations is None else Guess.ITERATIONS


def _look(spec: Spec, uid: int | None) -> tuple[Family | None, bool]:
    """Return the family of a job, None if its owner named its model, and whether it is a training."""
    with contextlib.suppress(OSError):  # the rights of the user cannot be taken, or the files do not answer
        return with_rights_of(uid, lambda: (None if spec.model else family_of(spec), is_training(spec)))
    return None, False
