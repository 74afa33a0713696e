"""The twin test: a simulation's events, fed to the live service, give the simulation's decisions."""

import asyncio
import json
import random
from dataclasses import replace
from itertools import groupby
from math import inf
from pathlib import Path

import pytest

from carpool import policies
from carpool.belief.model import Belief
from carpool.belief.prior import believe
from carpool.core import events as ev
from carpool.core.codec import decode
from carpool.core.guesses import DURATION
from carpool.core.model import Closure, FairShare, UserGroup
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.state import State
from carpool.core.usage_report import report_usage
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.service.config import ServiceConfig
from carpool.live.service.estimator import JobEstimator, JobKind
from carpool.live.service.service import Service, open_service
from carpool.live.spec import Spec
from carpool.profile.schema import load
from carpool.sim.engine import Costs, Engine
from tests.support import turns
from tests.support.fakes import FakeClock

GPUS = 8
TURNS = f"{Path(turns.__file__)}:TakeTurns"
"""A policy that pauses and resumes by the clock, given as a user would give it."""
MEMORY = 24 * 2**30
BELIEVED = "carpool_slowdown_believed_ratio"


def perf(xi: float) -> FittedModel:
    return FittedModel(load("t4").core_tasks(), ConstantInterference(xi), GPUS)


def workload(seed: int) -> list[tuple[float, Spec]]:
    """Return jobs that wait, share and are preempted; some arrive at the same instant, some depend on others."""
    drawn = random.Random(seed)
    models = sorted(load("t4").core_tasks())
    now, found = 0.0, []
    for number in range(1, 61):
        now += drawn.choice([0.0, 0.0, 5.0, 60.0, 300.0])
        spec = Spec(
            command=("true",),
            directory="/",
            gpus=drawn.choice([1, 1, 2, 4, 8]),
            batch=drawn.choice([8, 16, 32]),
            iterations=drawn.randint(50, 20_000),
            model=drawn.choice(models),
            priority=drawn.choice([0, 0, 0, 1]),
            exclusive=drawn.random() < 0.1,
            max_slowdown=drawn.choice([None, None, 1.4]),
            can_shrink=True if drawn.random() < 0.7 else None,
            after=(str(drawn.randrange(max(1, number - 10), number)),) if number > 1 and drawn.random() < 0.15 else (),
        )
        found.append((now, spec))
    return found


def simulate(jobs, policy: str, node, belief, truth, settings=()) -> list[ev.Event]:
    log: list[ev.Event] = []
    costs = Costs(launch_s=2.5, stop_s=1.25)
    models = {"belief": belief, "truth": truth}
    Engine(jobs, [node], policies.make(policy), **models, costs=costs, settings=settings, log=log.append).run()
    return log


def replayed(log: list[ev.Event], policy: str, belief) -> State:
    """Return the state to which the log of a simulation leads."""
    state = State(belief, policies.make(policy).key)
    for event in log:
        state.apply(event)
    return state


def steps_of(log: list[ev.Event]) -> list[tuple[float, list[ev.Event], ev.Planned | None]]:
    """Return the steps of a simulation: the events of an instant, and the plan that followed."""
    steps: list[tuple[float, list[ev.Event], ev.Planned | None]] = []
    for at, events in groupby(log, key=lambda event: event.at):
        batch: list[ev.Event] = []
        for event in events:
            if isinstance(event, ev.Planned):
                steps.append((at, batch, event))
                batch = []
            else:
                batch.append(event)
        if batch:
            steps.append((at, batch, None))
    return steps


