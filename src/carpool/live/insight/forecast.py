"""Forecasts: when each job starts and ends, if no other job is submitted.

The state is copied and simulated forward by the simulator's engine under the same policy, three times: with durations
as believed, and at the short and the long end of what is believed. `explain`, `submit --dry-run` and the record of
judged estimates use it.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, cast

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.accounts import Accounts
from carpool.core.elastic import Pace, Scaling
from carpool.core.learning import WeighsGuesses
from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.perf import Mate, PerformanceModel, Placement, no_startup
from carpool.core.queue import Entry, Queue
from carpool.core.record import JobRecord
from carpool.core.scheduler import Policy, Scheduler
from carpool.core.state import State
from carpool.live.insight.event_views import jobs_of
from carpool.live.insight.places import PlaceBook
from carpool.sim.engine import CannotFinish, Costs, Engine

MOST_QUIET_CALLS = 100
"""Number of calls of the policy in a row, while no job computes, after which a forecast ends."""
MAX_WAITING = 200
"""Number of queued jobs that are simulated; those behind them are estimated from the work before them."""
STRETCHED = ("whole_iteration_s", "alone_iteration_s", "iteration_s", "correction")
"""What is multiplied for a job that takes longer or shorter than believed."""


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Start and end of a job, in the clock of the state; infinite where it never starts or ends."""

    start: float
    end: float
    resume: float = inf
    """When a job that is paused now goes on."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Start and end of a job as believed, and their range."""

    believed: JobTimes
    early: JobTimes
    late: JobTimes


class FrozenModel:
    """A performance model that does not learn: a simulated future must not change the belief."""

    def __init__(self, model: PerformanceModel) -> None:
        self.iteration_time: Callable[[Job, int, Placement], float] = model.iteration_time
        self.fewest_nodes: Callable[[int], int] = model.fewest_nodes
        self.memory: Callable[[Job, int], int] = model.memory
        self.slowdown: Callable[[Job, int, Sequence[Mate]], float] = model.slowdown
        self.startup_s: Callable[[Job], float] = model.startup_s
        self.scaling: Callable[[Job], Scaling | None] = model.scaling
        self.noise: Callable[[Job, float], float] = model.noise
        self.scaled_pace: Callable[[Job, int, int, Placement, float], Pace] = model.scaled_pace
        weighs = model.relies_on_guess if isinstance(model, WeighsGuesses) else None
        self.relies_on_guess: Callable[[Job], bool] = weighs or (lambda job: True)


def forecast(
    state: State,
    policy: Callable[[], Policy],
    spread: Callable[[Job], tuple[float, float]] = lambda job: (1.0, 1.0),
    *,
    now: float | None = None,
    places: PlaceBook | None = None,
) -> dict[JobId, Forecast]:
    """Return forecasts of all jobs that have not ended and are not held.

    `policy` makes a new policy for each simulation. `spread` returns two factors for a job: how much shorter and how
    much longer than believed it may be. `now` may be later than the last event. `places` follows the
    jobs of the future as believed.
    """
    now = state.now if now is None else max(now, state.now)
    present = _encode(state)
    believed = _simulate(state, policy(), present, {}, now, places)
    low, high = ({name: spread(state.jobs[name].job)[end] for name in believed} for end in (0, 1))
    if all(factor == 1.0 for factor in (*low.values(), *high.values())):
        early = late = believed
    else:
        early = _simulate(state, policy(), present, low, now)
        late = _simulate(state, policy(), present, high, now)
    found = {}
    for name, times in believed.items():
        pair = (times, early.get(name, times), late.get(name, times))
        # shorter jobs may start a gang later, because others fill the gaps first: sort the bounds
        starts, ends = sorted(t.start for t in pair), sorted(t.end for t in pair)
        resumes = sorted(t.resume for t in pair)
        early_times, late_times = (JobTimes(starts[i], ends[i], resumes[i]) for i in (0, 2))
        found[name] = Forecast(times, early_times, late_times)
    if len(state.queue) > MAX_WAITING:
        found.update(_far(state, policy(), found, spread, now))
    return found


