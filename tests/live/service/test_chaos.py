"""No job is lost, none runs twice at once, and no GPU is over-committed, whatever is killed and when. See chaos.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("chaos.py")


@pytest.mark.slow
def test_twenty_rounds_of_killing_violate_no_guarantee():
    """`make chaos` runs 500 rounds."""
    command = [sys.executable, str(SCRIPT), "--rounds", "20", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["violations"] == []
    assert done.returncode == 0
    assert result["states"].get("finished", 0) >= 10, "too little happened to prove anything"
    assert result["killed"] >= 2
    assert result["pauses"] >= 10
    assert result["closures"] >= 3
    assert min(result["looks"].values()) >= 10
