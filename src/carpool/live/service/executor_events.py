"""What executors report, as inputs for the driver. Stale reports of earlier attempts change nothing."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from carpool.core import events as ev
from carpool.core.model import WORKING, GpuId, Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.clock import Clock, since_boot
from carpool.live.executors.base import Executor, GangEnded, GangKey, GangOutcome, NodeFault
from carpool.live.journal.store import Commit
from carpool.live.service.dispatcher import Dispatcher
from carpool.live.service.gang_outcomes import end_events
from carpool.live.service.inbox import Inbox
from carpool.live.service.inventory import Inventory
from carpool.live.service.jobs import JobBook
from carpool.live.service.warm_up import may_train

log = logging.getLogger("carpool.live")

MAX_FAULTS = 3
"""Number of node faults after which a job restarts alone, where the next failure can only be its own."""


@dataclass
class ExecutorEvents:
    """The `ExecutorListener` of the service."""

    state: State
    executor: Executor
    inventory: Inventory
    dispatcher: Dispatcher
    book: JobBook
    inbox: Inbox
    clock: Clock
    _node_changes: int = 0

    def _time(self, moment: float | None, now: float) -> float:
        """Return a moment of the machine's clock on the service's; None is now. Time never goes back."""
        if moment is None:
            return now
        return min(now, max(self.state.now, self.clock.now() - (since_boot() - moment)))

    def gang_started(self, key: GangKey, started_at: float | None = None) -> None:
        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.dispatcher.current(*key)
            if record is None or record.status is not Status.STARTING:
                return ()
            moved = record.checkpoint if record.leaving else None
            spec = self.book.specs.get(key[0])
            warms_up = spec is not None and may_train(spec)
            return (ev.Started(self._time(started_at, now), *key, moved, computes=not warms_up),)

        self.inbox.add(prepare)

    def gang_paused(self, key: GangKey, *, swapped: bool = False) -> None:
        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.dispatcher.current(*key)
            if record is None or record.status is not Status.PAUSING:
                return ()
            return (ev.SwapFailed(now, *key) if record.swapped and not swapped else ev.Paused(now, *key),)

        self.inbox.add(prepare)

    def gang_resumed(self, key: GangKey) -> None:
        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.dispatcher.current(*key)
            return () if record is None or record.status is not Status.RESUMING else (ev.Resumed(now, *key),)

        self.inbox.add(prepare)

    def gang_ended(self, ended: GangEnded) -> None:
        if ended.node_fault:
            ended = self._count_fault(ended)
        record = self.dispatcher.current(*ended.key)
        if ended.outcome is GangOutcome.REFUSED and record is not None and record.status in WORKING:
            self.inbox.note(f"job {ended.job} does not start: {ended.reason}; it is on hold")

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.state.jobs.get(ended.job)
            if record is None:
                return ()
            at = self._time(ended.ended_at, now)
            if record.attempt == ended.attempt:
                self.book.exit_codes[ended.job] = ended.exit_code
                return self._end_events(ended, record, at)
            return self._moved(record, ended, at)

        self.inbox.add(prepare)

    def _end_events(self, ended: GangEnded, record: JobRecord, at: float) -> Sequence[ev.Event]:
        """Return the events of a gang's end. A job whose end cannot be understood has failed: it must not stay."""
        try:
            return end_events(ended, record, at, self.dispatcher.had_mates(ended.key))
        except Exception as error:
            log.debug("the end of job %s was not understood", ended.job, exc_info=error)
            reason = f"its end was not understood ({type(error).__name__}: {error})"
            return (ev.Failed(at, *ended.key, reason),)

    def _count_fault(self, ended: GangEnded) -> GangEnded:
        """Count a node fault, and isolate a job that faults hit too often."""
        if ended.job not in self.book.specs:
            return ended
        times = self.book.faults[ended.job] = self.book.faults.get(ended.job, 0) + 1
        if ended.outcome is not GangOutcome.LOST or times <= MAX_FAULTS:
            return ended
        reason = f"{ended.reason}; node faults hit it {times} times, so it restarts alone on its GPUs"
        return replace(ended, reason=reason, needs_alone=True)

    def _moved(self, record: JobRecord, ended: GangEnded, now: float) -> Sequence[ev.Event]:
        """Return the events for the end of the old gang of a job that moves: its checkpoint counts for the new gang."""
        job, attempt = record.job.id, record.attempt
        events: list[ev.Event] = []
        if ended.checkpoint is not None and ended.attempt == attempt - 1:
            events.append(ev.Checkpointed(now, job, attempt, ended.checkpoint))
        if record.status in (Status.STOPPING, Status.CANCELLING) and not self.dispatcher.gangs_of(job):
            saved = record.checkpoint if ended.checkpoint is None else ended.checkpoint
            events.append(ev.Stopped(now, job, attempt, saved))
        return events

    def node_fault(self, fault: NodeFault) -> None:
        """Requeue the gangs that a fault hit and that still run."""
        hit = sorted(key for key in fault.gangs if self.dispatcher.current(*key) is not None)
        jobs = ", ".join(job for job, _ in hit) or "none seen"
        self.inbox.note(f"{fault.node}: {fault.reason}; jobs that start again: {jobs}")
        present = self.executor.present()
        for key in hit:
            if key in present:
                self.inbox.add_events(ev.Requeued(self.clock.now(), *key))

    def memory_taken(self, gpu: GpuId, memory: int) -> None:
        self.inbox.add_events(ev.MemoryTaken(self.clock.now(), gpu, memory))

    def nodes_changed(self) -> None:
        """Bring the state's nodes up to date with the executor's.

        Of several calls in one turn, only the latest looks at the nodes: many may fall silent or be heard again at
        once, and the state changes after all of them were asked.
        """
        self._node_changes += 1
        mine = self._node_changes

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            if mine != self._node_changes:
                return ()
            lines = self.inventory.describe_changes(self.state)
            for line in lines:
                log.warning("%s", line)
            # a new list: the one of the turn is kept if it cannot be written, and this is asked again then
            commit.notes = [*commit.notes, *((now, line) for line in lines)]
            return self.inventory.changes(self.state, now)

        self.inbox.add(prepare)

    def note(self, text: str, level: int = logging.WARNING) -> None:
        self.inbox.note(text, level)