async def feed(service: Service, clock: FakeClock, steps, specs) -> None:
    """Feed the simulation's events to the service; the plans are its own."""
    driver = service.driver
    for at, batch, _ in steps:
        while driver.wake_at is not None and driver.wake_at < at:
            clock.time = driver.wake_at
            await driver.turn()
            await driver.turn()
        clock.time = at
        asked = []
        for event in batch:
            if isinstance(event, ev.Submitted):
                service.users.rows["admin"] = {"group": event.job.group}
                asked.append(asyncio.create_task(service.requests.submit([specs[event.job.id]], "admin")))
                async with asyncio.timeout(30.0):
                    while sum(one.answer is not None for one in service.inbox._inputs) < len(asked):
                        await asyncio.sleep(0)  # its directory is looked at first, in a thread
            elif not isinstance(event, ev.NodeJoined):
                if isinstance(event, ev.Stopped | ev.Finished):
                    service.executor.gangs.pop((event.job, event.attempt), None)
                service.inbox.add_events(event)
        await driver.turn()  # applies and decides
        await driver.turn()  # writes and acts
        await asyncio.gather(*asked)


def journal(service: Service) -> list[ev.Event]:
    rows = service.store.rows(10**6)
    return [decode(json.loads(row["data"])) for row in rows if row["kind"] != "Note"]


def launched(log: list[ev.Event]) -> list[tuple[str, int]]:
    """Return the attempts that the simulation launched: all but the pauses, resumes and re-tunes of its plans."""
    attempts: dict[str, int] = {}
    held: dict[str, tuple[int, ...]] = {}
    found = []
    for event in log:
        for decision in event.decisions if isinstance(event, ev.Planned) else ():
            gpus = decision.allocation.gpus if decision.allocation else ()
            if gpus and gpus != held.get(decision.job):
                attempts[decision.job] = attempts.get(decision.job, 0) + 1
                found.append((decision.job, attempts[decision.job]))
            held[decision.job] = gpus
        if isinstance(event, ev.Stopped):
            held.pop(event.job, None)
    return sorted(found)


def switches(log: list[ev.Event]) -> list[tuple[tuple[str, int], bool]]:
    """Return the pauses (True) and resumes (False) that the simulation decided, by job and attempt."""
    active: dict[str, bool] = {}
    found = []
    for event in log:
        for decision in event.decisions if isinstance(event, ev.Planned) else ():
            assert decision.allocation is not None
            now = decision.allocation.active
            if active.get(decision.job, now) != now:
                found.append(((decision.job, 1), not now))
            active[decision.job] = now
    return found


def learning() -> Belief:
    profile = load("t4")
    return believe(profile, FittedModel(profile.core_tasks(), ConstantInterference(1.5), GPUS))


def used(state: State) -> dict[tuple[str, str], float]:
    """Return the GPU-seconds of all groups, and of the GPUs themselves, by group and column."""
    told = report_usage(state, ("group",), state.now).plain()
    columns = ("held_gpu_s", "computed_gpu_s", "shared_gpu_s", "paused_gpu_s", "jobs")
    rows = {(row["group"], column): row[column] for row in told["rows"] for column in columns}
    return {**rows, ("", "idle"): told["gpus"]["idle_gpu_s"]}


def used_in(log: list[ev.Event], policy: str, world: FittedModel) -> dict[tuple[str, str], float]:
    """Return the same for the log of a simulation."""
    state = State(world, policies.make(policy).key)
    for event in (ev.AccountsOpened(0.0), *log):
        state.apply(event)
    return used(state)


