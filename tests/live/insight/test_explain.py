"""Explanations, receipts and the book of estimates over a state, without a service."""

from dataclasses import replace

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Job, Limits, Node, Status
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.scheduler import Scheduler
from carpool.live.insight import forecaster
from carpool.live.insight.explain import explain, position
from carpool.live.insight.forecaster import Forecaster, accuracy
from carpool.live.insight.receipt import receipt


def job(name, gpus=1, seconds=100.0, **more):
    return Job(name, 0.0, "generic", gpus, 1, 1000, duration_s=seconds, can_shrink=False, **more)


class Box:
    """Four GPUs under a scheduler, and an outlook on them."""

    def __init__(self, policy="sjf-bsbf", xi=1.5):
        self.scheduler = Scheduler(policies.make(policy), FittedModel({}, ConstantInterference(xi), 4))
        self.state = self.scheduler.state
        self.now = 0.0
        self.outlook = Forecaster(
            lambda: self.state,
            lambda: policies.make(policy),
            lambda job: {"kind": "time", "detail": "what its owner said"},
            lambda job: f"name-{job}",
            lambda gpu: f"node0:{gpu}",
            lambda: self.now,
        )
        self.step(ev.NodeJoined(0.0, Node("node0", (0, 1, 2, 3), 1)))

    def step(self, *events):
        planned = self.scheduler.step(self.now, events)
        if planned is not None:
            self.outlook.planned(planned.decisions)
            started = [
                ev.Started(self.now, d.job, self.state.jobs[d.job].attempt) for d in planned.decisions if d.allocation
            ]
            self.step(*started)

    def submit(self, *jobs):
        self.step(*(ev.Submitted(self.now, replace(one, submitted=self.now)) for one in jobs))

    def explain(self, name):
        return self.outlook.explain(name)


def test_a_waiting_job_hears_its_place_the_reason_and_its_times():
    box = Box("fifo")
    box.submit(job("1", 4, 100), job("2", 4, 50), job("3", 4, 10))
    told = box.explain("3")
    assert (told["position"], told["waiting"], told["status"]) == (2, 2, "pending")
    assert told["reason"] == "it asks for 4 GPUs and none is free"
    assert told["start"]["value"] == pytest.approx(150.0)
    assert told["end"]["value"] == pytest.approx(160.0)
    assert told["start"]["low"] == pytest.approx(75.0)  # everybody half as long
    assert told["start"]["high"] == pytest.approx(300.0)
    assert "what its owner said" in told["end"]["source"]
    assert "number 2 of 2 in the queue" in told["sentences"][0]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([ev.Held(0.0, "2")], "carpool release 2"),
        ([ev.LimitsChanged(0.0, "eve", Limits(jobs=0))], "may run 0 at a time"),
        ([ev.LimitsChanged(0.0, "eve", Limits(gpus=0))], "may hold 0 at a time"),
    ],
)
def test_other_reasons(events, words):
    box = Box()
    box.submit(job("1", 4, exclusive=True), job("2", user="eve"))
    box.step(*events)
    assert words in box.explain("2")["reason"]


def test_a_dependency_is_a_reason_too():
    box = Box()
    box.submit(job("1", 4), job("2", after=("1",)))
    assert box.explain("2")["reason"] == "it starts after job 1 (running)"


def test_why_it_does_not_share():
    box = Box(xi=2.5)
    box.submit(job("1", 4, 100))
    box.submit(job("2", 1, 90))
    assert "it would take 2.50× as long (host 2.50×), so the two finish sooner" in box.explain("2")["reason"]
    (pair,) = box.explain("2")["compared"]
    assert (pair["job"], pair["slowdown"], pair["pays"]) == ("1", 2.5, False)
    assert (pair["share_s"], pair["wait_s"]) == pytest.approx((100 + 225 * 1.6, 290.0))
    box.submit(job("3", 1, 90, exclusive=True))
    assert "asked not to share" in box.explain("3")["reason"]


def test_why_it_does_not_share_under_the_joint_rule():
    box = Box("carpool", xi=3.0)
    box.submit(job("1", 4, 50), job("2", 4, 100), job("3", 4, 200, exclusive=True))
    told = box.explain("2")["reason"]
    assert "beside job 1 (name-1), its best host, it would take 3.00× as long (host 3.00×)" in told
    assert told.endswith("no move was found that lowers the sum of completion times over it, its hosts and the queue")
    assert box.explain("3")["reason"].endswith("; it asked not to share")


