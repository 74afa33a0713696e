"""The live driver: inputs, journal, `Scheduler.step`, executor, in that order, turn by turn.

A turn takes everything that came in, makes it durable together with the plan of the turn before, acts on that plan,
applies what came in, and lets the policy decide anew. So nothing is applied and nothing is done that is not on disk,
and whatever arrives while the disk is busy shares the next sync. If the journal cannot be written, users are told so,
what the executor reported is kept, and the turn is tried again: nothing new starts meanwhile, what runs goes on.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.core import events as ev
from carpool.core.model import Decision, JobId, Status
from carpool.core.record import JobRecord
from carpool.core.scheduler import Scheduler
from carpool.live.clock import Clock
from carpool.live.errors import Unavailable
from carpool.live.executors.base import Ended, Executor, How, Key, Launch
from carpool.live.journal.store import Batch, Store, StoreError
from carpool.live.service.outcomes import events_of

log = logging.getLogger("carpool.live")

RETRY_S = 1.0
Prepare = Callable[[float, Batch], Sequence[ev.Event]]
Answer = asyncio.Future[None]


@dataclass(slots=True)
class Input:
    """Something that came in. `prepare` says what it means in the light of the state when its turn comes; it may be
    asked twice, where the first time nothing could be written."""

    prepare: Prepare
    answer: Answer | None = None
    """Of a user's request, which is refused if it cannot be written. Everything else is kept and tried again."""


@dataclass(slots=True)
class Ending:
    """A job that has ended, and about whom nothing has been written yet."""

    record: JobRecord
    exit_code: int | None


