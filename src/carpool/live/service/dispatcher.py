"""Acting on durable plans: which gangs the executor launches, stops, pauses, resumes and retunes, and when.

The driver calls it after the journal is written. A gang is launched or resumed when all gangs that the plan moved away
from its GPUs are gone, and all that it paused there are paused. It also waits for gangs that leave other GPUs, as long
as its user or group would hold more with them than allowed. What the executor reports back comes through
`executor_events.py`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from carpool.core import events as ev
from carpool.core.model import Decision, GpuId, JobId, Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor, GangKey, KnowsEnds, Launch, OpensDoors, StopMode
from carpool.live.service.inbox import Inbox
from carpool.live.service.jobs import JobBook
from carpool.live.service.longer_nodes import LongerNodes
from carpool.live.service.terminals import NO_TERMINALS
from carpool.live.service.users import Users
from carpool.live.spec import IDLE_S, own_variables
from carpool.live.text import span

NO_JOBS: frozenset[JobId] = frozenset()


def stop_mode(record: JobRecord) -> StopMode:
    """Return how the workers of a job that is to stop are stopped: a cancelled job saves nothing."""
    saves = record.status is Status.STOPPING or record.at_limit
    return StopMode.SAVE if saves else StopMode.TERMINATE


class PresentGangs:
    """The gangs that the executor has at one moment, read once for many questions: there may be thousands."""

    def __init__(self, state: State, executor: Executor) -> None:
        self._state = state
        self.of_job: dict[JobId, list[GangKey]] = {}
        self._in_the_way: dict[GpuId, set[JobId]] = {}
        """Jobs whose workers are still to leave a GPU, or to stop computing there."""
        self._leaving: dict[JobId, set[GpuId]] = {}
        """The GPUs that workers of a job are still to leave."""
        for key, gpus in executor.present().items():
            self.of_job.setdefault(key[0], []).append(key)
            record = state.jobs.get(key[0])
            held = record.gpus if record is not None and record.attempt == key[1] else ()
            self._note_leaving(key[0], [gpu for gpu in gpus if gpu not in held])
        for record in state.jobs.values():
            if record.leaving:
                self._note_leaving(record.job.id, record.leaving)
        for record in state.switching.values():
            if not record.active:
                self._put_in_the_way(record.job.id, record.gpus)

    def _note_leaving(self, job: JobId, gpus: Collection[GpuId]) -> None:
        if gpus:
            self._leaving.setdefault(job, set()).update(gpus)
            self._put_in_the_way(job, gpus)

    def _put_in_the_way(self, job: JobId, gpus: Iterable[GpuId]) -> None:
        for gpu in gpus:
            self._in_the_way.setdefault(gpu, set()).add(job)

    def crowd(self, record: JobRecord) -> bool:
        """Return whether a gang of another job is still to leave a job's GPUs, or to stop computing there."""
        return any(self._in_the_way.get(gpu, NO_JOBS) - {record.job.id} for gpu in record.gpus)

    def exceed_limits(self, record: JobRecord) -> bool:
        """Return whether a job's user or group holds more than it may, counting the GPUs that are still to be left."""
        state, job = self._state, record.job
        leaving = [(state.jobs[other], len(gpus)) for other, gpus in self._leaving.items() if other in state.jobs]
        of_user = [(other, gpus) for other, gpus in leaving if other.job.user == job.user]
        of_group = sum(gpus for other, gpus in leaving if other.job.group == job.group)
        limits, (jobs_held, gpus_held) = state.limits_of(job.user), state.held_by(job.user)
        return (
            _exceeds(sum(not other.gpus for other, _ in of_user), jobs_held, limits.jobs)
            or _exceeds(sum(gpus for _, gpus in of_user), gpus_held, limits.gpus)
            or _exceeds(of_group, state.held_by_group(job.group), state.caps.get(job.group))
        )

    def block(self, record: JobRecord) -> bool:
        """Return whether a gang that must leave first is still present, or one that must pause first still computes."""
        return record.job.id in self.of_job or self.crowd(record) or self.exceed_limits(record)


def _exceeds(leaving: int, held: int, limit: int | None) -> bool:
    """Return whether what is still to be left is too much beside what is held. Without it, the plan was allowed."""
    return limit is not None and leaving > 0 and held + leaving > limit


