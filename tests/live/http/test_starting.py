"""A client waits for a service that is starting, and for no other."""

import json
import subprocess
import time
from contextlib import contextmanager

import pytest

from carpool.live.home import Home
from carpool.live.http import starting
from tests.support.command_line import COMMAND, environment, process

SLOW = """
import sys, time
from carpool.live.commands import serve
begin = serve._bound
def late(host, port):
    time.sleep(2.0)  # the home is locked, and nothing answers
    return begin(host, port)
serve._bound = late
from carpool.cli import main
sys.argv[0] = "carpool"
main()
"""


@contextmanager
def service(home, *program):
    words = [*(program or COMMAND), "serve", "--home", str(home), "--port", "0", "--gpus", "1"]
    started = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(30)


def test_a_command_right_after_serve_waits_for_the_service(tmp_path):
    """The process of the service has not even locked its home when the command looks."""
    for _ in range(2):  # the second time, it finds the files of a service that was here before
        with service(tmp_path):
            said = process("submit", "--home", tmp_path, "--json", "--", "true")
            assert said.code == 0, said.err
            assert json.loads(said.out)["job"]


def test_a_command_says_what_it_waits_for(tmp_path):
    with service(tmp_path, COMMAND[0], "-c", SLOW):
        until = time.monotonic() + 30.0
        while Home(tmp_path).holder() is None and time.monotonic() < until:
            time.sleep(0.02)
        said = process("jobs", "--home", tmp_path)
    assert said.code == 0, said.err
    assert said.err == f"waiting for the service of home {tmp_path}, which is starting\n"


def test_a_killed_service_that_is_started_again_is_waited_for(tmp_path):
    """Its old address is not taken for the new one."""
    with service(tmp_path) as first:
        assert process("jobs", "--home", tmp_path).code == 0
        first.kill()
        first.wait(30)
    assert Home(tmp_path).read_address()
    with service(tmp_path):
        assert process("jobs", "--home", tmp_path).code == 0


def test_without_a_service_a_command_fails_at_once(tmp_path, monkeypatch):
    home = Home(tmp_path)
    monkeypatch.setattr(starting, "_is_new_service", lambda pid, least_age_s: False)  # other tests start services
    monkeypatch.setattr(starting, "START_S", 0.3)
    home.create()
    assert not starting.is_starting(home)
    home.acquire()
    assert Home(tmp_path).holder()
    assert starting.is_starting(Home(tmp_path))
    home.write_address("http://127.0.0.1:1")
    assert not starting.is_starting(Home(tmp_path))
    home.remove_address()
    home.release()
    assert not starting.is_starting(home)


def test_services_that_are_started_later_are_not_waited_for(tmp_path):
    with service(tmp_path / "other") as later:
        until = time.monotonic() + 2.0
        while not starting._is_new_service(str(later.pid), least_age_s=0.0):  # a new process has no words for a moment
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not starting._is_new_service(str(later.pid), least_age_s=4.0)


def test_a_service_that_does_not_start_is_not_waited_for(tmp_path):
    with service(tmp_path, *COMMAND) as refused:
        assert process("jobs", "--home", tmp_path).code == 0
        second = subprocess.Popen(
            [*COMMAND, "serve", "--home", str(tmp_path / "other"), "--policy", "nonesuch"],
            env=environment(),
            stderr=subprocess.DEVNULL,
        )
        said = process("jobs", "--home", tmp_path / "other")
        assert second.wait(30) == 2
        assert said.code == 2
        assert "no service runs for home" in said.err
        assert refused.poll() is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/venv/bin/python /venv/bin/carpool serve --gpus 2", True),
        ("python -m carpool.cli serve", True),
        ("carpool submit -- serve", False),
        ("ray serve", False),
        ("serve carpool", False),
        ("carpool jobs", False),
    ],
)
def test_the_command_line_of_a_service_is_known(line, expected):
    assert starting.is_service([word.encode() for word in line.split()]) is expected
