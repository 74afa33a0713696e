"""The simulator against a world that moves in small steps, and its delays, beliefs and accounts."""

import time
from random import Random

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.codec import decode, encode
from carpool.core.draft import Draft
from carpool.core.model import Allocation, Decision, Status
from carpool.core.perf import ConstantInterference, FittedModel, MeasuredPair, TableInterference
from carpool.core.state import State
from carpool.policies.base import BasePolicy
from carpool.policies.simple.fifo import start_in_order
from carpool.policies.simple.sjf import Sjf
from carpool.profile.schema import load
from carpool.sim.engine import CannotFinish, Costs, Engine
from carpool.sim.unknown import UnknownBelief
from tests.support.effort import THOROUGH
from tests.support.stepper import step_through
from tests.support.turns import TakeTurns
from tests.support.world import TASKS, job, model, nodes

NAMES = [*policies.BUILT_IN, "fifo:skip=true", "tiresias:threshold_gpu_s=40,round_s=8,start_s=2,restart_s=3"]


def run(jobs, policy="sjf-bsbf", cluster="1x4", xi=1.5, **options):
    belief = options.pop("belief", None) or model(xi, int(cluster.split("x")[1]))
    chosen = policies.make(policy) if isinstance(policy, str) else policy
    engine = Engine(jobs, nodes(cluster), chosen, belief=belief, **options)
    state = engine.run()
    return dict(state.ended.items()), state


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("jobs_per_gpu", [1, 2, 3])
def test_exact_times_equal_a_stepped_world(name, jobs_per_gpu):
    """Durations are whole seconds and ξ is 2, so that with two jobs on a GPU all times are multiples of a small power
    of two and the stepped world is exact as well; with three (ξ = 3) it is off by some steps."""
    tolerance = 1e-6 if jobs_per_gpu < 3 else 0.2
    for seed in range(12 if THOROUGH else 5):
        random = Random(seed)
        jobs = [
            job(f"j{n}", random.choice([1, 1, 2, 4]), random.randint(1, 30), submitted=random.randint(0, 25))
            for n in range(random.randint(2, 7))
        ]
        ended, _ = run(jobs, name, xi=2.0, jobs_per_gpu=jobs_per_gpu, costs=Costs(pause_s=0.0))
        stepped = step_through(jobs, nodes("1x4"), policies.make(name), model(2.0), jobs_per_gpu)
        assert {n: r.ended for n, r in ended.items()} == pytest.approx(stepped, abs=tolerance), f"seed {seed}"


@pytest.mark.parametrize(("jobs_per_gpu", "pause_s"), [(1, 0.25), (2, 1.5)])
def test_exact_times_of_jobs_that_take_turns_equal_a_stepped_world(jobs_per_gpu, pause_s):
    pauses = 0
    for seed in range(12):
        random = Random(seed)
        jobs = [
            job(f"j{n}", random.choice([1, 1, 2, 4]), random.randint(1, 60), submitted=random.randint(0, 25))
            for n in range(random.randint(2, 9))
        ]
        costs = Costs(pause_s=pause_s)
        ended, state = run(jobs, TakeTurns(), xi=2.0, jobs_per_gpu=jobs_per_gpu, resident_per_gpu=3, costs=costs)
        stepped = step_through(jobs, nodes("1x4"), TakeTurns(), model(2.0), jobs_per_gpu, pause_s, 3)
        assert {n: r.ended for n, r in ended.items()} == pytest.approx(stepped, abs=1e-6), f"seed {seed}"
        pauses += state.pauses
    assert pauses > 50


class AtTimes(BasePolicy):
    """Decides what it was given, once, at the time it was given; all jobs run on GPU 0."""

    name = "at-times"
    pauses = True

    def __init__(self, **at):
        self.plans = {float(time[1:]): plan for time, plan in at.items()}

    def key(self, record, now):
        return (record.job.submitted,)

    def decide(self, view):
        return [
            Decision(name, Allocation((0,), active=act != "pause") if act != "stop" else None, act)
            for name, act in (self.plans.pop(view.now, {}) if view.jobs else {}).items()
        ]

    def wake(self, view):
        return min((time for time in self.plans if time > view.now), default=None)


