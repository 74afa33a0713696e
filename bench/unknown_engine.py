"""The simulated world of `bench/unknown_sim.py`: how fast the trainings really are, and what the service is told.

The scheduler knows the jobs as the service knew them: by script and arguments, as a thousand parts of a guessed
duration. Reports come as `carpool.live.service.progress` makes them: some time after a job's mates change, and in
regular intervals from then on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any, NamedTuple

from unknown_work import KINDS, UnknownJob

from carpool.belief.demand import slowdown
from carpool.core import events as ev
from carpool.core.guesses import expected_left
from carpool.core.healing import record_of
from carpool.core.model import GpuDemand, Job
from carpool.core.pace import update_pace
from carpool.core.perf import AllReduce, FittedModel, Mate, Task
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.service.progress import (
    EVERY_S,
    FIRST_ALONE_S,
    GUESS_S,
    GUESS_SHARE,
    JOURNAL_S,
    LATE_S,
    LATE_SHARE,
    QUICK_LOOKS,
    SETTLING_S,
)
from carpool.live.spec import UNCOUNTED
from carpool.sim.engine import Costs, DueEnd, Engine

COUNTERS_S = 0.5
"""Seconds between two looks at the counters, in the version of the service that was measured."""
ROUNDING = 1e-6
USER = "user"
"""All jobs are of one user, whose guesses are corrected by what became of the earlier ones."""
PLAIN = {"gpt", "diffusion", "diffusion-small", "gan", "tabular"}
"""Kinds whose scripts do not tell how many steps they make."""
WATCHED = PLAIN | {"finetune"}
"""Kinds without the training library: they have no report before their first step."""
TASK = Task(0.0, 1.0, AllReduce(0.0, 0.0), AllReduce(0.0, 0.0), 1.0)
"""Its constants do not matter, because every job has a duration."""


class Process(NamedTuple):
    """What is known of the process of a job."""

    startup_s: float
    exit_s: float
    """Seconds between its last step and its end, in which it keeps its place."""
    pace: float = 1.0
    """Seconds of a step alone, over those that were measured of its kind. A process that waits for its host takes up to
    1.4 times as long in some runs, and uses less of the GPU."""


def submitted(job: UnknownJob, alone_s: Mapping[str, float], pace: float) -> Job:
    """Return a job with its true duration, under the model by which the service knows it: jobs of a kind have the same
    script and arguments but for the number of steps."""
    model = f"script:{KINDS[job.kind].script}.py:{job.kind}/{job.steps}"
    duration_s = job.steps * alone_s[job.kind] * pace
    return Job(job.name, job.submitted_s, model, 1, 1, UNCOUNTED, USER, duration_s=duration_s)


def kind_of(model: str) -> str:
    """Return the kind of the jobs of a model."""
    return model.rpartition(":")[2].partition("/")[0]


class MeasuredPairs:
    """The slow-downs of pairs as measured, else from demands."""

    def __init__(self, speeds: Mapping[str, Any], demands: Mapping[str, GpuDemand], mechanism: str) -> None:
        alone = speeds["alone"]
        self.known = {(a, b): a_s / alone[a] for a, b, a_s, _ in speeds["pairs"]}
        self.known |= {(b, a): b_s / alone[b] for a, b, _, b_s in speeds["pairs"]}
        self.demands, self.mechanism = demands, mechanism

    def between(self, kind: str, mate: str) -> float:
        known = self.known.get((kind, mate))
        return max(1.0, known or slowdown(self.demands[kind], self.demands[mate], self.mechanism))

    def pair(self, model: str, samples: int, mate: str, mate_samples: int) -> float:
        return self.between(kind_of(model), kind_of(mate))

    def demand(self, model: str, samples: int) -> float:
        return self.demands[kind_of(model)].sm


class TrueModel(FittedModel):
    """How fast the trainings really are. One whose steps are done slows no mate down while its process ends."""

    def __init__(self, pairs: MeasuredPairs, jobs: Sequence[Job], processes: Mapping[str, Process]) -> None:
        tasks = {job.model: TASK for job in jobs}
        super().__init__(tasks, pairs, 1, ignore_memory=True, startup=lambda job: processes[job.id].startup_s)
        self.processes = processes
        self.ended: set[str] = set()

    def slowdown(self, job: Job, accumulation: int, mates: Sequence[Mate]) -> float:
        """Return ξ. Slow-downs were measured against a step of the job's kind alone; beside mates, a process waits for
        the GPU or for its host, whichever takes longer."""
        computing = [mate for mate in mates if mate[0].id not in self.ended]
        if not computing:
            return 1.0
        return max(1.0, super().slowdown(job, accumulation, computing) / self.processes[job.id].pace)


@dataclass(frozen=True)
class StartUps(Costs):
    """The costs of a case in which it is known how long each process took to start up."""

    processes: Mapping[str, Process] = field(default_factory=dict)

    def launch(self, job: Job) -> float:
        return self.processes[job.id].startup_s


class DueLook(NamedTuple):
    """A look at the reports of a job, or at the counters while it is alone, unless its mates change before."""

    job: str
    mates: tuple[object, ...]
    counters: bool = False


class WatchedEngine(Engine):
    """An engine in which jobs report as the service sees them, and demands are measured."""

    truth: TrueModel
    demands: Mapping[str, GpuDemand]
    processes: Mapping[str, Process]
    looks_s: float = 0.0
    """When the service looks at all reports for the first time; it does so in regular intervals from then on."""

    def run(self) -> State:
        self._exits: dict[str, float] = {}
        self._guessed_s: dict[str, float] = {}
        self._mates: dict[str, tuple[object, ...]] = {}  # beside what each job computes
        self._noticed: dict[str, float] = {}  # when the service notices that, of those not measured since
        return super().run()

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _push(self, at: float, what: Any, pace_version: int) -> None:
        """Let processes start at once, and compute once they are up, which the service sees as two events."""
        if isinstance(what, ev.Started):
            super()._push(self.world.now, replace(what, at=self.world.now, computes=False), 0)
            what = ev.Computing(at, what.job, what.attempt)
        super()._push(at, what, pace_version)

    def _pop(self, now: float, batch: list[ev.Event]) -> bool:
        wake = super()._pop(now, batch)
        found: list[Any] = list(batch)
        for what in found:
            if isinstance(what, DueLook):
                batch.remove(what)  # type: ignore[arg-type]
                self._reports += [what] if self._is_current(what) else []
            elif isinstance(what, ev.Finished) and now < self._ends_at(now, what):
                batch.remove(what)
        return wake

    def _ends_at(self, now: float, event: ev.Finished) -> float:
        """Return when the process of a job ends whose last step is done."""
        ends_at = self._exits.get(event.job)
        if ends_at is None:
            ends_at = self._exits[event.job] = now + self.processes[event.job].exit_s
            self._push(ends_at, ev.Finished(ends_at, event.job, event.attempt), 0)
            self.truth.ended.add(event.job)
            self._speed_up(now, self.world.cluster.mates(self.world.jobs[event.job]))
        return ends_at

    def _speed_up(self, now: float, mates: Sequence[JobRecord]) -> None:
        """Let the mates of a job that has made its last step be faster from now on."""
        self.world.advance(now)
        update_pace(self.world, mates)
        for record in self.world.pace_changes:
            if record.iteration_s:
                self._end_later(record)
        self.world.pace_changes.clear()

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _report_later(self, now: float, pace_changes: Iterable[JobRecord]) -> bool:
        """Look at the reports of the jobs whose mates have changed once there is something to see."""
        for name, believed in self.belief.jobs.items():
            mates = self._mates_of(believed)
            if mates == self._mates.get(name, ()):
                continue
            if mates:
                self._push(self._measured_at(now, believed), DueLook(name, mates), 0)
            if mates and not self._computing_mates(believed):
                self._push(self._next_look(now, COUNTERS_S) + COUNTERS_S, DueLook(name, mates, counters=True), 0)
            self._mates[name] = mates
        return False

    def _mates_of(self, believed: JobRecord) -> tuple[object, ...]:
        """Return beside what a job computes: a change of it begins a new measurement."""
        if not believed.computing:
            return ()
        return (believed.attempt, believed.pauses, *sorted(mate.job.id for mate in self._computing_mates(believed)))

    def _computing_mates(self, believed: JobRecord) -> list[JobRecord]:
        return [mate for mate in self.belief.cluster.mates(believed) if mate.active and not mate.starts_up]

    def _measured_at(self, now: float, believed: JobRecord) -> float:
        """Return when the service has seen enough steps of a job whose mates change now."""
        often = EVERY_S / QUICK_LOOKS
        settling_s = SETTLING_S if believed.alone_seen or self._computing_mates(believed) else FIRST_ALONE_S
        return self._noticed_at(now, believed.job, often) + (1 + ceil(settling_s / often)) * often

    def _noticed_at(self, now: float, job: Job, often: float) -> float:
        """Return when the service notices that the mates of a job change now. It looks more often at a job that was not
        measured since the last change, if it has a report."""
        before = self._noticed.get(job.id)
        if before is None or before <= now:
            has_report = job.id in self._mates or kind_of(job.model) not in WATCHED
            measured = before is None and job.id in self._mates
            before = self._next_look(now, often if has_report and not measured else EVERY_S)
        self._noticed[job.id] = before
        return before

    def _next_look(self, now: float, every_s: float) -> float:
        """Return when the service looks next, if it looks so often."""
        number = floor((now - self.looks_s) / every_s + ROUNDING) + 1
        return self.looks_s + number * every_s

    def _is_current(self, look: DueLook) -> bool:
        """Return whether a job still computes beside the same mates."""
        return look.mates == self._mates.get(look.job) and look.job in self.belief.jobs and look.job not in self._exits

    def _report(self, now: float, pace_changes: Any) -> None:
        """Apply what the looks of this moment find, and look again later."""
        for look in pace_changes:
            record, believed = self.world.jobs[look.job], self.belief.jobs[look.job]
            if look.counters:
                self._tell(ev.DemandMeasured(now, look.job, record.attempt, self._demand(record)))
                continue
            event = self._observed(now, record, believed) if record.iteration_s else None
            if event is not None:
                self._tell(event)
                self._noticed.pop(look.job, None)
            self._push(self._next_look(now + self._pause_s(record, event), EVERY_S), look, 0)

    def _demand(self, record: JobRecord) -> GpuDemand:
        """Return what the counters show of a job that is alone. One that is slower uses less of the GPU."""
        demand, pace = self.demands[kind_of(record.job.model)], self.processes[record.job.id].pace
        sm, busy = min(1.0, demand.sm / pace), min(1.0, demand.busy / pace)
        return replace(demand, sm=sm, busy=busy, iteration_s=record.alone_iteration_s)

    def _tell(self, event: ev.Event) -> None:
        self.belief.apply(event)
        self.belief.pace_changes.clear()
        if self.log is not None:
            self.log(event)

    def _pause_s(self, record: JobRecord, event: ev.Observed | None) -> float:
        """Return the least seconds until the next report of a job that keeps its mates."""
        if event is None:
            return 0.0
        if kind_of(record.job.model) not in PLAIN:
            return JOURNAL_S
        return max(GUESS_S, GUESS_SHARE * record.alone_done(self.world.now))

    def _observed(self, now: float, record: JobRecord, believed: JobRecord) -> ev.Observed | None:
        job = record.job
        done = record.done if record.since == now else job.iterations - record.iterations_left(now)
        if kind_of(job.model) not in PLAIN:
            return ev.Observed(now, job.id, record.attempt, done, record.iteration_s)
        if not self._knows_alone(believed):
            return None
        guessed_s = self._guessed_s.setdefault(job.id, believed.alone_iteration_s)
        worked_s = done * record.alone_iteration_s
        spread = record_of(self.belief, believed).spread
        left_s = expected_left(worked_s, believed.job.iterations * guessed_s, spread)
        seconds = record.iteration_s / record.alone_iteration_s * guessed_s
        return ev.Observed(
            now, job.id, record.attempt, max(0.0, believed.job.iterations - left_s / guessed_s), seconds, relative=True
        )

    def _knows_alone(self, believed: JobRecord) -> bool:
        """Return whether it is known how fast a job is alone: it was or is alone, or one of its family was."""
        if believed.job.id in self._guessed_s or not self._computing_mates(believed):
            return True
        known = self.belief.perf.demand_of(believed.job, 1)
        return known is not None and known.iteration_s > 0.0

    # ---- guesses that were too short ---------------------------------------------------------------------------------

    def _expect_end(self, record: JobRecord) -> None:
        """Look at a job that computes as long after it should have ended as the service does."""
        late_s = max(LATE_S, LATE_SHARE * record.job.iterations * record.alone_iteration_s)
        self._looks[record.job.id] = number = self._pushes + 1
        self._push(record.end() + late_s, DueEnd(record), number)
