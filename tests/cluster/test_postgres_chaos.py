"""No accepted job is lost, none runs twice and the journal has no gap, whatever is killed. See chaos_postgres.py."""

import json
import subprocess
import sys

from tests.support import ROOT


def test_faults_of_services_and_database_violate_no_guarantee():
    """`make chaos` makes 200 faults."""
    command = [sys.executable, "-m", "tests.cluster.chaos_postgres", "--faults", "2", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["violations"] == []
    assert result["jobs"] >= 8, "too little happened to prove anything"
