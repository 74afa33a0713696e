"""The jobs on each GPU over time, compared with an account that replays the log for every second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Job
from carpool.sim import Setup, simulate
from carpool.sim.timeline import Segment, segments
from tests.support.turns import TakeTurns

GPUS, JOBS = 4, 5


class Launches:
    """The GPUs and the attempt of each job, by a plain reading of the events."""

    def __init__(self) -> None:
        self.gpus: dict[str, tuple[int, ...]] = {}
        self.attempt: dict[str, int] = {}
        self.paused: set[str] = set()

    def apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.Planned):
            for decision in event.decisions:
                gpus = decision.allocation.gpus if decision.allocation else ()
                if gpus and gpus != self.gpus.get(decision.job, ()):
                    self.attempt[decision.job] = self.attempt.get(decision.job, 0) + 1
                if gpus != self.gpus.get(decision.job, ()):
                    self.paused.discard(decision.job)
                self.gpus[decision.job] = gpus
                if decision.allocation and not decision.allocation.active:
                    self.paused.add(decision.job)
        elif isinstance(event, ev.JobEvent) and event.attempt == self.attempt.get(event.job):
            if isinstance(event, ev.Finished | ev.Failed | ev.Stopped):
                self.gpus[event.job] = ()
            if isinstance(event, ev.Finished | ev.Failed | ev.Stopped | ev.Resumed):
                self.paused.discard(event.job)


@st.composite
def histories(draw) -> list[ev.Event]:
    """Plans and endings at whole seconds, as a driver could log them; some endings are those of earlier launches."""
    now, log, launches = 0.0, [], Launches()
    names = st.integers(0, JOBS - 1).map("j{}".format)
    places = st.lists(st.integers(0, GPUS - 1), min_size=1, max_size=3, unique=True).map(tuple)
    for _ in range(draw(st.integers(0, 12))):
        now += draw(st.integers(0, 3))
        kind = draw(st.sampled_from(["plan", "plan", "pause", "finish", "fail", "stop", "start", "resume"]))
        name = draw(names)
        attempt = max(0, launches.attempt.get(name, 0) - draw(st.sampled_from([0, 0, 1])))
        if kind == "plan":
            decisions = []
            for job in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
                held = launches.gpus.get(job, ())
                gpus = draw(st.sampled_from([draw(places), draw(places), held, ()]))  # start or move, re-tune, stop
                decisions.append(Decision(job, Allocation(gpus, draw(st.integers(1, 2))) if gpus else None, "because"))
            log.append(ev.Planned(now, tuple(decisions)))
        elif kind == "pause" and launches.gpus.get(name):
            held = Allocation(launches.gpus[name], active=draw(st.booleans()))
            log.append(ev.Planned(now, (Decision(name, held, "turn"),)))
        elif kind == "fail":
            log.append(ev.Failed(now, name, attempt, "x"))
        elif kind == "stop":
            log.append(ev.Stopped(now, name, attempt, 0.0))
        else:
            what = {"finish": ev.Finished, "resume": ev.Resumed}.get(kind, ev.Started)
            log.append(what(now, name, attempt))
        launches.apply(log[-1])
    # all jobs finish, so that every period ends
    log += [ev.Finished(now + 1, job, attempt) for job, attempt in launches.attempt.items()]
    return log


def second_by_second(log: list[ev.Event]) -> dict[tuple[int, int], tuple[frozenset[str], frozenset[str]]]:
    """The jobs on a GPU during each second and those of them that are paused, by playing the log for every second."""
    seen = {}
    for second in range(int(log[-1].at) if log else 0):
        launches = Launches()
        for event in log:
            if event.at <= second:
                launches.apply(event)
        for gpu in range(GPUS):
            jobs = frozenset(job for job, gpus in launches.gpus.items() if gpu in gpus)
            if jobs:
                seen[gpu, second] = jobs, jobs & launches.paused
    return seen


@given(histories())
def test_segments_agree_with_a_second_by_second_account(log):
    found = segments(log)
    account = {}
    for segment in found:
        assert segment.start < segment.end
        assert len(set(segment.jobs)) == len(segment.jobs) > 0
        for second in range(int(segment.start), int(segment.end)):
            assert (segment.gpu, second) not in account, "two periods of a GPU overlap"
            account[segment.gpu, second] = frozenset(segment.jobs), segment.paused
    assert account == second_by_second(log)
    assert found == sorted(found, key=lambda segment: (segment.start, segment.gpu))


def test_segments_of_a_shared_gpu():
    log = [
        ev.Planned(0.0, (Decision("a", Allocation((0, 1)), "first"),)),
        ev.Planned(5.0, (Decision("b", Allocation((1,)), "joins"),)),
        ev.Finished(7.0, "b", 1),
        ev.Finished(9.0, "a", 1),
    ]
    assert segments(log) == [
        Segment(0, 0.0, 9.0, ("a",)),
        Segment(1, 0.0, 5.0, ("a",)),
        Segment(1, 5.0, 7.0, ("a", "b")),
        Segment(1, 7.0, 9.0, ("a",)),
    ]


def test_a_retuned_job_keeps_its_lane():
    log = [
        ev.Planned(0.0, (Decision("a", Allocation((0,)), "first"), Decision("b", Allocation((0,)), "joins"))),
        ev.Planned(5.0, (Decision("a", Allocation((0,), 4), "smaller sub-batch"),)),
        ev.Finished(7.0, "b", 1),
        ev.Finished(9.0, "a", 1),
    ]
    assert segments(log) == [Segment(0, 0.0, 7.0, ("a", "b")), Segment(0, 7.0, 9.0, ("a",))]


def test_a_lost_node_empties_its_gpus():
    log = [
        ev.NodeJoined(0.0, ev.Node("n0", (0,), 1)),
        ev.NodeJoined(0.0, ev.Node("n1", (1,), 1)),
        ev.Planned(0.0, (Decision("a", Allocation((0, 1)), "x"), Decision("b", Allocation((1,)), "x"))),
        ev.NodeLost(4.0, "n0"),
        ev.Finished(6.0, "b", 1),
    ]
    assert segments(log) == [
        Segment(0, 0.0, 4.0, ("a",)),
        Segment(1, 0.0, 4.0, ("a", "b")),
        Segment(1, 4.0, 6.0, ("b",)),
    ]


def test_segments_agree_with_the_busy_time_of_a_run():
    jobs = [Job(f"j{n}", 3.0 * n, "generic", 1 + n % 3, 1, 50, duration_s=50.0 + n) for n in range(12)]
    for policy in ("fifo", "tiresias:threshold_gpu_s=60,restart_s=5", "sjf-ffs", "sjf-bsbf"):
        log: list[ev.Event] = []
        result = simulate(jobs, policy, Setup(cluster="1x4", memory_limit=False), log=log.append)
        busy = sum(segment.end - segment.start for segment in segments(log))
        assert busy == pytest.approx(result.state.busy_gpu_s), policy


def test_a_pause_lasts_from_the_decision_until_the_workers_compute_again():
    log = [
        ev.Planned(0.0, (Decision("a", Allocation((0, 1)), "first"),)),
        ev.Started(0.0, "a", 1),
        ev.Planned(
            5.0, (Decision("a", Allocation((0, 1), active=False), "turn"), Decision("b", Allocation((1,)), "x"))
        ),
        ev.Paused(6.0, "a", 1),
        ev.Planned(8.0, (Decision("a", Allocation((0, 1)), "turn"),)),
        ev.Resumed(9.0, "a", 1),
        ev.Finished(11.0, "b", 1),
        ev.Finished(11.0, "a", 1),
    ]
    paused = frozenset({"a"})
    assert segments(log) == [
        Segment(0, 0.0, 5.0, ("a",)),
        Segment(1, 0.0, 5.0, ("a",)),
        Segment(0, 5.0, 9.0, ("a",), paused),
        Segment(1, 5.0, 9.0, ("a", "b"), paused),
        Segment(0, 9.0, 11.0, ("a",)),
        Segment(1, 9.0, 11.0, ("a", "b")),
    ]


def test_an_owner_pauses_a_job_at_once_or_as_soon_as_it_runs():
    log = [
        ev.Planned(0.0, (Decision("a", Allocation((0,)), "x"), Decision("b", Allocation((1,)), "x"))),
        ev.Started(0.0, "a", 1),
        ev.PausedByOwner(2.0, "a"),
        ev.PausedByOwner(2.0, "b"),
        ev.Started(4.0, "b", 1),
        ev.ResumedByOwner(6.0, "a"),
        ev.Planned(6.0, (Decision("a", Allocation((0,)), "x"),)),
        ev.Resumed(7.0, "a", 1),
        ev.Finished(9.0, "a", 1),
        ev.Stopped(9.0, "b", 1, 0.0),
    ]
    a, b = frozenset({"a"}), frozenset({"b"})
    assert segments(log) == [
        Segment(0, 0.0, 2.0, ("a",)),
        Segment(1, 0.0, 4.0, ("b",)),
        Segment(0, 2.0, 7.0, ("a",), a),
        Segment(1, 4.0, 9.0, ("b",), b),
        Segment(0, 7.0, 9.0, ("a",)),
    ]


def test_segments_agree_with_the_paused_time_of_a_run():
    jobs = [Job(f"j{n}", 3.0 * n, "generic", 1 + n % 3, 1, 50, duration_s=50.0 + n) for n in range(12)]
    log: list[ev.Event] = []
    setup = Setup(cluster="1x4", memory_limit=False, jobs_per_gpu=1)
    result = simulate(jobs, TakeTurns(20.0), setup, log=log.append)
    found = segments(log)
    expected = sum(record.job.gpus * record.paused_s for record in result.jobs)
    assert sum(len(s.paused) * (s.end - s.start) for s in found) == pytest.approx(expected)
    assert expected > 100.0
