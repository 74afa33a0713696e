"""What holds for every policy in every situation."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Job, Node, Status, sub_batch
from carpool.core.perf import AllReduce, FittedModel, MeasuredPair, TableInterference, Task
from carpool.core.scheduler import Scheduler
from carpool.policies.preemptive import preemption
from tests.support.effort import cases
from tests.support.naive import naive_bsbf, naive_choice
from tests.support.situations import Situation, check_state, facts, situations
from tests.support.world import GIB

NAMES = [*policies.BUILT_IN, "fifo:skip=true", "sjf:skip=false", "tiresias:threshold_gpu_s=20", "pollux:fairness=0"]
NAMES += ["sjf-bsbf:floor=0.95,single_host=true", "carpool:pause=false"]
NAMES += ["carpool:suspend=true", "carpool:suspend=true,patience=0.001"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(situation=situations)
@settings(max_examples=cases(120))
def test_every_plan_is_whole_legal_and_repeatable(name, situation):
    policy = policies.make(name)
    state = situation.state(policy.key)
    check_state(state)
    before = facts(state)
    plan = list(policy.decide(state))
    assert facts(state) == before, "the view was changed"
    assert list(policy.decide(state)) == plan, "the same view gave another plan"
    again = situation.state(policies.make(name).key)
    assert list(policies.make(name).decide(again)) == plan, "another object decided otherwise"
    assert_legal(state, plan, moves="pollux" in name or "suspend" in name)
    if plan:
        state.apply(ev.Planned(state.now, tuple(plan)))
        check_state(state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiresias:threshold_gpu_s=20", "srtf", "srsf", "las:quantum_gpu_s=20"])
@given(situation=situations)
@settings(max_examples=cases(200))
def test_a_policy_that_preempts_decides_as_if_it_sorted_all_jobs(name, situation):
    policy = policies.make(name)
    state = situation.state(policy.key)
    plan = policy.decide(state)
    with patch.object(preemption, "_choose", naive_choice):
        assert policy.decide(state) == plan


def assert_legal(state, plan, moves):
    """Check the rules without the code that enforces them. `moves`: running jobs may move to other GPUs."""
    assert len({decision.job for decision in plan}) == len(plan)
    gone = {d.job for d in plan}
    on = {gpu: [] for gpu in state.topology.node_of}
    computing = {gpu: [] for gpu in on}
    for gpu in on:
        for record in state.jobs_on(gpu):
            if record.job.id not in gone:
                on[gpu].append((record.job, record.accumulation))
                if record.active:
                    computing[gpu].append((record.job, record.accumulation))
    for decision in plan:
        record = state.jobs[decision.job]
        assert decision.why
        if decision.allocation is None:
            assert record.gpus
            continue
        switches = decision.allocation.gpus == record.gpus and decision.allocation.active != record.active
        assert record.status is Status.PENDING or switches or (moves and record.status is Status.RUNNING), decision
        gpus, job = decision.allocation.gpus, record.job
        if decision.allocation.batch is not None:
            job = assert_scaled(state, job, decision.allocation)
        assert len(set(gpus)) == len(gpus) == job.gpus, "a gang is whole"
        assert decision.allocation.accumulation == 1 or record.job.can_shrink
        for gpu in gpus:
            on[gpu].append((job, decision.allocation.accumulation))
            if decision.allocation.active:
                computing[gpu].append((job, decision.allocation.accumulation))
    assert_room(state, on, computing)
    assert_within_limits(state, on)


def assert_room(state, on, computing):
    """Check the residents of each GPU against its memory, and those that compute against each other."""
    perf = state.perf
    for gpu, jobs in on.items():
        assert len(jobs) <= state.resident_per_gpu
        needed = sum(perf.tasks[job.model].memory(sub_batch(job.batch, accumulation)) for job, accumulation in jobs)
        assert needed <= state.topology.nodes[state.topology.node_of[gpu]].memory
        assert len(jobs) == 1 or not any(job.exclusive for job, _ in jobs), "paused or not, it holds no other job"
    for jobs in computing.values():
        assert len(jobs) <= state.jobs_per_gpu
        for index, (job, accumulation) in enumerate(jobs):
            mates = jobs[:index] + jobs[index + 1 :]
            if mates and job.max_slowdown is not None:
                assert perf.slowdown(job, accumulation, mates) <= job.max_slowdown


def assert_scaled(state, job, allocation):
    """Check that an elastic job is scaled within the limits of its task; return the job as it then is, exclusive."""
    limits, gpus = state.perf.tasks[job.model].scaling, len(allocation.gpus)
    assert job.elastic
    assert gpus <= max(limits.max_gpus or gpus, job.gpus)
    assert limits.initial_batch <= gpus * allocation.batch <= limits.max_batch
    assert sub_batch(allocation.batch, allocation.accumulation) <= limits.max_sub_batch
    return replace(job, gpus=gpus, batch=allocation.batch, exclusive=True)


def assert_within_limits(state, on):
    holding = {job.id: job for jobs in on.values() for job, _ in jobs}
    jobs, gpus = Counter(), Counter()
    for job in holding.values():
        jobs[job.user] += 1
        gpus[job.user] += job.gpus
    for user, limits in state.limits.items():
        held_before = state.held_by(user)
        assert limits.jobs is None or jobs[user] <= max(limits.jobs, held_before[0])
        assert limits.gpus is None or gpus[user] <= max(limits.gpus, held_before[1])


# A policy that preempts may change its mind: a job that started can be slower where it was placed.
CHANGES_ITS_MIND = ("tiresias", "srtf", "srsf", "las", "pollux", "suspend")


@pytest.mark.parametrize("name", [name for name in NAMES if not any(word in name for word in CHANGES_ITS_MIND)])
@given(situation=situations)
@settings(max_examples=cases(60))
def test_a_plan_leaves_nothing_to_add(name, situation):
    """A policy that does not stop jobs has nothing more to do right after its plan was carried out."""
    policy = policies.make(name)
    state = situation.state(policy.key)
    plan = list(policy.decide(state))
    if any(state.jobs[decision.job].gpus for decision in plan):  # stopped, moved or re-tuned
        return
    if plan:
        state.apply(ev.Planned(state.now, tuple(plan)))
    assert list(policy.decide(state)) == []


@pytest.mark.slow
@pytest.mark.parametrize("jobs_per_gpu", [1, 2, 3, 4])
def test_bsbf_finds_what_a_search_over_everything_finds(jobs_per_gpu):
    """The indexed search against one that looks at every job, host and sub-batch, without any index."""
    shared = 0
    for seed in range(cases(1200 if jobs_per_gpu == 2 else 400)):
        policy = policies.make("sjf-bsbf")
        state = Situation(seed, jobs_per_gpu, divided=False).state(policy.key)
        plan = policy.decide(state)
        found = {d.job: (frozenset(d.allocation.gpus), d.allocation.accumulation) for d in plan}
        assert found == naive_bsbf(state), f"seed {seed}"
        shared += any("shares" in d.why for d in plan)
    assert (shared > 25) == (jobs_per_gpu > 1), "the situations must be worth the comparison"


def test_a_longer_job_may_share_where_a_shorter_one_of_its_shape_cannot():
    """The shorter guest prefers a host that forces it to split its batch, and with the split batch the other host no
    longer gains. The longer guest does not want that host, and shares with the two others without splitting."""
    none = AllReduce(0.0, 0.0)
    tasks = {
        "guest": Task(1.0, 0.0, none, none, 1.0, 0, GIB),
        "tight": Task(1.0, 0.0, none, none, 1.0, 15 * GIB, 0.0),
        "roomy": Task(1.0, 0.0, none, none, 1.0, GIB, 0.0),
    }
    cells = {(a, b): [MeasuredPair(9.0)] for a in tasks for b in tasks}
    cells["guest", "tight"] = cells["tight", "guest"] = [MeasuredPair(1.0)]
    cells["guest", "roomy"] = cells["roomy", "guest"] = [MeasuredPair(1.5)]
    policy = policies.make("sjf-bsbf")
    scheduler = Scheduler(policy, FittedModel(tasks, TableInterference(cells), 8))
    state = scheduler.state
    scheduler.step(0.0, [ev.NodeJoined(0.0, Node("n", (0, 1, 2), 16 * GIB))])
    hosts = [Job("h1", 0.0, "tight", 1, 1, 60), Job("h2", 0.0, "roomy", 1, 1, 120), Job("h3", 0.0, "roomy", 1, 1, 121)]
    scheduler.step(0.0, [ev.Submitted(0.0, host) for host in hosts])
    scheduler.step(0.0, [ev.Started(0.0, host.id, 1) for host in hosts])
    for guest in (Job("short", 0.0, "guest", 2, 2, 50), Job("long", 0.0, "guest", 2, 2, 61)):
        state.apply(ev.Submitted(0.0, guest))
    found = {d.job: (frozenset(d.allocation.gpus), d.allocation.accumulation) for d in policy.decide(state)}
    assert found == naive_bsbf(state)
    assert set(found) == {"long"}
