"""The physical experiment's script: its workload, both worlds, going on where it stopped; on a logical slot here."""

import gzip
import importlib
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.model import Decision
from carpool.profile.measure.conclude import Naming, conclude
from carpool.profile.measure.raw import Machine, Measurement, Sample, Setting, Wish
from carpool.profile.schema import load, save
from carpool.sim.engine import Costs

SCRIPT = Path(__file__).parents[1] / "bench" / "physical.py"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The experiment's files are scripts beside each other."""
    pytest.importorskip("sqlalchemy")
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def work():
    return importlib.import_module("physical_work")


@pytest.fixture
def sim():
    return importlib.import_module("physical_sim")


@pytest.fixture
def options(tmp_path):
    told = {"out": str(tmp_path / "out"), "profile": "h200", "gpus": None, "jobs": 30, "mean": 8.0, "load": 2.5}
    more = {"repeats": 2, "crowds": [3, 4], "only": None, "minutes": None, "seed": 1, "examples": None}
    return Namespace(**told, **more)


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
    alone = [
        done.samples[0].iter_s
        for done in profile.raw
        if done.wish.mechanism == "time-slicing" and done.wish.settings == (Setting("bert", 64),)
    ]
    job = work.Job("j", 0.0, "bert", 1, 64, 1)
    model = work.MeasuredModel(profile, "time-slicing")
    assert model.iteration_time(job, 1, work.Placement(1, 1)) == pytest.approx(sum(alone) / len(alone))


def test_all_cases_come_once_before_any_is_repeated(work, options, monkeypatch):
    monkeypatch.setattr(work.mps, "available", lambda: None)
    cases = list(work.cases(options))
    assert len({case.name for case in cases}) == len(cases) == 2 * 11
    assert [case.repeat for case in cases] == [0] * 11 + [1] * 11
    assert {case.kind for case in cases if case.policy == "sjf-bsbf"} >= {
        ("sjf-bsbf", "mps", 2),
        ("sjf-bsbf", "time-slicing", 2),
        ("sjf-bsbf", "mps", 4),
    }


def test_the_simulated_side_pays_for_starting_and_stopping(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    sjf = work.Case("sjf", "time-slicing")
    free, dear = (sim.simulate(sjf, jobs, profile, options, Costs(launch))["makespan_s"] for launch in (0.0, 7.0))
    assert dear > free + 100
    tiresias = sim.simulate(work.Case("tiresias-12", "time-slicing"), jobs, profile, options, Costs(7.0, 2.0))
    assert tiresias["preemptions"] > 0


def tiny_profile(path):
    """ncf at a batch that a processor can bear, as slow as it may be there."""
    machine = Machine("CPU", None, None, "today", "test")
    done = []
    for mechanism in ("time-slicing",):
        for batch in (64, 256):
            sample = Sample(Setting("ncf", batch), 0.02, 0.01, 50)
            done.append(Measurement(Wish(mechanism, (sample.setting,)), (sample,), 1.0))
        both = tuple(Sample(Setting("ncf", 64), 0.03, 0.01, 50) for _ in range(2))
        done.append(Measurement(Wish(mechanism, tuple(s.setting for s in both)), both, 1.0))
    save(conclude(machine, done, Naming("tiny")), path)


def test_two_real_jobs_through_the_service_and_again_from_what_is_kept(options, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    physical, page = importlib.import_module("physical"), importlib.import_module("physical_page")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1] / "src"))
    tiny_profile(tmp_path / "tiny.json")
    told = {"profile": str(tmp_path / "tiny.json"), "gpus": 1, "jobs": 2, "mean": 0.5, "repeats": 1}
    small = Namespace(**{**vars(options), **told, "only": ["sjf-bsbf"], "crowds": []})
    (row,) = physical.run_all(small)
    (result,) = Path(options.out).glob("sjf-bsbf-logical-2-run1.json")
    kept = json.loads(result.read_text())
    assert len(kept["jobs"]) == 2
    assert all(job["launch_s"] > 0 and job["exit_s"] > 0 for job in kept["jobs"])
    assert (Path(options.out) / "sjf-bsbf-logical-2-run1.journal.gz").stat().st_size > 0
    lines = gzip.decompress((Path(options.out) / "sjf-bsbf-logical-2-run1.progress.gz").read_bytes()).splitlines()
    seen = [json.loads(line) for line in lines]
    assert {one["job"] for one in seen} == {"1", "2"}
    assert all(kept["jobs"][0]["submitted"] < one["at"] and one["iteration"] > 0 for one in seen)
    assert kept["machine"]
    assert row["measured"]["makespan_s"][0] > kept["jobs"][0]["launch_s"]
    before = result.stat().st_mtime_ns
    page.show(physical.run_all(small))
    assert result.stat().st_mtime_ns == before, "a case that was run is not run again"
    assert "sjf-bsbf logical C=2" in capsys.readouterr().out
    cold = Namespace(**{**vars(small), "minutes": 1e-6})
    result.write_text(json.dumps(kept | {"cold": True}))
    capsys.readouterr()
    physical.run_all(cold)
    assert "sjf-bsbf-logical-2-run1: left for the next call" in capsys.readouterr().out, "a cold case is run again"
    for other in ({"seed": 2}, {"gpus": 2}):
        with pytest.raises(SystemExit, match="results of another workload"):
            physical.run_all(Namespace(**{**vars(small), **other}))
    assert not list(Path(options.out).glob("*.part"))
    assert len(physical.kept(Path(options.out), Namespace(**{**vars(options), "gpus": None}))) == 1


