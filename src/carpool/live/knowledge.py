"""From what a user submitted to the job that the scheduler knows: its speed as believed, and where that comes from."""

from dataclasses import dataclass

from carpool.core.model import Job
from carpool.core.perf import GENERIC, ConstantInterference, FittedModel, PerformanceModel
from carpool.live.spec import Spec
from carpool.profile.schema import load

DEFAULT_TIME_S = 3600.0
"""How long a job of which nothing is known is believed to run alone."""
DEFAULT_SLOWDOWN = 1.5
PROFILE = "t4"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the belief about a job's length came from."""

    kind: str
    """profile, time or default"""
    detail: str


class Knowledge:
    def __init__(self, gpus: int, perf: PerformanceModel | None = None) -> None:
        self.tasks = load(PROFILE).core_tasks()
        self.perf = perf or FittedModel(self.tasks, ConstantInterference(DEFAULT_SLOWDOWN), gpus)

    def job(self, spec: Spec, name: str, user: str, now: float) -> tuple[Job, Source]:
        iterations, model, alone_s, source = self._length(spec)
        job = Job(
            name,
            now,
            model,
            spec.gpus,
            spec.batch,
            iterations,
            user=user,
            alone_s=alone_s,
            can_shrink=spec.can_shrink is True,  # otherwise the library's verdict allows it later
            exclusive=spec.exclusive,
            max_slowdown=spec.max_slowdown,
            priority=spec.priority,
            after=spec.after,
            retries=spec.retries,
        )
        return job, source

    def _length(self, spec: Spec) -> tuple[int, str, float | None, Source]:
        """Iterations, model, seconds alone where they are given, and why."""
        known = spec.model is not None and spec.model in self.tasks
        model = spec.model if known and spec.model is not None else GENERIC
        if spec.iterations is not None and known:
            return spec.iterations, model, None, Source("profile", f"the profile {PROFILE} of {model}")
        time_s = spec.time_s if spec.time_s is not None else DEFAULT_TIME_S
        iterations = spec.iterations if spec.iterations is not None else max(1, round(time_s))
        if spec.time_s is not None:
            return iterations, model, time_s, Source("time", "--time, as submitted")
        detail = f"nothing is known of it: {DEFAULT_TIME_S:g} s are assumed"
        return iterations, model, time_s, Source("default", detail)
