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
from carpool.core.closures import cleared
from carpool.core.model import SWAP_IN_S, SWAP_OUT_S, Closure, Decision, GpuId, Job, JobId, Node, Status
from carpool.core.perf import PerformanceModel
from carpool.core.record import JobRecord
from carpool.core.scheduler import Policy, Scheduler
from carpool.core.state import RESIDENT_PER_GPU, State
from carpool.core.time_limits import notice_s

MOST_IDLE_CALLS = 100_000
"""Number of idle wake-ups in a row (no event, no job running) after which a policy is taken to start nothing more."""
MOST_PLANS_AT_ONCE = 10_000
"""Number of plans at one moment after which a policy is taken to undo and repeat its own decisions."""
ALL_TIMED, TIMED_EVERY = 10_000, 17
"""Number of decisions of which each is timed, and every how many of those after them: reading the clock takes longer
than many a decision."""
LATE, LEAST_LATE_S = 0.05, 1.0
"""How much later than believed a job must be to have outlived it: as a share of its duration, and in seconds."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Delays that the simulator charges, in seconds. A policy's own `start_s` and `restart_s` add to every start."""

    launch_s: float = 0.0
    stop_s: float = 0.0
    pause_s: float = 0.05
    """Seconds that each pause and each resume takes, in which the job does not compute."""
    swap_out_s: float = SWAP_OUT_S
    """Seconds to move 1 GiB of a paused job to main memory."""
    swap_in_s: float = SWAP_IN_S
    """Seconds to move it back."""

    def launch(self, job: Job) -> float:
        """Seconds to launch this job: the same for all jobs, unless a subclass overrides it."""
        return self.launch_s


class DueReport(NamedTuple):
    """A report of a job's speed that its workers will make, if its pace stays as it is."""

    record: JobRecord


class DueLimit(NamedTuple):
    """The moment at which a job reaches its time limit, or comes near it, if its pace stays as it is."""

    record: JobRecord
    near: bool


class DueEnd(NamedTuple):
    """The time at which a job should have ended by what is believed of it, and a little more."""

    record: JobRecord


