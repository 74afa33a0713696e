"""The generator: the same jobs for a seed everywhere, and the distributions that its tables promise."""

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from io import StringIO
from math import sqrt
from statistics import fmean

import pytest

from carpool.core.perf import ConstantInterference as Constant
from carpool.core.perf import FittedModel, Placement
from carpool.profile.schema import load
from carpool.sim import Setup, generate, read, simulate
from carpool.sim.generate import DAY_S, FITTING_BATCHES, LENGTHS, by_name, philly_like, pollux_like
from carpool.sim.sweep import mean
from carpool.sim.workload import Workload, check_ids, write
from tests.support.command_line import process
from tests.support.effort import thorough_only

PROFILE = load("t4")
TASKS = PROFILE.core_tasks()
MANY = 24_000
KINDS = {  # of Pollux's jobs, with the share that the tables promise
    kind: length.share / sum(other.share for other in LENGTHS) / len(length.models) / len(kinds)
    for length in LENGTHS
    for kinds in length.models
    for kind in kinds
}


@pytest.fixture(scope="module")
def many() -> Workload:
    """100 eight-hour days."""
    return pollux_like(jobs=MANY, seed=11)


def text(workload: Workload) -> str:
    file = StringIO()
    write(workload, file)
    return file.getvalue()


def length_of(job):
    return next(length for length in LENGTHS if any(kinds[0].model == job.model for kinds in length.models))


# ---- the same seed, the same jobs ----------------------------------------------------------------------------------


def test_a_seed_gives_the_same_jobs_and_another_seed_others():
    assert philly_like(TASKS, seed=5) == philly_like(TASKS, seed=5)
    assert philly_like(TASKS, seed=5).jobs != philly_like(TASKS, seed=6).jobs


@pytest.mark.slow
def test_a_seed_gives_the_same_jobs_in_another_process():
    for hash_seed in ("0", "17"):
        said = process("workload", "generate", "--jobs", 50, "--seed", 9, PYTHONHASHSEED=hash_seed)
        assert said.code == 0, said.err
        assert said.out == text(philly_like(TASKS, jobs=50, seed=9))


def test_the_jobs_of_a_seed_do_not_change_between_releases():
    """Published figures depend on these jobs. A change of the tables must change this test and the CHANGELOG."""
    jobs = philly_like(TASKS, jobs=240, seed=1).jobs
    drawn = [(job.id, job.submitted, job.gpus, job.batch, job.user, round(job.duration_s or 0, 3)) for job in jobs]
    assert sha256(repr(drawn).encode()).hexdigest()[:16] == "ec39893e867087fd"


# ---- jobs and load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2, 240, 1000])
@pytest.mark.parametrize("load", [0.5, 1.0, 4.0])
def test_the_requested_number_of_jobs_arrives_over_the_requested_time(jobs, load):
    workload = philly_like(TASKS, jobs=jobs, load=load, seed=2)
    span = jobs / (30.0 * load) * 3600.0
    assert len(workload.jobs) == jobs
    times = [job.submitted for job in workload.jobs]
    assert times == sorted(times)
    assert min(times) >= 0
    assert max(times) <= span + 0.5
    if jobs >= 240:
        assert max(times) > 0.95 * span
    check_ids(workload)
    assert workload.source == f"philly-like (jobs={jobs}, load={load:g}, seed=2)"


def test_a_load_changes_the_arrivals_and_not_the_work():
    """So that a comparison of loads compares loads."""
    plain = philly_like(TASKS, seed=3)
    for factor in (0.5, 4.0):
        other = philly_like(TASKS, load=factor, seed=3)
        for before, after in zip(plain.jobs, other.jobs, strict=True):
            assert after == replace(before, submitted=after.submitted)
            assert abs(after.submitted - before.submitted / factor) <= 0.5


def test_fewer_jobs_over_the_same_hours_are_a_subset_of_more_jobs():
    """So that 120 and 480 jobs a day compare loads, and not luck."""

    def drawn(jobs):
        made = pollux_like(jobs=jobs, hours=8, seed=3).jobs
        assert max(job.submitted for job in made) <= DAY_S
        return Counter((job.submitted, job.model, job.gpus) for job in made)

    assert drawn(120) <= drawn(240) <= drawn(480)


# ---- the distributions ---------------------------------------------------------------------------------------------


def test_the_shares_of_the_table_sum_to_one_and_the_hours_average_one():
    assert sum(length.share for length in LENGTHS) == pytest.approx(1.0)
    for length in LENGTHS:
        assert fmean(length.hours) == pytest.approx(1.0, abs=0.005)


