"""The commands `fit` and `profiles`, called as a user calls them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from carpool.errors import InputError
from carpool.profile.commands import fit, profiles
from carpool.profile.schema import load, loads
from carpool.units import parse_bytes

DATA = os.environ.get("CARPOOL_DATA")
ROWS = ["x,1,1,8,0.5", "x,1,1,16,0.9", "x,1,1,32,1.7", "x,1,2,8,0.6", "x,1,2,16,1.0", "x,2,4,8,0.9", "x,2,4,32,2.0"]


def call(command, *arguments) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=True)


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
    assert any("rows hold batch 40" in note and "21.7 of 15.0 GiB" in note for note in notes)


def test_fit_takes_pairs_of_several_files_with_a_mechanism_each(tmp_path):
    xi = tmp_path / "xi.csv"
    xi.write_text(",a,b\na,1.5,2.55555\nb,1.25,1\n")
    options = ("--pairs", xi, "--mechanism", "mps", "--pairs", xi, "--mechanism", "time-slicing")
    profile = loads(call(fit, "--name", "m", *options, "--json").output, "stdout")
    assert profile.pair_mechanisms() == ["mps", "time-slicing"]
    assert profile.interference("mps").pair("a", 1, "b", 1) == 2.5556
    assert profile.interference("mps").pair("b", 1, "a", 1) == 1.25
    assert "ξ, row slowed by column" in call(fit, "--name", "m", *options).output


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


def test_profiles_lists_by_default_and_by_name():
    for arguments in ((), ("list",)):
        assert "h200" in call(profiles, *arguments).output
        names = [entry["name"] for entry in json.loads(call(profiles, *arguments, "--json").output)]
        assert names == ["gavel", "h200", "t4"]


def test_profiles_show():
    shown = call(profiles, "show", "t4").output
    assert "deepspeech2" in shown
    assert "largest batch alone" in shown
    assert call(profiles, "show", "h200").output.count("ξ, row slowed by column") == 4
    assert "6.04" in call(profiles, "show", "gavel").output
    assert json.loads(call(profiles, "show", "gavel", "--json").output)["schema"] == 2
    assert isinstance(call(profiles, "show", "t5").exception, InputError)


def test_importing_the_commands_loads_nothing_heavy():
    code = (
        "import sys, carpool.profile.commands, carpool.profile.interference\n"
        "print([m for m in ('numpy', 'scipy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def documented() -> list[list[str]]:
    """The commands of docs/profiles.md that write shipped files."""
    import shlex

    text = (Path(__file__).parents[1] / "docs" / "profiles.md").read_text().replace("\\\n", " ")
    lines = [line for block in text.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()]
    return [shlex.split(line.replace("$CARPOOL_DATA", DATA or "")) for line in lines if "library/" in line]


def test_the_documented_command_is_the_one_that_measured_h200(monkeypatch):
    """What it plans is what the raw points are: neither more nor less."""
    from carpool.gpu import nvml
    from carpool.profile.measure import commands
    from carpool.profile.measure.plan import plan
    from carpool.profile.measure.session import Gpu

    (words,) = [words for words in documented() if words[1] == "profile"]
    told = commands.profile.make_context("profile", words[2:]).params
    del told["as_json"]
    asked = commands.Asked(**told)
    monkeypatch.setattr(commands.mps, "available", lambda: None)
    phases = plan(asked.sources(Gpu(nvml.Device(0, "GPU-1", "test", 1, "1"))), asked.scope(on_gpu=True))
    assert {wish for phase in phases for wish in phase.wishes} == {done.wish for done in load("h200").raw}


@pytest.mark.skipif(not DATA, reason="CARPOOL_DATA is not set: the measurements are not part of the project")
def test_the_documented_commands_make_the_shipped_files(tmp_path):
    """Reads the commands from docs/profiles.md, so that neither they nor the files can drift."""
    root = Path(__file__).parents[1]
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
