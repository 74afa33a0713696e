"""When will each job start and end? The present is copied and played forward by the simulator's engine under the same
policy, three times: with jobs as long as believed, and at the short and the long end of what is believed.

`explain`, `submit --dry-run` and the service's own book of estimates use it. Nothing arrives in such a future, so a
forecast for a waiting job is what holds if nobody submits anything more urgent.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import inf
from typing import Any

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.elastic import Pace, Scaling
from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.perf import Mate, PerformanceModel, Placement
from carpool.core.scheduler import Policy, Scheduler
from carpool.core.state import State
from carpool.sim.engine import CannotFinish, Engine

MOST_WAITING = 200
"""Jobs further back in the queue than this are not played, but estimated from the work before them."""


@dataclass(frozen=True, slots=True)
class Times:
    """When a job starts and ends, in the clock of the state; infinite where it never does."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job's times: as believed, and between the short and the long end."""

    believed: Times
    early: Times
    late: Times


class Fixed:
    """A performance model as it answers now. A belief would learn from what is only imagined."""

    def __init__(self, model: PerformanceModel) -> None:
        self.iteration_time: Callable[[Job, int, Placement], float] = model.iteration_time
        self.fewest_nodes: Callable[[int], int] = model.fewest_nodes
        self.memory: Callable[[Job, int], int] = model.memory
        self.slowdown: Callable[[Job, int, Sequence[Mate]], float] = model.slowdown
        self.scaling: Callable[[Job], Scaling | None] = model.scaling
        self.noise: Callable[[Job, float], float] = model.noise
        self.scaled_pace: Callable[[Job, int, int, Placement, float], Pace] = model.scaled_pace


def forecast(
    state: State,
    policy: Callable[[], Policy],
    spread: Callable[[Job], tuple[float, float]] = lambda job: (1.0, 1.0),
    *,
    now: float | None = None,
) -> dict[JobId, Forecast]:
    """For every job that has not ended and is not held. `policy` makes a fresh one for each play; `spread` says how
    much shorter and longer than believed a job may be, as factors; `now` may be later than the last event."""
    now = state.now if now is None else max(now, state.now)
    present = _present(state)
    believed = _play(state, policy(), present, {}, now)
    low, high = ({name: spread(state.jobs[name].job)[end] for name in believed} for end in (0, 1))
    if all(factor == 1.0 for factor in (*low.values(), *high.values())):
        early = late = believed
    else:
        early = _play(state, policy(), present, low, now)
        late = _play(state, policy(), present, high, now)
    found = {}
    for name, times in believed.items():
        pair = (times, early.get(name, times), late.get(name, times))
        # a shorter queue may start a job later than a longer one would (gangs pack otherwise): order the ends
        starts, ends = sorted(t.start for t in pair), sorted(t.end for t in pair)
        found[name] = Forecast(times, Times(starts[0], ends[0]), Times(starts[2], ends[2]))
    if len(state.queue) > MOST_WAITING:
        found.update(_far(state, found, spread, now))
    return found


def _far(
    state: State, near: Mapping[JobId, Forecast], spread: Callable[[Job], tuple[float, float]], now: float
) -> dict[JobId, Forecast]:
    """Jobs at the far end of a long queue: all the work before them, spread evenly over all GPUs."""
    gpus = max(1, len(state.cluster.residents))
    work = [sum(record.alone_left(now) * record.job.gpus for record in state.running)] * 3
    found = {}
    for record in state.queue:
        own = record.alone_left(now)
        factors = (1.0, *spread(record.job))
        if record.job.id not in near:
            starts = [now + ahead / gpus for ahead in work]
            times = [Times(start, start + own * factor) for start, factor in zip(starts, factors, strict=True)]
            found[record.job.id] = Forecast(*times)
        for i, factor in enumerate(factors):
            work[i] += own * factor * record.job.gpus
    return found


@dataclass(frozen=True, slots=True)
class Trial:
    """What a job would meet if it were submitted now."""

    gpus: tuple[GpuId, ...]
    """Where it would start at once; empty: it would wait."""
    mates: tuple[JobId, ...]
    forecast: Forecast


def trial(
    state: State,
    policy: Callable[[], Policy],
    job: Job,
    spread: Callable[[Job], tuple[float, float]],
    now: float,
) -> Trial:
    """Submit a job to a copy of the present, and see."""
    world = snapshot.restore(_present(state), Fixed(state.perf), state.sort_key, state.jobs_per_gpu)
    world.apply(ev.Submitted(max(now, state.now), job))
    scheduler = Scheduler(policy(), world.perf, state.jobs_per_gpu, strict=False)
    scheduler.state = world
    scheduler.step(world.now, (), wake=True)
    record = world.jobs[job.id]
    mates = tuple(mate.job.id for mate in world.cluster.mates(record)) if record.gpus else ()
    return Trial(record.gpus, mates, forecast(world, policy, spread)[job.id])


def _present(state: State) -> dict[str, Any]:
    """The state as data, without jobs on hold and without the far end of the queue."""
    waiting = (Status.PENDING, Status.BLOCKED) if len(state.queue) > MOST_WAITING else ()
    near = {record.job.id for record, _ in zip(state.queue, range(MOST_WAITING), strict=False)}
    shallow = copy(state)  # only its list of jobs is another one
    shallow.jobs = {
        name: record
        for name, record in state.jobs.items()
        if record.status is not Status.HELD and (record.status not in waiting or name in near)
    }
    return snapshot.encode(shallow)


class Future(Engine):
    """The engine, begun in the middle of things."""

    def __init__(self, state: State, policy: Policy) -> None:
        super().__init__([], [], policy, belief=state.perf, jobs_per_gpu=state.jobs_per_gpu)
        self.scheduler.state = self.belief = self.world = state

    def begin(self) -> None:
        now, state = self.world.now, self.world
        for record in list(state.jobs.values()):
            if record.status is Status.RUNNING and record.iteration_s:
                self._push(max(now, record.end()), record, record.pace_version)
            elif record.status in (Status.STARTING, Status.RUNNING):
                restart_s = self.scheduler.policy.restart_s if record.attempt > 1 else 0.0
                at = max(now, record.gpus_since + restart_s)
                self._push(at, ev.Started(at, record.job.id, record.attempt), 0)
            elif record.status in (Status.STOPPING, Status.CANCELLING):
                self._push(now, ev.Stopped(now, record.job.id, record.attempt, record.checkpoint), 0)
        batch: list[ev.Event] = []
        self._pop(now, batch)
        self._step(now, batch, True)


def _play(
    state: State, policy: Policy, present: Mapping[str, Any], stretch: Mapping[JobId, float], now: float
) -> dict[JobId, Times]:
    """One future, from a copy of the present in which jobs are so many times as long."""
    jobs = []
    for entry in present["jobs"]:
        factor = stretch.get(entry["job"]["id"], 1.0)
        paces = {key: entry[key] * factor for key in ("whole_iteration_s", "alone_iteration_s", "iteration_s")}
        jobs.append({**entry, **paces} if factor != 1.0 else dict(entry))
    perf = Fixed(state.perf)
    world = snapshot.restore({**present, "jobs": jobs}, perf, policy.key, state.jobs_per_gpu)
    world.advance(now)
    future = Future(world, policy)
    try:
        future.begin()
        future.run()
    except CannotFinish:
        pass  # some wait for ever: for a limit to be raised, or a held forerunner
    times = {}
    for record in (*world.ended.values(), *world.jobs.values()):
        started = record.first_start if record.first_start >= 0.0 else inf
        times[record.job.id] = Times(started, record.ended if record.ended >= 0.0 else inf)
    return times
