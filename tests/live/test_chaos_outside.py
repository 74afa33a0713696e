"""No accepted job is lost, none runs again once complete, and no GPU is over-committed. See chaos_outside.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import chaos_outside as chaos
from tests.support.effort import thorough_only

SCRIPT = Path(__file__).with_name("chaos_outside.py")


def line(what: str, job: str, at: int, attempt: int = 1, rank: int = 0, size: int = 1, pid: int = 7) -> list[str]:
    """A line of a worker on one GPU, `at` in beats."""
    return [what, job, *map(str, (attempt, rank, size)), f"node0:{rank}", str(pid), "6", str(chaos.BEAT_S * at)]


def ledger(*beats: tuple[str, int]) -> list[list[str]]:
    """Lines of workers on one GPU: the job, and when it wrote, in beats."""
    return [line("beat", job, at) for job, at in beats]


def whole(job: str, at: int = 0, **more) -> list[list[str]]:
    """The lines of a job that runs from its start to its end."""
    return [line(what, job, at + number, **more) for number, what in enumerate(("start", "beat", "end"))]


def judged(tmp_path: Path, *lines: list[list[str]], touched=(), rows=None) -> list[str]:
    """What the judge says about these lines, and an array of two jobs that was accepted and is finished."""
    world = chaos.World(tmp_path)
    world.ledger.write_text("".join(" ".join(words) + "\n" for part in lines for words in part))
    world.accepted, world.touched = {"t0-1"}, set(touched)
    finished = [{"name": f"t0-1[{index}]", "status": "finished"} for index in (1, 2)]
    return chaos.judge(world, {"t0-1": finished if rows is None else rows})


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(chaos, "ARRAY", 2)
    return [*whole("t0-1.1"), *whole("t0-1.2", 4)]


def test_what_went_well_is_no_violation(tmp_path, pair):
    assert judged(tmp_path, pair) == []
    killed = [line("start", "t0-1.1", 0, pid=5), line("beat", "t0-1.1", 1, pid=5)]
    assert judged(tmp_path, killed, *[whole("t0-1.1", 3, attempt=2), whole("t0-1.2", 7)], touched=["t0-1.1"]) == []


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([], "t0-1 was accepted with 2 jobs and has 0"),
        ([{"name": f"t0-1[{index}]", "status": "finished"} for index in (1, 2, 1, 2)], "and has 4"),
        ([{"name": "t0-1[1]", "status": "finished"}, {"name": "t0-1[2]", "status": "pending"}], "t0-1.2 is pending"),
        ([{"name": "t0-1[1]", "status": "finished"}, {"name": "t0-1[2]", "status": "failed"}], "t0-1.2 is failed"),
    ],
)
def test_jobs_that_are_lost_or_there_twice_are_found(tmp_path, pair, rows, found):
    (said,) = judged(tmp_path, pair, rows=rows, touched=["t0-1.1"])
    assert found in said


def test_a_job_that_is_finished_and_never_ran_to_its_end_is_found(tmp_path, pair):
    assert judged(tmp_path, pair[:3]) == ["t0-1.2 is finished, and was never complete"]
    assert "t0-1.2 was never complete" in judged(tmp_path, pair[:-1])
    gang = [*whole("t0-1.2", 4, rank=0, size=2), line("start", "t0-1.2", 4, rank=1, size=2)]
    assert "t0-1.2 is finished, and was never complete" in judged(tmp_path, pair[:3], gang)


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (whole("t0-1.2", 8, pid=9), ["t0-1.2, attempt 1, worker 0 was started twice"] * 3),
        (whole("t0-1.2", 8, attempt=2), ["t0-1.2 was complete as attempt 1 and ran again up to attempt 2"]),
        ([line("start", "t0-1.2", 8, attempt=2)], ["t0-1.2 was complete as attempt 1 and ran again up to attempt 2"]),
    ],
)
def test_jobs_that_run_twice_are_found(tmp_path, pair, again, found):
    assert judged(tmp_path, pair, again) == found
    assert judged(tmp_path, pair, again, touched=["t0-1.1"]) == found, "the kill of another job is no excuse"


def test_attempts_that_run_at_once_are_found(tmp_path, pair):
    first, second = whole("t0-1.2", 4), whole("t0-1.2", 5, attempt=2, pid=9)
    mixed = [first[0], second[0], first[1], second[1], second[2]]
    assert judged(tmp_path, pair[:3], mixed, touched=["t0-1.2"]) == ["t0-1.2: attempts 1 and 2 ran at once"]


def test_jobs_that_compute_at_once_are_found_and_a_pause_is_none():
    at_once = [beat for at in range(6) for beat in (("a", at), ("b", at))]
    three = [beat for at in range(6) for beat in (("a", at), ("b", at), ("c", at))]
    paused = [*(("a", at) for at in range(4)), *(("b", at) for at in range(4, 9)), *(("a", at) for at in range(9, 12))]
    switch = [("a", 0), ("b", 1), ("a", 1), *(("b", at) for at in range(3, 9))]
    assert chaos.judge_computing(ledger(*at_once)) == ["GPU node0:0: a attempt 1 and b attempt 1 computed at once"]
    assert len(chaos.judge_computing(ledger(*three))) == 3, "each pair of the three"
    assert chaos.judge_computing(ledger(*at_once), [(0, -1.0, 60.0)]) == [], "both save and leave"
    assert chaos.judge_computing(ledger(*at_once), [(1, -1.0, 60.0), (0, 50.0, 60.0)]), "others do"
    assert chaos.judge_computing(ledger(*paused)) == chaos.judge_computing(ledger(*switch)) == []
    ahead = [line("start", "a", 0), line("start", "b", 0), *ledger(("a", 1), ("b", 1), ("a", 2), ("a", 3))]
    assert chaos.judge_computing(ahead) == [], "a job that starts ahead of its turn stands after its first step"


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
