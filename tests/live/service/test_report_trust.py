"""Reports that contradict their own counters or the clock are dropped; honest ones never are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.channel import Report, ReportWriter
from carpool.live.service.progress import DROPS_SAID
from carpool.live.service.report_trust import ReportTrust
from carpool.train.link import _SMOOTHING
from tests.support.services import notes, one, serving, shell, started, until

WALL = 1.7e9


def judged(*reports: tuple[float, Report]) -> list[bool]:
    trust = ReportTrust()
    return [bool(trust.contradiction(report, at, WALL + at)) for at, report in reports]


def report(iteration, seconds=1.0, at=0.0, **more):
    return Report(iteration=iteration, seconds=seconds, time=WALL + at, **more)


@pytest.mark.parametrize(
    "lie",
    [
        report(1000, at=2.0),
        report(9, at=2.0),
        report(11, at=1e6),
        report(11, at=-1e6),
        report(11, seconds=float("nan")),
        report(11, seconds=-1.0),
        report(11, checkpoint=400),
        report(11, accumulation=0),
    ],
)
def test_a_lie_is_dropped_and_the_next_honest_report_counts(lie):
    assert judged((1.0, report(10)), (2.0, lie), (3.0, report(12, at=3.0))) == [False, True, False]


@pytest.mark.parametrize("at", [1e308, -1e308])
def test_what_is_said_about_a_lie_is_short(at):
    trust = ReportTrust()
    assert trust.contradiction(report(10), 1.0, WALL) == ""
    assert "its clock" in (said := trust.contradiction(report(11, at=at), 2.0, WALL))
    assert len(said) < 60


def test_many_small_lies_are_no_better_than_a_large_one():
    claims = [(float(t), report(10 * t, at=t)) for t in range(1, 60)]
    assert sum(judged(*claims)) > 30, "ten seconds of work in every second"


@given(
    st.lists(st.tuples(st.floats(0.01, 20.0), st.integers(1, 100)), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.floats(0.5, 3.0),
)
def test_honest_reports_are_never_called_lies(phases, first, look_s):
    """A worker whose speed changes, with the moving average of the library. Each speed lasts for several looks: a burst
    of quick iterations between two looks, within slow ones, cannot be told from a lie."""
    trust, now, done, average, timed = ReportTrust(), 0.0, first, 0.0, 0
    assert not trust.contradiction(report(done, 0.0), now, WALL)
    looked, drops = now, 0
    for seconds, steps in phases:
        for _ in range(max(steps, int(3 * look_s / seconds) + 2)):
            now, done = now + seconds, done + 1
            average = seconds if timed < 2 else average + max(_SMOOTHING, 1 / timed) * (seconds - average)
            timed += 1
            if now - looked >= look_s:
                looked = now
                dropped = trust.contradiction(report(done, average, at=now), now, WALL + now)
                drops = drops + 1 if dropped else 0
                assert drops < DROPS_SAID


async def test_it_is_said(home):
    async with serving(home, gpus=1) as service:
        job = await one(service, shell("sleep 30", iterations=10_000, batch=4))
        await started(service, job)
        writer = ReportWriter(home.rank(job, 1, 0))
        for iteration in (5, 9000, 9000, 9000):
            writer.write(Report(attempt=1, iteration=iteration, seconds=1.0, time=service.clock.now()))
            service.progress.look()
            await service.driver.turn()
        writer.close()
        await until(lambda: any("cannot be true" in text for text in notes(service)))
        assert service.progress.done(service.state.jobs[job]) == 5
        assert "8995 iterations" in service.queries.show(job)["report_dropped"]
        assert any("8995 iterations" in line for line in service.queries.explain(job)["sentences"])
        await service.requests.cancel(job)
