"""Fitting statistical efficiency: known noise comes back, the shipped fit from its command; bad input is refused."""

import json

import pytest

from carpool.core.elastic import Scaling
from carpool.profile.efficiency import read_epochs
from carpool.profile.fields import ProfileError
from carpool.profile.schema import dumps, load, loads
from tests.profile.test_fit import constants
from tests.support.command_line import call

TIMES = "app,nodes,gpus,local_bsz,step_time\n" + "".join(f"toy,1,1,{b},{0.1 + 0.01 * b}\n" for b in (4, 8, 16, 32))


def tables(folder, noises, batches=(8, 32, 128)):
    """A training of 20 epochs of 100 small iterations; the noise scale is that of the list, in equal parts."""
    rows = ["app,batch,progress,iteration,metric"]
    for batch in batches:
        iterations = 0.0
        for epoch in range(20):
            noise = noises[epoch * len(noises) // 20]
            iterations += 100 * 1000 / (batch / 8 * (noise + 8) / (noise + batch))
            rows.append(f"toy,{batch},{100_000.0 * (epoch + 1)},{round(iterations)},0")
    times, progress = folder / "times.csv", folder / "progress.csv"
    times.write_text(TIMES)
    progress.write_text("\n".join(rows) + "\n")
    return ["fit", "--name", "mine", "--throughput", str(times), "--efficiency", str(progress)]


def test_known_noise_comes_back(tmp_path):
    said = call(*tables(tmp_path, [20.0, 20.0, 400.0, 5000.0]), "--json")
    scaling = json.loads(said.out)["tasks"]["toy"]["scaling"]
    assert (scaling["initial_batch"], scaling["max_batch"]) == (8, 128)
    assert (scaling["min_sub_batch"], scaling["max_sub_batch"]) == (4, 32)
    profile = loads(said.out, "mine.json")
    limits = profile.tasks["toy"].core().scaling
    assert isinstance(limits, Scaling)
    for share, noise in ((0.2, 20.0), (0.45, 20.0), (0.7, 400.0), (0.9, 5000.0)):
        found = next(phase.noise for phase in limits.phases if share < phase.until)
        assert found == pytest.approx(noise, rel=0.05)
    assert loads(dumps(profile), "again.json") == profile
    assert json.loads(said.out)["tasks"]["toy"]["scaling_error"]["p90"] < 0.005


def test_limits_can_be_given_and_are_shown(tmp_path):
    told = [*tables(tmp_path, [100.0]), "--most-per-gpu", "toy=10", "--most-gpus", "toy=3"]
    scaling = json.loads(call(*told, "--json").out)["tasks"]["toy"]["scaling"]
    assert (scaling["max_sub_batch"], scaling["max_gpus"]) == (10, 3)
    assert "8–128" in call(*told).out


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--most-per-gpu", "toy=none"], "--most-per-gpu toy=none: write it as toy=8"),
        (["--most-gpus", "boat=2"], "no such task in the rows; they have toy"),
        (["--most-gpus", "toy=0"], "write it as toy=8"),
    ],
)
def test_limits_that_make_no_sense(tmp_path, more, problem):
    said = call(*tables(tmp_path, [100.0]), *more)
    assert said.code == 2
    assert problem in said.err
    assert said.err.count("\n") == 1


def test_limits_without_a_curve(tmp_path):
    arguments = tables(tmp_path, [100.0])[:-2]
    said = call(*arguments, "--most-gpus", "toy=2")
    assert said.code == 2
    assert "give --efficiency as well" in said.err


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("app,batch,progress\ntoy,8,1", "line 1: no column iteration"),
        ("app,batch,progress,iteration", "no rows below the header"),
        ("app,batch,progress,iteration\ntoy,8,1", "line 2: 3 fields, the header has 4"),
        ("app,batch,progress,iteration\ntoy,8,1,x", "line 2: iteration: 'x' is not a number"),
        ("app,batch,progress,iteration\ntoy,8,0,5", "line 2: progress: '0' is not above 0"),
        ("app,batch,progress,iteration\n,8,1,5", "line 2: app: empty"),
        ("app,batch,progress,iteration\ntoy,8,9,5\ntoy,8,9,6", "line 3: iteration: no progress since the epoch before"),
    ],
)
def test_bad_tables(tmp_path, rows, problem):
    path = tmp_path / "progress.csv"
    path.write_text(rows)
    with pytest.raises(ProfileError, match=problem):
        read_epochs(path)


def test_one_batch_says_nothing_about_others(tmp_path):
    said = call(*tables(tmp_path, [100.0], batches=(8,)))
    assert said.code == 2
    assert "toy: rows of one batch only" in said.err


def test_a_table_of_other_tasks(tmp_path):
    arguments = tables(tmp_path, [100.0])
    (tmp_path / "progress.csv").write_text("app,batch,progress,iteration\nboat,8,1,5\n")
    said = call(*arguments)
    assert said.code == 2
    assert "no name in common" in said.err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"phases": []}, "phases: their ends do not rise to 1"),
        ({"phases": [{"until": 0.5, "noise": 1.0}]}, "phases: their ends do not rise to 1"),
        ({"phases": [{"until": 1.0, "noise": 1.0}, {"until": 1.0, "noise": 2.0}]}, "phases: their ends do not rise"),
        ({"phases": [{"until": 1.0, "noise": -1.0}]}, "noise: -1.0 must be a number from 0"),
        ({"max_batch": 4}, "max_batch: 4 must be a whole number from 12"),
        ({"max_sub_batch": 3}, "max_sub_batch: 3 must be a whole number"),
        ({"odd": 1}, "odd: no such field"),
    ],
)
def test_an_inconsistent_scaling_is_refused(change, problem):
    profile = json.loads(dumps(load("t4")))
    profile["tasks"]["bert"]["scaling"].update(change)
    with pytest.raises(ProfileError, match=problem):
        loads(json.dumps(profile), "mine.json")


@pytest.mark.slow
def test_the_shipped_constants_and_curves_come_from_their_command(data):
    said = call(
        *("fit", "--name", "t4", "--json", "--most-per-gpu", "yolov3=8", "--most-gpus", "ncf=1"),
        *("--throughput", str(data / "pollux" / "throughput.csv")),
        *("--efficiency", str(data / "pollux" / "efficiency.csv")),
    )
    fitted = loads(said.out, "again.json")
    assert sorted(fitted.tasks) == sorted(load("t4").tasks)
    for name, task in load("t4").tasks.items():
        assert constants(fitted.tasks[name]) == pytest.approx(constants(task), rel=0.01), name
    assert {name: task.scaling for name, task in fitted.tasks.items()} == {
        name: task.scaling for name, task in load("t4").tasks.items()
    }