def _far(
    state: State,
    policy: Policy,
    near: Mapping[JobId, Forecast],
    spread: Callable[[Job], tuple[float, float]],
    now: float,
) -> dict[JobId, Forecast]:
    """Return forecasts of jobs at the far end of a long queue: the work before them is spread evenly over all GPUs."""
    gpus = max(1, len(state.cluster.residents))
    work = [sum(record.alone_left(now) * record.job.gpus for record in state.running)] * 3
    found = {}
    for record in state.queue:
        own, delay = record.alone_left(now), _start_delay(policy, record)
        factors = (1.0, *spread(record.job))
        if record.job.id not in near:
            starts = [now + ahead / gpus + delay for ahead in work]
            times = [JobTimes(start, start + own * factor) for start, factor in zip(starts, factors, strict=True)]
            found[record.job.id] = Forecast(*times)
        for i, factor in enumerate(factors):
            work[i] += (own * factor + delay) * record.job.gpus
    return found


def _start_delay(policy: Policy, record: JobRecord) -> float:
    """Return the seconds that the simulator charges for the next start of a job that waits."""
    return record.startup_s + (policy.restart_s if record.attempt else float(getattr(policy, "start_s", 0.0)))


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would happen to a job that is submitted now."""

    gpus: tuple[GpuId, ...]
    """GPUs on which it would start at once; empty: it would wait."""
    mates: tuple[JobId, ...]
    forecast: Forecast | None
    """None: the forecast does not reach it."""


def dry_run(
    state: State,
    policy: Callable[[], Policy],
    jobs: Sequence[Job],
    spread: Callable[[Job], tuple[float, float]],
    now: float,
) -> list[DryRun]:
    """Submit jobs to a copy of the state and return what happens to each.

    The forecasts are those that the jobs have after their submission, also where the copy leaves out the far end of a
    long queue: the jobs take their places in the whole queue.
    """
    limits = (state.jobs_per_gpu, state.resident_per_gpu)
    world = snapshot.restore(_encode(state), FrozenModel(state.perf), state.sort_key, *limits)
    for job in jobs:
        world.apply(ev.Submitted(max(now, state.now), job))
    records = [world.jobs[job.id] for job in jobs]
    submitted = _with(state, records)
    ahead = forecast(submitted, policy, spread, now=now)
    near = {one.job.id for one in islice(submitted.queue, MAX_WAITING)}
    if any(job.id in near for job in jobs):
        scheduler = Scheduler(policy(), world.perf, *limits, strict=False)
        scheduler.state = world
        scheduler.step(world.now, (), wake=True)
    found = []
    for record in records:
        gpus = record.gpus if record.job.id in near else ()
        mates = tuple(mate.job.id for mate in world.cluster.mates(record)) if gpus else ()
        found.append(DryRun(gpus, mates, ahead.get(record.job.id)))
    return found


class _LongerQueue(Queue):
    """A queue with more jobs; it shares all other entries and is only read."""

    def __init__(self, queue: Queue, records: Sequence[JobRecord]) -> None:
        super().__init__()
        entries = [*queue.in_order]
        for record in records:
            if record.queue_entry is not None:
                insort(entries, cast(Entry, record.queue_entry))
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JobRecord]:
        return (record for *_, record in self._entries)


def _with(state: State, records: Sequence[JobRecord]) -> State:
    """Return the state with more jobs that wait. It shares everything else and is only read."""
    longer = copy(state)
    longer.jobs = {**state.jobs, **{record.job.id: record for record in records}}
    longer.queue = _LongerQueue(state.queue, records)
    longer.submissions = state.submissions + len(records)
    return longer


def _encode(state: State) -> dict[str, Any]:
    """Return the state as data, without held jobs and without the far end of the queue."""
    waiting = (Status.PENDING, Status.BLOCKED) if len(state.queue) > MAX_WAITING else ()
    near = {record.job.id for record, _ in zip(state.queue, range(MAX_WAITING), strict=False)}
    shallow = copy(state)  # shares everything but the list of jobs
    shallow.jobs = {
        name: record
        for name, record in state.jobs.items()
        if record.status is not Status.HELD and (record.status not in waiting or name in near)
    }
    shallow.accounts = Accounts()  # what a forecast uses is not counted
    return snapshot.encode(shallow)


@dataclass(frozen=True, slots=True)
class BelievedCosts(Costs):
    """The delays of a simulated future: each job starts up for as long as is believed of it."""

    startup: Callable[[Job], float] = no_startup

    def launch(self, job: Job) -> float:
        return self.startup(job)


class FutureEngine(Engine):
    """The simulator's engine, started from a state in which jobs already wait and run."""

    def __init__(self, state: State, policy: Policy, places: PlaceBook | None = None) -> None:
        super().__init__(
            [],
            [],
            policy,
            belief=state.perf,
            jobs_per_gpu=state.jobs_per_gpu,
            resident_per_gpu=state.resident_per_gpu,
            costs=BelievedCosts(startup=state.perf.startup_s),
            log=self._remember,
        )
        self.scheduler.state = self.belief = self.world = state
        self.resumes: dict[JobId, float] = {}
        """When each job first goes on after a pause."""
        self._quiet_calls = 0
        self._places = places
        self._touched: set[JobId] = set()

    def _remember(self, event: ev.Event) -> None:
        if self._places is not None:
            self._touched.update(jobs_of(event))
        if isinstance(event, ev.Resumed):
            self.resumes.setdefault(event.job, event.at)

    def _step(self, now: float, batch: list[ev.Event], wake: bool) -> None:
        """Give up where nothing will ever happen again: a job that its owner paused keeps its place for ever."""
        super()._step(now, batch, wake)
        if self._places is not None:
            self._places.follow(self.world, self._touched, now)
            self._touched.clear()
        still = not batch and all(r.status in (Status.PAUSED, Status.CANCELLING) for r in self.world.running)
        self._quiet_calls = self._quiet_calls + 1 if still else 0
        if self._quiet_calls > MOST_QUIET_CALLS:
            raise CannotFinish(None, "nothing happens any more")

    def begin(self) -> None:
        now, state = self.world.now, self.world
        if self._places is not None:
            self._places.follow(state, list(state.jobs), now)
        for record in list(state.jobs.values()):
            if record.status is Status.RUNNING and record.iteration_s:
                self._end_later(record, now)
                if record.limit_s is not None:
                    self._limit_later(now, record)
            elif record.status is Status.PAUSING:
                self._push(now, ev.Paused(now, record.job.id, record.attempt), 0)
            elif record.status is Status.RESUMING:
                self._push(now, ev.Resumed(now, record.job.id, record.attempt), 0)
            elif record.status in (Status.STARTING, Status.RUNNING):
                at = max(now, self._launch_time(record.gpus_since, record))
                kind = ev.Computing if record.warming_up else ev.Started
                self._push(at, kind(at, record.job.id, record.attempt), 0)
            elif record.status in (Status.STOPPING, Status.CANCELLING):
                self._push(now, ev.Stopped(now, record.job.id, record.attempt, record.checkpoint), 0)
        for closure in state.closures.values():
            if closure.id not in state.closures_begun:
                self._close_later(closure)
            elif closure.end is not None:
                self._push(max(now, closure.end), ev.ClosureRemoved(max(now, closure.end), closure.id), 0)
        batch: list[ev.Event] = []
        self._pop(now, batch)
        self._step(now, batch, True)


