"""Explanations, receipts and judged estimates over a state, without a service."""

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
from carpool.policies.sharing.pair import WAITING_WINS


def job(name, gpus=1, seconds=100.0, **more):
    return Job(name, 0.0, "generic", gpus, 1, 1000, duration_s=seconds, can_shrink=False, **more)


class FourGpus:
    """Four GPUs under a scheduler, with a forecaster."""

    def __init__(self, policy="sjf-bsbf", xi=1.5):
        self.scheduler = Scheduler(policies.make(policy), FittedModel({}, ConstantInterference(xi), 4))
        self.state = self.scheduler.state
        self.now = 0.0
        self.forecaster = Forecaster(
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
            self.forecaster.planned(planned.decisions)
            started = [
                ev.Started(self.now, d.job, self.state.jobs[d.job].attempt) for d in planned.decisions if d.allocation
            ]
            self.step(*started)

    def submit(self, *jobs):
        self.step(*(ev.Submitted(self.now, replace(one, submitted=self.now)) for one in jobs))

    def explain(self, name):
        return self.forecaster.explain(name)


def test_a_waiting_job_has_a_position_a_reason_and_times():
    gpus = FourGpus("fifo")
    gpus.submit(job("1", 4, 100), job("2", 4, 50), job("3", 4, 10))
    answer = gpus.explain("3")
    assert (answer["position"], answer["waiting"], answer["status"]) == (2, 2, "pending")
    assert answer["reason"] == "it asks for 4 GPUs and none is free"
    assert answer["start"]["value"] == pytest.approx(150.0)
    assert answer["end"]["value"] == pytest.approx(160.0)
    assert answer["start"]["low"] == pytest.approx(75.0)  # if all jobs take half as long
    assert answer["start"]["high"] == pytest.approx(300.0)
    assert "what its owner said" in answer["end"]["source"]
    assert "number 2 of 2 in the queue" in answer["sentences"][0]


def test_free_gpus_that_a_job_does_not_get_are_counted():
    for held, free in ((3, "1 GPU is free, but the policy keeps it"), (2, "2 GPUs are free, but")):
        gpus = FourGpus("fifo")
        gpus.submit(job("1", held), job("2", 4), job("3"))
        answer = gpus.explain("3")
        assert answer["reason"].startswith(free)
        assert answer["reason"].endswith("; its place in the queue is 2")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([ev.Held(0.0, "2")], "carpool release 2"),
        ([ev.LimitsChanged(0.0, "eve", Limits(jobs=0))], "may run 0 at a time"),
        ([ev.LimitsChanged(0.0, "eve", Limits(gpus=0))], "may hold 0 at a time"),
    ],
)
def test_limits_holds_and_size_are_reasons_to_wait(events, words):
    gpus = FourGpus()
    gpus.submit(job("1", 4, exclusive=True), job("2", user="eve"))
    gpus.step(*events)
    assert words in gpus.explain("2")["reason"]


def test_a_dependency_is_a_reason_to_wait():
    gpus = FourGpus()
    gpus.submit(job("1", 4), job("2", after=("1",)))
    assert gpus.explain("2")["reason"] == "it starts after job 1 (running)"


def test_the_reason_says_why_a_job_does_not_share():
    gpus = FourGpus(xi=2.5)
    gpus.submit(job("1", 4, 100))
    gpus.submit(job("2", 1, 90))
    assert f"it would take 2.50× as long, the host 2.50×, {WAITING_WINS}" in gpus.explain("2")["reason"]
    (pair,) = gpus.explain("2")["compared"]
    assert (pair["job"], pair["slowdown"], pair["pays"]) == ("1", 2.5, False)
    assert (pair["share_s"], pair["wait_s"]) == pytest.approx((100 + 225 * 1.6, 290.0))
    gpus.submit(job("3", 1, 90, exclusive=True))
    assert "asked not to share" in gpus.explain("3")["reason"]


def test_the_joint_policy_explains_why_a_job_does_not_share():
    gpus = FourGpus("carpool", xi=3.0)
    gpus.submit(job("1", 4, 50), job("2", 4, 100), job("3", 4, 200, exclusive=True))
    answer = gpus.explain("2")["reason"]
    assert "beside job 1 (name-1), its best host, it would take 3.00× as long, the host 3.00×" in answer
    assert answer.endswith("no move was found that lowers the sum of completion times over it, its hosts and the queue")
    assert gpus.explain("3")["reason"].endswith("; it asked not to share")


def test_a_running_job_shows_its_mates_and_the_reason_for_its_place():
    gpus = FourGpus()
    gpus.submit(job("1", 4, 1000))
    gpus.submit(job("2", 1, 10))
    answer = gpus.explain("2")
    (mate,) = answer["mates"]
    assert (mate["job"], mate["on"], mate["slowdown"]["predicted"], mate["slowdown"]["measured"]) == (
        "1",
        ["node0:0"],
        1.5,
        None,
    )
    assert any("it still ends sooner than if it waited" in line for line in answer["sentences"])
    record = gpus.state.jobs["2"]
    gpus.now = 6.0
    gpus.step(ev.Observed(6.0, "2", 1, 100.0, 0.02 * 1.4 / 2))
    assert gpus.explain("2")["mates"][0]["slowdown"]["measured"] == pytest.approx(0.014 / record.alone_iteration_s)


