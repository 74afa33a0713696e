"""From what a user submitted to the job that the scheduler knows: its speed as believed, and where that comes from.

The speed comes from the profile of the job's model, else from the history of the same name, else from `--time`, else
from a stated default; the belief (`carpool.belief`) keeps the first two and learns from every report.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from carpool.belief.estimate import model_name, run_time
from carpool.belief.model import Belief
from carpool.belief.prior import believe
from carpool.core.model import Job
from carpool.core.perf import GENERIC, ConstantInterference, FittedModel, PerformanceModel
from carpool.live.spec import Spec
from carpool.profile.schema import load

UNCOUNTED = 1000
"""The iterations of a job whose owner did not count any: thousandths of the whole, so that its history can tell."""
UNKNOWN_SLOWDOWN = 1.5


@dataclass(frozen=True, slots=True)
class Source:
    """Where the belief about a job's length came from."""

    kind: str
    """measured, profile, history, time or default"""
    detail: str


class Knowledge:
    def __init__(
        self,
        gpus: int,
        mechanism: str,
        gpu_names: Iterable[str] = (),
        perf: PerformanceModel | None = None,
        profile: str | None = None,
    ) -> None:
        """`perf`: a model that is given and does not learn, for tests. `profile`: a shipped name or a file; without
        one, that of the GPU where we ship it."""
        h200 = any("H200" in name for name in gpu_names)
        self.profile = load(profile or ("h200" if h200 else "t4"))
        self._tasks = self.profile.core_tasks()
        self._gpus = gpus
        self._mechanism = mechanism
        self._given = perf

    def fresh(self) -> PerformanceModel:
        """What is believed before anything was seen."""
        if self._given is not None:
            return self._given
        fitted = FittedModel(self._tasks, ConstantInterference(UNKNOWN_SLOWDOWN), self._gpus)
        return believe(self.profile, fitted, self._mechanism)

    def job(self, perf: PerformanceModel, spec: Spec, name: str, user: str, now: float) -> tuple[Job, Source]:
        model = model_name(spec.model, spec.name)
        known = model in self._tasks
        if not known and not isinstance(perf, Belief):
            model = GENERIC
        profiled = known and spec.iterations is not None
        known_now = {
            "model": model,
            "iterations": spec.iterations or UNCOUNTED,
            "duration_s": None if profiled else spec.duration_s or self._default(model),
            "can_shrink": spec.can_shrink is True,  # otherwise the library's verdict may allow it later
        }
        job = Job(id=name, submitted=now, user=user, **{**spec.for_job(), **known_now})
        return job, self._source(perf, job, spec)

    def _default(self, model: str) -> float | None:
        """A job without a name has no history either: only the stated default is left."""
        from carpool.belief.model import DEFAULT_RUN_S

        return DEFAULT_RUN_S if model == GENERIC or model in self._tasks else None

    def _source(self, perf: PerformanceModel, job: Job, spec: Spec) -> Source:
        if not isinstance(perf, Belief):
            return Source("time", "a model that was given")
        found = run_time(perf, job)
        if found.kind == "time" and spec.duration_s is None:
            return Source("default", f"no information; {found.value:g} s is assumed")
        return Source(found.kind, found.source)