def test_mates_and_why_there():
    box = Box()
    box.submit(job("1", 4, 1000))
    box.submit(job("2", 1, 10))
    told = box.explain("2")
    (mate,) = told["mates"]
    assert (mate["job"], mate["on"], mate["slowdown"]["predicted"], mate["slowdown"]["measured"]) == (
        "1",
        ["node0:0"],
        1.5,
        None,
    )
    assert any("still finishes sooner than waiting" in line for line in told["sentences"])
    record = box.state.jobs["2"]
    box.now = 6.0
    box.step(ev.Observed(6.0, "2", 1, 100.0, 0.02 * 1.4 / 2))
    assert box.explain("2")["mates"][0]["slowdown"]["measured"] == pytest.approx(0.014 / record.alone_iteration_s)


def test_the_receipt_adds_up():
    box = Box()
    box.submit(job("1", 4, 1000))
    box.submit(job("2", 1, 10))
    box.now = 15.0
    record, host = box.state.jobs["2"], box.state.jobs["1"]
    told = receipt(record, 15.0)
    assert (told["ran_s"], told["alone_s"], told["lost_s"]) == pytest.approx((15.0, 10.0, 5.0))
    assert told["saved_s"] == pytest.approx(1000.0)
    assert told["gained_s"] == pytest.approx(995.0)
    assert "estimated: the job does not report" in " ".join(told["sentences"])
    assert receipt(host, 15.0)["gained_s"] is None
    box.step(ev.Finished(15.0, "2", 1))
    ended = receipt(record, record.ended)
    assert (record.status, ended["lost_s"]) == (Status.FINISHED, pytest.approx(5.0))


def test_the_clock_may_be_ahead_of_the_last_event():
    box = Box("fifo")
    box.submit(job("1", 4, 100), job("2", 4, 50))
    box.now = 500.0  # job 1 takes longer than anybody thought
    assert box.explain("2")["start"]["value"] == pytest.approx(500.0)


def test_a_dry_run_leaves_everything_as_it_was():
    box = Box()
    box.submit(job("1", 3, 100))
    before = position(box.state, box.state.jobs["1"]), len(box.state.jobs), box.state.free.count
    source = {"kind": "time", "detail": "what its owner said"}
    fits = box.outlook.dry_run(job("9", 1, 40), source)
    assert (fits["where"], fits["mates"], fits["end"]["value"]) == (["node0:3"], [], pytest.approx(40.0))
    waits = box.outlook.dry_run(job("9", 4, 40, exclusive=True), source)
    assert (waits["where"], waits["start"]["value"]) == (None, pytest.approx(100.0))
    assert (position(box.state, box.state.jobs["1"]), len(box.state.jobs), box.state.free.count) == before


def test_estimates_are_judged_and_teach_the_next_ranges():
    box = Box("fifo")
    rows = []
    for number in range(1, 13):
        name = str(number)
        box.submit(job(name, 4, 10))
        box.outlook.look_ahead()
        record = box.state.jobs[name]
        box.now += 20.0  # twice as long as its owner said
        box.step(ev.Finished(box.now, name, 1))
        rows += box.outlook.judge(record, {"kind": "time", "alone_s": 10.0})
    told = accuracy(rows)
    assert told["duration, from time"]["judged"] == 12
    assert told["duration, from time"]["median_error_s"] == pytest.approx(10.0)
    assert told["end"]["median_error"] == pytest.approx(0.5)
    box.submit(job("20", 4, 10))
    learned = box.outlook.estimate(box.state.jobs["20"].job)
    assert (learned.low, learned.high) == pytest.approx((10.0, 20.0))
    fresh = Forecaster(lambda: box.state, lambda: None, lambda job: {"kind": "time"}, str, str, lambda: 0.0)
    fresh.learn(rows)  # as the next service does, from the journal
    assert fresh.estimate(box.state.jobs["20"].job).high == pytest.approx(20.0)


def test_what_failed_is_not_judged():
    box = Box()
    box.submit(job("1"))
    record = box.state.jobs["1"]
    box.step(ev.Failed(0.0, "1", 1, "broken"))
    assert box.outlook.judge(record, {"kind": "time", "alone_s": 10.0}) == []


def test_the_far_end_of_a_long_queue_is_estimated_from_the_work_before_it(monkeypatch):
    monkeypatch.setattr("carpool.live.insight.forecast.MAX_WAITING", 3)
    box = Box("fifo")
    box.submit(*(job(str(number), 4, 10) for number in range(1, 9)))
    assert box.explain("8")["start"]["value"] == pytest.approx(70.0)
    assert box.explain("4")["start"]["value"] == pytest.approx(30.0)


def test_everything_is_said_in_sentences():
    box = Box()
    box.submit(job("1", 4, 100), job("2", 4, 50))
    for name in ("1", "2"):
        for line in explain(box.outlook._context(), name)["sentences"]:
            assert line[0].isupper()
            assert line.endswith(".")
    assert forecaster.SPREADS["default"] > forecaster.SPREADS["time"] > 1.0
