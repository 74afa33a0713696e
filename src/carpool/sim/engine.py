"""The simulated world: an event heap and a virtual clock that drive `Scheduler.step`.

Time jumps from event to event and is never rounded. What happens follows the true performance model, and what the
policy sees follows the believed one. The world is itself a `State` under the true model. Where belief and truth are the
same model, it is the scheduler's own state; otherwise it is a second state that receives the same events.
`sim.run.simulate` and the live service's forecast build an engine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, inf
from random import Random
from time import thread_time
from typing import NamedTuple

from carpool.core import events as ev
from carpool.core.model import SWAP_IN_S, SWAP_OUT_S, Decision, GpuId, Job, JobId, Node, Status
from carpool.core.perf import PerformanceModel
from carpool.core.record import JobRecord
from carpool.core.scheduler import Policy, Scheduler
from carpool.core.state import RESIDENT_PER_GPU, State

MOST_IDLE_CALLS = 100_000
"""Number of idle wake-ups in a row (no event, no job running) after which a policy is taken to start nothing more."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Delays of the world, in seconds. A policy's own `start_s` and `restart_s` add to every start."""

    launch_s: float = 0.0
    stop_s: float = 0.0
    pause_s: float = 0.05
    """Seconds that each pause and each resume takes, in which the job does not compute."""
    swap_out_s: float = SWAP_OUT_S
    """Seconds to move 1 GiB of a paused job to main memory."""
    swap_in_s: float = SWAP_IN_S
    """Seconds to move it back."""

    def launch(self, job: Job) -> float:
        """Seconds to launch this job: the same for all jobs, unless a subclass knows better."""
        return self.launch_s


class DueReport(NamedTuple):
    """A report of a job's speed that its workers will make, if its pace stays as it is."""

    record: JobRecord


class CannotFinish(ValueError):
    """A job that can never run on the cluster, or that the policy never lets run."""

    def __init__(self, job: JobId | None, problem: str) -> None:
        super().__init__(problem)
        self.job = job


