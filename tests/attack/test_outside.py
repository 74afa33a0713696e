"""The short form of the outside suite; `make attack` runs all of it. See outside.py."""

import os
import subprocess
import sys

import pytest

from tests.attack.outside import CASES
from tests.attack.world import ROOT

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start jobs under other users' ids")


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("root", marks=as_root), "plain"])
def test_everything_holds(where):
    if (
        where == "plain"
        and os.getuid() == 0
        and subprocess.run(["setpriv", "--version"], capture_output=True).returncode
    ):
        pytest.skip("root needs setpriv to become a plain user")
    command = [sys.executable, "-m", "tests.attack.outside", "--short", "--where", where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds ") >= 8, "too little was tried"


def test_every_case_says_what_was_tried_and_what_has_to_hold():
    assert len({one.name for one in CASES}) == len(CASES) >= 25
    assert all(one.tried and one.holds for one in CASES)
