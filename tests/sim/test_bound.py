"""The lower bound: below everything that any policy does, and equal to the optimum where that is known."""

import json
from dataclasses import replace
from itertools import permutations
from random import Random
from statistics import fmean
from time import process_time

import numpy as np
import pytest

from carpool import policies
from carpool.core.model import Job
from carpool.sim import Costs, Setup, Workload, philly_like, simulate
from carpool.sim import bound as bounds
from carpool.sim.bound import lower_bound
from carpool.sim.mixes import Seat, find_mixes
from carpool.sim.run import cluster_nodes, true_model
from tests.support.command_line import call
from tests.support.effort import cases

MODELS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
TABLES = ("1", "1.2", "1.5", "2.5", "gavel", "h200:mps", "h200:time-slicing")


def workload(*jobs: Job) -> Workload:
    return Workload(tuple(sorted(jobs, key=lambda job: job.submitted)))


def plain(name: str, seconds: float, submitted: float = 0.0, gpus: int = 1, **more: object) -> Job:
    """A job of which only the duration is known; ξ must be a number."""
    return replace(Job(name, submitted, "generic", gpus, 1, 100, duration_s=seconds), **more)


def random_workload(random: Random) -> Workload:
    gap = random.choice([0.0, 20.0, 300.0])
    jobs, now = [], 0.0
    for number in range(random.randint(1, 25)):
        now += random.choice([0.0, random.uniform(0.0, gap)])
        model, batch = random.choice(MODELS), random.choice([1, 8, 16, 100])
        seconds = random.choice([None, random.uniform(1.0, 50.0), random.uniform(50.0, 5000.0)])
        job = Job(f"j{number}", now, model, random.choice([1, 1, 2, 3, 4, 6]), batch, random.randint(1, 300))
        flags = {"can_shrink": batch > 8 or random.random() < 0.5, "exclusive": random.random() < 0.1}
        jobs.append(replace(job, duration_s=seconds, **flags))
    return workload(*jobs)


def random_setup(random: Random) -> Setup:
    return Setup(
        cluster=random.choice(["1x6", "2x4", "3x2"]),
        truth=random.choice(TABLES),
        jobs_per_gpu=random.choice([1, 2, 2, 3, 4]),
        memory_limit=random.random() < 0.5,
        ignore_placement=random.random() < 0.5,
        costs=Costs(launch_s=random.choice([0.0, 7.0])),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(20)))
