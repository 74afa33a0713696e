"""`carpool service`: the unit that systemd runs, read by systemd itself where it is installed."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys

import pytest

from carpool.live.commands.system_service import unit_text
from tests.support.command_line import call


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A user's configuration, and a systemctl that notes what it is asked and says what the test wants."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fake = programs / "systemctl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/answer 2>/dev/null\nexit 0\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": f"{programs}:{os.environ['PATH']}"}
    env["CARPOOL_HOME"] = str(tmp_path / "a home with 100%")
    return tmp_path, env


def unit(tmp_path):
    return tmp_path / "config" / "systemd" / "user" / "carpool.service"


def test_install_writes_a_unit_and_starts_it(world):
    tmp_path, env = world
    said = call("service", "install", "--user", "--", "--gpus", "2", env=env)
    assert said.code == 0, said.err
    text = unit(tmp_path).read_text()
    command = next(line for line in text.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    words = [word.replace("%%", "%") for word in shlex.split(command)]
    assert words == [
        sys.executable, "-m", "carpool.cli", "serve", "--home", env["CARPOOL_HOME"], "--gpus", "2",
    ]  # fmt: skip
    assert "KillMode=process" in text, "jobs must survive a restart of the service"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--user daemon-reload", "--user enable carpool.service", "--user restart carpool.service"]
    assert call("service", "uninstall", "--user", env=env).code == 0
    assert not unit(tmp_path).exists()
    assert call("service", "uninstall", "--user", env=env).code == 2


def test_a_wrong_option_of_serve_is_refused_at_once(world):
    tmp_path, env = world
    said = call("service", "install", "--user", "--", "--gpu", "2", env=env)
    assert said.code == 2
    assert "--gpu" in said.err
    assert not unit(tmp_path).exists()


def test_doctor_checks_the_unit(world):
    tmp_path, env = world
    assert call("service", "install", "--user", "--no-start", env=env).code == 0
    assert not (tmp_path / "asked").exists()

    def found():
        return [one for one in json.loads(call("doctor", "--json", env=env).out) if one["what"] == "systemd"]

    (tmp_path / "answer").write_text("active\n")
    assert [one["level"] for one in found()] == ["ok"]
    (tmp_path / "answer").write_text("failed\n")
    assert "failed" in found()[0]["found"]
    unit(tmp_path).write_text(unit(tmp_path).read_text().replace(sys.executable, "/no/such/python"))
    assert "/no/such/python" in found()[0]["found"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("user", [True, False])
def test_systemd_accepts_the_unit(tmp_path, user):
    path = tmp_path / "carpool.service"
    path.write_text(unit_text([sys.executable, "-m", "carpool.cli", "serve", "--home", '/a "b" $c 5%'], user=user))
    command = ["systemd-analyze", "--man=no", *(["--user"] if user else []), "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "carpool.service" in line]
    assert not ours