@dataclass
class Dispatcher:
    """Carries out decisions through the executor."""

    state: State
    executor: Executor
    book: JobBook
    users: Users
    inbox: Inbox
    clock: Clock
    longer_nodes: LongerNodes
    """Jobs that are on hold because no node lasts as long as they need."""
    _to_launch: dict[JobId, int] = field(default_factory=dict)  # job -> attempt
    _shared: set[GangKey] = field(default_factory=set)
    _gated: set[GangKey] = field(default_factory=set)
    """Gangs that may stand still without a pause in the plan, until they have a turn and nothing is in their way."""

    def act(self, decisions: Sequence[Decision]) -> None:
        """Do what a durable plan says. What a decision means for a job is in the job's status."""
        present = PresentGangs(self.state, self.executor)
        for decision in decisions:
            record = self.state.jobs[decision.job]
            if record.status is Status.STARTING:
                self.launch_later(record)
                for key in present.of_job.get(decision.job, ()):
                    self.executor.stop(key, StopMode.SAVE)
            elif record.status is Status.STOPPING:
                self.stop_workers(record, StopMode.SAVE)
            elif record.status is Status.RUNNING:
                self.executor.retune((decision.job, record.attempt), record.accumulation)

    def follow(self, events: Sequence[ev.Event]) -> None:
        """Do what users' requests and lost nodes mean for gangs; the events are durable and applied."""
        for event in events:
            if isinstance(event, ev.Cancelled | ev.Requeued | ev.LimitReached):
                record = self.state.jobs.get(event.job)
                if record is not None and record.status in (Status.STOPPING, Status.CANCELLING):
                    self.stop_workers(record, stop_mode(record))
            elif isinstance(event, ev.LimitNeared) and self.current(event.job, event.attempt) is not None:
                self.executor.checkpoint((event.job, event.attempt))
            elif isinstance(event, ev.NodeLost | ev.ClosureBegan):
                self._stop_displaced()

    def compute_later(self, record: JobRecord) -> None:
        """Let a job's gang, which may stand still, compute once it has a turn and its GPUs are clear."""
        self._gated.add((record.job.id, record.attempt))

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
        present = PresentGangs(self.state, self.executor) if self._to_launch else None
        for job, attempt in list(self._to_launch.items()):
            record = self.current(job, attempt)
            if record is None or record.status is not Status.STARTING:
                del self._to_launch[job]
            elif present is not None and not present.block(record):
                del self._to_launch[job]
                if doubt := self._doubt(record):
                    self._hold(record, doubt)
                elif self._runs_into_end(record):
                    continue
                else:
                    if record.standby:
                        self.compute_later(record)
                    self.executor.launch(self._launch_of(record))
        self._note_mates()

    def switch(self, undurable: Collection[JobId] = ()) -> None:
        """Pause and resume gangs as the state says. `undurable`: jobs whose latest plan the journal does not have yet.
        It is called at every turn, because the executor ignores what it does already."""
        if not self.state.switching and not self._gated:
            return
        present = PresentGangs(self.state, self.executor)
        for record in list(self.state.switching.values()):
            if record.job.id in undurable:
                continue
            key = (record.job.id, record.attempt)
            if record.status is Status.PAUSING:
                self.executor.pause(key, swap=record.swapped)
            elif not present.crowd(record):
                self.executor.resume(key)
        for key in list(self._gated):
            self._let_compute(key, present)

    def _let_compute(self, key: GangKey, present: PresentGangs) -> None:
        """Let a gang that may stand still compute, if it has a turn and nothing is in its way."""
        record = self.current(*key)
        if record is not None and record.gpus and record.standby:
            return
        if record is not None and record.status is Status.RUNNING:
            if present.crowd(record):
                return
            self.executor.resume(key)
        self._gated.discard(key)

    def _note_mates(self) -> None:
        for shared in self.state.cluster.by_load[2:]:
            while shared:
                lowest = shared & -shared
                shared ^= lowest
                there = self.state.jobs_on(lowest.bit_length() - 1)
                self._shared.update([(record.job.id, record.attempt) for record in there])
        if len(self._shared) > 2 * len(self.state.running):
            self._shared.intersection_update([(r.job.id, r.attempt) for r in self.state.running])

    def _doubt(self, record: JobRecord) -> str:
        """Return why a job must not be launched; empty: it may."""
        if not self.book.specs[record.job.id].command:
            return "what was submitted is lost or damaged; cancel it and submit it again"
        if self.book.specs[record.job.id].terminal and not isinstance(self.executor, OpensDoors):
            return NO_TERMINALS
        doubt = self.users.doubt(record.job.user, self.book.recorded_uid(record.job.id))
        return f"its owner is not certain: {doubt}" if doubt else ""

    def _runs_into_end(self, record: JobRecord) -> bool:
        """Put a job that cannot be saved on hold, if its GPUs are taken back too soon; return whether it was."""
        if record.job.can_checkpoint or not isinstance(self.executor, KnowsEnds):
            return False
        now, job = self.clock.now(), record.job.id
        left, needed = self.executor.seconds_left(record.gpus), record.alone_left(now)
        if left is None or needed <= left:
            return False
        self.inbox.note(
            f"job {job} does not start: it cannot be saved, needs about {span(needed)}, and its GPUs are taken back in "
            f"{span(left)}; it is on hold, and it is released when a node lasts longer"
        )
        self.longer_nodes.hold(job, record.attempt, needed, now)
        return True

    def _hold(self, record: JobRecord, doubt: str) -> None:
        """Put a job that must not start back on hold."""
        now, job = self.clock.now(), record.job.id
        self.inbox.note(f"job {job} does not start: {doubt}; it is on hold")
        self.inbox.add_events(ev.Held(now, job, doubt), ev.Requeued(now, job, record.attempt))

    def had_mates(self, key: GangKey) -> bool:
        """Return whether a gang shared its GPUs at some time."""
        return key in self._shared

    def _launch_of(self, record: JobRecord) -> Launch:
        job, spec = record.job, self.book.specs[record.job.id]
        # A guest must not take its hosts' memory. One that runs out of memory returns alone and without a limit,
        # because the belief may be wrong.
        gpu_memory = self.state.perf.memory(job, 1) if self.state.cluster.mates(record) else 0
        return Launch(
            job.id,
            record.attempt,
            record.gpus,
            spec.command,
            spec.directory,
            {**spec.env, **own_variables(job.id, spec)},
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
            ahead=record.standby,
            idle_s=(spec.idle_s or IDLE_S) if spec.terminal else None,
        )

    def gangs_of(self, job: JobId) -> list[GangKey]:
        return [key for key in self.executor.present() if key[0] == job]

    def current(self, job: JobId, attempt: int) -> JobRecord | None:
        """Return a job's record if this is its present attempt."""
        record = self.state.jobs.get(job)
        return record if record is not None and record.attempt == attempt else None
