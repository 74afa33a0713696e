"""The physical experiment's script: its workload, both worlds, going on where it stopped; on a logical slot here."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

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
    return Namespace(**told, **more, threshold=None)


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
    tiresias = sim.simulate(work.Case("tiresias", "time-slicing"), jobs, profile, options, Costs(7.0, 2.0))
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
    (probe,) = Path(options.out).glob("probe-*.json")
    assert kept["probe"] == probe.stem
    (alone,) = json.loads(probe.read_text())
    assert alone["overhead_s"] > alone["launch_s"] / 2 > 0 < alone["iteration_s"] < 0.5
    assert row["measured"]["makespan_s"][0] > alone["overhead_s"] / 2
    assert row["simulated"]["makespan_s"][0] > alone["overhead_s"]
    before = result.stat().st_mtime_ns
    page.show(physical.run_all(small))
    assert result.stat().st_mtime_ns == before, "a case that was run is not run again"
    assert "sjf-bsbf logical C=2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="results of another workload"):
        physical.run_all(Namespace(**{**vars(small), "seed": 2}))


def test_a_probed_box_is_simulated_at_its_own_pace(work, sim, options):
    """Cores half as fast: what is alone takes twice as long; a job of another kind keeps the profile's time."""
    profile = load("h200")
    jobs = work.workload(profile, options)
    kind = jobs[0].setting
    rows = [{"task": kind.task, "batch": kind.batch, "iteration_s": 2.0, "overhead_s": 30.0, "exit_s": 1.0}]
    box = sim.box_of(rows)
    model, plain = work.MeasuredModel(profile, "mps", box), work.MeasuredModel(profile, "mps")
    same, other = (work.Job("j", 0.0, one.task, 1, one.batch, 1) for one in (kind, jobs[1].setting))
    place = work.Placement(1, 1)
    assert model.iteration_time(same, 1, place) == 2.0
    assert model.iteration_time(other, 1, place) == plain.iteration_time(other, 1, place)
    costs = box.costs(1.5)
    assert (costs.launch(same), costs.launch(other), costs.stop_s) == (30.0, work.GUESSED_LAUNCH_S, 0.5)


def test_each_run_is_simulated_with_the_box_it_ran_on(work, sim, options):
    profile = load("h200")
    jobs = work.workload(profile, options)
    slow = [
        {"task": s.task, "batch": s.batch, "iteration_s": 5.0, "overhead_s": 30.0, "exit_s": 1.0}
        for s in work.settings(profile)
    ]
    story = {"launch_s": 4.0, "exit_s": 1.0}
    measured = {"makespan_s": 100.0}
    runs = [
        {"case": {"policy": "sjf", "mechanism": "time-slicing", "repeat": repeat}, "jobs": [story], "stops_s": []}
        | {"measured": measured, **told}
        for repeat, told in enumerate(({}, {"probe": "probe-1"}))
    ]
    (row,) = sim.compare(runs, {"probe-1": sim.box_of(slow)}, jobs, profile, options)
    sjf = work.Case("sjf", "time-slicing")
    assert row["simulated"]["makespan_s"][0] == sim.simulate(sjf, jobs, profile, options, Costs(5.0))["makespan_s"]
    assert row["simulated"]["makespan_s"][1] > 5 * row["simulated"]["makespan_s"][0]