@dataclass
class Driver:
    scheduler: Scheduler
    store: Store
    executor: Executor
    clock: Clock
    launch_of: Callable[[JobRecord], Launch]
    """How to start a job that was given GPUs."""
    story_of: Callable[[Ending], dict[str, Any]]
    """The last row of a job that has ended."""
    after_turn: Callable[[Sequence[Ending]], None] = lambda written: None
    """Called with the jobs whose last word has been written."""
    on_plan: Callable[[Sequence[Decision]], None] = lambda decisions: None
    """Called with the decisions of every plan that is acted upon."""
    may_launch: Callable[[], bool] = lambda: True
    """Asked before each launch; whoever says no wakes the driver later."""
    trouble_now: str = ""
    """Why the journal cannot be written; empty: it can."""
    wake_at: float | None = None
    stopped: bool = False
    _inputs: list[Input] = field(default_factory=list)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _turning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _plan: ev.Planned | None = None
    _endings: list[Ending] = field(default_factory=list)
    _notes: list[tuple[float, str]] = field(default_factory=list)
    _exits: dict[JobId, int | None] = field(default_factory=dict)
    _waiting: dict[JobId, int] = field(default_factory=dict)  # job -> attempt that is to be launched
    _shared: set[Key] = field(default_factory=set)  # gangs that had mates

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def tell(self, *events: ev.Event) -> None:
        """Something happened."""
        self.put(lambda now, batch: events)

    def put(self, prepare: Prepare) -> None:
        self._inputs.append(Input(prepare))
        self._woken.set()

    async def ask(self, prepare: Prepare) -> None:
        """A user's request: on return it is durable and applied. Raises what `prepare` raises, or `Unavailable`."""
        if self.trouble_now or self.stopped:
            raise Unavailable(self._excuse())
        answer: Answer = asyncio.get_running_loop().create_future()
        self._inputs.append(Input(prepare, answer))
        self._woken.set()
        await answer

    def note(self, text: str, level: int = logging.WARNING) -> None:
        """For those who read the journal."""
        log.log(level, "%s", text)
        self._notes.append((self.clock.now(), text))
        self._woken.set()

    def gang_up(self, job: str, attempt: int) -> None:
        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            record = self._current(job, attempt)
            if record is None or record.status is not Status.STARTING:
                return ()
            moved = record.checkpoint if record.leaving else None
            return (ev.Started(now, job, attempt, moved),)

        self.put(prepare)

    def gang_ended(self, ended: Ended) -> None:
        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            record = self.scheduler.state.jobs.get(ended.job)
            if record is None:
                return ()
            if record.attempt == ended.attempt:
                self._exits[ended.job] = ended.exit_code
                return events_of(ended, record, now, (ended.job, ended.attempt) in self._shared)
            return self._moved(record, ended, now)

        self.put(prepare)

    def trouble(self, job: str, text: str) -> None:
        self.note(f"job {job}: {text}")

    def _moved(self, record: JobRecord, ended: Ended, now: float) -> Sequence[ev.Event]:
        """The old gang of a job that goes elsewhere is gone: what it saved counts for the new one."""
        events: list[ev.Event] = []
        if ended.done is not None and ended.attempt == record.attempt - 1:
            events.append(ev.Checkpointed(now, record.job.id, record.attempt, ended.done))
        if record.status in (Status.STOPPING, Status.CANCELLING) and not self._gangs_of(record.job.id):
            done = record.checkpoint if ended.done is None else ended.done
            events.append(ev.Stopped(now, record.job.id, record.attempt, done))
        return events

    # ---- turns -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while not self.stopped:
            timeout = None if self.wake_at is None else max(0.0, self.wake_at - self.clock.now())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), timeout)
            if not await self.turn():
                await asyncio.sleep(RETRY_S)

    def wake(self) -> None:
        self._woken.set()

    @property
    def endings(self) -> Sequence[Ending]:
        """Jobs that have ended and about whom nothing has been written yet."""
        return self._endings

    def remember(self, exit_code: Callable[[JobRecord], int | None]) -> None:
        """After a restart: jobs that ended, but of whose end nothing was written."""
        ended = self.scheduler.state.ended.values()
        self._exits.update((record.job.id, exit_code(record)) for record in ended)
        self._endings = [Ending(record, self._exits[record.job.id]) for record in ended]

    @property
    def quiet(self) -> bool:
        """Is everything that the state knows on disk?"""
        return self._plan is None and not self._endings

    async def finish(self) -> None:
        """Take no more turns; returns when the present one is over."""
        self.stopped = True
        self._woken.set()
        async with self._turning:
            self._refuse([given.answer for given in self._inputs if given.answer is not None])

    async def turn(self) -> bool:
        """One turn; False if the journal could not be written and nothing was done."""
        async with self._turning:
            return self.stopped or await self._turn()

    async def _turn(self) -> bool:
        self._woken.clear()
        now = self.clock.now()
        inputs, self._inputs = self._inputs, []
        plan, endings, noted = self._plan, self._endings, len(self._notes)
        batch = Batch(events=[plan] if plan is not None else [], notes=self._notes[:noted])
        batch.stories = [self.story_of(ending) for ending in endings]
        events, asked = self._prepare(now, inputs, batch)
        batch.events += events  # after the plan, which was made before any of this was applied
        if batch:
            try:
                await self.store.write(batch)
            except StoreError as error:
                self._fail(str(error), inputs)
                self._refuse(asked)
                return False
        del self._notes[:noted]
        if self.trouble_now and batch:
            self.trouble_now = ""
            self.note("the journal can be written again", logging.INFO)
        if plan is not None:
            self._act(plan.decisions)
        self._step(now, events)
        self._forget(endings)
        for answer in asked:
            if not answer.done():
                answer.set_result(None)
        self.after_turn(endings)
        self._launch_waiting()
        if self._plan is not None or self._endings or self._notes or self._inputs:
            self._woken.set()
        return True

    def _prepare(self, now: float, inputs: Sequence[Input], batch: Batch) -> tuple[list[ev.Event], list[Answer]]:
        events: list[ev.Event] = []
        asked: list[Answer] = []
        for given in inputs:
            if given.answer is None:
                events += given.prepare(now, batch)
            elif not given.answer.done():  # or nobody waits for it any more
                try:
                    events += given.prepare(now, batch)
                    asked.append(given.answer)
                except Exception as error:
                    given.answer.set_exception(error)
        return events, asked

    def _fail(self, reason: str, inputs: Sequence[Input]) -> None:
        """Nothing could be written: keep what cannot be refused."""
        if not self.trouble_now:
            text = f"the journal could not be written ({reason}); nothing was started or stopped until it could"
            self.note(text, logging.ERROR)  # which also gives the next turn something to try with
        self.trouble_now = reason
        self._inputs = [given for given in inputs if given.answer is None] + self._inputs
        self._woken.set()

    def _refuse(self, asked: Sequence[Answer]) -> None:
        for answer in asked:
            if not answer.done():
                answer.set_exception(Unavailable(self._excuse()))

    def _excuse(self) -> str:
        if self.stopped:
            return "the service is stopping; try again when it is back"
        return f"the journal cannot be written ({self.trouble_now}); running jobs go on; make room and try again"

    def _step(self, now: float, events: Sequence[ev.Event]) -> None:
        scheduler = self.scheduler
        wake = self.wake_at is not None and now >= self.wake_at
        asked = scheduler.asked
        self._plan = None
        try:
            self._plan = scheduler.step(now, events, wake=wake)
            self.wake_at = scheduler.policy.wake(scheduler.state)
        except Exception as error:
            if scheduler.asked == asked:
                raise
            log.exception("the policy failed")  # all events are applied; without a plan nothing changes
            self.note(f"the policy failed ({type(error).__name__}: {error}); it is asked again at the next event")
            self.wake_at = None
        while scheduler.refused:
            self.note(f"a decision of the policy was refused: {scheduler.refused.popleft()}")
        scheduler.state.pace_changes.clear()
        self._follow(events)

    def _forget(self, written: Sequence[Ending]) -> None:
        """Jobs that have ended leave the memory once their story is on disk."""
        ended = self.scheduler.state.ended
        for ending in written:
            del ended[ending.record.job.id]
        self._endings = [Ending(record, self._exits.get(name)) for name, record in ended.items()]
        for ending in written:
            self._exits.pop(ending.record.job.id, None)

    # ---- acting ----------------------------------------------------------------------------------------------------

    def _act(self, decisions: Sequence[Decision]) -> None:
        """Do what a durable plan says; what it means for a job shows in the job's state."""
        self.on_plan(decisions)
        for decision in decisions:
            record = self.scheduler.state.jobs[decision.job]
            if record.status is Status.STARTING:
                self._waiting[decision.job] = record.attempt
                for key in self._gangs_of(decision.job):
                    self.executor.stop(key, How.SAVE)
            elif record.status is Status.STOPPING:
                self.stop_workers(record, How.SAVE)
            elif record.status is Status.RUNNING:
                self.executor.retune((decision.job, record.attempt), record.accumulation)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        """Act on what users asked for; it is durable and applied."""
        jobs = self.scheduler.state.jobs
        for event in events:
            if isinstance(event, ev.Cancelled | ev.Requeued):
                record = jobs.get(event.job)
                if record is not None and record.status is Status.CANCELLING:
                    self.stop_workers(record, How.END)
                elif record is not None and record.status is Status.STOPPING:
                    self.stop_workers(record, How.SAVE)
            elif isinstance(event, ev.NodeLost):
                self._stop_unwanted()

    def stop_workers(self, record: JobRecord, how: How) -> None:
        """Stop a job's gangs; where there is none, it has stopped already."""
        self._waiting.pop(record.job.id, None)
        gangs = self._gangs_of(record.job.id)
        for key in gangs:
            self.executor.stop(key, how)
        if not gangs:
            self.tell(ev.Stopped(self.clock.now(), record.job.id, record.attempt, record.checkpoint))

    def _stop_unwanted(self) -> None:
        """Stop gangs whose jobs lost their GPUs while the workers live."""
        for job, attempt in self.executor.present():
            record = self._current(job, attempt)
            if record is None or not (record.gpus or record.leaving):
                self.executor.stop((job, attempt), How.SAVE)

    def wait_to_launch(self, record: JobRecord) -> None:
        self._waiting[record.job.id] = record.attempt

    def _launch_waiting(self) -> None:
        """Launch what was planned, as soon as everybody has left who is no longer to be there."""
        for job, attempt in list(self._waiting.items()):
            record = self._current(job, attempt)
            if record is None or record.status is not Status.STARTING:
                del self._waiting[job]
            elif not self._in_the_way(record) and self.may_launch():
                del self._waiting[job]
                self.executor.launch(self.launch_of(record))
        for record in self.scheduler.state.running:
            if self.scheduler.state.cluster.mates(record):
                self._shared.add((record.job.id, record.attempt))
        self._shared.intersection_update({(r.job.id, r.attempt) for r in self.scheduler.state.running})

    def _in_the_way(self, record: JobRecord) -> bool:
        state = self.scheduler.state
        mine = set(record.gpus)
        for (job, attempt), gpus in self.executor.present().items():
            if job == record.job.id:
                return True
            other = self._current(job, attempt)
            for gpu in mine.intersection(gpus):
                if other is None or gpu not in other.gpus:
                    return True
        return any(other is not record for other in state.leaving(record.gpus))

    def _gangs_of(self, job: JobId) -> list[Key]:
        return [key for key in self.executor.present() if key[0] == job]

    def _current(self, job: JobId, attempt: int) -> JobRecord | None:
        record = self.scheduler.state.jobs.get(job)
        return record if record is not None and record.attempt == attempt else None
