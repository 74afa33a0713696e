"""Reports of running jobs as events: read once a second, and journalled only where they say something new.

A worker with the training library reports how far it is, and a PyTorch script without it is watched. The queries show
every report. The journal gets a measurement when a job's mates change and otherwise every ten seconds, every
checkpoint, and every change of accumulation. The progress of any other job is an estimate. So is that of a job that
reports its speed, if neither it nor its owner states how many iterations it does in all.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from carpool.belief.estimate import run_time
from carpool.belief.model import Belief
from carpool.channel import Report, Shrinking
from carpool.core import events as ev
from carpool.core.guesses import expected_left
from carpool.core.healing import record_of
from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor, GangKey
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox
from carpool.live.service.jobs import JobBook
from carpool.live.service.report_trust import ReportTrust

log = logging.getLogger("carpool.live")

EVERY_S = 1.0
"""Seconds between two looks at the reports."""
JOURNAL_S = 10.0
"""Seconds between two journalled measurements of a job whose mates stay the same."""
DROPS_SAID = 3
"""Number of dropped reports in a row after which that is noted."""
SETTLING_ITERATIONS, SETTLING_S = 3, 0.4
"""Iterations and seconds beside the same mates after which a measurement counts."""
FIRST_ALONE_S = 0.6
"""The same for the first time alone: a trial waits for it, and the counters need this long to be the job's own."""
QUICK_LOOKS = 8
"""Number of quick looks for each look at all gangs. A quick look reads only gangs whose mates changed, because their
measurements are new."""
LATE_S, LATE_SHARE = 5.0, 0.05
"""How long a job must run beyond its believed end to have outlived it: in seconds, and as a share of its duration."""
GUESS_S, GUESS_SHARE = 3.0, 0.02
"""Least seconds between two measurements of a job whose duration is a guess, and as a share of what it has run."""


@dataclass(slots=True)
class GangProgress:
    """What is in the journal about a gang."""

    journalled_at: float = -inf
    mates: tuple[object, ...] = ()
    since_iteration: int = 0
    """Iteration at which its mates last changed."""
    base: tuple[int, float] | None = None
    """Iteration and time of the first report after that; None: there is none."""
    alone_s: float | None = None
    """Seconds of one of its iterations alone; None: not known. Needed where its duration is a guess."""
    guessed_s: float = 0.0
    """Seconds of one of the state's iterations alone, by that guess."""
    accumulation: int = 0
    """Accumulation that is in force by the journal; 0: not known."""
    latest: Report | None = None
    trust: ReportTrust = field(default_factory=ReportTrust)
    drops: int = 0
    """Number of reports in a row that were dropped."""
    dropped: str = ""
    """What the latest dropped report contradicts; empty: none was dropped."""