Due = ev.Event | JobRecord | DueReport | DueLimit | DueEnd | None
"""What happens at a later time: an event, a look whether a job has ended, a report, a limit, a look at a job that may
be late; None: a wake-up."""


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
        settings: Sequence[ev.Event] = (),
        guess: Callable[[Job], Job] | None = None,
        log: Callable[[ev.Event], None] | None = None,
    ) -> None:
        """`guess` returns a job as its user describes it to the scheduler, where that differs from the truth."""
        self.scheduler = Scheduler(policy, belief, jobs_per_gpu, resident_per_gpu)
        self.belief = self.scheduler.state
        same = truth is None or truth is belief
        self.world = self.belief if same else State(truth or belief, policy.key, jobs_per_gpu, resident_per_gpu)
        self.costs = costs or Costs()
        self._start_s: float = getattr(policy, "start_s", 0.0)
        self._report_error, seed = report_error
        self._report_s = report_s
        self._guess = guess
        self._looks: dict[JobId, int] = {}  # the number of the latest look that each job waits for
        self._late: list[JobRecord] = []  # the jobs that outlive what is believed of them now
        self._reports: list[JobRecord] = []  # the jobs that report now
        self._random = Random(f"{seed} reports")
        self.log = log
        self.decision_cpu_s: list[float] = []
        """CPU seconds of decisions, from the events that led to each until its plan was applied."""
        self.timed_every = TIMED_EVERY
        self._timed = True
        self._cpu_s = thread_time()  # CPU time, because other processes on the machine are no cost of the policy
        self._heap: list[tuple[float, int, Due, int]] = []
        self._pushes = 0
        self._wake_at: float | None = None
        self._arrivals = sorted(jobs, key=lambda job: job.submitted)
        self._empty_at: dict[GpuId, float] = {}  # when the workers of a preempted or paused job stop computing
        self._swapped: set[JobId] = set()
        self._closures: dict[str, Closure] = {}
        self._ends_due: dict[int, float] = {}  # when it is looked whether a job has ended, by `seq`
        self._limits_due: dict[int, int] = {}  # the pace for which a job's time limit is on the heap, by `seq`
        if self.world is not self.belief:
            self.world.guesses.trusted = True  # its jobs have their true lengths
        self._idle_calls = 0
        self._deliver(0.0, [*(ev.NodeJoined(0.0, node) for node in nodes), *(one for one in settings if one.at <= 0.0)])
        self._refuse_unrunnable_jobs()
        for setting in settings:
            if setting.at > 0.0:
                self._push(setting.at, setting, 0)
            elif isinstance(setting, ev.ClosureSet):
                self._close_later(setting.closure)

    def _close_later(self, closure: Closure) -> None:
        """Note when a closure begins and when it is over."""
        self._closures[closure.id] = closure
        begins = max(closure.start, self.world.now)
        self._push(begins, ev.ClosureBegan(begins, closure.id), 0)
        if closure.end is not None:
            self._push(closure.end, ev.ClosureRemoved(closure.end, closure.id), 0)

    def run(self) -> State:
        """Simulate until all jobs have ended, and return the world's state with each job's record."""
        arrivals, heap, jobs = self._arrivals, self._heap, self.world.jobs
        following, number = 0, len(arrivals)
        comes_at = arrivals[0].submitted if arrivals else inf
        while following < number or (heap and jobs):
            now = heap[0][0] if heap and heap[0][0] < comes_at else comes_at
            batch: list[ev.Event] = []
            wake = self._pop(now, batch)
            while following < number and comes_at == now:
                batch.append(ev.Submitted(now, arrivals[following]))
                following += 1
                comes_at = arrivals[following].submitted if following < number else inf
            if batch or wake or self._reports or self._late:
                self._step(now, batch, wake)
            if self._idle_calls > MOST_IDLE_CALLS and following == number:
                break
        if self.world.jobs:
            left = list(self.world.jobs)
            names = ", ".join(left[:5] + ["…"] * (len(left) > 5))
            raise CannotFinish(None, f"the policy left jobs waiting for ever, {len(left)} in all ({names})")
        return self.world

    def _refuse_unrunnable_jobs(self) -> None:
        if self._arrivals and self._arrivals[0].submitted < 0.0:
            raise CannotFinish(self._arrivals[0].id, "submitted: is before time 0")
        looked_at = set()
        for job in self._arrivals:
            alike = (job.gpus, job.model, job.batch, job.can_shrink, job.user, job.limit_s, job.group)
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
            if isinstance(what, JobRecord):
                self._look_at_end(now, what, batch)
            elif what is None:
                wake = wake or now == self._wake_at  # a wake-up that a later one replaced is dropped
            elif isinstance(what, DueReport):
                if what.record.pace_version == pace_version:
                    self._reports.append(what.record)
            elif isinstance(what, DueLimit):
                if what.record.pace_version == pace_version:
                    self._limit(now, what, batch)
            elif isinstance(what, DueEnd):
                self._look_at_late(now, what.record, pace_version)
            else:
                batch.append(what)
                if isinstance(what, ev.ClosureSet | ev.ClosureBegan):
                    self._close(now, what, batch)
        return wake

    def _look_at_end(self, now: float, record: JobRecord, batch: list[ev.Event]) -> None:
        """Add the end of a job to `batch`, or that its pace changes, if it is there; otherwise look again later."""
        if self._ends_due.get(record.seq) != now:  # an earlier look replaced this one
            return
        del self._ends_due[record.seq]
        if not record.iteration_s:
            return
        if record.end() > now:  # it was slowed down meanwhile
            self._end_later(record)
        elif record.pace_valid_until < record.job.iterations:  # its pace changes before it ends
            batch.append(ev.Progressed(now, record.job.id, record.attempt, record.pace_valid_until))
        else:
            batch.append(ev.Finished(now, record.job.id, record.attempt))

    def _close(self, now: float, event: ev.ClosureSet | ev.ClosureBegan, batch: list[ev.Event]) -> None:
        if isinstance(event, ev.ClosureSet):
            self._close_later(event.closure)
        else:
            self._clear(now, event, batch)

    def _clear(self, now: float, began: ev.ClosureBegan, batch: list[ev.Event]) -> None:
        """Save and stop jobs, or pause them, as executors would where a closure begins."""
        for record, saves in cleared(self.world, self._closures[began.closure]):
            name, attempt = record.job.id, record.attempt
            if saves:
                self._stop_at(now, record, batch)
            elif not record.paused_by_owner and record.status is Status.RUNNING:
                at = now + self.costs.pause_s
                self._computes_until(record.gpus, at)
                self._push(at, ev.Paused(at, name, attempt), 0)

    def _stop_at(self, now: float, record: JobRecord, batch: list[ev.Event]) -> None:
        """Stop the workers of a job that loses its GPUs by an event of this moment."""
        done = record.job.iterations - record.iterations_left(now)
        stopped = ev.Stopped(now + self.costs.stop_s, record.job.id, record.attempt, done)
        if stopped.at == now:
            batch.append(stopped)
        else:
            self._computes_until(record.gpus, stopped.at)
            self._push(stopped.at, stopped, 0)

    def _limit(self, now: float, due: DueLimit, batch: list[ev.Event]) -> None:
        """Warn a job of its time limit, or stop its workers at it, as the live service would."""
        record = due.record
        if due.near:
            batch.append(ev.LimitNeared(now, record.job.id, record.attempt, record.limit_left(now)))
            return
        batch.append(ev.LimitReached(now, record.job.id, record.attempt))
        self._stop_at(now, record, batch)

    def _limit_later(self, now: float, record: JobRecord) -> None:
        """Note when a job that computes at a new pace comes near its time limit and reaches it."""
        assert record.limit_s is not None
        if self._limits_due.get(record.seq) == record.pace_version:  # its pace changed twice at this moment
            return
        self._limits_due[record.seq] = record.pace_version
        left = max(0.0, record.limit_left(now))
        if not record.near_limit:
            near = max(now, now + left - notice_s(record.limit_s))
            self._push(near, DueLimit(record, True), record.pace_version)
        self._push(now + left, DueLimit(record, False), record.pace_version)

    def _step(self, now: float, batch: list[ev.Event], wake: bool) -> None:
        scheduler, world = self.scheduler, self.world
        pace_changes = world.pace_changes
        idle = not batch and world.free.count == len(world.topology.node_of)
        self._idle_calls = self._idle_calls + 1 if idle else 0
        if self._reports or self._late:
            wake = self._hear(now) or wake
        self._start_clock()
        plans = 0
        while batch or wake:
            plans += 1
            if plans > MOST_PLANS_AT_ONCE:
                raise CannotFinish(None, f"the policy undoes and repeats its own decisions at {now:g} s, without end")
            planned = self._deliver(now, batch, wake)
            if scheduler.pauses and world.switching:
                self._pause_those_without_a_turn(now, batch)
            batch = self._act(now, planned.decisions) if planned is not None else []
            wake = scheduler.asks_again
            for record in pace_changes:
                if record.iteration_s:  # the same plan may have paused it since
                    self._end_later(record)
                    if record.limit_s is not None:
                        self._limit_later(now, record)
            if world is not self.belief:
                wake = self._report_later(now, pace_changes) or wake
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

    def _end_later(self, record: JobRecord, not_before: float = 0.0) -> None:
        """See to it that a job that computes is looked at when it ends at its pace, or before.

        A job that shares is slowed down and speeds up again many times. A new look at each of them would fill the heap;
        only an end that comes sooner than the next look needs one.
        """
        end, due = max(record.end(), not_before), self._ends_due.get(record.seq)
        if due is None or end < due:
            self._ends_due[record.seq] = end
            self._push(end, record, 0)

    def _start_clock(self) -> None:
        """Begin to time the decisions of a step, if they are to be timed."""
        number = self.scheduler.policy_calls
        self._timed = number < ALL_TIMED or not number % self.timed_every
        if self._timed:
            self._cpu_s = thread_time()

    def _hear(self, now: float) -> bool:
        """Apply the reports and the ends that were expected and did not come; return whether a decision is needed."""
        self.scheduler.begin_moment(now)
        if self._reports:
            self._report(now, self._reports)
            self._reports = []
        if self._late:
            self._outlive(now)
        return self.belief.needs_decision

    def _pause_those_without_a_turn(self, now: float, batch: Sequence[ev.Event]) -> None:
        """Pause the jobs that have started up and may not compute so far, as executors would."""
        for event in batch:
            if isinstance(event, (ev.Started, ev.Computing)):
                record = self.world.jobs.get(event.job)
                if record is not None and record.status is Status.PAUSING:
                    at = self._paused_at(now, record)
                    self._computes_until(record.gpus, at)
                    self._push(at, ev.Paused(at, event.job, event.attempt), 0)

    def _report_later(self, now: float, pace_changes: Iterable[JobRecord]) -> bool:
        """Let jobs report their new speed to the belief, now or after a while. Return whether that may change the
        policy's decision."""
        moved = [record for record in pace_changes if record.iteration_s]
        if not self._report_s:
            self._report(now, moved)
            return self.belief.needs_decision
        for record in moved if self._report_s < inf else ():
            self._push(now + self._report_s, DueReport(record), record.pace_version)
        return False

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

    def _look_at_late(self, now: float, record: JobRecord, number: int) -> None:
        """Note that a job has outlived what is believed of it, or look again later."""
        if self._looks.get(record.job.id) != number or not record.iteration_s:
            return
        if record.iterations_left(now):
            self._expect_end(record)
        else:
            self._late.append(record)

    def _expect_end(self, record: JobRecord) -> None:
        """Look at a job that computes some time after it should have ended."""
        late_s = max(LEAST_LATE_S, LATE * record.job.iterations * record.alone_iteration_s)
        self._looks[record.job.id] = number = self._pushes + 1
        self._push(record.end() + late_s, DueEnd(record), number)

    def _outlive(self, now: float) -> None:
        """Tell the belief that jobs should have ended."""
        late, self._late = self._late, []
        for record in late:
            event = ev.Outlived(now, record.job.id, record.attempt)
            self.belief.apply(event)
            if self.log is not None:
                self.log(event)
            if record.iterations_left(now):  # else guesses are trusted
                self._expect_end(record)
        self.belief.pace_changes.clear()

    def _deliver(self, now: float, batch: list[ev.Event], wake: bool = False) -> ev.Planned | None:
        """Apply the events to the scheduler and to the world, and return the plan, applied to both as well."""
        asked = self.scheduler.policy_calls
        told = batch if self._guess is None else self._as_guessed(batch)
        planned = self.scheduler.step(now, told, wake=wake)
        if self._timed and self.scheduler.policy_calls != asked:
            cpu_s = thread_time()
            self.decision_cpu_s.append(cpu_s - self._cpu_s)
            self._cpu_s = cpu_s
        if self.world is not self.belief or self.log is not None:
            plans = [] if planned is None else [planned]
            self._pass_on([*batch, *plans], [*told, *plans])
        return planned

    def _as_guessed(self, batch: list[ev.Event]) -> list[ev.Event]:
        """Return events as the scheduler receives them: jobs are as long as their users guess."""
        assert self._guess is not None
        return [
            ev.Submitted(event.at, self._guess(event.job)) if isinstance(event, ev.Submitted) else event
            for event in batch
        ]

    def _pass_on(self, batch: Sequence[ev.Event], told: Sequence[ev.Event]) -> None:
        """Apply events to the world, if it is a state of its own, and log them as the scheduler sees them."""
        if self.world is not self.belief:
            for event in batch:
                self.world.apply(event)
                if isinstance(event, (ev.Started, ev.Computing, ev.Resumed)):
                    record = self.belief.jobs.get(event.job)
                    if record is not None and record.iteration_s:
                        self._expect_end(record)
                elif isinstance(event, ev.Finished):
                    self._looks.pop(event.job, None)
        if self.log is not None:
            for event in told:
                self.log(event)

    def _act(self, now: float, decisions: Sequence[Decision]) -> list[ev.Event]:
        """Launch and stop jobs as executors would. Return events of this instant; push later ones on the heap."""
        prompt: list[ev.Event] = []
        jobs, costs = self.world.jobs, self.costs
        for decision in decisions if costs.stop_s or self.world.switching else ():
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
        clear = self._clear_time(now, record) if self._empty_at else now
        return clear + self.costs.launch(record.job) + again_s

    def _paused_at(self, now: float, record: JobRecord) -> float:
        """Time at which a job that is to be paused now has stopped computing and, if it is swapped, holds no memory."""
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
        for gpu in (*record.gpus, *record.leaving):
            at = max(at, self._empty_at.get(gpu, now))
        return at

    def _push(self, at: float, what: Due, pace_version: int) -> None:
        """Let something happen later. The ends of jobs come by `_end_later`."""
        self._pushes += 1
        heappush(self._heap, (at, self._pushes, what, pace_version))
