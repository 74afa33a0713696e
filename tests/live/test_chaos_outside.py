"""No accepted job is lost, none runs again once complete, and no GPU is over-committed. See chaos_outside.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import chaos_outside as chaos
from tests.support.effort import thorough_only

SCRIPT = Path(__file__).with_name("chaos_outside.py")


def ledger(*beats: tuple[str, int]) -> list[list[str]]:
    """Lines of workers on one GPU: the job, and when it wrote, in beats."""
    return [["beat", job, "1", "0", "1", "node0:0", "7", "6", str(chaos.BEAT_S * at)] for job, at in beats]


def test_jobs_that_compute_at_once_are_found_and_a_pause_is_none():
    at_once = [beat for at in range(6) for beat in (("a", at), ("b", at))]
    paused = [*(("a", at) for at in range(4)), *(("b", at) for at in range(4, 9)), *(("a", at) for at in range(9, 12))]
    switch = [("a", 0), ("b", 1), ("a", 1), *(("b", at) for at in range(3, 9))]
    always = [(-9.0, 9.0)]
    for up, found in ((always, 1), ([(-9.0, 0.0)], 0), ([(0.0, 9.0)], 0)):  # the service is killed, or has just begun
        assert len(chaos.judge_computing(ledger(*at_once), up)) == found
    assert chaos.judge_computing(ledger(*paused), always) == chaos.judge_computing(ledger(*switch), always) == []


def test_more_residents_than_allowed_are_found():
    stays = [(0, 9, "a"), (1, 8, "b"), (2, 7, "c")]
    assert chaos.judge_residents({"node0:0": [*stays, (8, 9, "d")]}) == []
    assert chaos.judge_residents({"node0:0": [*stays, (3, 4, "d")]}) == ["GPU node0:0 held a, b, c, d at once"]


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