@dataclass
class ProgressWatch:
    """Reads reports from the executor and turns them into events."""

    state: State
    executor: Executor
    book: JobBook
    inbox: Inbox
    clock: Clock
    late: dict[GangKey, float] = field(default_factory=dict)
    """When each gang was first seen to compute beyond its believed end."""
    gangs: dict[GangKey, GangProgress] = field(default_factory=dict)

    async def run(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(EVERY_S / QUICK_LOOKS)
            try:
                running = self._running()
                if number % QUICK_LOOKS == 0:
                    self.look_for_late()
                else:
                    running = [key for key in running if key in self.gangs and self.gangs[key].journalled_at == -inf]
                if running:
                    self._take(await asyncio.to_thread(self._read, running))
            except Exception:  # the next look must happen
                log.exception("reports could not be read")

    def look(self) -> None:
        """Read the reports and put what is new into the inbox."""
        self._take(self._read(self._running()))
        self.look_for_late()

    def look_for_late(self) -> None:
        """Report which jobs run for longer than is believed of them."""
        state, now = self.state, self.clock.now()
        if any(record.iteration_s and not record.iterations_left(now) for record in state.running):

            def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
                late = [record for record in state.running if self._is_late(record, now)]
                return [ev.Outlived(now, record.job.id, record.attempt) for record in late]

            self.inbox.add(prepare)

    def _is_late(self, record: JobRecord, now: float) -> bool:
        """Return whether a job has computed for some time since it should have ended."""
        key = (record.job.id, record.attempt)
        if not record.iteration_s or record.iterations_left(now):
            self.late.pop(key, None)
            return False
        since = self.late.setdefault(key, now)
        return now - since >= max(LATE_S, LATE_SHARE * record.job.iterations * record.alone_iteration_s)

    def _take(self, reports: Sequence[tuple[GangKey, Report]]) -> None:
        if reports:

            def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
                return self._events(reports, now)

            self.inbox.add(prepare)

    def latest(self, record: JobRecord) -> Report | None:
        """Return the latest report of a job's present attempt."""
        gang = self.gangs.get((record.job.id, record.attempt))
        return gang.latest if gang else None

    def seconds(self, record: JobRecord) -> float | None:
        """Return the seconds of one of a job's own iterations beside its present mates; None: not known yet."""
        gang, report = self.gangs.get((record.job.id, record.attempt)), self.latest(record)
        if gang is None or report is None or report.accumulation != record.accumulation:
            return None
        return _measured(gang, report, SETTLING_S)

    def done(self, record: JobRecord) -> float | None:
        """Return the iterations done as the workers report them, in those of the state; None: no report."""
        report = self.latest(record)
        scale = self._scale(record, report) if report is not None else None
        return None if report is None or scale is None else report.iteration * scale

    def _scale(self, record: JobRecord, report: Report) -> float | None:
        """Return the iterations of the state for one that a worker reports; None: the worker does not report its total.

        Where the owner gave no number of iterations, those of the state are parts of the whole job.
        """
        if self.book.counts_iterations(record.job.id):
            return 1.0
        return record.job.iterations / report.total if report.total else None

    def _running(self) -> list[GangKey]:
        """Return the gangs to read, and forget those that are gone."""
        for gone in self.gangs.keys() - {(record.job.id, record.attempt) for record in self.state.running}:
            del self.gangs[gone]
        for gone in self.late.keys() - {(record.job.id, record.attempt) for record in self.state.running}:
            del self.late[gone]
        return [(r.job.id, r.attempt) for r in self.state.running if r.status is Status.RUNNING]

    def _read(self, running: Sequence[GangKey]) -> list[tuple[GangKey, Report]]:
        """Read reports; not on the event loop, because the workers own these files."""
        found = [(key, self.executor.report(key)) for key in running]
        # an empty one says that PyTorch is imported; the checkpoint from which a job goes on is no iteration 0
        return [(key, one) for key, one in found if one is not None and (one.iteration or not one.watched)]

    def _events(self, reports: Sequence[tuple[GangKey, Report]], now: float) -> list[ev.Event]:
        found: list[ev.Event] = []
        for key, report in reports:
            record = self.state.jobs.get(key[0])
            if record is not None and record.attempt == key[1] and record.status is Status.RUNNING:
                gang = self.gangs.setdefault(key, GangProgress())
                why = gang.trust.contradiction(report, now, time.time())
                if why:
                    self._drop(record, gang, why)
                    continue
                gang.drops = 0
                found += self._gang_events(record, gang, report, now)
                gang.latest = report
        return found

    def _drop(self, record: JobRecord, gang: GangProgress, why: str) -> None:
        """Note that reports are not believed, in the journal once for each attempt. A single one may follow from the
        moving average after a change of speed."""
        gang.drops += 1
        if gang.drops < DROPS_SAID:
            return
        if not gang.dropped:
            self.inbox.note(f"job {record.job.id}: its reports are dropped where they cannot be true: {why}")
        gang.dropped = why

    def dropped(self, record: JobRecord) -> str:
        """Return why a report of a job's present attempt was dropped; empty: none was."""
        gang = self.gangs.get((record.job.id, record.attempt))
        return gang.dropped if gang else ""

    def _gang_events(self, record: JobRecord, gang: GangProgress, report: Report, now: float) -> Iterator[ev.Event]:
        job, attempt = record.job.id, record.attempt
        scale = self._scale(record, report)
        if (
            scale is not None
            and not report.watched
            and report.checkpoint >= 0
            and report.checkpoint != record.checkpoint
        ):
            yield ev.Checkpointed(now, job, attempt, report.checkpoint * scale)
        saves = not report.watched  # the training library does; a script that is only watched is not asked
        if record.job.saves is not saves:
            yield ev.SavingSeen(now, job, attempt, saves)
        if not record.job.can_shrink and report.shrinking in (Shrinking.CERTIFIED, Shrinking.WARNED):
            yield ev.ConstraintsChanged(now, job, can_shrink=True)
        yield from self._accumulation_events(record, gang, report, now)
        if report.can_stand and not record.job.can_pause and self.book.specs[job].can_pause:
            yield ev.ConstraintsChanged(now, job, can_pause=True)
        # a measurement that began before a pause contains it, so a pause counts as a change of mates
        mates = (record.pauses, record.accumulation, *sorted(mate.job.id for mate in self._computing_mates(record)))
        if mates != gang.mates:
            gang.mates, gang.since_iteration, gang.journalled_at, gang.base = mates, report.iteration, -inf, None
        elif gang.base is None and report.iteration > gang.since_iteration:
            gang.base = report.iteration, report.time
        unchanged = gang.latest is not None and report.iteration == gang.latest.iteration
        if unchanged or record.warming_up:
            return
        settling_s = SETTLING_S if record.alone_seen or self._computing_mates(record) else FIRST_ALONE_S
        seconds = _measured(gang, report, settling_s) if report.accumulation == record.accumulation else None
        if scale is None:
            yield from self._guessed_events(record, gang, report, seconds, now)
        elif seconds is not None and now - gang.journalled_at >= JOURNAL_S:
            gang.journalled_at = now
            yield ev.Observed(now, job, attempt, report.iteration * scale, seconds / scale)
        elif gang.latest is None and now - gang.journalled_at >= JOURNAL_S:
            yield ev.Progressed(now, job, attempt, report.iteration * scale)

    def _computing_mates(self, record: JobRecord) -> list[JobRecord]:
        """Return the mates that may slow a job down now: not those that are paused or start up."""
        return [mate for mate in self.state.cluster.mates(record) if mate.active and not mate.starts_up]

    def _guessed_events(
        self, record: JobRecord, gang: GangProgress, report: Report, seconds: float | None, now: float
    ) -> Iterator[ev.Event]:
        """Return the speed of a job that does not report how many iterations it makes, as a ratio to its speed alone.

        The state's iterations are thousandths of its guessed duration, and are slowed down as much as its own. What is
        left of it follows from the guess and from the time alone that its iterations so far are worth.
        """
        if seconds is None:
            return
        if gang.alone_s is None:
            gang.alone_s, gang.guessed_s = self._seconds_alone(record, seconds), record.alone_iteration_s
        elapsed = report.iteration * seconds
        if gang.alone_s is None or now - gang.journalled_at < max(GUESS_S, GUESS_SHARE * elapsed):
            return
        gang.journalled_at = now
        job, guessed_s = record.job, gang.guessed_s
        worked_s = report.iteration * gang.alone_s
        left_s = expected_left(worked_s, job.iterations * guessed_s, self._spread(record))
        done = max(0.0, job.iterations - left_s / guessed_s)
        yield ev.Observed(now, job.id, record.attempt, done, seconds / gang.alone_s * guessed_s, relative=True)

    def _spread(self, record: JobRecord) -> float:
        """Return the factor by which what is believed of a job's duration may be wrong."""
        perf, job = self.state.perf, record.job
        if record.guess_s and self.state.relies_on_guess(job):
            return record_of(self.state, record).spread
        estimate = run_time(perf, job) if isinstance(perf, Belief) else None
        return estimate.high / estimate.value if estimate is not None and estimate.value > 0.0 else 1.0

    def _seconds_alone(self, record: JobRecord, seconds: float) -> float | None:
        """Return the seconds of an iteration alone, where it takes `seconds` now; None: not known."""
        if not self._computing_mates(record):
            return seconds
        perf = self.state.perf
        known = perf.demand_of(record.job, record.accumulation) if isinstance(perf, Belief) else None
        return known.iteration_s if known is not None and known.iteration_s > 0.0 else None

    def _accumulation_events(
        self, record: JobRecord, gang: GangProgress, report: Report, now: float
    ) -> Iterator[ev.Event]:
        """Confirm a retune, or report that the job split its batch further by itself because memory ran out."""
        job, attempt, accumulation = record.job.id, record.attempt, report.accumulation
        if accumulation == record.accumulation:
            # after a restart, the reserved memory shows whether a retune was confirmed
            confirmed = self.state.perf.memory(record.job, accumulation) == record.memory
            known = gang.accumulation or (accumulation if confirmed else 0)
            gang.accumulation = accumulation
            if known != accumulation:
                yield ev.Retuned(now, job, attempt, accumulation)
        elif (
            report.out_of_memory
            and record.accumulation < accumulation <= record.job.batch
            and gang.accumulation != accumulation
        ):
            gang.accumulation = accumulation
            yield ev.Retuned(now, job, attempt, accumulation, unasked=True)


def _measured(gang: GangProgress, report: Report, settling_s: float) -> float | None:
    """Return the seconds per iteration beside the present mates; None: too few iterations are done beside them.

    Soon after a change this is a mean over the iterations since, because the worker's moving average lags behind.
    """
    if report.iteration - gang.since_iteration < SETTLING_ITERATIONS or report.seconds <= 0.0:
        return None
    if not report.time:
        return report.seconds
    if gang.base is None:
        return None
    steps, span = report.iteration - gang.base[0], report.time - gang.base[1]
    if steps < SETTLING_ITERATIONS or span < settling_s:
        return None
    return span / steps if span < JOURNAL_S else report.seconds
