"""Start-up as a phase: a job that is up but does not compute, and what is learned from how long it took."""

import json
from dataclasses import replace

import pytest

from carpool.belief.model import Belief
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.codec import decode, encode
from carpool.core.learning import StartUp, observe_running
from carpool.core.model import Allocation, Decision, Status
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.rules import may_start_ahead
from carpool.core.state import State
from carpool.core.validate import validate
from tests.support.situations import facts
from tests.support.world import job, model, nodes


def first_come(record, now):
    return (record.job.submitted,)


def happen(state: State, *events: ev.Event) -> None:
    """Apply events; after each of them the state must agree with itself."""
    for event in events:
        state.apply(event)
        _ = state.end_times, state.active_hosts  # the indexes are kept from now on
        validate(state)


def start(state: State, *names: str, at: float = 0.0) -> None:
    happen(state, ev.Planned(at, tuple(Decision(name, Allocation((0,)), "why") for name in names)))


def state_with(perf, *jobs) -> State:
    state = State(perf, first_come)
    happen(state, *[ev.NodeJoined(0.0, node) for node in nodes("1x1")])
    happen(state, *[ev.Submitted(0.0, one) for one in jobs])
    return state


def beside_a_host(perf=None) -> State:
    """Return a state in which `guest` is up beside `host` and warms up: 100 s of work each, ξ = 2."""
    state = state_with(perf or model(2.0, 1), job("host", left=100.0), job("guest", left=100.0))
    start(state, "host")
    happen(state, ev.Started(0.0, "host", 1))
    start(state, "guest", at=10.0)
    happen(state, ev.Started(12.0, "guest", 1, computes=False))
    return state


class TestWarmingUp:
    def test_it_makes_no_progress_and_slows_nothing_down_until_it_computes(self):
        state = beside_a_host()
        host, guest = state.jobs["host"], state.jobs["guest"]
        assert (guest.status, guest.warming_up, guest.computing) == (Status.RUNNING, True, False)
        assert host.end() == pytest.approx(100.0), "its mate takes no GPU time"
        happen(state, ev.Computing(20.0, "guest", 1))
        assert (host.slowdown, guest.slowdown, guest.computing) == (2.0, 2.0, True)
        assert guest.iterations_left(20.0) == guest.job.iterations, "it did nothing before"
        assert host.end() == pytest.approx(180.0)

    def test_reports_before_it_computes_are_ignored(self):
        state = beside_a_host()
        before = facts(state)
        happen(state, ev.Observed(12.0, "guest", 1, 50.0, 0.1), ev.Progressed(12.0, "guest", 1, 50.0))
        assert facts(state) == before

    def test_a_report_of_its_mate_teaches_nothing(self):
        """What a job does to its mates before its first iteration is unknown."""
        state = beside_a_host()
        assert observe_running(state.cluster, state.jobs["host"], 1.0) is None
        happen(state, ev.Computing(20.0, "guest", 1))
        assert observe_running(state.cluster, state.jobs["host"], 1.0) is not None

    def test_a_job_that_its_owner_pauses_meanwhile_goes_on_warming_up(self):
        state = beside_a_host()
        happen(state, ev.PausedByOwner(13.0, "guest"), ev.Paused(13.0, "guest", 1), ev.ResumedByOwner(14.0, "guest"))
        happen(state, ev.Planned(14.0, (Decision("guest", Allocation((0,)), "why"),)), ev.Resumed(14.0, "guest", 1))
        assert state.jobs["guest"].warming_up
        happen(state, ev.Computing(20.0, "guest", 1))
        assert state.jobs["guest"].computing

    @pytest.mark.parametrize(
        "event", [ev.Cancelled(13.0, "guest"), ev.Requeued(13.0, "guest", 1), ev.Failed(13.0, "guest", 1, "it died")]
    )
    def test_a_job_that_leaves_does_not_warm_up(self, event):
        state = beside_a_host()
        guest = state.jobs["guest"]
        happen(state, event)
        assert not guest.warming_up

    def test_a_snapshot_keeps_it(self):
        state = beside_a_host()
        data = json.loads(json.dumps(snapshot.encode(state)))
        again = snapshot.restore(data, model(2.0, 1), first_come)
        assert again.jobs["guest"].warming_up
        for one in (state, again):
            happen(one, ev.Computing(20.0, "guest", 1))
        assert facts(again) == facts(state)

    def test_a_journal_without_the_field_means_that_it_computes(self):
        data = encode(ev.Started(1.0, "a", 1))
        del data["computes"]
        assert decode(data) == ev.Started(1.0, "a", 1, computes=True)


class TestPredictedEnds:
    def perf(self) -> FittedModel:
        return FittedModel(
            model(2.0, 1).tasks, ConstantInterference(2.0), 1, ignore_memory=True, startup=lambda job: 8.0
        )

    def test_a_start_up_delays_the_end_of_the_job_alone(self):
        state = state_with(self.perf(), job("host", left=100.0), job("guest", left=100.0))
        start(state, "host")
        assert state.end_times.ends[0] == pytest.approx(108.0)
        assert state.jobs["host"].startup_left(3.0) == pytest.approx(5.0)
        assert state.jobs["guest"].startup_left(3.0) == pytest.approx(8.0), "it has not begun"
        happen(state, ev.Started(8.0, "host", 1))
        start(state, "guest", at=8.0)
        assert state.end_times.ends == {0: pytest.approx(108.0), 1: pytest.approx(116.0)}
        assert state.jobs["host"].startup_left(8.0) == 0.0


class TestLearningIt:
    def belief(self) -> Belief:
        return Belief(model(2.0, 1), busy={}, kappa=1.0)

    def test_from_the_claim_to_the_first_iteration(self):
        state = beside_a_host(self.belief())
        happen(state, ev.Submitted(15.0, job("later", left=10.0)), ev.Computing(20.0, "guest", 1))
        guest = state.jobs["guest"]
        assert guest.startup_s == 10.0, "the host, which was up at once, teaches nothing"
        assert state.jobs["later"].startup_s == guest.startup_s, "what is learned counts for jobs that wait"

    @pytest.mark.parametrize("silent", [ev.Computing(20.0, "guest", 1, told=False), ev.Finished(20.0, "guest", 1)])
    def test_a_job_that_never_told_is_not_taken_for_one_that_does(self, silent):
        state = beside_a_host(self.belief())
        guest = state.jobs["guest"].job
        happen(state, silent)
        assert state.learner.announces(guest) is False
        happen(state, ev.Submitted(21.0, replace(guest, id="later")))
        assert state.jobs["later"].startup_s == 0.0, "nothing is known of how long it takes"
        assert not may_start_ahead(state, replace(guest, id="later"))

    def test_other_families_take_the_mean_of_all(self):
        belief = self.belief()
        assert belief.startup_s(job("x")) == 0.0
        belief.learn_startup(StartUp(job("a", model="one"), 4.0))
        belief.learn_startup(StartUp(job("b", model="two"), 4.0))
        assert belief.startup_s(job("c", model="three")) == pytest.approx(4.0)
        again = self.belief()
        again.restore(json.loads(json.dumps(belief.dump())))
        assert again.startup_s(job("c", model="three")) == pytest.approx(4.0)
        assert again.startups == belief.startups
