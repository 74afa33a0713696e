"""The short form of the outside suite; `make attack` runs all of it. See outside.py."""

import os
import subprocess
import sys

import pytest

from tests.attack.outside import CASES
from tests.attack.world import ROOT


@pytest.mark.slow
def test_everything_holds():
    """As root it attacks a service with two users, elsewhere one of a plain user; `make attack` as root does both."""
    where = "root" if os.getuid() == 0 else "plain"
    command = [sys.executable, "-m", "tests.attack.outside", "--short", "--where", where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds ") >= 8, "too little was tried"


def test_every_case_says_what_was_tried_and_what_has_to_hold():
    assert len({one.name for one in CASES}) == len(CASES) >= 25
    assert all(one.tried and one.holds for one in CASES)
