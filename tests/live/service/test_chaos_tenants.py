"""The judges of chaos_tenants.py find what they look for, and take nothing else for it."""

from dataclasses import replace

from carpool.core import events as ev
from carpool.core.model import Allocation, Closure, Decision, Job
from tests.live import outside_tenants
from tests.live.service import chaos_tenants as tenants

ALWAYS_UP = tenants.Uptime([(0.0, 1000.0)])


def run(job: str, start: float, end: float, *, gpu: int = 0, group: str = "red", limit_s: float = 0.0) -> tenants.Run:
    """A worker that writes every beat from one moment to another."""
    beats = int((end - start) / tenants.BEAT_S)
    times = [start + tenants.BEAT_S * number for number in range(beats)] + [end]
    return tenants.Run(job, 1, 0, gpu, group, limit_s, times)


def test_a_cap_that_is_exceeded_is_found():
    two = [run("1", 0.0, 2.0), run("2", 1.0, 3.0)]
    assert tenants.judge_caps([*two, run("3", 2.5, 4.0), run("4", 0.0, 9.0, group="blue")]) == []
    assert tenants.judge_caps([*two, run("3", 1.5, 4.0)]) == [
        "group red with a cap of 2 GPUs held 3 for at least 0.500 s: jobs 1 attempt 1, 2 attempt 1, 3 attempt 1"
    ]


def test_a_job_that_computes_after_its_limit_is_found_if_a_service_was_up():
    late = run("1", 0.0, 2.0 + tenants.LATE_S, limit_s=1.0)
    assert len(tenants.judge_limits([late], ALWAYS_UP)) == 1
    assert tenants.judge_limits([late], tenants.Uptime([(0.0, 1.0), (2.0, 3.0)])) == []
    assert tenants.judge_limits([run("1", 0.0, 90.0), run("2", 0.0, 2.0, limit_s=1.0)], ALWAYS_UP) == []
    paused = replace(late, times=[*(time for time in late.times if time < 3.0), late.times[-1]])
    assert tenants.judge_limits([paused], ALWAYS_UP) == []


def test_a_job_that_computes_where_a_closure_has_begun_is_found():
    closed = [tenants.Closed(Closure("node0:0", (0,), 10.0), 60.0)]
    stays = run("1", 5.0, 11.0 + tenants.LATE_S)
    assert len(tenants.judge_cleared([stays], closed, ALWAYS_UP)) == 1
    for other in (run("1", 5.0, 12.0), run("1", 5.0, 50.0, gpu=1), run("1", 61.0, 99.0)):
        assert tenants.judge_cleared([other], closed, ALWAYS_UP) == []
    own = [tenants.Closed(Closure("r1", (0,), 10.0, 60.0, "red"), 60.0)]
    ends = [tenants.Closed(Closure("node0:0", (0,), 10.0, lets_finish=True), 60.0)]
    assert tenants.judge_cleared([stays], own, ALWAYS_UP) == tenants.judge_cleared([stays], ends, ALWAYS_UP) == []
    begins = run("1", 11.0 + outside_tenants.LATE_S, 40.0)
    assert len(outside_tenants.judge([begins], ends, ALWAYS_UP, tenants.BEAT_S)) == 1


def started(at: float, gpu: int, closure: Closure, group: str = "red") -> list[ev.Event]:
    job = Job("1", 0.0, "m", 1, 1, 100, group=group)
    plan = ev.Planned(at, (Decision("1", Allocation((gpu,)), "why"),))
    return [ev.Submitted(0.0, job), ev.ClosureSet(1.0, closure), plan]


def test_a_start_that_runs_into_a_closure_is_found():
    soon, seconds = Closure("node0:0", (0,), 10.0), {"1": 8.0}
    assert tenants.judge_starts(started(5.0, 0, soon), seconds) == ([], 1), "it may end before"
    assert len(tenants.judge_starts(started(7.0, 0, soon), seconds)[0]) == 1
    assert len(tenants.judge_starts(started(11.0, 0, soon), {})[0]) == 1, "it has begun"
    assert tenants.judge_starts(started(11.0, 1, soon), seconds) == ([], 0)
    assert tenants.judge_starts(started(11.0, 0, Closure("r1", (0,), 10.0, 60.0, "red")), seconds) == ([], 0)
    over = [*started(2.0, 1, soon)[:2], ev.ClosureRemoved(3.0, "node0:0"), started(11.0, 0, soon)[2]]
    assert tenants.judge_starts(over, seconds) == ([], 0)


def test_accounts_that_miss_jobs_or_seconds_are_found():
    runs = [run("1", 0.0, 10.0), run("2", 5.0, 10.0), run("3", 0.0, 5.0, gpu=1)]
    assert round(tenants.computed_gpu_s(runs), 1) == 15.0, "what is shared counts once"

    def judged(held: float, jobs: int = 3, idle: float = 5.0) -> list[str]:
        gpus = {"existed_gpu_s": 21.0, "idle_gpu_s": idle, "closed_gpu_s": 0.0}
        told = {"rows": [{"user": "ann", "jobs": jobs}], "total": {"held_gpu_s": held}, "gpus": gpus}
        return tenants.judge_usage(told, runs, {"ann": 3})

    assert judged(16.0) == []
    assert judged(16.0, jobs=2) == ["the accounts know 2 jobs of ann, and 3 ended"]
    assert judged(16.0, idle=4.0) == ["the accounts miss 1.0 GPU-seconds of 21.0"]
    assert judged(6.0, idle=15.0) == ["workers computed for 15.0 GPU-seconds, and the accounts have 6.0"]
