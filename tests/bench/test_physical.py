"""The physical experiment's script: its workload, both worlds, going on where it stopped; on a logical slot here."""

import asyncio
import contextlib
import gzip
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import pytest

from carpool.core.codec import encode
from carpool.core.events import Submitted
from carpool.core.model import Decision
from carpool.errors import InputError
from carpool.gpu import nvml
from carpool.profile.measure.conclude import Naming, conclude
from carpool.profile.measure.raw import MeasuredMachine, Measurement, MeasurementRequest, Sample, Setting
from carpool.profile.schema import load, save
from tests.support import ROOT

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "bench" / "physical.py"
KEPT = SCRIPT.parents[1] / "docs" / "experiments" / "h200"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The experiment's files are scripts beside each other."""
    pytest.importorskip("sqlalchemy")
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def work():
    return importlib.import_module("physical_work")


@pytest.fixture(scope="module")
def sim():
    return importlib.import_module("physical_sim")


@pytest.fixture
def options(tmp_path):
    found = {"out": str(tmp_path / "out"), "profile": "h200", "gpus": None, "jobs": 30, "mean": 8.0, "load": 2.5}
    found["truth"] = None
    more = {"repeats": 2, "more_jobs_per_gpu": [3, 4], "only": None, "minutes": None, "seed": 1, "examples": None}
    return Namespace(**found, **more)


