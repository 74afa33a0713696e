"""The generator: the same jobs for a seed everywhere, and the distributions that its tables promise."""

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from io import StringIO
from math import sqrt
from statistics import fmean

import pytest
from calling import process

from carpool.core.perf import ConstantInterference as Constant
from carpool.core.perf import FittedModel, Placement
from carpool.profile.schema import load
from carpool.sim import generate
from carpool.sim.generate import DAY_S, HALF_HOURS, KINDS, LONG_S, philly_like
from carpool.sim.workload import Workload, check_ids, write

PROFILE = load("t4")
TASKS = PROFILE.core_tasks()
MANY = 24_000


@pytest.fixture(scope="module")
def many() -> Workload:
    """100 eight-hour days."""
    return philly_like(TASKS, jobs=MANY, seed=11)


def text(workload: Workload) -> str:
    file = StringIO()
    write(workload, file)
    return file.getvalue()


def kind_of(job):
    return next(kind for kind in KINDS if (kind.model, kind.gpus) == (job.model, job.gpus))


# ---- the same seed, the same jobs ----------------------------------------------------------------------------------


def test_a_seed_gives_the_same_jobs_and_another_seed_others():
    assert philly_like(TASKS, seed=5) == philly_like(TASKS, seed=5)
    assert philly_like(TASKS, seed=5).jobs != philly_like(TASKS, seed=6).jobs


def test_a_seed_gives_the_same_jobs_in_another_process():
    for hash_seed in ("0", "17"):
        said = process("workload", "generate", "--jobs", 50, "--seed", 9, PYTHONHASHSEED=hash_seed)
        assert said.code == 0, said.err
        assert said.out == text(philly_like(TASKS, jobs=50, seed=9))


def test_the_jobs_of_a_seed_are_what_they_have_always_been():
    """Published numbers stand on them; whoever changes the tables changes this line and says so."""
    jobs = philly_like(TASKS, jobs=240, seed=1).jobs
    drawn = [(job.id, job.submitted, job.gpus, job.batch, job.user, round(job.alone_s or 0, 3)) for job in jobs]
    assert sha256(repr(drawn).encode()).hexdigest()[:16] == "0abaaaa8eefa787e"


# ---- jobs and load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2, 240, 1000])
@pytest.mark.parametrize("load", [0.5, 1.0, 4.0])
def test_so_many_jobs_over_so_long(jobs, load):
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


# ---- the distributions ---------------------------------------------------------------------------------------------


def test_the_shares_of_the_table_sum_to_one():
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)


def test_models_and_gangs_come_in_their_shares(many):
    counts = Counter((job.model, job.gpus) for job in many.jobs)
    assert set(counts) == {(kind.model, kind.gpus) for kind in KINDS}
    for kind in KINDS:
        sigma = sqrt(MANY * kind.share * (1 - kind.share))
        assert abs(counts[kind.model, kind.gpus] - MANY * kind.share) < 4.5 * sigma, kind


def test_one_job_in_eight_is_large_and_the_mean_run_is_that_of_the_paper(many):
    assert fmean(job.gpus > 4 for job in many.jobs) == pytest.approx(0.128, abs=0.01)
    assert fmean(job.alone_s for job in many.jobs) / 3600 == pytest.approx(0.69, rel=0.06)


def test_run_times_are_lognormal_around_the_mean_of_their_kind(many):
    for kind in KINDS:
        times = [job.alone_s / kind.mean_s for job in many.jobs if kind_of(job) == kind]
        assert abs(fmean(times) - 1.0) < 4.5 * 0.254 / sqrt(len(times)), kind
        below = fmean(time < 0.9692 for time in times)  # the median, exp(−σ²/2)
        assert abs(below - 0.5) < 4.5 * 0.5 / sqrt(len(times)), kind


def test_batches_are_those_of_the_table_and_iterations_fill_the_run_time(many):
    for job in many.jobs[:500]:
        kind = kind_of(job)
        assert job.batch == kind.batch
        iteration = TASKS[job.model].iteration(job.batch, 1, Placement(job.gpus, -(-job.gpus // 4)))
        assert abs(job.iterations * iteration - job.alone_s) <= 0.51 * iteration


def test_short_jobs_crowd_in_the_busy_period(many):
    times = [job.submitted for job in many.jobs if kind_of(job).mean_s <= LONG_S]
    slots = Counter(int(time % DAY_S / DAY_S * len(HALF_HOURS)) for time in times)
    mean = len(times) / len(HALF_HOURS)
    for slot, density in enumerate(HALF_HOURS):
        expected = mean * density / fmean(HALF_HOURS)
        assert abs(slots[slot] - expected) < 4.5 * sqrt(expected) + 2, slot
    assert fmean(HALF_HOURS) == pytest.approx(1.0)
    assert max(slots, key=slots.__getitem__) in (10, 11), "the second half of the fifth and the sixth hour"


def test_long_jobs_come_at_all_hours_alike(many):
    times = [job.submitted for job in many.jobs if kind_of(job).mean_s > LONG_S]
    slots = Counter(int(time % DAY_S / DAY_S * 8) for time in times)
    for slot in range(8):
        assert abs(slots[slot] - len(times) / 8) < 4.5 * sqrt(len(times) / 8), slot


def test_a_few_of_twelve_users_submit_most(many):
    users = Counter(job.user for job in many.jobs)
    assert set(users) == {f"user{number}" for number in range(1, 13)}
    assert users["user1"] / MANY == pytest.approx(sqrt(1 / 12), abs=0.02)
    assert [users[f"user{number}"] for number in (1, 2, 3)] == [count for _, count in users.most_common(3)]


# ---- they can run --------------------------------------------------------------------------------------------------


def test_every_job_fits_one_16_gb_gpu_alone_without_cutting_its_batch():
    model = FittedModel(TASKS, Constant(1.5), 4)
    memory = PROFILE.gpu.memory_bytes
    assert memory <= 16 * 10**9
    for job in philly_like(TASKS, jobs=400, seed=1).jobs:
        assert 0 < model.memory(job, 1) <= memory, job


def test_the_generator_needs_its_models_in_the_profile():
    said = process("workload", "generate", "--profile", "gavel")
    assert said.code == 2
    assert "philly-like uses; try t4" in said.err
    assert generate.NAME in said.err
