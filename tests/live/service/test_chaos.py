"""No job lost, none run twice at once, no GPU over-committed, whoever is killed and whenever. See chaos.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("chaos.py")


def test_twenty_rounds_of_killing_break_no_promise():
    """`make chaos` plays 500."""
    command = [sys.executable, str(SCRIPT), "--rounds", "20", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["violations"] == []
    assert done.returncode == 0
    assert told["states"].get("finished", 0) >= 10, "too little happened to prove anything"
    assert told["killed"] >= 2
