"""A job runs as in the shell from which it was submitted: program, environment, settings; but no secrets."""

import json
import os
import sys
from pathlib import Path

import pytest

from carpool.field_types import Variables
from carpool.live.shell import find_program, travelling

pytestmark = pytest.mark.slow


def test_the_active_environment_and_settings_travel_and_secrets_stay():
    shell = {
        "PATH": "/venv/bin:.:bin::/usr/bin",
        "VIRTUAL_ENV": "/venv",
        "PYTHONPATH": "/code",
        "OMP_NUM_THREADS": "4",
        "HF_HOME": "/data/hf",
        "HF_TOKEN": "hf_secret",
        "WANDB_API_KEY": "secret",
        "MLFLOW_TRACKING_URI": "http://user:secret@host/",
        "AWS_ACCESS_KEY_ID": "secret",
        "EDITOR": "vi",
        "CARPOOL_TOKEN": "secret",
        "CARPOOL_HOME": "/home",
        "NCCL_DEBUG": "INFO",
        "PYTHONWARNINGS": "\udcff",
        "PYTHON-ODD": "1",
    }
    found = travelling(shell)
    assert found == {
        "PATH": "/venv/bin:/usr/bin",
        "VIRTUAL_ENV": "/venv",
        "PYTHONPATH": "/code",
        "OMP_NUM_THREADS": "4",
        "HF_HOME": "/data/hf",
        "NCCL_DEBUG": "INFO",
    }


def test_whatever_travels_is_accepted_by_the_service():
    Variables().check(travelling({**os.environ, "TORCH_" + "X" * 500: "1", "PYTHONX": "x" * 10**6}))


def test_a_program_is_found_as_the_shell_finds_it(tmp_path):
    program = tmp_path / "train"
    program.symlink_to(sys.executable)
    assert find_program("train", {"PATH": f"relative:{tmp_path}"}) == str(program)
    assert find_program("./train", {"PATH": ""}) == "./train"
    assert find_program("no-such-program", {"PATH": str(tmp_path)}) is None


# ---- from outside ----------------------------------------------------------------------------------------------------

SCRIPT = "import os, sys; print(sys.prefix, os.environ.get('OMP_NUM_THREADS'), os.environ.get('HF_TOKEN'))"


@pytest.fixture(scope="module")
def own_python(tmp_path_factory) -> Path:
    """An interpreter in an environment of the user's own, made as `python -m venv` makes one."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    return folder


def output(service, said):
    assert said.code == 0, said.err
    job = json.loads(said.out)["job"]
    service.until(job, "finished")
    return service.call("logs", job).out.split()


def test_python_is_that_of_the_submitters_environment(service, own_python):
    shell = {"PATH": f"{own_python}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "3", "HF_TOKEN": "secret"}
    submit = ("submit", "--json", "--")
    assert output(service, service.call(*submit, "python", "-c", SCRIPT, **shell)) == [str(own_python), "3", "None"]
    with_token = ("submit", "--json", "--env", "HF_TOKEN", "--env", "OMP_NUM_THREADS=5", "--")
    assert output(service, service.call(*with_token, "python", "-c", SCRIPT, **shell))[1:] == ["5", "secret"]
    clean = service.call("submit", "--json", "--clean-env", "--", "python3", "-c", SCRIPT, **shell)
    assert output(service, clean)[1:] == ["None", "None"]
    job = json.loads(service.call(*submit, "python", "-c", "pass", **shell).out)["job"]
    shown = service.json("show", job)["spec"]
    assert shown["command"][0] == f"{own_python}/bin/python"
    assert "OMP_NUM_THREADS" in service.call("show", job).out


def test_a_program_that_this_shell_does_not_find_is_said(service):
    said = service.call("submit", "--json", "--", "no-such-program-here")
    assert said.code == 0
    assert "'no-such-program-here' is not in your PATH" in said.err
