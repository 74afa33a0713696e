"""Acting on durable plans: which gangs the executor launches, stops, pauses, resumes and retunes, and when.

The driver calls it after the journal is written. A gang is launched or resumed when all gangs are gone or paused that
the plan moved away from its GPUs or paused there. What the executor reports back comes through `executor_events.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from carpool.core import events as ev
from carpool.core.model import Decision, JobId, Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor, GangKey, Launch, StopMode
from carpool.live.service.inbox import Inbox
from carpool.live.service.jobs import JobBook
from carpool.live.service.users import Users
from carpool.live.spec import ARRAY_VARIABLE


@dataclass
class Dispatcher:
    """Carries out decisions through the executor."""

    state: State
    executor: Executor
    book: JobBook
    users: Users
    inbox: Inbox
    clock: Clock
    _to_launch: dict[JobId, int] = field(default_factory=dict)  # job -> attempt
    _shared: set[GangKey] = field(default_factory=set)

    def act(self, decisions: Sequence[Decision]) -> None:
        """Do what a durable plan says. What a decision means for a job is in the job's status."""
        for decision in decisions:
            record = self.state.jobs[decision.job]
            if record.status is Status.STARTING:
                self.launch_later(record)
                for key in self.gangs_of(decision.job):
                    self.executor.stop(key, StopMode.SAVE)
            elif record.status is Status.STOPPING:
                self.stop_workers(record, StopMode.SAVE)
            elif record.status is Status.RUNNING:
                self.executor.retune((decision.job, record.attempt), record.accumulation)

    def follow(self, events: Sequence[ev.Event]) -> None:
        """Do what users' requests and lost nodes mean for gangs; the events are durable and applied."""
        for event in events:
            if isinstance(event, ev.Cancelled | ev.Requeued):
                record = self.state.jobs.get(event.job)
                if record is not None and record.status is Status.CANCELLING:
                    self.stop_workers(record, StopMode.TERMINATE)
                elif record is not None and record.status is Status.STOPPING:
                    self.stop_workers(record, StopMode.SAVE)
            elif isinstance(event, ev.NodeLost):
                self._stop_displaced()

    def stop_workers(self, record: JobRecord, mode: StopMode) -> None:
        """Stop a job's gangs; a job without a gang has stopped already."""
        self._to_launch.pop(record.job.id, None)
        gangs = self.gangs_of(record.job.id)
        for key in gangs:
            self.executor.stop(key, mode)
        if not gangs:
            self.inbox.add_events(ev.Stopped(self.clock.now(), record.job.id, record.attempt, record.checkpoint))

    def _stop_displaced(self) -> None:
        """Stop gangs whose jobs have lost their GPUs. A job that was still to be launched on them has stopped."""
        present = self.executor.present()
        for job, attempt in present:
            record = self.current(job, attempt)
            if record is None or not record.gpus:
                self.executor.stop((job, attempt), StopMode.SAVE)
        having = {job for job, _ in present}
        for record in list(self.state.jobs.values()):
            if record.status in (Status.STOPPING, Status.CANCELLING) and record.job.id not in having:
                self.stop_workers(record, StopMode.TERMINATE)

    def drop(self, job: JobId) -> None:
        """Do not launch a job that was to be launched."""
        self._to_launch.pop(job, None)

    def launch_later(self, record: JobRecord) -> None:
        """Launch a job's gang as soon as its GPUs are clear."""
        self._to_launch[record.job.id] = record.attempt

    def launch_ready(self) -> None:
        """Launch the gangs whose GPUs are clear."""
        for job, attempt in list(self._to_launch.items()):
            record = self.current(job, attempt)
            if record is None or record.status is not Status.STARTING:
                del self._to_launch[job]
            elif not self._is_blocked(record):
                del self._to_launch[job]
                if doubt := self._doubt(record):
                    self._hold(record, doubt)
                else:
                    self.executor.launch(self._launch_of(record))
        self._note_mates()

    def switch(self, undurable: Collection[JobId] = ()) -> None:
        """Pause and resume the gangs that the state says so about. `undurable`: jobs whose latest plan the journal does
        not have yet. It is called at every turn, because the executor ignores what it does already."""
        for record in list(self.state.switching.values()):
            if record.job.id in undurable:
                continue
            key = (record.job.id, record.attempt)
            if record.status is Status.PAUSING:
                self.executor.pause(key, swap=record.swapped)
            elif not self._is_crowded(record):
                self.executor.resume(key)

    def _note_mates(self) -> None:
        running = list(self.state.running)
        self._shared.update((r.job.id, r.attempt) for r in running if self.state.cluster.mates(r))
        self._shared.intersection_update((r.job.id, r.attempt) for r in running)

    def _doubt(self, record: JobRecord) -> str:
        """Return why a job must not be launched; empty: it may."""
        if not self.book.specs[record.job.id].command:
            return "what was submitted is lost or damaged; cancel it and submit it again"
        return self.users.doubt(record.job.user)

    def _hold(self, record: JobRecord, doubt: str) -> None:
        """Put a job that must not start back on hold."""
        now, job = self.clock.now(), record.job.id
        self.inbox.note(f"job {job} does not start: {doubt}; it is on hold")
        self.inbox.add_events(ev.Held(now, job), ev.Requeued(now, job, record.attempt))

    def had_mates(self, key: GangKey) -> bool:
        """Return whether a gang shared its GPUs at some time."""
        return key in self._shared

    def _is_blocked(self, record: JobRecord) -> bool:
        """Return whether a gang is still present that must leave first, or computes that must pause first."""
        return bool(self.gangs_of(record.job.id)) or self._is_crowded(record)

    def _is_crowded(self, record: JobRecord) -> bool:
        """Return whether a gang of another job is still to leave a job's GPUs, or to stop computing there."""
        for (job, attempt), gpus in self.executor.present().items():
            if job == record.job.id:
                continue
            other = self.current(job, attempt)
            for gpu in set(record.gpus).intersection(gpus):
                if other is None or gpu not in other.gpus:
                    return True
        return any(other is not record for other in self.state.leaving(record.gpus))

    def _launch_of(self, record: JobRecord) -> Launch:
        job, spec = record.job, self.book.specs[record.job.id]
        array = {} if spec.array_index is None else {ARRAY_VARIABLE: str(spec.array_index)}
        # A guest must not take its hosts' memory. One that runs out of memory returns alone and without a limit,
        # because the belief may be wrong.
        gpu_memory = self.state.perf.memory(job, 1) if self.state.cluster.mates(record) else 0
        return Launch(
            job.id,
            record.attempt,
            record.gpus,
            spec.command,
            spec.directory,
            {**spec.env, **array},
            accumulation=record.accumulation,
            can_shrink=spec.can_shrink,
            cpus=spec.cpus,
            memory=spec.memory,
            grace_s=spec.grace_s,
            uid=self.users.uid_of(job.user),
            exclusive=job.exclusive,
            watch=spec.watch,
            gpu_memory=gpu_memory,
            snapshot=spec.snapshot,
        )

    def gangs_of(self, job: JobId) -> list[GangKey]:
        return [key for key in self.executor.present() if key[0] == job]

    def current(self, job: JobId, attempt: int) -> JobRecord | None:
        """Return a job's record if this is its present attempt."""
        record = self.state.jobs.get(job)
        return record if record is not None and record.attempt == attempt else None