class TestPauses:
    """One GPU on which one job computes at a time."""

    def ends(self, policy, *jobs, **options):
        log = []
        ended, state = run(jobs, policy, cluster="1x1", log=log.append, **{"jobs_per_gpu": 1, **options})
        return {name: record.ended for name, record in ended.items()}, state, log

    def test_a_pause_takes_pause_s_and_what_is_resumed_waits_for_it(self):
        policy = AtTimes(
            t0={"a": "start"},
            t10={"a": "pause", "b": "start"},
            t20={"b": "pause", "a": "resume"},
            t50={"b": "resume"},
        )
        ends, state, log = self.ends(policy, job("a", left=20.0), job("b", left=30.0), costs=Costs(pause_s=2.0))
        # a: 0–10, paused until 20 + 2 (b is still) + 2, 24–34. b: 12 (a is still)–20, then 50 + 2 with 22 left.
        assert ends == pytest.approx({"a": 34.0, "b": 74.0})
        times = [(e.at, type(e).__name__, e.job) for e in log if isinstance(e, ev.Paused | ev.Resumed)]
        assert times == [(12.0, "Paused", "a"), (22.0, "Paused", "b"), (24.0, "Resumed", "a"), (52.0, "Resumed", "b")]
        records = state.ended
        assert [(r.pauses, r.paused_s) for r in (records["a"], records["b"])] == [(1, 14.0), (1, 32.0)]

    def test_pauses_that_take_no_time(self):
        policy = AtTimes(t0={"a": "start"}, t10={"a": "pause", "b": "start"}, t40={"a": "resume"})
        ends, _, _ = self.ends(policy, job("a", left=20.0), job("b", left=30.0), costs=Costs(pause_s=0.0))
        assert ends == {"a": 50.0, "b": 40.0}

    def test_a_paused_job_slows_no_job_down(self):
        policy = AtTimes(t0={"a": "start", "b": "start"}, t30={"a": "pause"}, t90={"a": "resume"})
        ends, _, _ = self.ends(
            policy, job("a", left=100.0), job("b", left=50.0), jobs_per_gpu=2, costs=Costs(pause_s=0.0)
        )
        # both at 1.5 until 30 (20 done), b alone 30–60, a from 90 on alone
        assert ends == pytest.approx({"b": 60.0, "a": 170.0})

    def test_a_launch_waits_for_a_stop_that_takes_longer_than_a_later_pause(self):
        policy = AtTimes(
            t0={"a": "start", "b": "start"},
            t10={"a": "stop"},
            t11={"b": "pause", "c": "start"},
            t60={"b": "resume"},
            t70={"a": "start"},
        )
        jobs = (job("a", left=100.0), job("b", left=30.0), job("c", left=5.0))
        ends, _, log = self.ends(policy, *jobs, jobs_per_gpu=2, costs=Costs(stop_s=20.0, pause_s=1.0))
        (started,) = [event.at for event in log if isinstance(event, ev.Started) and event.job == "c"]
        assert started == 30.0, "the workers of a compute until then, though those of b are still at 12"
        assert ends["c"] == 35.0

    @pytest.mark.parametrize(("act", "again", "end"), [("pause", "resume", 40.0), ("stop", "start", 50.0)])
    def test_a_job_that_is_paused_or_stopped_in_the_instant_it_starts_does_not_end_there(self, act, again, end):
        policy = AtTimes(t0={"a": "start"}, t10={"a": act}, t20={"a": again})
        ends, _, _ = self.ends(policy, job("a", left=20.0), costs=Costs(launch_s=10.0, pause_s=0.0))
        assert ends == {"a": end}