def test_models_and_gangs_have_the_shares_of_the_table(many):
    counts = Counter((job.model, job.gpus) for job in many.jobs)
    assert set(counts) == {(kind.model, kind.gpus) for kind in KINDS}
    for kind, share in KINDS.items():
        sigma = sqrt(MANY * share * (1 - share))
        assert abs(counts[kind.model, kind.gpus] - MANY * share) < 4.5 * sigma, kind


def test_calibrated_jobs_have_what_the_papers_tables_imply(many):
    calibrated = pollux_like(jobs=MANY, seed=11, calibrated=True).jobs
    assert fmean(job.gpus > 4 for job in calibrated) == pytest.approx(0.136, abs=0.01)
    assert fmean(job.duration_s for job in calibrated) / 3600 == pytest.approx(0.69, rel=0.06)
    for before, after in zip(many.jobs[:500], calibrated, strict=False):
        assert after.gpus == {1: 1, 4: 2, 6: 2, 8: 4, 12: 4, 16: 8, 24: 8, 32: 16, 48: 16}[before.gpus]
        assert after.duration_s == pytest.approx(1.41 * before.duration_s)
        assert (after.id, after.submitted, after.iterations) == (before.id, before.submitted, before.iterations)


@pytest.mark.slow
def test_run_times_of_philly_like_are_lognormal_around_those_of_the_calibrated_jobs():
    drawn = philly_like(TASKS, jobs=MANY, seed=11).jobs
    calibrated = pollux_like(jobs=MANY, seed=11, calibrated=True).jobs
    times = [job.duration_s / one.duration_s for job, one in zip(drawn, calibrated, strict=True)]
    assert abs(fmean(times) - 1.0) < 4.5 * 0.254 / sqrt(MANY)
    below = fmean(time < 0.9692 for time in times)  # the median, exp(−σ²/2)
    assert abs(below - 0.5) < 4.5 * 0.5 / sqrt(MANY)


def test_batches_are_those_of_the_table_and_iterations_fill_the_run_time():
    for job in philly_like(TASKS, jobs=500, seed=11).jobs:
        assert job.batch == FITTING_BATCHES[job.model]
        iteration = TASKS[job.model].iteration(job.batch, 1, Placement(job.gpus, -(-job.gpus // 4)))
        assert abs(job.iterations * iteration - job.duration_s) <= 0.51 * iteration


@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_each_length_has_its_own_busy_hours(many, number):
    length = LENGTHS[number]
    hours = Counter(int(job.submitted % DAY_S / 3600) for job in many.jobs if length_of(job) == length)
    for hour, density in enumerate(length.hours):
        expected = hours.total() / 8 * density
        assert abs(hours[hour] - expected) < 4.5 * sqrt(expected) + 2, hour


def test_a_few_of_twelve_users_submit_most_jobs(many):
    users = Counter(job.user for job in many.jobs)
    assert set(users) == {f"user{number}" for number in range(1, 13)}
    assert users["user1"] / MANY == pytest.approx(sqrt(1 / 12), abs=0.02)
    assert [users[f"user{number}"] for number in (1, 2, 3)] == [count for _, count in users.most_common(3)]


# ---- they can run --------------------------------------------------------------------------------------------------


def test_every_job_fits_alone_on_a_16_gb_gpu_with_its_whole_batch():
    model = FittedModel(TASKS, Constant(1.5), 4)
    memory = PROFILE.gpu.memory_bytes
    assert memory <= 16 * 10**9
    for job in philly_like(TASKS, jobs=400, seed=1).jobs:
        assert 0 < model.memory(job, 1) <= memory, job


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [240, pytest.param(480, marks=thorough_only)])
@pytest.mark.parametrize(
    ("name", "file"), [("pollux-like", "pollux"), ("pollux-calibrated", "calibrated"), ("philly-like", "calibrated")]
)
def test_policies_fare_on_generated_jobs_as_on_the_real_files(data, name, file, jobs):
    """Mean JCTs agree within two standard errors of the difference, and within the spread over the files' seeds."""
    setup = Setup(ignore_placement=True, memory_limit=False)
    real = [read(data / file / "workloads.csv", {"n": str(jobs), "seed": str(seed)}) for seed in range(1, 9)]
    ours = [by_name(name, TASKS, jobs=jobs, seed=seed, hours=8) for seed in range(1, 17)]
    for policy in ("sjf", "sjf-bsbf"):
        theirs, made = (mean([simulate(w, policy, setup).summary.mean_jct_s for w in some]) for some in (real, ours))
        gap = abs(made.value - theirs.value)
        assert gap <= 2.0 * sqrt(theirs.error**2 + made.error**2), (policy, theirs, made)
        assert gap <= theirs.error * sqrt(8), (policy, theirs, made)


def test_the_generator_needs_its_models_in_the_profile():
    said = process("workload", "generate", "--profile", "gavel")
    assert said.code == 2
    assert "philly-like uses; try t4" in said.err
    assert generate.NAME in said.err
