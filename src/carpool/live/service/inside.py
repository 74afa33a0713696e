"""What the parts of the service share: the home, the journal, the driver, and how a job is found.

`Service` is made of three files: this one with its fields, `requests.py` with what users may change, `reading.py` with
what they may look at; `service.py` puts them together and runs them.
"""

import asyncio
import json
from collections.abc import Collection, Mapping
from typing import Any

from carpool.core.perf import PerformanceModel
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.clock import Clock, RealClock
from carpool.live.errors import NoSuchJob, WrongStatus
from carpool.live.executors.base import Executor
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.machine import Machine
from carpool.live.home import Home
from carpool.live.insight import views
from carpool.live.insight.forecaster import Forecaster
from carpool.live.journal.store import Store
from carpool.live.service.driver import Driver, Ending
from carpool.live.service.knowledge import Knowledge
from carpool.live.service.prune import Keep
from carpool.live.service.watch import Watch
from carpool.live.spec import Spec

Row = dict[str, Any]


class Inside:
    def __init__(
        self,
        home: Home,
        policy: str = "sjf-bsbf",
        *,
        gpus: int | None = None,
        only: Collection[str] = (),
        jobs_per_gpu: int = 2,
        gpu_memory: int | None = None,
        mps: bool = True,
        executor: Executor | None = None,
        clock: Clock | None = None,
        perf: PerformanceModel | None = None,
        profile: str | None = None,
        keep: Keep | None = None,
    ) -> None:
        """`gpus`: so many logical slots; None: the GPUs that NVML finds, and of these only those with the UUIDs `only`,
        the same as long as the home lives. `perf`: a belief that does not learn. `profile`: what is believed of jobs
        before they are seen."""
        self.home = home
        self.policy = policy
        self.jobs_per_gpu = jobs_per_gpu
        self.keep = keep or Keep()
        self.specs: dict[str, Spec] = {}
        """Of the jobs that have not ended."""
        self._gpus, self._gpu_memory, self._only, self._mps = gpus, gpu_memory, only, mps
        self._executor = executor or LocalExecutor(home)
        self._clock = clock or RealClock()
        self._perf, self._profile = perf, profile
        self._store = Store(home.journal)
        self._users: dict[str, Row] = {}
        self._watch = Watch(self._executor, lambda job: job in self.specs and self.specs[job].iterations is not None)
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._sources: dict[str, Row] = {}
        """How the lengths of the jobs that have not ended are known."""
        self._next_id = 1
        self._driver: Driver
        self._machine: Machine
        self._knowledge: Knowledge
        self._outlook: Forecaster

    @property
    def _state(self) -> State:
        return self._driver.scheduler.state

    def _living(self, job: str) -> JobRecord:
        record = self._state.jobs.get(job)
        if record is not None:
            return record
        raise WrongStatus(f"job {job} has {self._known_row(job)['state']}; submit it again to run it again")

    def _known_row(self, job: str) -> Row:
        """The row of a job that has ended."""
        row = self._ended_row(job)
        if row is None or row["state"] is None:
            raise NoSuchJob(job)
        return row

    def _ended_row(self, job: str) -> Row | None:
        for ending in self._driver.endings:
            if ending.record.job.id == job:
                return self._fresh_row(ending)
        return self._store.job(int(job)) if job.isdigit() and len(job) < 19 else None

    def _fresh_row(self, ending: Ending) -> Row:
        """Of a job that has ended just now: as it will be written."""
        job = ending.record.job
        row = new_row(job.id, job.user, job.submitted, self.specs[job.id], self._sources.get(job.id, {}))
        return {**row, **self._story_of(ending)}

    def _story_of(self, ending: Ending) -> Row:
        record = ending.record
        row = views.ended_row(self._state, record, self.specs[record.job.id], ending.exit_code)
        row["alone_estimate_s"] = record.job.iterations * record.whole_iteration_s
        row["batch"], row["iterations"] = record.job.batch, record.job.iterations
        return {"id": int(record.job.id), "state": row["status"], "ended": record.ended, "story": json.dumps(row)}


def new_row(name: str, user: str, submitted: float, spec: Spec, source: Mapping[str, Any]) -> Row:
    """A job's row in the table of jobs."""
    row = {"id": int(name), "user": user, "name": spec.name, "spec": spec.to_json(), "submitted": submitted}
    return {**row, "source": json.dumps(dict(source))}