def test_no_policy_does_better(seed):
    random = Random(seed)
    jobs, setup = random_workload(random), random_setup(random)
    bound = lower_bound(jobs, setup)
    assert bound.exclusive_s >= bound.sharing_s >= bound.alone_s * (1 - 1e-9)
    for name in policies.BUILT_IN:
        reached = simulate(jobs, name, setup).summary
        assert reached.mean_jct_s >= bound.sharing_s * (1 - 1e-9), name
        if not reached.shares:
            assert reached.mean_jct_s >= bound.exclusive_s * (1 - 1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_any_prices_give_a_bound(seed):
    """The program may find what it likes: prices at random stay below a good schedule too."""
    random = Random(seed)
    jobs, setup = random_workload(random), replace(random_setup(random), costs=Costs())
    problem = bounds._problem(jobs, setup)
    best = min(simulate(jobs, name, setup).summary.mean_jct_s for name in ("sjf", "sjf-bsbf", "sjf-ffs"))
    good = bounds._good_prices(problem)
    assert bounds.bound_at(problem, good) <= best
    for _ in range(5):
        noise = np.array([[random.lognormvariate(0.0, 1.0) for _ in row] for row in good])
        assert bounds.bound_at(problem, good * noise) <= best
        assert bounds.bound_at(problem, np.full_like(good, random.random())) <= best


@pytest.mark.parametrize("seed", range(6))
def test_one_gpu_without_sharing_is_bounded_by_what_shortest_remaining_time_reaches(seed):
    random = Random(seed)
    jobs = [plain(f"j{n}", random.uniform(1, 300), random.uniform(0, seed * 1000)) for n in range(20)]
    bound = lower_bound(workload(*jobs), Setup(cluster="1x1", jobs_per_gpu=1))
    assert bound.exclusive_s == pytest.approx(shortest_remaining_first(jobs), rel=1e-6)


def shortest_remaining_first(jobs: list[Job]) -> float:
    """In steps from one arrival or end to the next, without a heap."""
    left, ends, now = {job.id: job.duration_s for job in jobs}, {}, 0.0
    while left:
        there = [job for job in jobs if job.id in left and job.submitted <= now]
        coming = [job.submitted for job in jobs if job.submitted > now]
        if not there:
            now = min(coming)
            continue
        runs = min(there, key=lambda job: left[job.id])
        until = min([now + left[runs.id], *coming])
        left[runs.id] -= until - now
        now = until
        if left[runs.id] <= 1e-9:
            ends[runs.id] = now
            del left[runs.id]
    return fmean(ends[job.id] - job.submitted for job in jobs)


class TestCasesSolvedByHand:
    def test_jobs_that_never_overlap_take_their_time_alone(self):
        bound = lower_bound(workload(plain("a", 100), plain("b", 60, submitted=500, gpus=4)), Setup(cluster="1x4"))
        assert bound.sharing_s == pytest.approx(80.0)

    def test_whole_gangs_one_after_the_other(self):
        jobs = [plain("a", 10, gpus=4), plain("b", 20, gpus=4), plain("c", 40, gpus=4)]  # ends 10, 30, 70
        bound = lower_bound(workload(*jobs), Setup(cluster="2x2", jobs_per_gpu=1))
        assert bound.exclusive_s == pytest.approx(110 / 3, rel=0.01)

    def test_two_gpus_take_the_best_order(self):
        lengths = (50, 70, 90, 110)
        best = min(sum(a + (a + c) + b + (b + d) for a, b, c, d in [order]) / 4 for order in permutations(lengths))
        jobs = [plain(f"j{length}", length) for length in lengths]
        bound = lower_bound(workload(*jobs), Setup(cluster="1x2", jobs_per_gpu=1))
        assert bound.exclusive_s <= best
        assert bound.exclusive_s >= best * 0.93  # the program lets work flow between GPUs

    def test_sharing_that_costs_nothing(self):
        bound = lower_bound(workload(plain("a", 100), plain("b", 100)), Setup(cluster="1x1", truth="1"))
        assert bound.sharing_s == pytest.approx(100.0)
        assert bound.exclusive_s == pytest.approx(150.0, rel=0.005)

    def test_sharing_that_costs_as_much_as_it_gains(self):
        bound = lower_bound(workload(plain("a", 100), plain("b", 100)), Setup(cluster="1x1", truth="2"))
        assert bound.sharing_s == pytest.approx(150.0, rel=0.005)

    def test_a_pair_with_a_slow_down_of_1_2(self):
        """Together both end at 120; the bound may be a few per cent lower, and not as low as without interference."""
        bound = lower_bound(workload(plain("a", 100), plain("b", 100)), Setup(cluster="1x1", truth="1.2"))
        assert 120 * 0.95 <= bound.sharing_s <= 120

    def test_an_exclusive_job_gets_no_mates(self):
        jobs = (plain("a", 100, exclusive=True), plain("b", 100, exclusive=True))
        assert lower_bound(workload(*jobs), Setup(cluster="1x1", truth="1")).sharing_s == pytest.approx(150, rel=0.005)

    def test_launch_time_is_part_of_the_bound(self):
        bound = lower_bound(workload(plain("a", 100)), Setup(cluster="1x1", costs=Costs(launch_s=30.0)))
        assert bound.sharing_s == pytest.approx(130.0)


@pytest.mark.slow
def test_the_bound_is_close_to_what_policies_reach():
    """On philly-like jobs at load 1 and ξ = 1.2 a simple policy comes within 15 %: the bound is not idle."""
    jobs = philly_like(true_tasks(), jobs=240, seed=3)
    setup = Setup(truth="1.2", ignore_placement=True, memory_limit=False)
    reached = simulate(jobs, "sjf-bsbf", setup).summary.mean_jct_s
    assert reached <= 1.15 * lower_bound(jobs, setup).sharing_s


@pytest.mark.slow
def test_the_bound_of_480_jobs_is_computed_in_seconds():
    jobs = philly_like(true_tasks(), jobs=480, load=2.0, seed=1)
    began = process_time()
    lower_bound(jobs, Setup(truth="gavel"))
    assert process_time() - began < 30


def true_tasks():
    from carpool.profile.schema import load

    return load("t4").core_tasks()


class TestMixes:
    def test_jobs_that_behave_alike_are_one_class(self):
        jobs = [Job(f"j{n}", 0.0, "bert", 1, batch, 10) for n, batch in enumerate((8, 16, 16))]
        setup = Setup(truth="gavel")
        mixes = find_mixes(jobs, true_model(workload(*jobs), setup), cluster_nodes(setup), 2)
        assert mixes.class_of == (0, 0, 0)
        assert mixes.mixes[0] == (Seat(0, 1.0, 1),)
        assert len(mixes.mixes) == 2
        xi = true_model(workload(*jobs), setup).slowdown(jobs[0], 1, [(jobs[1], 1)])
        assert mixes.mixes[1] == (Seat(0, 1.0 / xi, 2),)

    def test_jobs_that_do_not_fit_in_memory_together_form_no_mix(self):
        jobs = [Job(f"j{n}", 0.0, "bert", 1, 24, 10, can_shrink=False) for n in range(2)]
        setup = Setup(truth="1.2", gpu_memory=true_model(workload(*jobs), Setup()).memory(jobs[0], 1) * 3 // 2)
        mixes = find_mixes(jobs, true_model(workload(*jobs), setup), cluster_nodes(setup), 2)
        assert len(mixes.mixes) == 1

    def test_a_mix_that_is_slower_than_one_job_alone_is_left_out(self):
        jobs = [plain("a", 10)]
        setup = Setup(truth="2.5")
        assert len(find_mixes(jobs, true_model(workload(*jobs), setup), cluster_nodes(setup), 4).mixes) == 1


class TestCommand:
    def test_prints_bounds_for_every_case(self):
        said = call("bound", "philly-like", "--jobs", 20, "--loads", "1,2", "--seeds", "1-2", "--json")
        rows = json.loads(said.out)["bounds"]
        assert [(row["case"], row["seed"]) for row in rows] == [
            (f"20 jobs, load {load}", seed) for load in "12" for seed in "12"
        ]
        assert all(row["exclusive_s"] >= row["sharing_s"] > 0 for row in rows)
        assert "bound with sharing" in call("bound", "--jobs", 20, "--load", 2, "--seed", 3).out

    def test_compare_shows_multiples_of_the_bound(self):
        options = ("compare", "--jobs", 20, "--seeds", "1", "--policy", "sjf", "--bound", "--workers", 1)
        (row,) = json.loads(call(*options, "--json").out)["means"]
        (bound,) = json.loads(call("bound", "--jobs", 20, "--json").out)["bounds"]
        assert row["bound_s"] == pytest.approx(bound["sharing_s"])
        assert row["mean_jct_over_bound"] == pytest.approx(row["mean_jct_s"] / row["bound_s"])
        shown = call(*options).out
        assert "÷ bound" in shown
        assert "lower bound" in shown

    def test_says_what_is_wrong(self, tmp_path):
        assert call("bound", "nowhere.csv").code == 2
        assert "--cluster" in call("bound", "--cluster", "1x4", "--jobs", 40).err
        said = call("bound", "--gpu-memory", "1GiB", "--jobs", 20)
        assert (said.code, "--gpu-memory" in said.err) == (2, True)
        assert "--jobs-per-gpu" in call("bound", "--jobs-per-gpu", 60, "--interference", "gavel", "--jobs", 60).err