class TestByHand:
    def test_one_job(self):
        ended, _ = run([job("a", left=100.0, submitted=7.0)])
        assert ended["a"].ended == 107.0

    def test_two_jobs_share_and_the_host_speeds_up_again(self):
        # b joins at 10; both 1.5 times slower; b done at 10 + 30; a has 100 − 10 − 20 = 70 left.
        ended, state = run([job("a", gpus=4, left=100.0), job("b", left=20.0, submitted=10.0)])
        assert ended["b"].ended == pytest.approx(40.0)
        assert ended["a"].ended == pytest.approx(110.0)
        assert state.shares == 1
        assert ended["a"].ran_s / ended["a"].alone_s == pytest.approx(1.1)

    def test_a_gang_on_two_hosts_runs_at_the_worst_of_both(self):
        cells = {(a, b): [MeasuredPair(1.2)] for a in ("plain", "thin") for b in ("plain", "thin")}
        cells["plain", "thin"] = [MeasuredPair(2.0)]  # the guest beside thin
        jobs = [
            job("a", gpus=2, left=1000.0),
            job("b", gpus=2, left=1000.0, model="thin"),
            job("c", gpus=4, left=10.0, submitted=1.0),
        ]
        ended, _ = run(jobs, xi=TableInterference(cells))
        assert ended["c"].ended == pytest.approx(1.0 + 20.0)

    def test_a_host_runs_at_the_worst_of_its_guests_while_they_come_and_go(self):
        cells = {(a, b): [MeasuredPair(1.25)] for a in ("plain", "thin") for b in ("plain", "thin")}
        cells["plain", "thin"] = [MeasuredPair(2.0)]  # the host beside thin
        jobs = [
            job("host", gpus=2, left=100.0),
            job("thin", left=24.0, submitted=10.0, model="thin"),
            job("plain", left=40.0, submitted=20.0),
        ]
        ended, _ = run(jobs, "sjf-ffs", "1x2", xi=TableInterference(cells))
        # thin from 10 to 40, plain from 20 to 70: the host has 90 left at 10, 75 at 40 and 51 at 70
        assert (ended["thin"].ended, ended["plain"].ended) == (pytest.approx(40.0), pytest.approx(70.0))
        assert ended["host"].ended == pytest.approx(121.0)

    def test_the_ends_of_jobs_that_share_and_end_together_are_told_once(self):
        log = []
        run([job("a", left=10.0), job("b", left=10.0)], "sjf-ffs", "1x1", xi=2.0, log=log.append)
        assert [event.job for event in log if isinstance(event, ev.Finished)] == ["a", "b"]

    def test_tiresias_pays_for_every_restart_and_keeps_the_work_done(self):
        jobs = [job("a", gpus=4, left=100.0), job("b", gpus=4, left=10.0, submitted=30.0)]
        ended, state = run(jobs, "tiresias:threshold_gpu_s=80,restart_s=5")
        # a is demoted at 20; b starts at once at 30 and ends at 40; a restarts: 40 + 5 + 70
        assert ended["b"].ended == pytest.approx(40.0)
        assert ended["a"].ended == pytest.approx(115.0)
        assert (state.preemptions, ended["a"].waited_s) == (1, 10.0)

    def test_launch_and_stop_are_delays(self):
        jobs = [job("a", gpus=4, left=100.0), job("b", gpus=4, left=10.0, submitted=30.0)]
        ended, _ = run(jobs, "tiresias:threshold_gpu_s=80,restart_s=5", costs=Costs(launch_s=2.0, stop_s=3.0))
        # a runs from 2; b waits for a to stop (3) and launches (2): 35 to 45; a: launch 2 + restart 5, 100 − 28 left
        assert ended["b"].ended == pytest.approx(45.0)
        assert ended["a"].ended == pytest.approx(45.0 + 7.0 + 72.0)

    def test_a_job_that_is_launching_slows_no_other_job_down(self):
        jobs = [job("a", gpus=4, left=100.0), job("b", left=20.0, submitted=10.0)]
        ended, _ = run(jobs, costs=Costs(launch_s=6.0))
        # a runs from 6; b is up at 16 and takes 30
        assert ended["b"].ended == pytest.approx(46.0)
        assert ended["a"].ended == pytest.approx(6.0 + 10.0 + 30.0 + 70.0)

    def test_a_job_starts_after_the_job_that_it_depends_on(self):
        ended, _ = run([job("a", left=50.0), job("b", left=5.0, after=("a",))])
        assert ended["b"].ended == 55.0

    def test_utilisation_counts_a_shared_gpu_once(self):
        _, state = run([job("a", gpus=4, left=100.0), job("b", left=20.0, submitted=10.0)])
        assert state.busy_gpu_s == pytest.approx(4 * 110.0)

    def test_a_batch_that_is_split_to_fit_slows_the_job_down(self):
        fat = job("a", left=100.0, iterations=100, model="fat", batch=128)
        ended, _ = run([fat])
        assert ended["a"].accumulation == 2
        assert ended["a"].ended == pytest.approx(100.0 * (2 * 0.1 + 1.28) / (0.1 + 1.28))

    def test_an_impossible_job_is_named(self):
        with pytest.raises(CannotFinish, match="asks for 5 GPUs") as error:
            run([job("a"), job("b", gpus=5)])
        assert error.value.job == "b"

    def test_a_policy_that_undoes_its_own_decisions_for_ever_is_an_error(self):
        class Wavering(Sjf):
            """Replace what runs by what waits."""

            def decide(self, view):
                draft = Draft(view)
                for running in view.running:
                    draft.stop(running, "another one waits")
                for waiting in draft.pending():
                    draft.start(waiting, "it waits")
                return draft.decisions

        with pytest.raises(CannotFinish, match="undoes and repeats its own decisions at 3 s"):
            run([job("a", gpus=4), job("b", gpus=4, submitted=3.0)], policy=Wavering())

    def test_a_policy_that_never_starts_a_job_is_an_error(self):
        class Lazy:
            name, restart_s = "lazy", 0.0

            def key(self, record, now):
                return (0.0,)

            def decide(self, view):
                return []

            def wake(self, view):
                return None

        with pytest.raises(CannotFinish, match=r"waiting for ever, 1 in all \(a\)"):
            run([job("a")], Lazy())
        with pytest.raises(CannotFinish, match=r"6 in all \(a, b, c, d, e, …\)"):
            run([job(name) for name in "abcdef"], Lazy())


