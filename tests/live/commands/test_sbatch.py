"""Batch scripts of Slurm: what their `#SBATCH` lines mean to Carpool, and what is named as ignored."""

import json
import re
from pathlib import Path

import pytest

from carpool.errors import InputError
from carpool.live.commands import sbatch

pytestmark = pytest.mark.slow

SCRIPT = """#!/bin/bash -e
#SBATCH --job-name=tiny   # a comment
#SBATCH --gres=gpu:a100:2,lscratch:10
#SBATCH -t 1-02:30:00 --mem=2G
#SBATCH --array 0-6:2,9%2
#SBATCH --dependency=afterok:3:4,afterany:5
#SBATCH -c4 --account=vision
#SBATCH --partition=long -N 1 --exclusive
#SBATCH --output=out-%x-%A_%a_%j.txt

# a remark
echo "$1 $CARPOOL_ARRAY_INDEX"; env | grep ^SLURM_ | sort; echo problem >&2
#SBATCH --gpus=99
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT)
    return path


def test_the_lines_before_the_first_command_count(script):
    fields, ignored = sbatch.read(script, ["hello"])
    assert {
        name: fields[name] for name in ("name", "project", "gpus", "duration", "array", "after", "cpus", "memory")
    } == {
        "name": "tiny",
        "project": "vision",
        "gpus": 2,
        "duration": (26 * 60 + 30) * 60,
        "array": "0,2,4,6,9",
        "after": ["3", "4"],
        "cpus": 4,
        "memory": "2GiB",
    }
    assert ignored == [
        "--gres=lscratch:10", "%2 of --array", "--dependency=afterany:5", "--partition=long", "-N 1", "--exclusive",
    ]  # fmt: skip
    assert fields["command"][-4:] == ["/bin/bash", "-e", str(script), "hello"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("2:30", 150), ("1:00:05", 3605), ("2-0", 172_800), ("1-1:30", 91_800), ("1-1:1:1", 90_061)],
)
def test_times_as_slurm_writes_them(text, seconds, tmp_path):
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/sh\n#SBATCH --time={text}\ntrue\n")
    fields = sbatch.read(path)[0]
    assert fields["duration"] == fields["limit"] == seconds


def test_a_script_may_ask_to_be_requeued_at_its_limit(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("#!/bin/sh\n#SBATCH --requeue -t 5\ntrue\n")
    fields, ignored = sbatch.read(path)
    assert (fields["requeue"], fields["limit"], ignored) == (True, 300, [])


@pytest.mark.parametrize("line", ["--time=soon", "--gpus=many", "--mem=lots", "--array=1-x:2", "--gpus", "-c four"])
def test_wrong_values_are_refused_with_their_line(line, tmp_path):
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/sh\n#SBATCH {line}\ntrue\n")
    with pytest.raises(InputError, match=r"a\.sh, line 2"):
        sbatch.read(path)


def test_a_script_without_such_lines_is_a_plain_command(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("#!/bin/sh\necho '#SBATCH'\n")
    assert not sbatch.is_batch_script(str(path))
    assert not sbatch.is_batch_script(str(tmp_path / "none.sh"))
    assert not sbatch.is_batch_script(str(tmp_path))


def test_the_bare_name_of_a_script_in_this_folder_runs_as_sbatch_runs_it(service, tmp_path):
    (tmp_path / "plain.sh").write_text("echo plain $1\n")
    said = service.call("submit", "--json", "plain.sh", "word", cwd=tmp_path)
    assert said.code == 0, said.err
    row = service.until(json.loads(said.out)["job"], "finished")
    assert row["name"] == "plain"
    assert row["spec"]["command"] == ["/bin/sh", str(tmp_path / "plain.sh"), "word"]


def test_the_bare_name_of_a_program_stays_a_command(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "plain.sh"
    program.parent.mkdir()
    for path in (program, tmp_path / "plain.sh"):
        path.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert sbatch.is_batch_script("plain.sh")
    monkeypatch.setenv("PATH", str(program.parent))
    assert not sbatch.is_batch_script("plain.sh")


def test_a_script_runs_from_outside(service, tmp_path):
    path = tmp_path / "train.sh"
    lines = [line for line in SCRIPT.splitlines() if "dependency" not in line and "--mem" not in line]
    path.write_text("\n".join(lines) + "\n")
    said = service.call("submit", "--json", "--name", "other", str(path), "hello", cwd=tmp_path)
    assert said.code == 0, said.err
    assert "ignored: " in said.err
    assert "--partition=long" in said.err
    jobs = json.loads(said.out)["jobs"]
    rows = [service.until(job, "finished") for job in jobs]
    assert [row["name"] for row in rows] == [f"other[{index}]" for index in (0, 2, 4, 6, 9)]
    assert rows[0]["gpus"] == 2
    written = sorted(Path(tmp_path).glob("out-*.txt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    indexes = zip((0, 2, 4, 6, 9), jobs, strict=True)
    assert [file.name for file in written] == [f"out-other-{jobs[0]}_{index}_{job}.txt" for index, job in indexes]
    text = written[2].read_text()
    assert "hello 4\n" in text
    assert "problem\n" in text
    assert set(re.findall("^SLURM_.*", text, re.M)) == {
        f"SLURM_ARRAY_JOB_ID={jobs[0]}", "SLURM_ARRAY_TASK_ID=4", f"SLURM_JOB_ID={jobs[2]}", "SLURM_JOB_NAME=other",
        f"SLURM_SUBMIT_DIR={tmp_path}",
    }  # fmt: skip
