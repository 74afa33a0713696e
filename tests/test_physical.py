"""The physical experiment's script: its workload, both worlds, going on where it stopped; on a logical slot here."""

import importlib.util
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


@pytest.fixture(scope="module")
def physical():
    pytest.importorskip("sqlalchemy")
    spec = importlib.util.spec_from_file_location("physical", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["physical"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def options(tmp_path):
    told = {"out": str(tmp_path / "out"), "profile": "h200", "gpus": None, "jobs": 30, "mean": 8.0, "load": 2.5}
    more = {"repeats": 2, "crowds": [3, 4], "only": None, "minutes": None, "seed": 1, "examples": None}
    return Namespace(**told, **more, threshold=None)


def test_the_workload_is_the_same_every_time_and_has_every_task(physical, options):
    profile = load("h200")
    jobs = physical.workload(profile, "time-slicing", options)
    assert jobs == physical.workload(profile, "time-slicing", options)
    assert len(jobs) == 30
    assert {(job.task, job.batch) for job in jobs} == {(s.task, s.batch) for s in physical.settings(profile)}
    model = physical.MeasuredModel(profile, "time-slicing")
    lengths = [
        job.iterations * model.iteration_time(physical.Job("j", 0.0, job.task, 1, job.batch, 1), 1, (1, 1))
        for job in jobs
    ]
    assert 0.6 * options.mean < sum(lengths) / len(lengths) < 1.4 * options.mean


def test_at_a_measured_batch_the_model_gives_the_measured_time(physical):
    profile = load("h200")
    alone = [
        done.samples[0].iter_s
        for done in profile.raw
        if done.wish.mechanism == "time-slicing" and done.wish.settings == (Setting("bert", 64),)
    ]
    job = physical.Job("j", 0.0, "bert", 1, 64, 1)
    model = physical.MeasuredModel(profile, "time-slicing")
    assert model.iteration_time(job, 1, physical.Placement(1, 1)) == pytest.approx(sum(alone) / len(alone))


def test_all_cases_come_once_before_any_is_repeated(physical, options, monkeypatch):
    monkeypatch.setattr(physical.mps, "available", lambda: None)
    cases = list(physical.cases(options))
    assert len({case.name for case in cases}) == len(cases) == 2 * 11
    assert [case.repeat for case in cases] == [0] * 11 + [1] * 11
    assert {case.kind for case in cases if case.policy == "sjf-bsbf"} >= {
        ("sjf-bsbf", "mps", 2),
        ("sjf-bsbf", "time-slicing", 2),
        ("sjf-bsbf", "mps", 4),
    }


def test_the_simulated_side_pays_for_starting_and_stopping(physical, options):
    profile = load("h200")
    jobs = physical.workload(profile, "time-slicing", options)
    sjf = physical.Case("sjf", "time-slicing")
    free, dear = (physical.simulate(sjf, jobs, profile, options, Costs(launch))["makespan_s"] for launch in (0.0, 7.0))
    assert dear > free + 100
    tiresias = physical.simulate(physical.Case("tiresias", "time-slicing"), jobs, profile, options, Costs(7.0, 2.0))
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


def test_two_real_jobs_through_the_service_and_again_from_what_is_kept(
    physical, options, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("torch")
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
    assert row["measured"]["makespan_s"][0] > row["launch_s"]
    before = result.stat().st_mtime_ns
    physical.show(physical.run_all(small))
    assert result.stat().st_mtime_ns == before, "a case that was run is not run again"
    assert "sjf-bsbf logical C=2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="results of another workload"):
        physical.run_all(Namespace(**{**vars(small), "seed": 2}))