def story(job, launch_s, iterating_s, **more):
    """A job that ran in one piece, as a case's file tells it."""
    ran_s = launch_s + 1.0 + iterating_s
    return {
        "name": job.name,
        "launch_s": launch_s,
        "exit_s": 1.0,
        "ran_s": ran_s,
        "shared": False,
        "preemptions": 0,
    } | more


def case_file(model, jobs, policy, machine, launch_s, stretch, **more):
    """A case in which every iteration took `stretch` times what the profile says."""
    return {
        "case": {"policy": policy, "mechanism": "time-slicing"},
        "machine": machine,
        "jobs": [story(job, launch_s, stretch * model.alone_s(job), **more) for job in jobs],
        "stops_s": [3.0],
        "measured": {"makespan_s": 100.0},
    }


def test_a_box_is_known_from_the_other_cases_on_it_and_from_jobs_that_ran_alone(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    model = work.MeasuredModel(profile, "time-slicing")
    mine = case_file(model, jobs, "sjf", "here", 99.0, 9.0)
    near = case_file(model, jobs, "fifo", "here", 4.0, 1.5)
    shared = case_file(model, jobs, "sjf-ffs", "here", 50.0, 7.0, shared=True)
    far = case_file(model, jobs, "fifo", "there", 8.0, 0.5)
    box = sim.box_of(mine, [mine, near, shared, far], jobs, profile)
    assert list(box.stretch.values()) == pytest.approx([1.5] * 12)
    assert {tuple(set(values)) for values in box.overheads_s.values()} == {(51.0, 5.0)}, "beside others is a start too"
    assert box.costs(3.0, 1).stop_s == 2.0
    shared["case"]["mechanism"] = "mps"
    box = sim.box_of(mine, [mine, near, shared, far], jobs, profile)
    assert {tuple(set(values)) for values in box.overheads_s.values()} == {(5.0,)}, "the same mechanism counts alone"
    cold = case_file(model, jobs, "fifo", "here", 70.0, 3.0) | {"cold": True}
    box = sim.box_of(mine, [mine, far, cold], jobs, profile)
    assert {tuple(set(values)) for values in box.overheads_s.values()} == {(9.0,)}, (
        "any, if nothing else ran on this one"
    )
    assert list(box.stretch.values()) == pytest.approx([0.5] * 12)


def test_a_box_gives_every_kind_its_own_pace_and_launch(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    kind, other = jobs[0].setting, jobs[1].setting
    plain = work.MeasuredModel(profile, "mps")
    result = case_file(work.MeasuredModel(profile, "time-slicing"), jobs, "fifo", "here", 4.0, 1.0)
    slow = case_file(work.MeasuredModel(profile, "time-slicing"), jobs, "fifo", "here", 30.0, 2.0)
    by_kind = zip(jobs, slow["jobs"], result["jobs"], strict=True)
    result["jobs"] = [dear if job.setting == kind else row for job, dear, row in by_kind if job.setting != other]
    box = sim.box_of({"case": {"mechanism": "mps"}, "machine": "here"}, [result], jobs, profile)
    model = work.MeasuredModel(profile, "mps", box)
    seen, unseen = (work.Job("j", 0.0, one.task, 1, one.batch, 1) for one in (kind, other))
    place = work.Placement(1, 1)
    assert model.iteration_time(seen, 1, place) == pytest.approx(2.0 * plain.iteration_time(seen, 1, place))
    assert model.iteration_time(unseen, 1, place) == plain.iteration_time(unseen, 1, place)
    assert (box.costs(0.0, 1).launch(seen), box.costs(0.0, 1).launch(unseen)) == (31.0, work.GUESSED_LAUNCH_S)


def test_each_run_is_simulated_with_the_box_it_ran_on(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    model = work.MeasuredModel(profile, "time-slicing")
    quick, slow = (
        [case_file(model, jobs, policy, where, launch_s, 1.0) for policy in ("sjf", "fifo")]
        for where, launch_s in (("here", 4.0), ("there", 30.0))
    )
    slow[0]["case"]["repeat"] = slow[1]["case"]["repeat"] = 1
    rows = sim.compare([*quick, *slow], jobs, profile, options)
    for row in rows:
        draws = row["simulated"]["makespan_s"]
        one, other = draws[: sim.DRAWS], draws[sim.DRAWS :]
        assert len(set(one)) == 1, "all starts were alike"
        assert other[0] == pytest.approx(one[0] + 26.0 * len(jobs), rel=0.1)


def test_starts_are_drawn_from_those_that_were_seen_and_always_the_same(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    model = work.MeasuredModel(profile, "time-slicing")
    seen = [case_file(model, jobs, policy, "here", launch_s, 1.0) for policy, launch_s in (("sjf", 2.0), ("fifo", 6.0))]
    mine = case_file(model, jobs, "sjf", "here", 99.0, 1.0)
    mine["case"]["repeat"] = 1
    box = sim.box_of(mine, [*seen, mine], jobs, profile)
    job = work.Job("j", 0.0, jobs[0].task, 1, jobs[0].batch, 1)
    drawn = [
        [costs.launch(job) for _ in range(50)] for costs in (box.costs(0.0, 1), box.costs(0.0, 1), box.costs(0.0, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {3.0, 7.0}
    (row, _) = sim.compare([*seen, mine], jobs, profile, options)
    assert len(set(row["simulated"]["makespan_s"])) > sim.DRAWS
    assert sim.compared(row, "makespan_s").spread > 0


def test_the_paper_reads_the_rows_that_the_script_writes(work, sim, options, tmp_path):
    from carpool.report.paper import config as configuration
    from carpool.report.paper.measured import read_measured

    page = importlib.import_module("physical_page")
    profile = load("h200")
    jobs = work.workload(profile, options)
    model = work.MeasuredModel(profile, "time-slicing")
    done = [case_file(model, jobs, policy, "here", 4.0, 1.0) for policy in ("sjf", "fifo")]
    for result in done:
        result["measured"] = dict.fromkeys(("makespan_s", "mean_jct_s", "mean_queue_s"), 100.0)
        result["measured"]["gpu_utilisation"] = 0.5
    page.write_rows(tmp_path / "rows.csv", sim.compare(done, jobs, profile, options))
    config = configuration.load()
    found = read_measured(replace(config, physical=replace(config.physical, measured=tmp_path / "rows.csv")))
    assert [(row.policy, row.jobs_per_gpu, row.runs) for row in found.cases] == [("sjf", 1, 1), ("fifo", 1, 1)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--load", "0"], "--load"),
        (["--jobs", "0"], "--jobs"),
        (["--mean", "nan"], "--mean"),
        (["--gpus", "-1"], "--gpus"),
        (["--crowds", "0"], "--crowds"),
        (["--gpus", "1", "--profile", "nosuch"], "nosuch"),
        (["--gpus", "1", "--only", "sfj"], "--only sfj: no such case; give some of sjf,"),
        (["--rows", "rows.csv"], "there are no results"),
    ],
)
def test_wrong_options_are_refused_in_a_line(arguments, problem, tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), *arguments]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert told.returncode
    assert problem in told.stderr
    assert "Traceback" not in told.stderr


def test_who_gains_how_much_and_who_is_off_by_how_much(work, sim):
    page = importlib.import_module("physical_page")
    figures = {"policy": "sjf", "mechanism": "time-slicing", "jobs_per_gpu": 2, "cold": True}
    slow = figures | {"measured": {"mean_jct_s": [90.0, 110.0]}, "simulated": {"mean_jct_s": [100.0, 140.0]}}
    quick = slow | {"policy": "sjf-bsbf", "measured": {"mean_jct_s": [25.0]}, "cold": False}
    (told,) = page.gains([slow, quick])
    assert "exclusive SJF is 4.00 times as long (but SJF found its machine cold)" in told
    found = sim.compared(slow, "mean_jct_s")
    assert (found.measured, found.simulated, found.off) == (100.0, 120.0, pytest.approx(20.0))


def test_what_a_case_measured_is_told_from_submission_to_end(work):
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
    result = live.told(work.Case("tiresias-11", "time-slicing"), live.Outcome(rows, events, [], [0.25, 0.75]))
    measured = result["measured"]
    assert (measured["makespan_s"], measured["mean_jct_s"], measured["mean_queue_s"]) == (22.0, 15.0, 3.0)
    assert (measured["gpu_utilisation"], measured["preemptions"]) == (0.5, 2)
    assert measured["occupied"] == pytest.approx(16 / 22)
    assert result["stops_s"] == [1.5]
