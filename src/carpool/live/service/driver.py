"""The live driver: turn by turn from inputs to the journal, the executor and `Scheduler.step`, in that order.

A turn makes everything that came in durable, together with the plan of the turn before. Only then it acts on that plan,
applies the inputs, and lets the policy decide again. So nothing is applied or done that is not on disk, and inputs that
arrive while the disk is busy share the next sync. If the journal cannot be written, requests are refused, reports of
the executor are kept, and the turn is tried again: nothing new starts in the meantime, and running jobs continue.

Where several services share a journal, a turn also makes sure that this one still leads before it acts: it may have
been stopped for a while after the commit.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

from carpool.core import events as ev
from carpool.core.scheduler import Scheduler
from carpool.live.clock import Clock
from carpool.live.insight.forecaster import Forecaster
from carpool.live.journal.store import Commit, CommitInDoubt, Store, StoreError
from carpool.live.service.cancellations import UnwrittenCancels
from carpool.live.service.dispatcher import Dispatcher
from carpool.live.service.inbox import Answer, Inbox, Note, TurnInput
from carpool.live.service.jobs import EndedJob, JobBook
from carpool.live.service.snapshots import SnapshotKeeper
from carpool.live.service.turns import TurnDone, TurnObserver

log = logging.getLogger("carpool.live")

FAILURE_AGAIN_S = 600.0
"""Seconds after which the same failure of the policy is noted again."""
WAKE_APART_S = 0.1
"""Least number of seconds between two times that the policy is asked although nothing happened: a policy that names a
time which is over would be asked without a pause."""
RETRY_S = 1.0
"""Seconds before a turn whose commit failed is tried again."""


@dataclass
class Driver:
    """Takes turns."""

    scheduler: Scheduler
    store: Store
    clock: Clock
    inbox: Inbox
    book: JobBook
    dispatcher: Dispatcher
    forecaster: Forecaster
    snapshots: SnapshotKeeper
    unwritten: UnwrittenCancels
    write_error: str = ""
    """Why the journal cannot be written; empty: it can."""
    wake_at: float | None = None
    """Time at which the policy is to be asked again."""
    stopped: bool = False
    observers: list[TurnObserver] = field(default_factory=list)
    """Parts that are called after every turn."""
    _plan: ev.Planned | None = None
    """Plan of the last turn, not written and not acted on yet."""
    _failures_noted: dict[str, float] = field(default_factory=dict)
    _failed: bool = False
    _lost: bool = False
    """The journal may hold events that the state lacks, because the service was stopped in between."""
    _turning: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Take turns until `close`."""
        while not self.stopped:
            timeout = None if self.wake_at is None else max(0.0, self.wake_at - self.clock.now())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.inbox.woken.wait(), timeout)
            if not await self.turn():
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Take no more turns; return when the present one is over."""
        self.stopped = self.inbox.closed = True
        self.inbox.refusal = "the service is stopping; try again when it runs again"
        self.inbox.woken.set()
        async with self._turning:
            inputs, _ = self.inbox.take()
            self.inbox.refuse([one.answer for one in inputs if one.answer is not None])

    @property
    def settled(self) -> bool:
        """Whether the state is that of the journal."""
        return self._plan is None and not self.book.ended and not self._lost

    async def turn(self) -> bool:
        """Take one turn; return False if the journal could not be written, so that nothing was done."""
        async with self._turning:
            return self.stopped or await self._turn()

    async def _turn(self) -> bool:
        # 1. Take what came in, the plan of the last turn, and the jobs that ended in it.
        self.inbox.woken.clear()
        now = self.clock.now()
        inputs, notes = self.inbox.take()
        plan, ended = self._plan, self.book.ended

        # 2. Prepare the commit: the plan first, because it was made before the inputs are applied.
        commit = Commit(events=[plan] if plan is not None else [], notes=notes, now=now)
        commit.stories = [self.book.story(job) for job in ended]
        events, answers = self._prepare(now, inputs, commit)
        commit.events += events

        # 3. Write the journal. Nothing below happens unless this is durable.
        if not await self._write(commit, inputs, notes, answers) or not await self._leads():
            return False

        # 4. Act on the plan.
        if plan is not None:
            self.forecaster.planned(plan.decisions)
            self.dispatcher.act(plan.decisions)

        # 5. Step the scheduler: apply the inputs and let the policy decide. Its plan waits for the next turn.
        decision_s = self._step(now, events)
        self.dispatcher.follow(events)

        # 6. Answer requests, and let go of ended jobs whose stories are written.
        self.book.release(ended)
        for answer in answers:
            if not answer.done():
                answer.set_result(None)
        self._close_jobs(ended, commit.stories[: len(ended)])  # recovery adds stories of its own
        if self.settled:
            self.snapshots.after_turn()

        self.unwritten.settle()
        rows = len(commit.events) + len(commit.notes)
        first = self.store.seq - rows + 1
        self._tell(TurnDone(now, first, commit.events, commit.notes, self._plan, ended, decision_s))

        # 7. Pause gangs, and launch and resume those whose GPUs are clear. The plan of this turn is not durable yet.
        self.dispatcher.switch({decision.job for decision in self._plan.decisions} if self._plan is not None else ())
        self.dispatcher.launch_ready()
        if not self.settled or not self.inbox.empty:
            self.inbox.woken.set()
        return True

    def _tell(self, turn: TurnDone) -> None:
        for observer in self.observers:
            try:
                observer.turned(turn)
            except Exception:  # nothing that is scheduled depends on it
                log.exception("%s could not follow a turn", type(observer).__name__)

    def _prepare(self, now: float, inputs: list[TurnInput], commit: Commit) -> tuple[list[ev.Event], list[Answer]]:
        """Ask every input what it means now. One that fails adds nothing to the commit and stops no other: a request is
        answered with the error at once, anything else is dropped and noted."""
        events: list[ev.Event] = []
        answers: list[Answer] = []
        for one in list(inputs):
            if one.answer is not None and one.answer.done():  # the caller has gone
                continue
            part = Commit()
            try:
                meant = list(one.prepare(now, part))
            except Exception as error:
                if one.answer is not None:
                    one.answer.set_exception(error)
                else:
                    inputs.remove(one)  # it would fail again if the journal cannot be written
                    log.debug("an input failed", exc_info=error)
                    what = f"{type(error).__name__}: {error}"
                    self.inbox.note(f"an input could not be processed and was dropped ({what})")
                continue
            events += meant
            commit.add(part)
            if one.answer is not None:
                answers.append(one.answer)
        return events, answers

    async def _write(
        self, commit: Commit, inputs: Sequence[TurnInput], notes: Sequence[Note], answers: Sequence[Answer]
    ) -> bool:
        """Write the commit; if that fails, refuse the requests and keep the rest for the next turn."""
        if not commit:
            return True
        try:
            try:
                await self.store.write(commit)
            except CommitInDoubt as doubt:
                self._refuse(doubt)
                if not await self._settle():
                    raise
        except StoreError as error:
            if self._lost:
                return False
            self.inbox.put_back(inputs, notes)
            self._refuse(error)
            self.inbox.refuse(answers)
            return False
        if self.write_error:
            self.write_error = ""
            self.inbox.refusal = "" if not self.stopped else self.inbox.refusal
            self.inbox.note("the journal can be written again", logging.INFO)
        return True

    def _refuse(self, error: StoreError) -> None:
        """Refuse requests until the journal can be written."""
        if not self.write_error:  # the note also makes sure that the next turn has something to write
            text = f"the journal could not be written ({error}); nothing was started or stopped until it could"
            self.inbox.note(text, logging.ERROR)
        self.write_error = str(error)
        if not self.stopped:
            remedy = "try again when the database answers" if self.store.place.shared else "make room and try again"
            self.inbox.refusal = f"the journal cannot be written ({error}); running jobs continue; {remedy}"

    async def _settle(self) -> bool:
        """Wait until it is known whether the commit in doubt is written, and return it. A service that is stopped
        before that leaves its requests without an answer: what is in the journal counts."""
        while not self.stopped:
            try:
                return await self.store.settle()
            except StoreError as error:
                log.debug("a commit is in doubt: %s", error)
                await asyncio.sleep(RETRY_S)
        self._lost = True
        return False

    async def _leads(self) -> bool:
        """Wait until this service is certain to lead. Raise `Deposed` if another one does."""
        while not self.store.leadership.leads():
            try:
                await self.store.renew()
            except StoreError as error:
                self._refuse(error)
                if self.stopped:  # what is written is applied by the next service
                    self._lost = True
                    return False
                await asyncio.sleep(RETRY_S)
        return True

    def _step(self, now: float, events: Sequence[ev.Event]) -> float | None:
        """Step the scheduler; return the seconds that it took, or None if the policy was not asked."""
        scheduler = self.scheduler
        wake = self.wake_at is not None and now >= self.wake_at
        asked, began = scheduler.policy_calls, perf_counter()
        self._plan = None
        try:
            self._plan = scheduler.step(now, events, wake=wake)
            self.wake_at = scheduler.policy.wake(scheduler.state)
            if self.wake_at is not None and wake and not events:
                self.wake_at = max(self.wake_at, now + WAKE_APART_S)
        except Exception as error:  # of the scheduler itself: a policy's own failures have a fallback
            if scheduler.policy_calls == asked:
                raise
            log.debug("no plan was made", exc_info=error)  # all events are applied; without a plan nothing changes
            self.inbox.note(f"no plan was made ({type(error).__name__}: {error}); tried again at the next event")
            self.wake_at = None
        decision_s = perf_counter() - began if scheduler.policy_calls > asked else None
        self._note_failure(now)
        while scheduler.refused:
            self._note_once(f"a decision of the policy was refused: {scheduler.refused.popleft()}", now)
        scheduler.state.pace_changes.clear()
        return decision_s

    def journal_problem(self) -> str:
        """Return why the journal cannot be written, also where nothing was written since; empty: it can."""
        return self.write_error or self.store.place.problem()

    def policy_failure(self) -> str:
        """Return how the policy failed lately, and what decides instead; empty: it did not."""
        return str(getattr(self.scheduler.policy, "failure", ""))

    def _note_failure(self, now: float) -> None:
        """Note that the policy fails, and that it works again."""
        failure = self.policy_failure()
        if failure:
            self._note_once(failure, now)
        elif self._failed and not failure:
            self.inbox.note("the policy decides again", logging.INFO)
        self._failed = bool(failure)

    def _note_once(self, text: str, now: float) -> None:
        """Note a failure of the policy, which may be the same at every turn."""
        if now - self._failures_noted.get(text, -inf) > FAILURE_AGAIN_S:
            self._failures_noted = {said: at for said, at in self._failures_noted.items() if now - at < FAILURE_AGAIN_S}
            self._failures_noted[text] = now
            self.inbox.note(text)

    def _close_jobs(self, ended: Sequence[EndedJob], stories: Sequence[dict[str, Any]]) -> None:
        for job, story in zip(ended, stories, strict=True):
            judged = self.forecaster.judge(job.record, self.book.source(job.id))
            self.book.close(job, story)
            if judged:

                def prepare(now: float, commit: Commit, rows: list[dict[str, object]] = judged) -> Sequence[ev.Event]:
                    commit.estimates.extend(rows)
                    return ()

                self.inbox.add(prepare)
