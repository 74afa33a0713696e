"""No accepted job is lost, none runs again once complete, and no GPU is over-committed. See chaos_outside.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.effort import thorough_only

SCRIPT = Path(__file__).with_name("chaos_outside.py")


@pytest.mark.slow
@thorough_only
def test_kills_from_outside_violate_no_guarantee():
    """`make chaos` kills the service 100 times."""
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["violations"] == []
    assert result["jobs"] >= 8, "too little happened to prove anything"
