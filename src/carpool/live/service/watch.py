"""Reports of running jobs turned into events, once a second, and only where they tell something new.

A worker with the training library says how far it is; most of that is shown to people and forgotten. The journal gets a
measurement when a job's company changes and otherwise every ten seconds, every checkpoint, and every change of
accumulation. A job without the library says nothing: its progress is an estimate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from carpool.channel import Report, Shrinking
from carpool.core import events as ev
from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.executors.base import Executor, Key

EVERY_S = 1.0
JOURNAL_S = 10.0
"""How often a job's progress is journalled while nothing else changes."""
STEPS = 3
"""A measurement counts after so many iterations in the present company: the average needs some time."""


@dataclass(slots=True)
class Watched:
    """What was last told about a gang."""

    told_at: float = -1e18
    company: tuple[object, ...] = ()
    since_iteration: int = 0
    """Where it was when its company last changed."""
    accumulation: int = 0
    """The accumulation that the journal knows to be in force; 0: not looked at yet."""
    latest: Report | None = None


@dataclass
class Watch:
    executor: Executor
    counted: Callable[[str], bool] = lambda job: True
    """Did the owner say how many iterations a job has? Otherwise its reports count in other units than the state."""
    seen: dict[Key, Watched] = field(default_factory=dict)

    def latest(self, record: JobRecord) -> Report | None:
        watched = self.seen.get((record.job.id, record.attempt))
        return watched.latest if watched else None

    def read(self, state: State) -> list[tuple[Key, Report]]:
        """The newest reports of all running jobs."""
        running = [(r.job.id, r.attempt) for r in state.running if r.status is Status.RUNNING]
        reports = [(key, report) for key in running if (report := self.executor.report(key)) is not None]
        for gone in self.seen.keys() - set(running):
            del self.seen[gone]
        return reports

    def events(self, state: State, reports: Sequence[tuple[Key, Report]], now: float) -> list[ev.Event]:
        found: list[ev.Event] = []
        for key, report in reports:
            record = state.jobs.get(key[0])
            if record is not None and record.attempt == key[1] and record.status is Status.RUNNING:
                watched = self.seen.setdefault(key, Watched())
                found += self._events(state, record, watched, report, now)
                watched.latest = report
        return found

    def _events(
        self, state: State, record: JobRecord, watched: Watched, report: Report, now: float
    ) -> Iterator[ev.Event]:
        job, attempt = record.job.id, record.attempt
        counted = self.counted(job)
        if counted and report.checkpoint >= 0 and report.checkpoint != record.checkpoint:
            yield ev.Checkpointed(now, job, attempt, float(report.checkpoint))
        if not record.job.can_shrink and report.shrinking in (Shrinking.CERTIFIED, Shrinking.WARNED):
            yield ev.ConstraintsChanged(now, job, can_shrink=True)
        yield from _accumulation(state, record, watched, report, now)
        company = (record.accumulation, *sorted(mate.job.id for mate in state.cluster.mates(record)))
        if company != watched.company:
            watched.company, watched.since_iteration, watched.told_at = company, report.iteration, -1e18
        settled = report.iteration - watched.since_iteration >= STEPS
        if (
            not counted
            or now - watched.told_at < JOURNAL_S
            or (watched.latest and report.iteration == watched.latest.iteration)
        ):
            return
        if settled and report.seconds > 0.0 and report.accumulation == record.accumulation:
            watched.told_at = now
            yield ev.Observed(now, job, attempt, float(report.iteration), report.seconds)
        elif watched.latest is None:
            yield ev.Progressed(now, job, attempt, float(report.iteration))


def _accumulation(state: State, record: JobRecord, watched: Watched, report: Report, now: float) -> Iterator[ev.Event]:
    """Has the job obeyed a re-tune, or split its batch further by itself because memory ran out?"""
    job, attempt, accumulation = record.job.id, record.attempt, report.accumulation
    if accumulation == record.accumulation:
        # after a restart nobody remembers whether a re-tune was confirmed; what it reserves tells
        known = watched.accumulation or (
            accumulation if state.perf.memory(record.job, accumulation) == record.memory else 0
        )
        watched.accumulation = accumulation
        if known != accumulation:
            yield ev.Retuned(now, job, attempt, accumulation)
    elif report.out_of_memory and accumulation > record.accumulation and watched.accumulation != accumulation:
        watched.accumulation = accumulation
        yield ev.Retuned(now, job, attempt, accumulation, unasked=True)