class TestBelief:
    def test_events_follow_the_truth_and_decisions_the_belief(self):
        jobs = [job("a", gpus=4, left=100.0), job("b", left=200.0, submitted=10.0)]
        believed_harmless, _ = run(jobs, belief=model(1.1), truth=model(2.0))
        assert believed_harmless["a"].hosted == 1
        assert believed_harmless["a"].ended == pytest.approx(10.0 + 180.0)
        believed_harmful, _ = run(jobs, belief=model(3.0), truth=model(1.0))
        assert believed_harmful["a"].ended == pytest.approx(100.0)
        assert believed_harmful["b"].ended == pytest.approx(300.0)

    def test_reports_keep_the_believed_progress_correct(self):
        """What the policy believes about work done equals the truth at every decision, though its ξ is wrong."""
        jobs = [job("a", gpus=4, left=100.0), job("b", left=20.0, submitted=10.0), job("c", left=1.0, submitted=35.0)]
        engine = Engine(jobs, nodes("1x4"), policies.make("sjf-bsbf"), belief=model(1.2), truth=model(2.0))
        compared = []

        def watch(event):
            if isinstance(event, ev.Submitted):
                for name, record in engine.world.jobs.items():
                    believed = engine.belief.jobs[name].iterations_left(event.at)
                    compared.append(abs(believed - record.iterations_left(event.at)))

        engine.log = watch
        engine.run()
        assert len(compared) >= 5
        assert max(compared) < 1e-9

    def test_the_same_belief_as_a_second_object_changes_nothing(self):
        random = Random(5)
        jobs = [job(f"j{n}", random.choice([1, 2, 4]), random.randint(1, 300), submitted=9.0 * n) for n in range(40)]
        one, _ = run(jobs)
        two, _ = run(jobs, belief=model(1.5), truth=model(1.5))
        assert {n: r.ended for n, r in one.items()} == pytest.approx({n: r.ended for n, r in two.items()})


@pytest.mark.parametrize("name", NAMES)
def test_replaying_the_log_gives_the_same_records_and_repeating_the_run_the_same_log(name):
    random = Random(11)
    jobs = [job(f"j{n}", random.choice([1, 2, 4]), random.randint(1, 300), submitted=7.0 * n) for n in range(60)]
    logs = []
    for _ in range(2):
        log = []
        _, state = run(jobs, name, cluster="2x4", log=log.append)
        logs.append(log)
    assert logs[0] == logs[1]
    replayed = State(model(1.5), policies.make(name).key)
    for event in logs[0]:
        replayed.apply(decode(encode(event)))
    records = [{n: (r.ended, r.waited_s, r.ran_s, r.status) for n, r in s.ended.items()} for s in (state, replayed)]
    assert records[0] == records[1]
    assert all(record.status is Status.FINISHED for record in replayed.ended.values())


class SleepingPolicy(BasePolicy):
    """FIFO that sleeps before it decides: wall time passes, CPU time hardly does."""

    name = "sleeping"

    def key(self, record, now):
        return (record.job.submitted,)

    def decide(self, view):
        time.sleep(0.2)
        return start_in_order(view, False, "next")


def test_decision_times_are_cpu_seconds_of_the_policy_and_not_wall_seconds():
    began = time.perf_counter()
    engine = Engine([job("a")], nodes("1x4"), SleepingPolicy(), belief=model(1.5))
    engine.run()
    assert time.perf_counter() - began > 0.2
    assert len(engine.decision_cpu_s) >= 1
    assert sum(engine.decision_cpu_s) < 0.1


def test_a_report_makes_only_the_jobs_of_its_own_moment_be_looked_at_again():
    seen = {}

    class Watching(type(policies.make("sjf-ffs"))):
        def decide(self, view):
            seen.setdefault(view.now, set()).update(one.job.id for one in view.awakened.values())
            return super().decide(view)

    truth = FittedModel({"plain": TASKS["plain"]}, ConstantInterference(1.5), 2, ignore_memory=True)
    jobs = [job(name, left=100.0, submitted=at) for name, at in (("a", 0.0), ("b", 10.0), ("c", 20.0), ("d", 22.0))]
    belief = UnknownBelief(truth, 2, load("t4"), "mps")
    Engine(jobs, nodes("1x2"), Watching(), belief=belief, truth=truth, report_s=5.0).run()
    assert seen[25.0] == {"a", "c"}
    assert seen[27.0] == {"b", "d"}
