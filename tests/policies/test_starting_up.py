"""The joint rule plans start-ups: the next job starts up while others compute, and is up when its turn comes."""

import pytest

from carpool.belief.model import Belief
from carpool.core import events as ev
from carpool.core.learning import StartUp
from carpool.core.model import Allocation, Decision, Status
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.rules import IllegalPlan, check, may_start_ahead
from carpool.core.state import State
from carpool.core.validate import validate
from carpool.policies import make
from carpool.sim.engine import Costs, Engine
from tests.support.world import TASKS, cluster, given, job, model, nodes, pending, running


def ends(jobs, policy="carpool", xi=9.0, launch_s=5.0, pause_s=0.0, where="1x1", **options):
    """Simulate jobs that start up for `launch_s`; return when each ends, and the events."""
    perf = FittedModel(TASKS, ConstantInterference(xi), 1, ignore_memory=True, startup=lambda job: launch_s)
    log = []

    def see(event):
        log.append(event)
        validate(engine.world)

    engine = Engine(jobs, nodes(where), make(policy), belief=perf, costs=Costs(launch_s, pause_s=pause_s), **options)
    engine.log = see
    state = engine.run()
    return {name: record.ended for name, record in state.ended.items()}, log


class TestTheNextJob:
    @pytest.mark.parametrize("jobs_per_gpu", [1, 2])
    def test_is_up_when_the_one_before_it_ends(self, jobs_per_gpu):
        jobs = [job("a", left=20.0), job("b", left=30.0), job("c", left=40.0)]
        found, log = ends(jobs, jobs_per_gpu=jobs_per_gpu)
        assert found == {"a": 25.0, "b": 55.0, "c": 95.0}, "only the first start-up is waited for"
        starts = {event.job: event.at for event in log if isinstance(event, ev.Started)}
        assert starts["c"] >= 25.0, "it does not hold memory long before its turn"

    def test_says_why_it_starts(self):
        _, log = ends([job("a", left=20.0), job("b", left=30.0)])
        reasons = [d.why for event in log if isinstance(event, ev.Planned) for d in event.decisions if d.job == "b"]
        assert "starts up beside a, so that it is up when its turn comes" in reasons[0]

    def test_starts_up_before_a_longer_one_is_paused_for_it(self):
        found, log = ends([job("long", left=100.0), job("short", left=10.0, submitted=50.0)])
        assert found == {"short": 65.0, "long": 115.0}, "the long one computes while the short one starts up"
        paused = [event.at for event in log if isinstance(event, ev.Paused)]
        assert paused == [55.0, 55.0], "the short one for a moment, and then the long one"

    def test_waits_in_the_queue_while_memory_is_short(self):
        perf = FittedModel(TASKS, ConstantInterference(9.0), 1, startup=lambda job: 5.0)
        jobs = [job(name, left=left, can_shrink=False) for name, left in (("a", 20.0), ("b", 30.0))]
        for resident_per_gpu, memory_gib, expected in ((8, 16.0, 55.0), (8, 2.0, 60.0), (1, 16.0, 60.0)):
            engine = Engine(
                jobs,
                nodes("1x1", memory_gib),
                make("carpool"),
                belief=perf,
                costs=Costs(5.0, pause_s=0.0),
                jobs_per_gpu=1,
                resident_per_gpu=resident_per_gpu,
            )
            assert engine.run().ended["b"].ended == expected

    def test_that_must_not_be_paused_waits(self):
        found, _ = ends([job("a", left=20.0), job("b", left=30.0, can_pause=False)], jobs_per_gpu=1)
        assert found["b"] == 60.0

    def test_that_does_not_tell_when_it_computes_waits(self):
        found, log = ends([job("a", left=20.0), job("b", left=30.0, can_start_ahead=False)], jobs_per_gpu=1)
        assert found["b"] == 60.0
        plans = [d.allocation for event in log if isinstance(event, ev.Planned) for d in event.decisions]
        assert all(allocation.active for allocation in plans)

    def test_shares_from_its_first_iteration_on_where_that_pays(self):
        found, log = ends([job("host", left=100.0), job("guest", left=50.0, submitted=10.0)], xi=1.2)
        plans = [d for event in log if isinstance(event, ev.Planned) for d in event.decisions if d.job == "guest"]
        assert [plan.allocation.active for plan in plans] == [True]
        assert found == {"guest": pytest.approx(10.0 + 5.0 + 60.0), "host": pytest.approx(5.0 + 100.0 + 10.0)}


class TestStandby:
    """A job that starts without a turn, as the core keeps it."""

    def state(self, *parts):
        return given(cluster("1x1", jobs_per_gpu=1), running("host", left=100.0), *parts).state(lambda job, now: ())

    def start(self, state, name="guest"):
        plan = (Decision(name, Allocation((0,), active=False), "why"),)
        check(state, plan)
        state.apply(ev.Planned(10.0, plan))
        validate(state)

    def test_it_is_paused_once_it_computes(self):
        state = self.state(pending("guest", left=50.0))
        self.start(state)
        guest = state.jobs["guest"]
        assert (guest.status, guest.active, guest.standby) == (Status.STARTING, False, True)
        assert guest.shares == 0, "it shares nothing so far"
        state.apply(ev.Started(12.0, "guest", 1, computes=False))
        validate(state)
        assert (guest.status, guest.standby) == (Status.RUNNING, True)
        state.apply(ev.Computing(15.0, "guest", 1))
        validate(state)
        assert (guest.status, guest.active, guest.standby) == (Status.PAUSING, False, False)
        assert state.jobs["host"].slowdown == 1.0

    def test_it_computes_at_once_where_no_other_job_does(self):
        state = self.state(pending("guest", left=50.0))
        self.start(state)
        state.apply(ev.Finished(11.0, "host", 1))
        validate(state)
        state.apply(ev.Started(12.0, "guest", 1))
        validate(state)
        assert state.jobs["guest"].computing
        assert state.jobs["guest"].active

    def test_its_predicted_end_follows_its_turn(self):
        state = self.state(pending("guest", left=50.0))
        _ = state.end_times
        self.start(state)
        assert state.end_times.ends == {0: 100.0, 1: 150.0}

    @pytest.mark.parametrize(("own", "seen", "may"), [
        (True, None, True), (True, False, False), (True, True, True), (None, None, False), (None, True, True),
        (False, True, False),
    ])  # fmt: skip
    def test_what_was_seen_of_its_model_counts_more_than_what_a_job_says_of_itself(self, own, seen, may):
        guest = job("guest", can_start_ahead=own)
        belief = Belief(model(2.0, 1), busy={}, kappa=1.0)
        if seen is not None:
            belief.learn_startup(StartUp(guest, 5.0, told=seen))
        assert may_start_ahead(State(belief, lambda job, now: ()), guest) is may

    @pytest.mark.parametrize(
        ("refuses", "why"),
        [
            ({"can_pause": False}, "asked not to be paused"),
            ({"can_start_ahead": False}, "does not report when it is up"),
        ],
    )
    def test_not_for_jobs_that_must_not_be_paused_or_do_not_tell_when_they_compute(self, refuses, why):
        with pytest.raises(IllegalPlan, match=why):
            self.start(self.state(pending("guest", left=50.0, **refuses)))