def test_the_workload_is_the_same_every_time_and_has_every_task(work, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    assert jobs == work.workload(profile, options)
    assert len(jobs) == 30
    assert {(job.task, job.batch) for job in jobs} == {(s.task, s.batch) for s in work.settings(profile)}
    model = work.MeasuredModel(profile, "time-slicing")
    lengths = [
        job.iterations * model.iteration_time(work.Job("j", 0.0, job.task, 1, job.batch, 1), 1, (1, 1)) for job in jobs
    ]
    assert 0.6 * options.mean < sum(lengths) / len(lengths) < 1.4 * options.mean


def test_at_a_measured_batch_the_model_gives_the_measured_time(work):
    profile = load("h200")
    alone = {}
    for done in profile.raw:
        if done.request.mechanism == "time-slicing" and done.request.settings == (Setting("bert", 64),):
            alone.setdefault(done.series, []).append(done.samples[0].iter_s)
    assert len(alone) == 3
    job = work.Job("j", 0.0, "bert", 1, 64, 1)
    model = work.MeasuredModel(profile, "time-slicing")
    assert model.iteration_time(job, 1, work.Placement(1, 1)) == pytest.approx(fmean(map(fmean, alone.values())))


def test_all_cases_come_once_before_any_is_repeated(work, options, monkeypatch):
    monkeypatch.setattr(work.mps, "available", lambda: None)
    cases = list(work.cases(options))
    assert len({case.name for case in cases}) == len(cases) == 2 * 11
    assert [case.repeat for case in cases] == [0] * 11 + [1] * 11
    assert [case.kind for case in cases[:11]] == [case.kind for case in cases[:10:-1]], "there and back"
    assert {case.kind for case in cases if case.policy == "sjf-bsbf"} >= {
        ("sjf-bsbf", "mps", 2),
        ("sjf-bsbf", "time-slicing", 2),
        ("sjf-bsbf", "mps", 4),
    }


def test_the_simulated_side_pays_for_starting_and_stopping(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    sjf = work.ExperimentCase("sjf", "time-slicing")
    alike = [
        work.MachineEffects(overheads_s={job.setting: [start] for job in jobs}, stop_s=2.0) for start in (0.0, 7.0)
    ]
    free, dear = (sim.simulate(sjf, jobs, profile, options, effects)["makespan_s"] for effects in alike)
    assert dear == pytest.approx(free + 7.0 * len(jobs), rel=0.05)
    tiresias = sim.simulate(work.ExperimentCase("tiresias-12", "time-slicing"), jobs, profile, options, alike[1])
    assert tiresias["preemptions"] > 0
    assert tiresias["makespan_s"] > dear + 7.0 * tiresias["preemptions"]


def tiny_profile(path, iteration_s=0.02):
    """ncf at a batch that a processor can bear, as slow as it may be there."""
    machine = MeasuredMachine("CPU", None, None, "today", "test")
    done = []
    for mechanism in ("time-slicing",):
        for batch in (64, 256):
            sample = Sample(Setting("ncf", batch), iteration_s, 0.01, 50)
            done.append(Measurement(MeasurementRequest(mechanism, (sample.setting,)), (sample,), 1.0))
        both = tuple(Sample(Setting("ncf", 64), 0.03, 0.01, 50) for _ in range(2))
        done.append(Measurement(MeasurementRequest(mechanism, tuple(s.setting for s in both)), both, 1.0))
    save(conclude(machine, done, Naming("tiny")), path)


def test_two_real_jobs_run_and_the_kept_results_are_read_again(options, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    physical, page = importlib.import_module("physical"), importlib.import_module("physical_page")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1] / "src"))
    tiny_profile(tmp_path / "tiny.json")
    found = {"profile": str(tmp_path / "tiny.json"), "gpus": 1, "jobs": 2, "mean": 0.5, "repeats": 1}
    small = Namespace(**{**vars(options), **found, "only": ["sjf-bsbf"], "more_jobs_per_gpu": []})
    (row,) = physical.run_all(small)
    (result,) = Path(options.out).glob("sjf-bsbf-logical-2-run1.json")
    kept = json.loads(result.read_text())
    assert len(kept["jobs"]) == 2
    assert all(job["launch_s"] > 0 and job["exit_s"] > 0 for job in kept["jobs"])
    lines = gzip.decompress((Path(options.out) / "sjf-bsbf-logical-2-run1.progress.gz").read_bytes()).splitlines()
    seen = [json.loads(line) for line in lines]
    assert {one["job"] for one in seen} == {"1", "2"}
    assert all(kept["jobs"][0]["submitted"] < one["at"] and one["iteration"] > 0 for one in seen)
    events = gzip.decompress((Path(options.out) / "sjf-bsbf-logical-2-run1.journal.gz").read_bytes()).splitlines()
    submissions = [event["job"] for event in map(json.loads, events) if event["event"] == "Submitted"]
    for submitted, job in zip(submissions, physical.set_up(Path(options.out), small)[0], strict=True):
        simulated = encode(Submitted(0.0, job.job))["job"]
        differs = {key for key, value in simulated.items() if value != submitted[key]}
        assert differs <= {"id", "submitted", "user", "guess", "saves"}, "both worlds have the same jobs"
    assert kept["machine"]
    assert row["measured"]["makespan_s"][0] > kept["jobs"][0]["launch_s"]
    before = result.stat().st_mtime_ns
    page.show(physical.run_all(small))
    assert result.stat().st_mtime_ns == before, "a case that was run is not run again"
    assert "sjf-bsbf logical C=2" in capsys.readouterr().out
    tiny_profile(tmp_path / "tiny.json", 0.5)
    assert [job.iterations for job in physical.set_up(Path(options.out), small)[0]] == [
        submitted["iterations"] for submitted in submissions
    ], "what a profile says later changes nothing"
    small.repeats, small.minutes = 2, 1e-6
    physical.run_all(small)
    assert "sjf-bsbf-logical-2-run2: left for the next call" in capsys.readouterr().out
    for other in ({"seed": 2}, {"gpus": 2}):
        with pytest.raises(SystemExit, match="results of another workload"):
            physical.run_all(Namespace(**{**vars(small), **other}))
    assert not list(Path(options.out).glob("*.part"))
    assert len(physical.kept(Path(options.out), Namespace(**{**vars(options), "gpus": None}))) == 1


def job_row(job, number, launch_s, iterating_s, **more):
    """Return the row of a job that was never preempted, as in the file of a case."""
    ran_s = launch_s + 1.0 + iterating_s
    return {
        "name": job.name,
        "started": 100.0 * number,
        "launch_s": launch_s,
        "exit_s": 1.0,
        "ran_s": ran_s,
        "shared": False,
        "preemptions": 0,
    } | more


def case_file(model, jobs, policy, machine, launch_s, stretch, repeat=0, **more):
    """Return a case in which every iteration took `stretch` times as long as in the profile."""
    return {
        "case": {"policy": policy, "mechanism": "time-slicing", "repeat": repeat},
        "machine": machine,
        "jobs": [job_row(job, i, launch_s, stretch * model.alone_s(job), **more) for i, job in enumerate(jobs)],
        "stops_s": [3.0],
        "measured": {"makespan_s": 100.0},
    }