class Engine:
    """One simulation: construct it with jobs, nodes, a policy and its models, then call `run`."""

    def __init__(
        self,
        jobs: Iterable[Job],
        nodes: Sequence[Node],
        policy: Policy,
        *,
        belief: PerformanceModel,
        truth: PerformanceModel | None = None,
        jobs_per_gpu: int = 2,
        resident_per_gpu: int = RESIDENT_PER_GPU,
        costs: Costs | None = None,
        report_error: tuple[float, int] = (0.0, 1),
        report_s: float = 0.0,
        log: Callable[[ev.Event], None] | None = None,
    ) -> None:
        self.scheduler = Scheduler(policy, belief, jobs_per_gpu, resident_per_gpu)
        self.belief = self.scheduler.state
        same = truth is None or truth is belief
        self.world = self.belief if same else State(truth or belief, policy.key, jobs_per_gpu, resident_per_gpu)
        self.costs = costs or Costs()
        self._start_s: float = getattr(policy, "start_s", 0.0)
        self._report_error, seed = report_error
        self._report_s = report_s
        self._reports: list[JobRecord] = []  # the jobs that report now
        self._random = Random(f"{seed} reports")
        self.log = log
        self.decision_cpu_s: list[float] = []
        """CPU seconds of every step in which the policy was asked."""
        self._heap: list[tuple[float, int, ev.Event | JobRecord | DueReport | None, int]] = []
        self._pushes = 0
        self._wake_at: float | None = None
        self._arrivals = sorted(jobs, key=lambda job: job.submitted)
        self._empty_at: dict[GpuId, float] = {}  # when the workers of a preempted or paused job compute no more
        self._swapped: set[JobId] = set()
        self._idle_calls = 0
        self._deliver(0.0, [ev.NodeJoined(0.0, node) for node in nodes])
        self._refuse_unrunnable_jobs()

    def run(self) -> State:
        """Simulate until all jobs have ended, and return the world's state with each job's record."""
        arrivals, heap = self._arrivals, self._heap
        following, number = 0, len(arrivals)
        while following < number or (heap and self.world.jobs):
            if following < number and (not heap or arrivals[following].submitted <= heap[0][0]):
                now = arrivals[following].submitted
            else:
                now = heap[0][0]
            batch: list[ev.Event] = []
            wake = self._pop(now, batch)
            while following < number and arrivals[following].submitted == now:
                batch.append(ev.Submitted(now, arrivals[following]))
                following += 1
            if batch or wake or self._reports:
                self._step(now, batch, wake)
            if self._idle_calls > MOST_IDLE_CALLS and following == number:
                break
        if self.world.jobs:
            names = ", ".join(list(self.world.jobs)[:5])
            raise CannotFinish(None, f"the policy left {len(self.world.jobs)} jobs waiting for ever ({names}, …)")
        return self.world

    def _refuse_unrunnable_jobs(self) -> None:
        if self._arrivals and self._arrivals[0].submitted < 0.0:
            raise CannotFinish(self._arrivals[0].id, "submitted: lies before time 0")
        looked_at = set()
        for job in self._arrivals:
            alike = (job.gpus, job.model, job.batch, job.can_shrink, job.user)
            if alike not in looked_at:
                looked_at.add(alike)
                refusal = self.belief.refusal(job) or self.world.refusal(job)
                if refusal:
                    raise CannotFinish(job.id, refusal)

    def _pop(self, now: float, batch: list[ev.Event]) -> bool:
        """Move what happens now from the heap to `batch`; return whether the policy asked to be woken now."""
        heap = self._heap
        wake = False
        while heap and heap[0][0] == now:
            _, _, what, pace_version = heappop(heap)
            if what is None:
                wake = wake or now == self._wake_at  # a wake-up that a later one replaced is dropped
            elif isinstance(what, DueReport):
                if what.record.pace_version == pace_version:
                    self._reports.append(what.record)
            elif isinstance(what, JobRecord):
                if what.pace_version != pace_version:
                    continue
                if what.pace_valid_until < what.job.iterations:  # its pace changes before it ends
                    batch.append(ev.Progressed(now, what.job.id, what.attempt, what.pace_valid_until))
                else:
                    batch.append(ev.Finished(now, what.job.id, what.attempt))
            else:
                batch.append(what)
        return wake

    def _step(self, now: float, batch: list[ev.Event], wake: bool) -> None:
        scheduler, pace_changes = self.scheduler, self.world.pace_changes
        idle = not batch and self.world.free.count == len(self.world.topology.node_of)
        self._idle_calls = self._idle_calls + 1 if idle else 0
        if self._reports:
            self._report(now, self._reports)
            self._reports = []
            wake = wake or self.belief.needs_decision
        while batch or wake:
            planned = self._deliver(now, batch, wake)
            if scheduler.pauses:
                self._pause_those_without_a_turn(now, batch)
            batch, wake = self._act(now, planned.decisions) if planned is not None else [], False
            moved = [record for record in pace_changes if record.iteration_s]  # the same plan may have paused it since
            for record in moved:
                self._push(record.end(), record, record.pace_version)
            if self.world is not self.belief and self._report_s:
                for record in moved:
                    self._push(now + self._report_s, DueReport(record), record.pace_version)
            elif self.world is not self.belief:
                self._report(now, moved)
                wake = self.belief.needs_decision  # the policy may decide otherwise after the reports
            pace_changes.clear()
        again = scheduler.policy.wake(scheduler.state)
        if again is not None and not now < again < inf:
            raise CannotFinish(
                None, f"the policy asks at {now} s to be woken at {again} s: wake() must name a later time"
            )
        if again != self._wake_at:
            self._wake_at = again
            if again is not None:
                self._push(again, None, 0)

    def _pause_those_without_a_turn(self, now: float, batch: Sequence[ev.Event]) -> None:
        """Pause jobs as executors would that have started up and may not compute so far."""
        for event in batch:
            if isinstance(event, ev.Started | ev.Computing):
                record = self.world.jobs.get(event.job)
                if record is not None and record.status is Status.PAUSING:
                    at = self._paused_at(now, record)
                    self._computes_until(record.gpus, at)
                    self._push(at, ev.Paused(at, event.job, event.attempt), 0)

    def _report(self, now: float, pace_changes: list[JobRecord]) -> None:
        """Report to the belief how fast jobs really run, as live workers would."""
        for record in pace_changes:
            seconds = record.iteration_s
            if not seconds:
                continue
            if self._report_error:
                seconds *= exp(self._random.gauss(0.0, self._report_error))
            done = record.done if record.since == now else record.job.iterations - record.iterations_left(now)
            event = ev.Observed(now, record.job.id, record.attempt, done, seconds)
            self.belief.apply(event)
            if self.log is not None:
                self.log(event)
        self.belief.pace_changes.clear()

    def _deliver(self, now: float, batch: list[ev.Event], wake: bool = False) -> ev.Planned | None:
        """Apply the events to the scheduler and to the world, and return the plan, applied to both as well."""
        asked = self.scheduler.policy_calls
        before = thread_time()  # CPU time, because other processes on the machine are no cost of the policy
        planned = self.scheduler.step(now, batch, wake=wake)
        if self.scheduler.policy_calls != asked:
            self.decision_cpu_s.append(thread_time() - before)
        if planned is not None:
            batch = [*batch, planned]
        if self.world is not self.belief:
            for event in batch:
                self.world.apply(event)
        if self.log is not None:
            for event in batch:
                self.log(event)
        return planned

    def _act(self, now: float, decisions: Sequence[Decision]) -> list[ev.Event]:
        """Launch and stop jobs as executors would. Return events of this instant; push later ones on the heap."""
        prompt: list[ev.Event] = []
        jobs, costs = self.world.jobs, self.costs
        for decision in decisions:
            record = jobs[decision.job]
            if costs.stop_s and record.leaving:
                self._computes_until(record.leaving, self._stopped(now, record).at)
            elif record.status is Status.PAUSING:
                self._computes_until(record.gpus, self._paused_at(now, record))
        for decision in decisions:
            record = jobs[decision.job]
            event: ev.Event
            if record.status is Status.STARTING:
                event = ev.Started(self._launch_time(now, record), decision.job, record.attempt)
            elif record.status is Status.STOPPING:
                event = self._stopped(now, record)
            elif record.status is Status.PAUSING:
                event = ev.Paused(self._paused_at(now, record), decision.job, record.attempt)
                if record.swapped:
                    self._swapped.add(decision.job)
            elif record.status is Status.RESUMING:
                event = ev.Resumed(self._resumed_at(now, record), decision.job, record.attempt)
            else:
                event = ev.Retuned(now, decision.job, record.attempt, record.accumulation, record.batch)
            if event.at == now:
                prompt.append(event)
            else:
                self._push(event.at, event, 0)
        return prompt

    def _computes_until(self, gpus: Iterable[GpuId], at: float) -> None:
        """Note that a job that gives up these GPUs, or is being paused, may compute on them until then."""
        for gpu in gpus:
            self._empty_at[gpu] = max(at, self._empty_at.get(gpu, at))

    def _stopped(self, now: float, record: JobRecord) -> ev.Stopped | ev.Finished:
        """The event that follows from stopping a job now."""
        return ev.Stopped(now + self.costs.stop_s, record.job.id, record.attempt, record.done)

    def _launch_time(self, now: float, record: JobRecord) -> float:
        """Time at which a job that receives GPUs now is up."""
        again_s = self.scheduler.policy.restart_s if record.attempt > 1 else self._start_s
        return self._clear_time(now, record) + self.costs.launch(record.job) + again_s

    def _paused_at(self, now: float, record: JobRecord) -> float:
        """Time at which a job that is to be paused now computes no more and, if it is swapped, holds no memory."""
        return now + self.costs.pause_s + (self._gib(record) * self.costs.swap_out_s if record.swapped else 0.0)

    def _resumed_at(self, now: float, record: JobRecord) -> float:
        """Time at which a paused job that is to go on now computes again."""
        at = self._clear_time(now, record) + self.costs.pause_s
        if record.job.id in self._swapped:
            self._swapped.remove(record.job.id)
            at += self._gib(record) * self.costs.swap_in_s
        return at

    def _gib(self, record: JobRecord) -> float:
        return self.world.perf.memory(record.job, record.accumulation) / 2**30

    def _clear_time(self, now: float, record: JobRecord) -> float:
        """Time at which all jobs that left a job's GPUs, or are being paused on them, have ceased to compute."""
        at = now
        for gpu in (*record.gpus, *record.leaving) if self._empty_at else ():
            at = max(at, self._empty_at.get(gpu, now))
        return at

    def _push(self, at: float, what: "ev.Event | JobRecord | DueReport | None", pace_version: int) -> None:
        self._pushes += 1
        heappush(self._heap, (at, self._pushes, what, pace_version))