def _simulate(
    state: State,
    policy: Policy,
    present: Mapping[str, Any],
    stretch: Mapping[JobId, float],
    now: float,
    places: PlaceBook | None = None,
) -> dict[JobId, JobTimes]:
    """Simulate a copy of the state to its end, with the durations of jobs multiplied by the factors in `stretch`."""
    jobs = []
    for entry in present["jobs"]:
        factor = stretch.get(entry["job"]["id"], 1.0)
        stretched = {key: entry[key] * factor for key in STRETCHED}
        jobs.append({**entry, **stretched} if factor != 1.0 else dict(entry))
    perf = FrozenModel(state.perf)
    limits = (state.jobs_per_gpu, state.resident_per_gpu)
    world = snapshot.restore({**present, "jobs": jobs}, perf, policy.key, *limits)
    world.guesses.trusted = True  # nothing is learned from simulated events
    world.advance(now)
    future = FutureEngine(world, policy, places)
    try:
        future.begin()
        future.run()
    except CannotFinish:
        pass  # some jobs never start, because of a limit or a held job
    times = {}
    for record in (*world.ended.values(), *world.jobs.values()):
        started = record.first_start if record.first_start >= 0.0 else inf
        ended = record.ended if record.ended >= 0.0 else inf
        times[record.job.id] = JobTimes(started, ended, future.resumes.get(record.job.id, inf))
    return times