@pytest.fixture
def setting(work, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    return profile, jobs, work.MeasuredModel(profile, "time-slicing")


def starts(effects):
    return {tuple(sorted(set(values))) for values in effects.overheads_s.values()}


def test_effects_of_a_machine_are_predicted_from_its_other_cases(sim, setting):
    profile, jobs, model = setting
    mine = case_file(model, jobs, "sjf", "here", 99.0, 9.0)
    near = case_file(model, jobs, "fifo", "here", 4.0, 1.5)
    shared = case_file(model, jobs, "sjf-ffs", "here", 50.0, 7.0, shared=True)
    far = case_file(model, jobs, "fifo", "there", 8.0, 0.5)
    runs = sim.Runs([mine, near, shared, far], jobs, profile)
    assert starts(runs.predicted_effects(mine)) == {(5.0, 51.0)}, "beside others is a start too"
    assert runs.predicted_effects(mine).stop_s == 3.0
    shared["case"]["mechanism"] = "mps"
    assert starts(runs.predicted_effects(mine)) == {(5.0,)}, "the same mechanism counts alone"
    assert starts(sim.Runs([mine, far], jobs, profile).predicted_effects(mine)) == {(9.0,)}, (
        "any, if it is alone on its machine"
    )
    assert sim.Runs([mine], jobs, profile).predicted_effects(mine).alone_s == {}


def stretch(effects, model, jobs):
    """An iteration of every kind of job on the effects, relative to the profile's."""
    return {job.setting: effects.alone_s[job.setting] * job.iterations / model.alone_s(job) for job in jobs}


def test_slow_cores_slow_a_job_down_by_its_launch_bound_share(sim, setting):
    """Two cases agree at the same speed of the cores; cores half as fast slow down jobs that wait for them."""
    profile, jobs, model = setting
    seen, mine = (case_file(model, jobs, policy, "here", 4.0, 1.5) for policy in ("fifo", "sjf"))
    runs = sim.Runs([seen, mine], jobs, profile)
    assert list(stretch(runs.known_effects(mine), model, jobs).values()) == pytest.approx([1.5] * 12)
    assert list(stretch(runs.predicted_effects(mine), model, jobs).values()) == pytest.approx([1.5] * 12)
    mine["jobs"] = case_file(model, jobs, "sjf", "here", 8.0, 99.0)["jobs"]
    slow = sim.Runs([seen, mine], jobs, profile)
    assert slow.slowness(mine) == pytest.approx(2.0 * slow.slowness(seen))
    times = stretch(slow.known_effects(mine), model, jobs)
    for kind, time_ in times.items():
        launching = 1.0 - profile.tasks[kind.task].busy.share(kind.batch)
        assert time_ == pytest.approx(1.5 * 2.0**launching), "the times of the case itself have no part in it"
    assert max(times.values()) > 2.9
    assert min(times.values()) < 1.51
    assert list(stretch(slow.predicted_effects(mine), model, jobs).values()) == pytest.approx([1.5] * 12)


def test_the_first_start_does_not_count_for_the_speed_of_the_cores(sim, setting):
    profile, jobs, model = setting
    seen, mine = (case_file(model, jobs, policy, "here", 4.0, 1.0) for policy in ("fifo", "sjf"))
    mine["jobs"] = [mine["jobs"][0] | {"launch_s": 50.0}, mine["jobs"][1]]
    assert sim.Runs([seen, mine], jobs, profile).slowness(mine) == 1.0
    mine["jobs"] = mine["jobs"][:1]
    assert sim.Runs([seen, mine], jobs, profile).slowness(mine) == 1.0


def test_effects_set_iteration_and_launch_times_of_each_kind_of_job(work, setting):
    profile, jobs, _ = setting
    kind, other = jobs[0].setting, jobs[1].setting
    effects = work.MachineEffects(alone_s={kind: 7.0}, overheads_s={kind: [31.0]}, own_s={"mine": 6.0})
    plain = work.MeasuredModel(profile, "mps")
    seen, unseen = (work.Job("j", 0.0, one.task, 1, one.batch, 1) for one in (kind, other))
    place = work.Placement(1, 1)
    for job, alone_s in ((seen, 7.0), (unseen, plain.iteration_time(unseen, 1, place))):
        times = [work.MachineModel(profile, "mps", effects, draw).iteration_time(job, 1, place) for draw in range(200)]
        logs = [math.log(time / alone_s) for time in times]
        sigma = work.Noise(profile.raw).sigma("mps", job.model)
        assert abs(fmean(logs)) < 0.25 * sigma
        assert stdev(logs) == pytest.approx(sigma, rel=0.2)
        again = work.MachineModel(profile, "mps", effects, 3).iteration_time(job, 1, place)
        assert again == times[3], "a draw is always the same"
    costs = effects.costs(1)
    assert (costs.launch(seen), costs.launch(unseen)) == (31.0, work.GUESSED_LAUNCH_S)
    mine = work.Job("mine", 0.0, kind.task, 1, kind.batch, 1)
    assert [costs.launch(mine), costs.launch(mine)] == [6.0, 31.0], "a job that starts again has no start of its own"


def test_a_job_alone_runs_under_mps_as_fast_as_without(work, sim, setting):
    profile, jobs, model = setting
    seen, mine = (case_file(model, jobs, policy, "here", 4.0, 1.5) for policy in ("fifo", "sjf-ffs"))
    mine["case"]["mechanism"] = "mps"
    effects = sim.Runs([seen, mine], jobs, profile).known_effects(mine)
    calm = replace(
        profile, raw=tuple(done for done in profile.raw if not done.request.run)
    )  # no repeated measurements, so no noise
    for job in jobs:
        assert work.MachineModel(calm, "mps", effects, 0).alone_s(job) == pytest.approx(1.5 * model.alone_s(job))


def test_the_policy_uses_the_profile_of_the_service_and_the_world_the_true_one(work, sim, setting):
    profile, jobs, model = setting
    short, long = sorted({job.task: job for job in jobs}.values(), key=model.alone_s)[::5]
    short, long, first = replace(short, submitted=1.0), replace(long, submitted=1.0), replace(jobs[0], submitted=0.0)

    def slow(done):
        samples = tuple(replace(s, iter_s=1000 * s.iter_s) if s.setting.task == short.task else s for s in done.samples)
        return replace(done, samples=samples)

    truth = replace(profile, raw=tuple(map(slow, profile.raw)))
    effects, case = (
        work.MachineEffects(overheads_s={job.setting: [1.0] for job in jobs}),
        work.ExperimentCase("sjf", "time-slicing"),
    )

    def mean_jct(*profiles):
        believed, *more = profiles
        return sim.simulate(case, [first, short, long], believed, Namespace(gpus=1), effects, 0, *more)["mean_jct_s"]

    last, middle, begin = (
        work.MachineModel(truth, "time-slicing", effects, 0).alone_s(job) for job in (long, short, first)
    )
    ends = (1 + begin, 2 + begin + middle, 3 + begin + middle + last)
    assert mean_jct(profile, truth) == pytest.approx((sum(ends) - 2) / 3), "the job that was believed short goes first"
    assert mean_jct(profile) < mean_jct(truth) < mean_jct(profile, truth)


def test_a_job_that_is_stopped_just_before_its_end_finishes(work, sim, setting):
    """Of two jobs that reach their threshold, one has done its iterations; what it takes to end lies at its start."""
    profile, jobs, _ = setting
    first = replace(jobs[0], submitted=0.0)
    second = replace(jobs[1], submitted=1.0)
    effects = work.MachineEffects(own_s={first.name: 5.0, second.name: 5.0}, exit_s=2.0, stop_s=3.0, overheads_s={})
    alone_s = work.MachineModel(profile, "time-slicing", effects, 0).alone_s(first)

    def preempted(after_s):
        case = work.ExperimentCase(f"tiresias-{after_s}", "time-slicing")
        return sim.simulate(case, [first, second], profile, Namespace(gpus=1), effects)

    early, late = preempted(5.0 + alone_s - 2.1), preempted(5.0 + alone_s - 1.9)
    assert early["preemptions"] == late["preemptions"] == 1
    others_s = 5.0 + work.MachineModel(profile, "time-slicing", effects, 0).alone_s(second)
    assert late["makespan_s"] == pytest.approx(5.0 + alone_s + others_s), "nothing is saved, nothing started again"
    again_s = work.GUESSED_LAUNCH_S + 0.1
    assert early["makespan_s"] == pytest.approx(5.0 + alone_s - 2.1 + 3.0 + others_s + again_s), (
        "it got on for a moment"
    )


def test_a_run_is_simulated_with_its_own_start_times_and_predicted_with_others(sim, setting, options):
    profile, jobs, model = setting
    quick = [case_file(model, jobs, policy, "here", 4.0, 1.0) for policy in ("sjf", "fifo")]
    slow = case_file(model, jobs, "sjf", "here", 30.0, 1.0, repeat=1)
    rows = {row["policy"]: row for row in sim.compare([*quick, slow], jobs, profile, options)}
    simulated, predicted = (rows["sjf"][world]["makespan_s"] for world in ("simulated", "predicted"))
    assert min(simulated[1]) > max(simulated[0]) + 20.0 * len(jobs)
    assert min(predicted[0]) > max(simulated[0]), "it is drawn from the slow ones, too"
    assert max(predicted[1]) < min(simulated[1])
    found = sim.compared(rows["sjf"], "makespan_s")
    assert found.spread > 0


def test_a_gpu_is_busy_while_kernels_of_any_job_run(sim):
    on = sim.IterationSpans()
    for at, kind, job in [
        (0.0, "Started", "a"),
        (4.0, "Started", "b"),
        (10.0, "Finished", "a"),
        (12.0, "Finished", "b"),
    ]:
        on.note(getattr(sim.ev, kind)(at, job, 1))
    assert on.busy_s({"a": 0.5, "b": 0.2}) == pytest.approx(4 * 0.5 + 6 * (1 - 0.5 * 0.8) + 2 * 0.2)


def test_differences_between_runs_are_not_part_of_the_spread(sim):
    draws = [[10.0, 11.0] * 10, [20.0, 21.0] * 10]
    row = {"measured": {"x": [10.0, 21.0]}, "simulated": {"x": draws}, "predicted": {"x": draws}}
    assert sim.compared(row, "x").spread == pytest.approx(stdev(draws[0]))
    assert (sim.compared(row, "x").measured, sim.compared(row, "x").simulated) == (15.5, 15.5)
    assert [sim.compared(row, "x", run).off for run in (0, 1)] == [pytest.approx(5.0), pytest.approx(-50 / 21)]


def test_start_times_are_drawn_reproducibly_from_observed_ones(work, sim, setting):
    profile, jobs, model = setting
    seen = [case_file(model, jobs, policy, "here", launch_s, 1.0) for policy, launch_s in (("sjf", 2.0), ("fifo", 6.0))]
    mine = case_file(model, jobs, "sjf", "here", 99.0, 1.0, repeat=1)
    effects = sim.Runs([*seen, mine], jobs, profile).predicted_effects(mine)
    job = work.Job("j", 0.0, jobs[0].task, 1, jobs[0].batch, 1)
    drawn = [[costs.launch(job) for _ in range(50)] for costs in map(effects.costs, (1, 1, 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {3.0, 7.0}


def test_the_paper_reads_the_rows_that_the_script_writes(sim, setting, options, tmp_path):
    from carpool.report.paper import config as configuration
    from carpool.report.paper.measured import read_measured

    page = importlib.import_module("physical_page")
    profile, jobs, model = setting
    done = [case_file(model, jobs, policy, "here", 4.0, 1.0) for policy in ("sjf", "fifo")]
    for result in done:
        result["measured"] = dict.fromkeys(("makespan_s", "mean_jct_s", "mean_queue_s"), 100.0)
        result["measured"]["gpu_utilisation"] = 0.5
    page.write_rows(tmp_path / "rows.csv", sim.compare(done, jobs, profile, options))
    config = configuration.load()
    found = read_measured(replace(config, physical=replace(config.physical, measured=tmp_path / "rows.csv")))
    assert [(row.policy, row.jobs_per_gpu, row.runs) for row in found.cases] == [("sjf", 1, 1), ("fifo", 1, 1)]


def test_the_shipped_rows_and_the_page_agree_with_the_kept_runs(work):
    from carpool.report.paper import config as configuration
    from carpool.report.paper.measured import read_measured

    runs = {}
    for path in KEPT.glob("*-run*.json"):
        result = json.loads(path.read_text())
        case = work.ExperimentCase(**result["case"])
        if case.policy not in work.RETIRED:
            jobs_per_gpu = 1 if case.policy in work.EXCLUSIVE else case.jobs_per_gpu
            runs.setdefault((case.policy, case.mechanism, jobs_per_gpu), []).append(result["measured"])
    cases, page = read_measured(configuration.load()).cases, KEPT.with_name("h200-tables.md").read_text()
    assert {(case.policy, case.mechanism, case.jobs_per_gpu): case.runs for case in cases} == {
        kind: len(same) for kind, same in runs.items()
    }
    for case in cases:
        same = runs[case.policy, case.mechanism, case.jobs_per_gpu]
        means = [fmean(run[key] for run in same) for key in ("makespan_s", "mean_jct_s", "mean_queue_s")]
        figures = (case.makespan, case.jct, case.queue)
        assert [figure.measured for figure in figures] == pytest.approx(means, abs=0.006)
        (line,) = re.findall(rf"^\| {case.policy} \| {case.mechanism} \| {case.jobs_per_gpu} \|.*", page, re.MULTILINE)
        found = [tuple(map(float, both)) for both in re.findall(r"([\d.]+) / \*\*([\d.]+)\*\* ±", line)]
        assert found == [pytest.approx((figure.measured, figure.simulated), abs=0.06) for figure in figures]
    off = [max(abs(case.makespan.off), abs(case.jct.off)) for case in cases]
    assert (len(off), sum(one <= 5.0 for one in off)) == (11, 10), "as the page says"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--load", "0"], "--load"),
        (["--jobs", "0"], "--jobs"),
        (["--mean", "nan"], "--mean"),
        (["--gpus", "-1"], "--gpus"),
        (["--more-jobs-per-gpu", "0"], "--more-jobs-per-gpu"),
        (["--gpus", "1", "--profile", "nosuch"], "nosuch"),
        (["--gpus", "1", "--only", "sfj"], "--only sfj: no such case; give some of sjf,"),
        (["--rows", "rows.csv"], "has no results"),
        (["--gpus", "1", "--profile", "t4"], "t4: has no pairs of the examples"),
        (["--gpus", "1", "--profile", "gavel"], "gavel: has no pairs of the examples"),
        (["--out", str(KEPT), "--rows", "no/such/folder.csv"], "no/such: no such folder"),
        (["--out", str(KEPT), "--report", "none.md"], "none.md: No such file"),
        (["--out", str(KEPT), "--rows", "r.csv", "--truth", "gavel"], "--truth gavel: has no times of bert"),
        (["--out", str(KEPT), "--rows", "r.csv", "--truth", "t4"], "profile t4: it has no pairs"),
        (["--out", str(KEPT), "--rows", "r.csv", "--truth", "mps.json"], "no pairs for 'time-slicing'; it has mps"),
    ],
)
def test_wrong_options_are_refused_in_a_line(arguments, problem, tmp_path, monkeypatch, capsys):
    pairs = tuple(pair for pair in load("h200").pairs if pair.mechanism == "mps")
    save(replace(load("h200"), pairs=pairs), tmp_path / "mps.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path / "out"), *arguments])
    physical = importlib.import_module("physical")
    with pytest.raises(SystemExit) as ended:
        physical.in_one_line(physical.main)
    said = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)  # argparse prints its own
    assert problem in said
    assert len(said.splitlines()) == 1 or "usage:" in said


def test_the_script_itself_refuses_wrong_options_in_a_line(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--gpus", "1", "--profile", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode
    assert "nosuch" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_pairs_of_jobs_must_be_in_the_profile(options, work):
    physical = importlib.import_module("physical")
    profile = load("h200")
    mates = tuple(pair for pair in profile.pairs if {pair.a, pair.b} != {"ncf"})
    path = Path(options.out).with_suffix(".json")
    save(replace(profile, pairs=mates), path)
    with pytest.raises(SystemExit, match=r"out.json: has no pair of ncf and ncf; measure them with carpool profile"):
        physical.set_up(Path(options.out), Namespace(**{**vars(options), "profile": str(path), "gpus": 1}))
    assert not Path(options.out).exists(), "a better profile may be given the same place"


def test_the_first_of_several_gpus_is_used(monkeypatch, work, setting, options):
    live = importlib.import_module("physical_live")
    several = [nvml.Device(i, f"GPU-{i}", "NVIDIA Test", 2**34, "1.0") for i in range(4)]
    monkeypatch.setattr(nvml, "devices", lambda: several)
    configs = []

    async def refuse(config):
        configs.append(config)
        raise InputError("that is all")

    monkeypatch.setattr(live, "open_service", refuse)
    _, jobs, model = setting
    with pytest.raises(InputError, match="that is all"):
        asyncio.run(live.run_live(work.ExperimentCase("sjf", "time-slicing"), jobs, model, 1.0, options))
    assert [(config.gpus, config.only) for config in configs] == [(None, ("GPU-0",))]


def test_a_damaged_result_is_named(tmp_path, options):
    physical = importlib.import_module("physical")
    for name in ("workload.json", "profile.json"):
        (tmp_path / name).write_bytes((KEPT / name).read_bytes())
    with pytest.raises(SystemExit, match="has no results"):
        physical.kept(tmp_path, options)
    (tmp_path / "sjf-time-slicing-2-run1.json").write_text("{")
    with pytest.raises(SystemExit, match=r"sjf-time-slicing-2-run1.json: is damaged"):
        physical.kept(tmp_path, options)


def test_a_stopped_script_ends_the_processes_that_it_started(tmp_path):
    pytest.importorskip("torch")
    tiny_profile(tmp_path / "tiny.json")
    out = tmp_path / "out"
    length = f"{7000 + os.getpid() / 1000}"  # so that no other process has jobs with this number of iterations
    asked = ["--gpus", "1", "--jobs", "2", "--mean", length, "--only", "sjf", "--profile", str(tmp_path / "tiny.json")]
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, str(SCRIPT), "--out", str(out), *asked], env=env) as run:
        try:
            until(lambda: (out / "workload.json").exists())
            lengths = [str(job["iterations"]) for job in json.loads((out / "workload.json").read_text())["jobs"]]
            until(lambda: running(lengths))
            run.terminate()
            assert run.wait(30) == 128 + signal.SIGTERM
        finally:
            run.kill()
    assert not running(lengths)


def until(found):
    give_up = time.monotonic() + 60
    while not found():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def running(lengths):
    """Return the command lines of trainings with these numbers of iterations."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace").split("\0"))
    return [words for words in found if "--iterations" in words and set(lengths) & set(words)]


def test_gains_and_deviations_of_a_case(work, sim):
    page = importlib.import_module("physical_page")
    figures = {"policy": "sjf", "mechanism": "time-slicing", "jobs_per_gpu": 2, "sjf_jct_s": [100.0]}
    worlds = {"measured": [100.0], "simulated": [[100.0, 140.0]], "predicted": [[90.0, 90.0]]}
    slow = figures | {world: {"mean_jct_s": values} for world, values in worlds.items()}
    slow["machines"] = ["here"]
    found = sim.compared(slow, "mean_jct_s")
    assert (found.measured, found.simulated, found.off) == (100.0, 120.0, pytest.approx(20.0))
    assert found.predicted_off == pytest.approx(-10.0)
    quick = slow | {
        "policy": "sjf-bsbf",
        "measured": {"mean_jct_s": [25.0]},
        "machines": ["there"],
        "sjf_jct_s": [75.0],
    }
    (found,) = page.gains([slow, quick])
    assert found.endswith("of this case: not measured on the same machine; 3.00 by simulation with the same cores")
    quick["measured"], quick["machines"] = {"mean_jct_s": [25.0, 50.0]}, ["here", "there"]
    quick["sjf_jct_s"] = [75.0, 80.0]
    (found,) = page.gains([slow, quick])
    assert found.endswith(": 4.00 on the same machine; 1.60 and 3.00 by simulation with the same cores")


def test_the_record_of_a_case_covers_submission_to_end(work):
    live = importlib.import_module("physical_live")
    common = {"waited_s": 3.0, "preemptions": 1}
    rows = [
        common | {"submitted": 10.0, "started": 14.0, "finished": 20.0},
        common | {"submitted": 12.0, "started": 22.0, "finished": 32.0},
    ]
    stop = work.Job("7", 0.0, "bert", 1, 12, 5)
    events = [
        live.ev.Planned(5.0, (Decision(stop.id, None, "others go first"),)),
        live.ev.Stopped(6.5, stop.id, 1, 2.0),
    ]
    result = live.case_record(
        work.ExperimentCase("tiresias-11", "time-slicing"), live.Recording(rows, events, [], [0.25, 0.75])
    )
    measured = result["measured"]
    assert (measured["makespan_s"], measured["mean_jct_s"], measured["mean_queue_s"]) == (22.0, 15.0, 3.0)
    assert (measured["gpu_utilisation"], measured["preemptions"]) == (0.5, 2)
    assert measured["occupied"] == pytest.approx(16 / 22)
    assert result["stops_s"] == [1.5]


# ---- progress -------------------------------------------------------------------------------------------------------


def test_progress_counts_only_while_the_mates_are_known(tmp_path, work, monkeypatch):
    """Job 1 iterates from 0 to 20 s, alone at 20 a second and at 10 beside job 2 (8 to 14 s); 3 just starts up."""
    progress = importlib.import_module("physical_progress")
    jobs = [work.ExperimentJob(f"{task}-{i}", task, 8, 100, 0.0) for i, task in enumerate(("bert", "ncf", "bert"), 1)]
    kept = {"asked": {"gpus": 2}, "jobs": [asdict(job) for job in jobs]}
    (tmp_path / "workload.json").write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match="ran on several slots"):
        progress.report_intervals(tmp_path)
    (tmp_path / "workload.json").write_text(json.dumps({**kept, "asked": {"gpus": None}}))
    lives = ((-5.0, 5.0, 20.0), (3.0, 5.0, 14.0), (9.0, 30.0, 50.0))
    rows = [
        {"started": begin, "launch_s": launch, "finished": end + 1.0, "exit_s": 1.0, "preemptions": 0}
        for begin, launch, end in lives
    ]
    (tmp_path / "a-run1.json").write_text(json.dumps({"case": {"policy": "sjf", "mechanism": "mps"}, "jobs": rows}))

    def iteration(at):
        return round(20 * min(at, 8.0) + 10 * max(0.0, min(at, 14.0) - 8.0) + 20 * max(0.0, at - 14.0))

    found = [{"job": "1", "at": at / 2, "iteration": iteration(at / 2)} for at in range(1, 40)]
    found += [{"job": "2", "at": at / 2, "iteration": 3 * at} for at in range(17, 28)]
    lines = "".join(json.dumps(row) + "\n" for row in found)
    (tmp_path / "a-run1.progress.gz").write_bytes(gzip.compress(lines.encode()))
    bert, ncf = (jobs[i].setting for i in (0, 1))
    found = progress.iteration_times(progress.report_intervals(tmp_path))
    assert found == {
        (bert, None): (pytest.approx(12.0), pytest.approx(0.05)),
        (bert, ncf): (pytest.approx(5.0), pytest.approx(0.1)),
        (ncf, bert): (pytest.approx(5.0), pytest.approx(1 / 6)),
    }
    rows[1]["preemptions"] = 1
    (tmp_path / "a-run1.json").write_text(json.dumps({"case": {"policy": "sjf", "mechanism": "mps"}, "jobs": rows}))
    left = progress.iteration_times(progress.report_intervals(tmp_path))
    assert left == {(bert, None): (pytest.approx(7.0), pytest.approx(0.05))}, "mates of a preempted job are left out"


@pytest.mark.parametrize(("judged", "most"), [((), 0.07), (("--profile", "h200"), 0.06)])
def test_progress_of_the_experiment_agrees_with_what_was_measured(judged, most, work, monkeypatch, capsys):
    """Where the profile has measured a pair at these batches, the jobs of the experiment ran as it says."""
    progress = importlib.import_module("physical_progress")
    monkeypatch.setattr(sys, "argv", ["physical_progress.py", str(KEPT), *judged])
    progress.main()
    said = capsys.readouterr().out
    errors = [float(line.split()[-1]) for line in said.splitlines() if "measured at these batches" in line]
    assert len(errors) == 2
    assert max(errors) < most
    assert ("from the nearest batches" in said) != bool(judged), "h200 has measured all that met"


def test_progress_on_logical_slots_is_compared_with_the_pairs_of_the_profile(tmp_path, capsys):
    progress = importlib.import_module("physical_progress")
    tiny_profile(tmp_path / "tiny.json")
    ncf = Setting("ncf", 64)
    seen = [progress.ReportInterval("logical", ncf, mate, 2.0, steps) for mate, steps in ((None, 100), (ncf, 50))]
    progress.show_pairs(seen, load(str(tmp_path / "tiny.json")))
    assert "logical       measured at these batches" in (said := capsys.readouterr().out)
    assert "ncf 64 beside ncf 64                         2.00 observed, 1.50 believed" in said
    progress.show_pairs([*seen, replace(seen[1], mate=Setting("bert", 8))], load(str(tmp_path / "tiny.json")))
    assert "bert" not in capsys.readouterr().out, "the profile knows nothing of it"
    progress.show_pairs(seen, load("t4"))
    assert "logical       the profile has no pairs" in capsys.readouterr().out