DIVIDED = (
    ev.GroupChanged(0.0, UserGroup("red", 2.0, guarantee=2)),
    ev.GroupChanged(0.0, UserGroup("blue", 1.0, cap=6)),
    ev.FairShareChanged(0.0, FairShare(0.7, 3600.0)),
)
"""A cluster that is divided among groups."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sjf", "sjf-bsbf", "tiresias", "carpool", "pollux"])
async def test_live_divides_the_cluster_as_the_simulation_did(policy, quick_home):
    world = perf(1.5)
    clock, executor = FakeClock(), MemoryExecutor(gpus=GPUS, memory=MEMORY)
    service = await open_service(ServiceConfig(quick_home, policy, executor=executor, clock=clock, perf=world))
    given = [(at, replace(spec, gpus=min(spec.gpus, 6))) for at, spec in workload(3)]
    estimator = JobEstimator(GPUS, "logical", perf=world)
    specs = {str(number): spec for number, (_, spec) in enumerate(given, 1)}
    jobs = []
    for number, (at, spec) in enumerate(given, 1):
        job = estimator.job(world, spec, JobKind(spec.model), str(number), "admin", at)[0]
        jobs.append(replace(job, group=random.Random(number).choice(["red", "blue", "green"])))
    (node,) = executor.nodes()
    log = simulate(jobs, policy, node.node, world, world, DIVIDED)
    await feed(service, clock, steps_of(log), specs)
    expected = [event for event in log if isinstance(event, ev.Planned)]
    assert [event for event in journal(service) if isinstance(event, ev.Planned)] == expected
    assert used(service.state) == pytest.approx(used_in(log, policy, world))
    plain = simulate(jobs, policy, node.node, world, world)
    assert expected != [event for event in plain if isinstance(event, ev.Planned)], "shares decided nothing"
    await service.close()


CLOSED = (
    ev.ClosureSet(0.0, Closure("node0:0-1", (0, 1), 3000.0, 9000.0)),
    ev.ClosureSet(600.0, Closure("r1", (2, 3, 4), 2000.0, 6000.0, group="red")),
    ev.ClosureSet(1200.0, Closure("node0:7", (7,), 1200.0, 4000.0, lets_finish=True)),
)
"""GPUs that are drained and reserved for a time."""


@pytest.mark.slow
async def test_live_ends_jobs_at_their_limits_and_empties_gpus_as_the_simulation_did(quick_home):
    world, policy = perf(1.5), "carpool"
    clock, executor = FakeClock(), MemoryExecutor(gpus=GPUS, memory=MEMORY)
    service = await open_service(ServiceConfig(quick_home, policy, executor=executor, clock=clock, perf=world))
    drawn = random.Random(7)
    given = [
        (at, replace(spec, gpus=min(spec.gpus, 4), limit_s=drawn.choice([None, 900.0]), requeue=drawn.random() < 0.5))
        for at, spec in workload(4)[:40]
    ]
    estimator = JobEstimator(GPUS, "logical", perf=world)
    specs = {str(number): spec for number, (_, spec) in enumerate(given, 1)}
    jobs = []
    for number, (at, spec) in enumerate(given, 1):
        job = estimator.job(world, spec, JobKind(spec.model), str(number), "admin", at)[0]
        jobs.append(replace(job, group=random.Random(number).choice(["red", "blue"])))
    (node,) = executor.nodes()
    log = simulate(jobs, policy, node.node, world, world, CLOSED)
    kinds = {type(event) for event in log}
    assert {ev.LimitNeared, ev.LimitReached, ev.ClosureBegan, ev.ClosureRemoved} <= kinds
    await feed(service, clock, steps_of(log), specs)
    expected = [event for event in log if isinstance(event, ev.Planned)]
    assert [event for event in journal(service) if isinstance(event, ev.Planned)] == expected
    await service.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "truth", "make"),
    [
        *((policy, 1.5, None) for policy in sorted(policies.BUILT_IN)),
        ("sjf-bsbf", 1.9, lambda: perf(1.5)),
        ("tiresias", 1.9, lambda: perf(1.5)),
        ("sjf-bsbf", 1.3, learning),
        ("sjf-ffs", 1.9, learning),
        pytest.param(f"{TURNS}:turn_s=600", 1.5, None, id="take-turns"),
        pytest.param(f"{TURNS}:turn_s=600", 1.9, lambda: perf(1.5), id="take-turns-mistaken"),
    ],
)
async def test_live_decides_as_the_simulation_did(policy, truth, make, quick_home):
    """`make` makes a belief that differs from the truth; the simulation reports true speeds, and a belief may learn."""
    world = perf(truth)
    belief, simulated = (make(), make()) if make else (world, world)
    clock, executor = FakeClock(), MemoryExecutor(gpus=GPUS, memory=MEMORY)
    config = ServiceConfig(quick_home, policy, executor=executor, clock=clock, perf=belief)
    service = await open_service(config)
    given = workload(len(policy.rpartition("/")[2]))
    estimator = JobEstimator(GPUS, "logical", perf=belief)
    specs = {str(number): spec for number, (_, spec) in enumerate(given, 1)}
    jobs = [
        estimator.job(belief, spec, JobKind(spec.model), str(n), "", at)[0] for n, (at, spec) in enumerate(given, 1)
    ]
    (node,) = executor.nodes()
    log = simulate(jobs, policy, node.node, simulated, world)
    await feed(service, clock, steps_of(log), specs)
    expected = [event for event in log if isinstance(event, ev.Planned)]
    decided = [event for event in journal(service) if isinstance(event, ev.Planned)]
    assert decided == expected
    assert len(expected) > 20
    if "bsbf" in policy or "ffs" in policy:
        assert service.state.shares > 5, "a run without sharing proves little"
        believed = [service.metrics.registry.get_sample_value(f"{BELIEVED}_{what}") for what in ("sum", "count")]
        assert believed[0] > 1.01 * believed[1], "jobs were expected to slow each other down"
    assert service.state.shares == replayed(log, policy, make() if make else world).shares
    if policy == "tiresias":
        assert service.state.preemptions > 5
    if policy.startswith(TURNS):
        # the live service pauses a gang only after the training library has said that it can, so these are single jobs
        assert service.executor.switched == switches(log)
        assert service.state.pauses > 20
        assert not service.executor.stopped, "a pause stops no workers"
    if make is learning:
        assert belief.version == simulated.version > 5
    assert [row["status"] for row in service.queries.jobs(all=True)] == ["finished"] * len(jobs)
    assert sorted((launch.job, launch.attempt) for launch in service.executor.launched) == launched(log)
    await service.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sjf-bsbf", "srtf"])
async def test_live_heals_guesses_as_the_simulation_did(policy, quick_home):
    """Jobs take one to ten times their guesses and report nothing."""
    clock, executor = FakeClock(), MemoryExecutor(gpus=GPUS, memory=MEMORY)
    config = ServiceConfig(quick_home, policy, executor=executor, clock=clock, perf=perf(1.5))
    service = await open_service(config)
    drawn, estimator = random.Random(policy), JobEstimator(GPUS, "logical", perf=perf(1.5))
    given = [
        (at, replace(spec, iterations=None, duration_s=drawn.uniform(20.0, 2000.0), max_slowdown=None))
        for at, spec in workload(5)[:40]
    ]
    specs = {str(number): spec for number, (_, spec) in enumerate(given, 1)}
    told = {
        str(n): estimator.job(perf(1.5), spec, JobKind(spec.model), str(n), "admin", at)[0]
        for n, (at, spec) in enumerate(given, 1)
    }
    true = [replace(job, duration_s=job.duration_s * drawn.uniform(1.0, 10.0)) for job in told.values()]
    (node,) = executor.nodes()
    log: list[ev.Event] = []
    engine = Engine(
        true,
        [node.node],
        policies.make(policy),
        belief=perf(1.5),
        truth=perf(1.5),
        costs=Costs(launch_s=2.5, stop_s=1.25),
        report_s=inf,
        guess=lambda job: told[job.id],
        log=log.append,
    )
    engine.run()
    assert sum(isinstance(event, ev.Outlived) for event in log) > 20
    assert engine.belief.guesses.of("admin", DURATION).factor > 2.0
    steps = steps_of(log)
    await feed(service, clock, steps, specs)
    expected = [event for event in log if isinstance(event, ev.Planned)]
    assert [event for event in journal(service) if isinstance(event, ev.Planned)] == expected
    assert service.state.guesses.dump() == engine.belief.guesses.dump()
    await service.close()
    again = await open_service(replace(config, perf=perf(1.5)))
    assert again.state.guesses.dump() == engine.belief.guesses.dump(), "a restarted service knows the users"
    await again.close()
