"""The state of the cluster and its jobs. `apply(event)` is the only writer; everything else reads.

The scheduler applies what drivers report and what it plans itself; policies read it through `View`. Indexes (queue,
free GPUs, hosts) are kept up to date event by event, and only jobs whose neighbours changed get a new pace.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from carpool.core import events as ev
from carpool.core.cluster import Cluster
from carpool.core.end_times import EndTimes
from carpool.core.hosts import Hosts
from carpool.core.learning import LearningModel, Lesson, Observation, life, sighting
from carpool.core.model import Allocation, GpuId, Job, JobId, Limits, Status, allowed_accumulations, as_scaled
from carpool.core.perf import PerformanceModel, Placement
from carpool.core.queue import Queue
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape, Shapes
from carpool.core.view import SortKey

UNLIMITED = Limits()
HOLDING = (Status.STARTING, Status.RUNNING, Status.CANCELLING)
"""The states in which a job may hold GPUs."""
ALIVE = (*HOLDING, Status.STOPPING)
"""The states in which a job may have workers."""


class State:
    def __init__(self, perf: PerformanceModel, sort_key: SortKey, jobs_per_gpu: int = 2) -> None:
        if jobs_per_gpu < 1:
            raise ValueError("at least one job must fit on a GPU")
        self.perf = perf
        self.belief_version = 0
        """Grows whenever `perf` learned something that may change its answers."""
        self._learner = perf if isinstance(perf, LearningModel) else None
        self.sort_key = sort_key
        self.jobs_per_gpu = jobs_per_gpu
        self.now = 0.0
        self.jobs: dict[JobId, JobRecord] = {}
        self.ended: dict[JobId, JobRecord] = {}
        self.cluster = Cluster(jobs_per_gpu)
        self.topology = self.cluster.topology
        self.free = self.cluster.free
        self.queue = Queue()
        self.limits: dict[str, Limits] = {}
        self.needs_decision = False
        """Something happened that may open a place for a job or close one; the scheduler lowers it."""
        self.last_capacity_change = 0.0
        """When something other than a submission last happened that may open a place for a job that waits."""
        self.pace_changes: list[JobRecord] = []
        """Jobs whose pace changed, for the driver to drain."""
        self.busy_gpu_s = 0.0
        self.shares = 0
        self.preemptions = 0
        self._held: dict[str, list[int]] = {}  # user -> jobs, GPUs
        self._running: dict[int, JobRecord] = {}  # by order: jobs that hold GPUs
        self._dependents: dict[JobId, list[JobId]] = {}
        self._shapes = Shapes(perf)
        self._hosts: Hosts | None = None
        self._end_times: EndTimes | None = None
        self._submissions = 0
        self._completed = 0
        self._completed_jct_s = 0.0

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Collection[JobRecord]:
        """The jobs that hold GPUs, started or starting."""
        return self._running.values()

    @property
    def hosts(self) -> Hosts:
        """Running jobs that may take a guest. Kept from the first time that somebody asks, so that policies that
        never share do not pay for it."""
        if self._hosts is None:
            self._hosts = Hosts(self.cluster, self.jobs_per_gpu)
            for record in self._running.values():
                self._hosts.update(record)
        return self._hosts

    @property
    def end_times(self) -> EndTimes:
        """When running jobs will end. Kept from the first time that somebody asks, as `hosts` is."""
        if self._end_times is None:
            self._end_times = EndTimes(self.cluster, self.perf)
            for record in self._running.values():
                self._end_times.touch(record)
        return self._end_times.refresh()

    @property
    def mean_jct_s(self) -> float:
        """Of the jobs that have finished so far; 0 before the first."""
        return self._completed_jct_s / self._completed if self._completed else 0.0

    def newest_first(self) -> Iterator[JobRecord]:
        """Return the jobs that have not ended, last submitted first."""
        return reversed(self.jobs.values())

    def jobs_on(self, gpu: GpuId) -> tuple[JobRecord, ...]:
        return self.cluster.residents[gpu]

    def memory_used(self, gpu: GpuId) -> int:
        return self.cluster.memory[gpu]

    def gpus_holding(self, jobs: int) -> int:
        """The GPUs that hold so many jobs, one bit each."""
        return self.cluster.by_load[jobs]

    def limits_of(self, user: str) -> Limits:
        return self.limits.get(user) or self.limits.get("", UNLIMITED)

    def held_by(self, user: str) -> tuple[int, int]:
        """How many jobs and GPUs the user holds now; counted only where there are limits."""
        jobs, gpus = self._held.get(user, (0, 0))
        return jobs, gpus

    def leaving(self, gpus: Iterable[GpuId]) -> list[JobRecord]:
        """The jobs whose workers may still be on these GPUs though they are no longer theirs. Nobody is to be launched
        there before `Stopped` or `Failed` has come for each of them."""
        wanted = set(gpus)
        return [record for record in self.jobs.values() if not wanted.isdisjoint(record.leaving)]

    def refusal(self, job: Job) -> str | None:
        """Why this job could never run here, or None."""
        if job.id in self.jobs or job.id in self.ended:
            return f"job {job.id} exists already"
        smallest = allowed_accumulations(job)[-1]
        needed = self.perf.memory(job, smallest)
        total, fitting = self.topology.total(), self.topology.total(self.topology.with_memory(needed))
        if job.gpus > total:
            return f"gpus: job {job.id} asks for {job.gpus} GPUs and the cluster has {total}"
        if job.gpus > fitting:
            at = "even at sub-batch 1" if job.can_shrink else f"at batch {job.batch}, which may not be cut"
            gib = self.topology.largest_memory / 2**30
            return (
                f"batch: job {job.id} needs {needed / 2**30:.1f} GiB per GPU {at}; the largest GPUs have {gib:.1f} GiB"
            )
        limit = self.limits_of(job.user).gpus
        if limit is not None and job.gpus > limit:
            return f"gpus: job {job.id} asks for {job.gpus} GPUs and user {job.user or '(none)'} may hold {limit}"
        return None

    # ---- writing -------------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        if event.at != self.now:
            self.advance(event.at)
        _APPLY[type(event)](self, event)

    def advance(self, now: float) -> None:
        """Let time pass. A clock that was set back stands still until it catches up."""
        if now <= self.now:
            return
        self.busy_gpu_s += (len(self.cluster.residents) - self.free.count) * (now - self.now)
        self.now = now

    def _submitted(self, event: ev.Submitted) -> None:
        job = event.job
        if job.id in self.jobs or job.id in self.ended:
            raise ValueError(f"job {job.id} exists already")
        shape = self._shape(job, job.priority)
        record = JobRecord(job, shape, self._submissions, self.perf.iteration_time(job, 1, shape.placement))
        self._submissions += 1
        self.jobs[job.id] = record
        record.pending_since = self.now
        record.waits_for = tuple([name for name in dict.fromkeys(job.after) if not self._succeeded(name)])
        if not record.waits_for:
            self._enqueue(record)
            return
        record.status = Status.BLOCKED
        for name in record.waits_for:
            self._dependents.setdefault(name, []).append(job.id)
        failed = next((self.ended[name] for name in record.waits_for if name in self.ended), None)
        if failed is not None:
            self._end(record, Status.CANCELLED, _waits_in_vain(failed))

    def _succeeded(self, name: JobId) -> bool:
        return name in self.ended and self.ended[name].status is Status.FINISHED

    def _planned(self, event: ev.Planned) -> None:
        claims: list[tuple[JobRecord, Allocation]] = []
        for decision in event.decisions:
            record, allocation = self.jobs[decision.job], decision.allocation
            if record.gpus:
                if allocation is not None and allocation.gpus == record.gpus:
                    self._retune(record, allocation)
                    continue
                self._preempt(record)
            if allocation is not None:  # a start, or a move: stop there, start here
                claims.append((record, allocation))
        for record, allocation in claims:
            self._claim(record, allocation)

    def _preempt(self, record: JobRecord) -> None:
        record.leaving = record.gpus
        self._leave(record)
        record.status = Status.STOPPING
        record.preemptions += 1
        self.preemptions += 1

    def _requeued(self, event: ev.Requeued) -> None:
        record = self._current(event)
        if record is not None and record.status in (Status.STARTING, Status.RUNNING):
            self._preempt(record)

    def _retune(self, record: JobRecord, allocation: Allocation) -> None:
        self._settle(record)
        record.accumulation = allocation.accumulation
        if allocation.batch is None:
            record.forget_scale()
        record.batch = allocation.batch
        needed = self._needed(record.job, allocation)
        if needed > record.memory:  # what it holds until the workers confirm is the larger of the two
            self.cluster.reserve(record, needed)
        self._index_host(record)

    def _retuned(self, event: ev.Retuned) -> None:
        record = self._current(event)
        if record is None or not record.gpus:
            return
        if event.unasked and record.job.can_shrink and record.status is not Status.CANCELLING:
            self._retune(record, Allocation(record.gpus, event.accumulation, record.batch))
        elif (event.accumulation, event.batch) != (record.accumulation, record.batch):  # another re-tune is under way
            return
        self.cluster.reserve(
            record, self._needed(record.job, Allocation(record.gpus, record.accumulation, record.batch))
        )
        self._place(record)
        self._update_pace([record, *self.cluster.mates(record)])
        self._capacity_changed()

    def _started(self, event: ev.Started) -> None:
        record = self._current(event)
        if record is None or record.status is not Status.STARTING:
            return
        record.status = Status.RUNNING
        record.leaving = ()
        if event.done is not None:
            record.done = min(event.done, float(record.job.iterations))
        if record.first_start < 0.0:
            record.first_start = self.now
        if len(record.gpus) > record.most_gpus:
            record.most_gpus = len(record.gpus)
        self._update_pace([record, *self.cluster.mates(record)])

    def _progressed(self, event: ev.Progressed) -> None:
        record = self._current(event)
        if record is not None and record.iteration_s:
            self._settle(record)
            record.done = min(event.done, record.job.iterations)
            if record.done >= record.pace_valid_until and record.batch is not None:  # its pace changes here
                self._place(record)
                self._update_pace([record])
            self._index_host(record)

    def _observed(self, event: ev.Observed) -> None:
        record = self._current(event)
        if record is None or not record.iteration_s:
            return
        self._settle(record)
        record.done = min(event.done, record.job.iterations)
        seen = None if self._learner is None else sighting(self.cluster, record, event.iteration_s)
        if self.cluster.mates(record):
            record.slowdown = max(1.0, event.iteration_s / record.alone_iteration_s)
        else:
            record.alone_iteration_s = event.iteration_s
            record.alone_seen = True
        record.iteration_s = event.iteration_s
        record.pace_seen = record.reported = True
        self._index_host(record)
        if seen is not None:
            self._learn(seen)

    def _checkpointed(self, event: ev.Checkpointed) -> None:
        record = self._current(event)
        if record is not None:
            record.checkpoint = event.done

    def _stopped(self, event: ev.Stopped) -> None:
        record = self._current(event)
        if record is None or record.status not in (Status.STOPPING, Status.CANCELLING):
            return
        record.checkpoint = min(event.done, float(record.job.iterations))
        self._gone(record)

    def _finished(self, event: ev.Finished) -> None:
        record = self._current(event)
        if record is None or record.status not in ALIVE:
            return
        seen = None
        if record.gpus:
            if self._learner is not None:
                self._settle(record)
                seen = life(self.cluster, record)
            self._leave(record)
        record.done = float(record.job.iterations)
        self._end(record, Status.FINISHED, "")
        if seen is not None:
            self._learn(seen)

    def _failed(self, event: ev.Failed) -> None:
        record = self._current(event)
        if record is None or record.status not in ALIVE:
            return
        dies = record.status in (Status.STARTING, Status.RUNNING) and not event.again
        if dies and not record.retries_left:
            self._leave(record)
            self._end(record, Status.FAILED, event.reason)
            return
        record.retries_left -= dies
        self._gone(record)

    def _gone(self, record: JobRecord) -> None:
        """All workers of a job are gone: it goes back to the queue with what it saved, unless it was cancelled."""
        if record.gpus:
            self._leave(record)
        record.leaving = ()
        record.done = record.checkpoint
        if record.status is Status.CANCELLING:
            self._end(record, Status.CANCELLED, record.reason)
        else:
            self._requeue(record)

    def _cancelled(self, event: ev.Cancelled) -> None:
        record = self.jobs.get(event.job)
        if record is None:
            return
        record.reason = "cancelled by its owner"
        if record.gpus:
            self._settle(record)
            record.iteration_s = 0.0
            record.status = Status.CANCELLING
            record.pace_version += 1
            self._update_pace([record, *self.cluster.mates(record)])
        elif record.status is Status.STOPPING:
            record.status = Status.CANCELLING
        else:
            self._end(record, Status.CANCELLED, record.reason)

    def _put_on_hold(self, event: ev.Held) -> None:
        record = self.jobs.get(event.job)
        if record is None or record.on_hold:
            return
        record.on_hold = True
        if record.status is Status.PENDING:
            self.queue.remove(record)
            record.waited_s += self.now - record.pending_since
            record.status = Status.HELD

    def _released(self, event: ev.Released) -> None:
        record = self.jobs.get(event.job)
        if record is None:
            return
        record.on_hold = False
        if record.status is Status.HELD:
            self._requeue(record)
            self._capacity_changed()

    def _constraints_changed(self, event: ev.ConstraintsChanged) -> None:
        record = self.jobs.get(event.job)
        if record is None:
            return
        waits = not record.gpus
        changes: dict[str, Any] = {}
        if event.can_shrink is not None and (waits or event.can_shrink):
            changes["can_shrink"] = event.can_shrink
        if event.min_accumulation is not None and waits:
            changes["min_accumulation"] = min(event.min_accumulation, record.job.batch)
        if event.exclusive is not None and waits:
            changes["exclusive"] = event.exclusive
        record.job = replace(record.job, **changes)
        self._reshape(record, record.shape.priority)
        self._capacity_changed()

    def _memory_taken(self, event: ev.MemoryTaken) -> None:
        if event.gpu not in self.topology.node_of:
            return
        if event.memory > 0:
            self.topology.taken[event.gpu] = event.memory
        else:
            self.topology.taken.pop(event.gpu, None)
        for record in self.jobs_on(event.gpu):
            self._index_host(record)
        self._capacity_changed()

    def _priority_changed(self, event: ev.PriorityChanged) -> None:
        record = self.jobs.get(event.job)
        if record is None:
            return
        self.last_capacity_change = self.now
        if event.priority is not None:
            self._reshape(record, event.priority)
        elif record.status is Status.PENDING:
            self._reshape(record, record.shape.priority)

    def _limits_changed(self, event: ev.LimitsChanged) -> None:
        if not self.limits:  # nobody counted so far
            for record in self._running.values():
                self._count_for_user(record, 1)
        self.limits[event.user] = event.limits
        for record in self.jobs.values():
            if not event.user or record.job.user == event.user:
                self._reshape(record, record.shape.priority)
        self._capacity_changed()

    def _node_joined(self, event: ev.NodeJoined) -> None:
        self.cluster.join(event.node)
        self._rethink_sizes()
        self._capacity_changed()

    def _node_lost(self, event: ev.NodeLost) -> None:
        number = self.topology.present.get(event.node)
        if number is None:
            return
        lost = self.topology.nodes[number].gpus
        for record in list(self.jobs.values()):
            if any(gpu in lost for gpu in record.gpus):
                record.leaving = record.gpus
                self._leave(record)
                record.done = record.checkpoint
                if record.status is not Status.CANCELLING:
                    record.status = Status.STOPPING
            if record.leaving:
                record.leaving = tuple([gpu for gpu in record.leaving if gpu not in lost])
                if not record.leaving and record.status in (Status.STOPPING, Status.CANCELLING):
                    self._gone(record)
        self.cluster.lose(event.node)
        self._rethink_sizes()
        self._capacity_changed()

    def _rethink_sizes(self) -> None:
        """Other nodes may let waiting jobs run at another sub-batch."""
        for record in list(self.queue):
            if self._best_iteration_time(record) != record.alone_iteration_s:
                self._reshape(record, record.shape.priority)

    def _capacity_changed(self) -> None:
        self.needs_decision = True
        self.last_capacity_change = self.now

    # ---- a job's way through the queue -----------------------------------------------------------------------------

    def _enqueue(self, record: JobRecord) -> None:
        record.status = Status.HELD if record.on_hold else Status.PENDING
        record.alone_iteration_s = self._best_iteration_time(record)
        if record.on_hold:
            return
        self.queue.add(record, self.sort_key(record, self.now))
        self.needs_decision = True

    def _requeue(self, record: JobRecord) -> None:
        record.pending_since = self.now
        self._enqueue(record)

    def _reshape(self, record: JobRecord, priority: int) -> None:
        waiting = record.status is Status.PENDING
        if waiting:
            self.queue.remove(record)
        record.shape = self._shape(record.job, priority)
        if waiting:
            self._enqueue(record)

    def _end(self, record: JobRecord, status: Status, reason: str) -> None:
        """A job's end, and that of all who waited for it in vain."""
        ending = [(record, status, reason)]
        while ending:
            record, status, reason = ending.pop()
            if record.queue_entry is not None:
                self.queue.remove(record)
                record.waited_s += self.now - record.pending_since
            record.status = status
            record.reason = reason
            record.ended = self.now
            record.leaving = ()
            if status is Status.FINISHED:
                self._completed += 1
                self._completed_jct_s += self.now - record.job.submitted
            self.ended[record.job.id] = self.jobs.pop(record.job.id)
            for name in self._dependents.pop(record.job.id, ()):
                later = self.jobs.get(name)
                if later is None or later.status is not Status.BLOCKED:
                    continue
                if status is not Status.FINISHED:
                    ending.append((later, Status.CANCELLED, _waits_in_vain(record)))
                    continue
                later.waits_for = tuple([other for other in later.waits_for if other != record.job.id])
                if not later.waits_for:
                    later.pending_since = self.now
                    self._enqueue(later)
        self._capacity_changed()

    def _current(self, event: ev.JobEvent) -> JobRecord | None:
        """The job an event speaks of, unless it speaks of an earlier launch."""
        record = self.jobs.get(event.job)
        return record if record is not None and record.attempt == event.attempt else None

    def _shape(self, job: Job, priority: int) -> Shape:
        limited = bool(self.limits) and self.limits_of(job.user) != UNLIMITED
        return self._shapes.of(job, priority, job.user if limited else None)

    def _best_iteration_time(self, record: JobRecord) -> float:
        """At the most consolidated placement and the largest sub-batch that fits a GPU."""
        largest = self.topology.largest_memory
        for size in record.shape.sizes:
            if size.memory <= largest:
                break
        return record.whole_iteration_s * size.relative_time

    # ---- GPUs ------------------------------------------------------------------------------------------------------

    def _claim(self, record: JobRecord, allocation: Allocation) -> None:
        if record.queue_entry is not None:
            self.queue.remove(record)
            record.waited_s += self.now - record.pending_since
        record.status = Status.STARTING
        record.attempt += 1
        record.gpus = allocation.gpus
        record.accumulation = allocation.accumulation
        if allocation.batch is None:
            record.memory = self.perf.memory(record.job, allocation.accumulation)
        else:
            record.batch = allocation.batch
            record.memory = self._needed(record.job, allocation)
        record.gpus_since = self.now
        self._place(record)
        self._running[record.seq] = record
        if self.limits:
            self._count_for_user(record, 1)
        self.cluster.enter(record)
        mates = self.cluster.mates(record)
        if mates:
            record.shares += 1
            record.saved_s += max([mate.alone_left(self.now) for mate in mates])
            self.shares += 1
            for mate in mates:
                mate.hosted += 1
                self._index_host(mate)
        self._index_host(record)

    def _needed(self, job: Job, allocation: Allocation) -> int:
        """Bytes that a job takes on each GPU of an allocation."""
        return self.perf.memory(as_scaled(job, allocation), allocation.accumulation)

    def _leave(self, record: JobRecord) -> None:
        """Give back all GPUs of a job; its mates speed up."""
        self._settle(record)
        record.iteration_s = 0.0
        record.slowdown = 1.0
        record.pace_version += 1
        mates = self.cluster.mates(record)
        self.cluster.leave(record)
        record.served = record.service(self.now)
        del self._running[record.seq]
        if self.limits:
            self._count_for_user(record, -1)
        record.gpus = ()
        record.memory = 0
        if record.batch is not None:
            record.forget_scale()
        self._index_host(record)
        if mates:
            self._update_pace(mates)
        self._capacity_changed()

    def _count_for_user(self, record: JobRecord, sign: int) -> None:
        held = self._held.setdefault(record.job.user, [0, 0])
        held[0] += sign
        held[1] += sign * len(record.gpus)

    # ---- pace ------------------------------------------------------------------------------------------------------

    def _settle(self, record: JobRecord) -> None:
        """Turn the time since the last settlement into iterations."""
        if record.iteration_s:
            ran = self.now - record.since
            record.done = min(record.done + ran / record.iteration_s, float(record.job.iterations))
            record.ran_s += ran
            record.alone_s += ran / record.slowdown
        record.since = self.now

    def _update_pace(self, records: Iterable[JobRecord]) -> None:
        for record in records:
            if record.status is Status.RUNNING:
                self._settle(record)
                record.slowdown = self._slowdown(record)
                record.iteration_s = record.alone_iteration_s * record.slowdown
                record.pace_seen = False
                record.pace_version += 1
                self.pace_changes.append(record)
            self._index_host(record)

    def _slowdown(self, record: JobRecord) -> float:
        """The gang waits for its slowest worker: the worst ξ over its GPUs. Who does not iterate disturbs nobody."""
        worst = 1.0
        for cell in self.cluster.shared_cells(record):
            mates = [(m.job, m.accumulation) for m in cell if m is not record and m.status is Status.RUNNING]
            if mates:
                worst = max(worst, self.perf.slowdown(record.job, record.accumulation, mates))
        return worst

    def _place(self, record: JobRecord) -> None:
        """Compute the iteration time alone on its GPUs at its accumulation."""
        record.alone_seen = False
        nodes = self.topology.nodes_spanned(record.gpus)
        if record.batch is not None:
            placement = Placement(len(record.gpus), nodes)
            pace = self.perf.scaled_pace(record.job, record.batch, record.accumulation, placement, record.done)
            record.alone_iteration_s, record.pace_valid_until = pace
            return
        if record.accumulation == 1 and nodes == record.shape.placement.nodes:
            record.alone_iteration_s = record.whole_iteration_s
        else:
            placement = Placement(len(record.gpus), nodes)
            record.alone_iteration_s = self.perf.iteration_time(record.job, record.accumulation, placement)

    # ---- belief ----------------------------------------------------------------------------------------------------

    def _learn(self, seen: Observation) -> None:
        """Tell the model what was seen. If it changed its mind, refresh all that was derived from its answers."""
        lesson = self._learner.learn(seen) if self._learner is not None else Lesson.NOTHING
        if not lesson:
            return
        self.belief_version += 1
        if lesson & Lesson.SPEEDS:
            self._shapes = Shapes(self.perf)
            for record in self.jobs.values():
                self._rethink_speed(record)
        # what was measured beside the present mates needs no belief
        self._update_pace([r for r in self._running.values() if not r.pace_seen and r.status is Status.RUNNING])
        self.needs_decision = True

    def _rethink_speed(self, record: JobRecord) -> None:
        record.whole_iteration_s = self.perf.iteration_time(record.job, 1, record.shape.placement)
        self._reshape(record, record.shape.priority)
        if record.gpus and not record.alone_seen:
            self._place(record)
            self._index_host(record)

    def _index_host(self, record: JobRecord) -> None:
        if self._hosts is not None:
            self._hosts.update(record)
        if self._end_times is not None:
            self._end_times.touch(record)


def _waits_in_vain(forerunner: JobRecord) -> str:
    return f"job {forerunner.job.id}, which it waits for, {forerunner.status}"


_APPLY: dict[type[ev.Event], Callable[[State, Any], None]] = {
    ev.Submitted: State._submitted,
    ev.Planned: State._planned,
    ev.Started: State._started,
    ev.Progressed: State._progressed,
    ev.Observed: State._observed,
    ev.Retuned: State._retuned,
    ev.Checkpointed: State._checkpointed,
    ev.Stopped: State._stopped,
    ev.Requeued: State._requeued,
    ev.Finished: State._finished,
    ev.Failed: State._failed,
    ev.Cancelled: State._cancelled,
    ev.Held: State._put_on_hold,
    ev.Released: State._released,
    ev.ConstraintsChanged: State._constraints_changed,
    ev.PriorityChanged: State._priority_changed,
    ev.LimitsChanged: State._limits_changed,
    ev.NodeJoined: State._node_joined,
    ev.MemoryTaken: State._memory_taken,
    ev.NodeLost: State._node_lost,
}
