"""The commands `fit` and `profiles`, called as a user calls them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from carpool.cli import cli
from carpool.commands.fit import fit
from carpool.commands.profiles import profiles
from carpool.errors import InputError
from carpool.profile.matrix import matrix
from carpool.profile.measure.conclude import Naming, conclude
from carpool.profile.measure.raw import MeasuredMachine, Measurement, MeasurementRequest, Sample, Setting
from carpool.profile.schema import load, loads, save
from carpool.profile.values import Pair, Profile
from carpool.units import parse_bytes
from tests.support import ROOT

DATA = os.environ.get("CARPOOL_DATA")
ROWS = ["x,1,1,8,0.5", "x,1,1,16,0.9", "x,1,1,32,1.7", "x,1,2,8,0.6", "x,1,2,16,1.0", "x,2,4,8,0.9", "x,2,4,32,2.0"]


def call(command, *arguments) -> Result:
    """Call a command below `carpool`, because click keeps the names of the help option from the first call."""
    return CliRunner().invoke(cli, [command.name, *map(str, arguments)], catch_exceptions=True)


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["app,nodes,gpus,local_bsz,step_time", *ROWS]) + "\n")
    return path


def memory_file(folder: Path, task: str, per_sample: float) -> Path:
    path = folder / "m.json"
    solo = [{"model": task, "batch": b, "accum": 1, "iter_s": 0.1, "mem_gib": 1 + per_sample * b} for b in (2, 4)]
    path.write_text(json.dumps({"solo": solo}))
    return path


def test_fit_prints_tables_and_writes_a_profile(tmp_path, table):
    out = tmp_path / "mine.json"
    result = call(fit, "--name", "mine", "--throughput", table, "--gpu", "X", "--gpu-memory", "16GiB", "--out", out)
    assert result.exit_code == 0, result.output
    assert "Iteration time" in result.output
    assert f"wrote {out}" in result.output
    profile = load(out)
    assert (profile.gpu.memory_bytes, profile.tasks["x"].error.points) == (16 * 2**30, 7)
    assert profile.tasks["x"].source == "t.csv", "no folder of the maker's machine"


def test_fit_as_json_is_the_file_itself(tmp_path, table):
    out = tmp_path / "mine.json"
    result = call(fit, "--name", "mine", "--throughput", table, "--json", "--out", out)
    assert result.output == out.read_text()
    assert loads(result.output, "stdout").name == "mine"


def test_fit_notes_what_is_odd_in_the_data(tmp_path, table):
    table.write_text(table.read_text() + "x,1,1,40,0.4\n")
    memory = memory_file(tmp_path, "x", 0.25)
    options = ("--throughput", table, "--memory", memory, "--gpu", "X", "--gpu-memory", "15GiB", "--json")
    notes = json.loads(call(fit, "--name", "m", *options).output)["notes"]
    assert any("batch 40 (0.4 s) ran faster than batch 32 (1.7 s)" in note for note in notes)
    assert any("batch 40 ran on this GPU" in note and "21.7 of 15.0 GiB" in note for note in notes)


def test_fit_takes_pairs_of_several_files_with_a_mechanism_each(tmp_path):
    xi = tmp_path / "xi.csv"
    xi.write_text(",a,b\na,1.5,2.55555\nb,1.25,1\n")
    options = ("--pairs", xi, "--mechanism", "mps", "--pairs", xi, "--mechanism", "time-slicing")
    profile = loads(call(fit, "--name", "m", *options, "--json").output, "stdout")
    assert profile.pair_mechanisms() == ["mps", "time-slicing"]
    assert profile.interference("mps").pair("a", 1, "b", 1) == 2.5556
    assert profile.interference("mps").pair("b", 1, "a", 1) == 1.25
    assert "ξ, row slowed down by column" in call(fit, "--name", "m", *options).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to fit; give --throughput"),
        (("--pairs", "p.csv", "--memory", "m.json"), "--memory: memory belongs to tasks"),
        (("--throughput", "none.csv"), "none.csv: no such file"),
        (("--throughput", "{table}", "--gpu-memory", "16GiB"), "--gpu: missing"),
        (
            ("--throughput", "{table}", "--gpu", "X", "--gpu-memory", "lots"),
            "--gpu-memory 'lots': write a size",
        ),
        (("--throughput", "{table}", "--batch-norm", "y"), "--batch-norm y: no such task in the rows; they have x"),
        (("--throughput", "{table}", "--activation-scale", "0"), "--activation-scale 0.0: give a finite number"),
        (("--throughput", "{table}", "--context-gib", "nan"), "--context-gib nan: give a finite number"),
        (("--pairs", "{table}", "--mechanism", "magic"), "--mechanism magic: unknown; give mps"),
        (("--pairs", "a", "--mechanism", "mps", "--mechanism", "mps"), "--mechanism: 2 of them for 1 --pairs"),
    ],
)
def test_bad_options_are_input_errors_and_write_nothing(tmp_path, table, options, message):
    out = tmp_path / "out.json"
    result = call(fit, "--name", "m", "--out", out, *(option.format(table=table) for option in options))
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(message)
    assert not out.exists()


@pytest.mark.parametrize(("text", "size"), [("15GiB", 15 * 2**30), ("80 GB", 80 * 10**9), ("15109mib", 15109 * 2**20)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.slow
def test_profiles_lists_by_default_and_by_name():
    for arguments in ((), ("list",)):
        assert "h200" in call(profiles, *arguments).output
        names = [entry["name"] for entry in json.loads(call(profiles, *arguments, "--json").output)]
        assert names == ["gavel", "h200", "t4"]


def test_profiles_show():
    shown = call(profiles, "show", "t4").output
    assert "deepspeech2" in shown
    assert "largest batch alone" in shown
    assert call(profiles, "show", "h200").output.count("ξ, row slowed down by column") == 2
    assert "6.04" in call(profiles, "show", "gavel").output
    assert json.loads(call(profiles, "show", "gavel", "--json").output)["schema"] == 2
    assert isinstance(call(profiles, "show", "t5").exception, InputError)


def test_the_matrix_shows_every_measured_pair_and_no_other():
    def pair(a, batch_a, b, batch_b, xi_a, xi_b):
        return Pair(a, batch_a, b, batch_b, "mps", xi_a, xi_b)

    found = matrix(
        Profile(
            "p",
            "",
            pairs=(
                pair("b", 4, "a", 8, 1.2, 1.5),
                pair("a", 8, "a", 8, 1.0, 1.5),
                pair("a", 1024, "b", 4, 0.9, 1.7),
                Pair("a", 8, "c", 1, "time-slicing", 3.0, 3.0),
            ),
        ),
        "mps",
    )
    assert found.labels == ("a 8", "b 4", "a 1,024"), "smallest batches first"
    assert found.rows == ((1.25, 1.5, None), (1.2, None, 1.7), (None, 1.0, None))


# ---- merge ----------------------------------------------------------------------------------------------------------


def series(folder: Path, name: str, pace: float, gpu: str = "X", memory: int = 10**9, task: str = "a", **said) -> Path:
    """A profile of one task alone at two batches and beside its like, on a machine of a given pace."""
    done, mechanism = [], said.pop("mechanism", "mps")
    for jobs in (((8, 0.1),), ((16, 0.12),), ((8, 0.15), (8, 0.15))):
        samples = tuple(Sample(Setting(task, b), pace * s, 0.01, 50, memory + b, 10**8) for b, s in jobs)
        done.append(
            Measurement(MeasurementRequest(mechanism, tuple(sample.setting for sample in samples)), samples, 1.0)
        )
    machine = MeasuredMachine(gpu, said.pop("room", 10**10), said.pop("driver", "1"), said.pop("date", "2026"), "test")
    save(conclude(machine, done, Naming(name, f"about {name}", **said)), folder / f"{name}.json")
    return folder / f"{name}.json"


def test_merge_makes_one_profile_of_two_series(tmp_path):
    one = series(tmp_path, "one", 1.0, batch_norm=("a",), notes=("odd",), date="2025")
    two = series(tmp_path, "two", 2.0, notes=("odd", "odder"), driver="2", room=9 * 10**9)
    result = call(profiles, "merge", one, two, "--note", "oddest", "--out", tmp_path / "m.json")
    assert result.exit_code == 0, result.output
    assert "Iteration time" in result.stdout
    assert result.stdout.endswith(f"wrote {tmp_path / 'm.json'}; 6 measurements in 2 series\n")
    assert "not checked" in result.stderr
    found = load(tmp_path / "m.json")
    assert (found.name, found.description) == ("one", "about one")
    assert [done.series for done in found.raw] == [0, 0, 0, 1, 1, 1]
    assert found.tasks["a"].core().compute(8) == pytest.approx(0.15, rel=1e-3)
    assert found.tasks["a"].batch_norm is True, "the other does not say"
    assert [(pair.xi_a, pair.runs) for pair in found.pairs] == [(1.5, 2)]
    assert found.notes[:3] == ("odd", "odder", "oddest")
    assert len(found.notes) == 5, "what every profile notes is noted once"
    assert found.measured == "2025, test; 2026, test"
    assert (found.gpu.driver, found.gpu.memory_bytes) == ("1; 2", 9 * 10**9)


def test_merge_keeps_series_apart_that_were_merged_before(tmp_path):
    one, two = (series(tmp_path, name, pace) for name, pace in (("one", 1.0), ("two", 2.0)))
    three = series(tmp_path, "three", 3.0, date="2027")
    call(profiles, "merge", two, three, "--out", tmp_path / "m.json")
    options = ("--name", "all", "--description", "", "--out", tmp_path / "all.json", "--json")
    result = call(profiles, "merge", one, tmp_path / "m.json", *options)
    assert result.stdout == (tmp_path / "all.json").read_text()
    found = load(tmp_path / "all.json")
    assert (found.name, found.description, found.measured) == ("all", "", "2026, test; 2027, test")
    assert [done.series for done in found.raw] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.tasks["a"].core().compute(8) == pytest.approx(0.2, rel=1e-3)
    again = call(profiles, "merge", three, tmp_path / "m.json", "--out", tmp_path / "x.json").exception
    assert "contains the same measurements as" in str(again), "it is in there as the second series"


def test_merge_of_different_tasks_says_that_nothing_can_be_compared(tmp_path):
    one = series(tmp_path, "one", 1.0)
    result = call(profiles, "merge", one, series(tmp_path, "two", 1.0, task="b"), "--out", tmp_path / "m.json")
    assert result.exit_code == 0, result.output
    assert "no task is in two of the profiles" in result.stderr
    assert sorted(load(tmp_path / "m.json").tasks) == ["a", "b"]


def test_merge_loses_no_task_that_was_measured_under_another_mechanism(tmp_path):
    one = series(tmp_path, "one", 1.0)
    two = series(tmp_path, "two", 2.0, task="b", mechanism="time-slicing", batch_norm=("b",))
    assert call(profiles, "merge", one, two, "--out", tmp_path / "m.json").exit_code == 0
    found = load(tmp_path / "m.json")
    assert [task.core().compute(8) for task in found.tasks.values()] == pytest.approx([0.1, 0.2], rel=1e-3)
    assert found.tasks["b"].batch_norm is True
    assert found.notes[0] == "Iteration times are those under mps; of b, under time-slicing."
    three = series(tmp_path, "three", 3.0, task="b", date="2027")
    assert call(profiles, "merge", tmp_path / "m.json", three, "--out", tmp_path / "n.json").exit_code == 0
    again = load(tmp_path / "n.json")
    assert again.tasks["b"].core().compute(8) == pytest.approx(0.3, rel=1e-3), "now it is known under mps, too"
    assert [note for note in again.notes if "Iteration times" in note] == ["Iteration times are those under mps."]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "a merge needs at least two profiles; give them by name or path"),
        (("{one}",), "a merge needs at least two profiles"),
        (("{one}", "{one}"), "{one}: contains the same measurements as {one}; give each profile once"),
        (("{one}", "{grown}"), "{grown}: contains the same measurements as {one}"),
        (("{one}", "gavel"), "gavel: has no raw measurements to merge; give profiles that carpool profile measured"),
        (("t4", "{one}"), "t4: has no raw measurements"),
        (("{one}", "h201"), "h201: no such profile (did you mean h200?)"),
        (("{one}", "{other}"), "{other}: measured on Y, and {one} on X; merge only profiles of the same GPU"),
        (("{one}", "{nameless}"), "{nameless}: does not name its GPU"),
        (("{one}", "{larger}"), "{larger}: a at batch 8 takes 1431 MiB, and 954 MiB in {one}, so it is not the same"),
        (("{one}", "{normed}"), "{normed}: tasks.a.batch_norm: True, unlike before, so it is not the same training"),
    ],
)
def test_what_does_not_belong_together_is_not_merged(tmp_path, names, message):
    made = {
        "one": series(tmp_path, "one", 1.0),
        "other": series(tmp_path, "other", 2.0, gpu="Y"),
        "larger": series(tmp_path, "larger", 2.0, memory=15 * 10**8),
        "normed": series(tmp_path, "normed", 2.0, batch_norm=("a",)),
        "nameless": tmp_path / "nameless.json",
        "grown": tmp_path / "grown.json",
    }
    first = load(made["one"])
    save(replace(load(made["other"]), gpu=None), made["nameless"])
    save(replace(first, raw=(*first.raw, *(replace(d, seconds=2.0) for d in first.raw))), made["grown"])
    save(replace(first, tasks={"a": replace(first.tasks["a"], batch_norm=False)}), made["one"])
    result = call(profiles, "merge", *(name.format(**made) for name in names), "--out", tmp_path / "out.json")
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(message.format(**made))
    assert not (tmp_path / "out.json").exists()


def test_importing_the_commands_loads_nothing_heavy():
    code = (
        "import sys, carpool.commands.profiles, carpool.profile.interference\n"
        "print([m for m in ('numpy', 'scipy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def documented() -> list[list[str]]:
    """The commands of docs/reference/shipped-profiles.md that write shipped files, or what they are made of."""
    import shlex

    text = (ROOT / "docs" / "reference" / "shipped-profiles.md").read_text().replace("\\\n", "")
    text = text.split("## How the shipped files were made")[1].split("\n## ")[0]
    lines = [line for block in text.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()]
    return [shlex.split(line.replace("$CARPOOL_DATA", DATA or "")) for line in lines if "--out" in line]


@pytest.mark.parametrize(("which", "left"), [(0, 0), (1, 2), (2, 2), (3, 0)])
def test_the_documented_commands_are_those_that_measured_h200(monkeypatch, which, left):
    """What they plan is what the raw points are, but for repetitions that two of them had no time for."""
    from carpool.commands import profile as commands
    from carpool.gpu import nvml
    from carpool.profile.measure.plan import plan
    from carpool.profile.measure.session import MeasuredGpu

    words = [words for words in documented() if words[1] == "profile"][which]
    told = commands.profile.make_context("profile", words[2:]).params
    del told["as_json"]
    asked = commands.ProfileOptions(**told)
    monkeypatch.setattr(commands.mps, "available", lambda: None)
    phases = plan(asked.sources(MeasuredGpu(nvml.Device(0, "GPU-1", "test", 1, "1"))), asked.scope(on_gpu=True))
    planned = {request for phase in phases for request in phase.requests}
    measured = {done.request for done in load("h200").raw if done.series == which}
    assert measured <= planned
    assert [request.run for request in planned - measured] == [1] * left


@pytest.mark.slow
def test_the_documented_merge_makes_h200(tmp_path, monkeypatch):
    """Of what each series concludes for itself, the documented command makes the shipped file."""
    # most of the fits are for the held-out errors, which may differ below; test_conclude.py compares them
    monkeypatch.setattr("carpool.profile.measure.conclude.hold_out", lambda runs: (None, 0))
    shipped = load("h200")
    machine = MeasuredMachine(
        shipped.gpu.name, shipped.gpu.memory_bytes, shipped.gpu.driver, *shipped.measured.split(", ", 1)
    )
    norms = tuple(name for name, task in shipped.tasks.items() if task.batch_norm)
    for number, name in enumerate(("first", "second", "third", "fourth")):
        own = [replace(done, series=0) for done in shipped.raw if done.series == number]
        told = Naming("h200" if number == 0 else name, "", norms, shipped.notes[:1])
        save(conclude(machine, own, told), tmp_path / f"{name}.json")
    (words,) = [words for words in documented() if words[1:3] == ["profiles", "merge"]]
    assert words[words.index("--out") + 1].endswith("library/h200.json")
    words[words.index("--out") + 1] = "h200.json"
    monkeypatch.chdir(tmp_path)
    assert call(profiles, *words[2:]).exit_code == 0
    made = load(tmp_path / "h200.json")
    rough = {name: replace(task, **dict.fromkeys(FITTED)) for name, task in shipped.tasks.items()}
    assert {name: replace(task, **dict.fromkeys(FITTED)) for name, task in made.tasks.items()} == rough
    assert replace(made, tasks={}, kappa={}) == replace(shipped, tasks={}, kappa={})


FITTED = ("alpha_s", "beta_s", "knee", "error", "busy", "demands")
"""What may differ in the last digits on another processor."""


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="CARPOOL_DATA is not set: the measurements are not part of the project")
def test_the_documented_commands_make_the_shipped_files(tmp_path):
    """Reads the commands from docs/reference/shipped-profiles.md, so that neither they nor the files can drift."""
    root = ROOT
    commands = [words for words in documented() if words[1] == "fit"]
    assert len(commands) == 2
    for words in commands:
        shipped = root / words[words.index("--out") + 1]
        words[words.index("--out") + 1] = str(tmp_path / shipped.name)
        assert call(fit, *words[2:]).exit_code == 0
        ours, theirs = load(tmp_path / shipped.name), load(shipped)
        assert (ours.pairs, ours.groups, ours.gpu, ours.notes) == (
            theirs.pairs,
            theirs.groups,
            theirs.gpu,
            theirs.notes,
        )
        assert list(ours.tasks) == list(theirs.tasks)
        for name, task in ours.tasks.items():
            assert task.alpha_s == pytest.approx(theirs.tasks[name].alpha_s, rel=0.01)
            assert task.memory == theirs.tasks[name].memory