def test_the_receipt_adds_up():
    gpus = FourGpus()
    gpus.submit(job("1", 4, 1000))
    gpus.submit(job("2", 1, 10))
    gpus.now = 15.0
    record, host = gpus.state.jobs["2"], gpus.state.jobs["1"]
    answer = receipt(record, 15.0)
    assert (answer["ran_s"], answer["alone_s"], answer["lost_s"]) == pytest.approx((15.0, 10.0, 5.0))
    assert answer["saved_s"] == pytest.approx(1000.0)
    assert answer["gained_s"] == pytest.approx(995.0)
    assert "estimated: the job does not report" in " ".join(answer["sentences"])
    assert receipt(host, 15.0)["gained_s"] is None
    gpus.step(ev.Finished(15.0, "2", 1))
    ended = receipt(record, record.ended)
    assert (record.status, ended["lost_s"]) == (Status.FINISHED, pytest.approx(5.0))


def test_the_clock_may_be_ahead_of_the_last_event():
    gpus = FourGpus("fifo")
    gpus.submit(job("1", 4, 100), job("2", 4, 50))
    gpus.now = 500.0  # job 1 takes longer than believed
    assert gpus.explain("2")["start"]["value"] == pytest.approx(500.0)


def test_a_dry_run_leaves_everything_as_it_was():
    gpus = FourGpus()
    gpus.submit(job("1", 3, 100))
    before = position(gpus.state, gpus.state.jobs["1"]), len(gpus.state.jobs), gpus.state.free.count
    sources = {"9": {"kind": "time", "detail": "what its owner said"}}
    fits = gpus.forecaster.dry_run([job("9", 1, 40)], sources)
    assert (fits["where"], fits["mates"], fits["end"]["value"]) == (["node0:3"], [], pytest.approx(40.0))
    waits = gpus.forecaster.dry_run([job("9", 4, 40, exclusive=True)], sources)
    assert (waits["where"], waits["start"]["value"]) == (None, pytest.approx(100.0))
    assert (position(gpus.state, gpus.state.jobs["1"]), len(gpus.state.jobs), gpus.state.free.count) == before


def test_estimates_are_judged_and_teach_the_next_ranges():
    gpus = FourGpus("fifo")
    rows = []
    for number in range(1, 13):
        name = str(number)
        gpus.submit(job(name, 4, 10))
        gpus.forecaster.look_ahead()
        record = gpus.state.jobs[name]
        gpus.now += 20.0  # twice as long as its owner said
        gpus.step(ev.Finished(gpus.now, name, 1))
        rows += gpus.forecaster.judge(record, {"kind": "time", "alone_s": 10.0})
    answer = accuracy(rows)
    assert answer["duration, from time"]["judged"] == 12
    assert answer["duration, from time"]["median_error_s"] == pytest.approx(10.0)
    assert answer["end"]["median_error"] == pytest.approx(0.5)
    gpus.submit(job("20", 4, 10))
    learned = gpus.forecaster.estimate(gpus.state.jobs["20"].job)
    assert (learned.low, learned.high) == pytest.approx((10.0, 20.0))
    fresh = Forecaster(lambda: gpus.state, lambda: None, lambda job: {"kind": "time"}, str, str, lambda: 0.0)
    fresh.learn(rows)  # as the next service does with the rows in the journal
    assert fresh.estimate(gpus.state.jobs["20"].job).high == pytest.approx(20.0)


def test_estimates_of_failed_jobs_are_not_judged():
    gpus = FourGpus()
    gpus.submit(job("1"))
    record = gpus.state.jobs["1"]
    gpus.step(ev.Failed(0.0, "1", 1, "broken"))
    assert gpus.forecaster.judge(record, {"kind": "time", "alone_s": 10.0}) == []


def test_the_far_end_of_a_long_queue_is_estimated_from_the_work_before_it(monkeypatch):
    monkeypatch.setattr("carpool.live.insight.forecast.MAX_WAITING", 3)
    gpus = FourGpus("fifo")
    gpus.submit(*(job(str(number), 4, 10) for number in range(1, 9)))
    assert gpus.explain("8")["start"]["value"] == pytest.approx(70.0)
    assert gpus.explain("4")["start"]["value"] == pytest.approx(30.0)


def test_every_explanation_is_also_given_in_sentences():
    gpus = FourGpus()
    gpus.submit(job("1", 4, 100), job("2", 4, 50))
    for name in ("1", "2"):
        for line in explain(gpus.forecaster._context(), name)["sentences"]:
            assert line[0].isupper()
            assert line.endswith(".")
    assert forecaster.SPREADS["default"] > forecaster.SPREADS["time"] > 1.0
