"""The belief as a performance model that learns: its observations, its answers, and how the state follows."""

import json
from math import log
from random import Random

import pytest
from hypothesis import settings

from carpool import policies
from carpool.belief import estimate
from carpool.belief.model import Belief
from carpool.belief.pairs import job_class
from carpool.belief.prior import believe, busy_of, kappa_of
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.codec import decode, encode
from carpool.core.learning import LearningModel, ModelChange, Observation, StartUp
from carpool.core.model import Allocation, Decision, Job, Node
from carpool.core.perf import (
    ConstantInterference,
    FittedModel,
    MeasuredPair,
    Placement,
    TableInterference,
)
from carpool.core.scheduler import Scheduler
from carpool.core.state import State
from carpool.profile.schema import load
from carpool.profile.values import Busy
from carpool.sim.engine import Engine
from tests.core.test_state_machine import Life
from tests.support.effort import cases
from tests.support.situations import facts
from tests.support.world import GIB, TASKS, job, nodes

ONE = Placement(1, 1)
BUSY = dict.fromkeys(TASKS, Busy(1e-6, 1.0))
"""All keep the GPU busy, so that the prior is 1 + κ for everybody."""


def fitted(node_gpus=4):
    return FittedModel(TASKS, ConstantInterference(1.0), node_gpus)


def belief(kappa=1.0, node_gpus=4, **options):
    return Belief(fitted(node_gpus), busy=BUSY, kappa=kappa, **options)


def sighting(name, mates=(), seconds=2.0, alone=1.0, *, seen=True, model="plain", attempt=1, **attributes):
    cells = tuple(((job(mate, model=kind), 1),) for mate, kind in mates)
    about = job(name, model=model, **attributes)
    return Observation(about, attempt, 1, ONE, seconds, alone, seen, cells)


def xi(model, a="plain", b="thin"):
    return model.slowdown(job("x", model=a), 1, [(job("y", model=b), 1)])


class TestPairs:
    def test_the_prior_comes_from_how_busy_both_are(self):
        assert xi(belief(0.5)) == pytest.approx(1.5 * 1.1)

    def test_an_episode_counts_once_however_often_it_is_reported(self):
        once, often = belief(), belief()
        once.learn(sighting("a", [("b", "thin")], 1.5))
        for _ in range(20):
            often.learn(sighting("a", [("b", "thin")], 1.5))
        assert often.dump()["pairs"] == once.dump()["pairs"]
        assert (once.version, often.version) == (1, 1)

    def test_the_mean_of_an_episode_counts(self):
        steady, shaky = belief(), belief()
        steady.learn(sighting("a", [("b", "thin")], 1.5))
        for seconds in (1.2, 1.9, 1.4):
            shaky.learn(sighting("a", [("b", "thin")], seconds))
        assert xi(shaky) == pytest.approx(xi(steady), rel=1e-9)

    def test_another_mate_is_another_episode(self):
        model = belief()
        for mate in "bcd":
            model.learn(sighting("a", [(mate, "thin")], 1.3))
        (row,) = model.pairs.rows.values()
        assert row.known.precision == pytest.approx(300.0)
        assert xi(model) == pytest.approx(1.3, rel=0.01)

    def test_each_direction_learns_for_itself(self):
        model = belief()
        model.learn(sighting("a", [("b", "thin")], 1.1))
        model.learn(sighting("b", [("a", "plain")], 3.0, model="thin"))
        assert xi(model) < 1.25
        assert xi(model, "thin", "plain") > 2.7

    def test_a_guessed_time_alone_says_less(self):
        sure, guess = belief(), belief()
        sure.learn(sighting("a", [("b", "thin")], 1.2))
        guess.learn(sighting("a", [("b", "thin")], 1.2, seen=False))
        assert abs(log(xi(guess) / 1.2)) > abs(log(xi(sure) / 1.2))

    def test_how_wrong_guesses_were_decides_how_much_less(self):
        """Jobs that turn out to be three times faster or slower than believed: then an episode of a job that was never
        alone says next to nothing."""
        model = belief()
        for number in range(30):
            model.learn(sighting(f"j{number}", (), 3.0 if number % 2 else 1 / 3, seen=False))
        model.learn(sighting("a", [("b", "thin")], 1.2, seen=False))
        assert 1.8 < xi(model) < 2.0

    def test_a_gang_tells_of_its_worst_pair(self):
        """Believed 1.1 beside fat and 2 beside thin; seen 1.8: that was thin."""
        model = belief()
        model.learn(sighting("x", [("f", "fat")], 1.1))
        before = xi(model, "plain", "fat")
        model.learn(sighting("a", [("t", "thin"), ("f", "fat")], 1.8))
        assert xi(model) == pytest.approx(1.8, rel=0.02)
        assert len(model.pairs.rows) == 2
        assert xi(model, "plain", "fat") == pytest.approx(before, rel=0.05)

    def test_a_gang_that_runs_well_clears_all_its_pairs(self):
        model = belief()
        model.learn(sighting("a", [("t", "thin"), ("f", "fat")], 1.05))
        assert xi(model) < 1.15
        assert xi(model, "plain", "fat") < 1.15

    def test_groups_of_three_tell_of_no_pair(self):
        model = belief()
        group = ((job("b", model="thin"), 1), (job("c", model="fat"), 1))
        lesson = model.learn(Observation(job("a"), 1, 1, ONE, 2.0, 1.0, True, (group,)))
        assert lesson is ModelChange.NOTHING
        assert not model.pairs.rows

    def test_a_job_that_hangs_does_not_ruin_its_relatives(self):
        model = belief()
        model.learn(sighting("a", [("b", "thin")], 1e9))
        assert xi(model, "plain", "fat") < 5.0

    def test_a_probe_is_for_families_never_seen_and_breaks_no_promise(self):
        model = belief(probe=1.4)
        assert xi(model) == 1.4
        careful = job("x", max_slowdown=1.6)
        assert model.slowdown(careful, 1, [(job("y", model="thin"), 1)]) == pytest.approx(2.2)
        assert model.slowdown(job("y", model="thin"), 1, [(careful, 1)]) == pytest.approx(2.2)
        model.learn(sighting("a", [("b", "thin")], 2.5))
        assert xi(model) == pytest.approx(2.5, rel=0.02)
        assert xi(model, "plain", "fat") == 1.4


class TestProfiles:
    def test_measured_pairs_are_known_from_the_start(self):
        profile = load("h200")
        tasks = profile.core_tasks()
        table = profile.interference("mps")
        model = believe(profile, FittedModel(tasks, ConstantInterference(1.0), 8), "mps")
        errors = []
        for (a, b), cells in table.cells.items():
            for cell in cells:
                believed = model.interference.pair(a, cell.samples, b, cell.mate_samples)
                errors.append(abs(believed / max(1.0, cell.xi) - 1.0))
        assert sorted(errors)[len(errors) // 2] < 0.05

    def test_without_its_pairs_only_the_prior_counts(self):
        profile = load("h200")
        model = believe(
            profile, FittedModel(profile.core_tasks(), ConstantInterference(9.0), 8), "mps", with_pairs=False
        )
        assert not model.pairs.rows
        assert model.interference.pair("imagenet", 256, "imagenet", 256) < 1.75

    def test_demands_go_with_the_busy_share(self):
        model = Belief(
            fitted(), busy={"plain": Busy(1.0, 0.1)}, kappa=1.0, demands={"plain": (64, 0.8), "thin": (8, 0.5)}
        )
        demand = model.interference.demand
        assert demand("plain", 128) == demand("plain", 64) == 0.8
        assert 0.0 < demand("plain", 4) < demand("plain", 8) < 0.8
        assert (demand("thin", 2), demand("fat", 2)) == (0.5, 0.0)

    def test_kappa_of_the_mechanism(self):
        profile = load("t4")
        assert [kappa_of(profile, m) for m in ("mps", "time-slicing", "unknown", "magic")] == [0.46, 1.15, 1.0, 1.0]
        assert all(0.0 < busy.share(64) <= 1.0 for busy in busy_of(profile).values())


class TestSpeeds:
    def test_measured_times_replace_the_profile(self):
        model = belief()
        short = job("x", duration_s=None, iterations=100)
        predicted = model.iteration_time(short, 1, ONE)
        assert model.learn(sighting("a", (), 2 * predicted, duration_s=None)) is ModelChange.SPEEDS
        assert model.iteration_time(short, 1, ONE) == pytest.approx(2 * predicted)
        other = job("y", duration_s=None, batch=64)
        assert model.iteration_time(other, 4, ONE) == pytest.approx(2 * fitted().iteration_time(other, 4, ONE))

    def test_a_duration_that_was_given_is_the_jobs_own(self):
        model = belief()
        model.learn(sighting("a", (), 7.0))
        assert model.iteration_time(job("x", left=100.0), 1, ONE) == 1.0
        assert model.iteration_time(job("x", duration_s=None), 1, ONE) == pytest.approx(7.0)

    def test_history_of_a_name_beats_its_owners_guess(self):
        model = belief()
        named = {"model": "name:sweep", "iterations": 100}
        assert model.iteration_time(job("x", duration_s=None, **named), 1, ONE) == 36.0
        assert model.iteration_time(job("x", duration_s=50.0, **named), 1, ONE) == 0.5
        model.learn(sighting("a", (), 0.25, duration_s=50.0, **named))
        assert model.iteration_time(job("x", duration_s=50.0, **named), 1, ONE) == pytest.approx(0.25)
        assert model.memory(job("x", **named), 1) == 0

    def test_small_changes_take_effect_later(self):
        model = belief()
        seconds = [1.0, 1.001, 0.999, 1.002]
        lessons = [model.learn(sighting(f"j{n}", (), s, duration_s=None)) for n, s in enumerate(seconds)]
        assert lessons == [ModelChange.SPEEDS, ModelChange.NOTHING, ModelChange.NOTHING, ModelChange.NOTHING]


class TestEstimates:
    def test_estimates_name_their_source(self):
        model = belief()
        unknown = {"model": "name:sweep", "iterations": 100}
        asked = [
            (job("x", duration_s=None, **unknown), "default", 3600.0),
            (job("x", duration_s=50.0, **unknown), "time", 50.0),
            (job("x", left=70.0), "time", 70.0),
            (
                job("x", duration_s=None, iterations=100),
                "profile",
                100 * fitted().iteration_time(job("x", left=0.18), 1, ONE),
            ),
        ]
        for about, kind, _ in asked:
            found = estimate.run_time(model, about)
            assert found.kind == kind
            assert found.low < found.value < found.high
        assert [estimate.run_time(model, about).value for about, _, _ in asked[:3]] == [3600.0, 50.0, 70.0]
        model.learn(sighting("a", (), 0.25, **unknown))
        model.learn(sighting("b", (), 0.3, duration_s=None, iterations=100))
        assert estimate.run_time(model, asked[0][0]).kind == "history"
        measured = estimate.run_time(model, asked[3][0])
        assert (measured.kind, measured.value) == ("measured", pytest.approx(30.0))
        assert "1 earlier run of plain" in measured.source

    def test_ranges_follow_what_was_observed(self):
        steady, shaky = belief(), belief()
        for number in range(10):
            steady.learn(sighting(f"j{number}", (), 1.0, duration_s=None))
            shaky.learn(sighting(f"j{number}", (), 3.0 if number % 2 else 1.0, duration_s=None))
        asked = job("x", duration_s=None)
        narrow, wide = (estimate.run_time(model, asked) for model in (steady, shaky))
        assert narrow.high / narrow.low < 1.3 < 2.0 < wide.high / wide.low

    def test_slowdowns_say_where_they_come_from(self):
        model = belief()
        pair = (job("x"), 1, job("y", model="thin"), 1)
        before = estimate.slowdown(model, *pair)
        assert before.kind == "profile"
        model.learn(sighting("a", [("b", "thin")], 1.5))
        after = estimate.slowdown(model, *pair)
        assert (after.kind, after.value) == ("measured", pytest.approx(1.5, rel=0.03))
        assert after.high / after.low < before.high / before.low
        assert estimate.slowdown(model, job("x", batch=64), 1, job("y", model="thin"), 1).kind == "relatives"
        strangers = Belief(fitted(), busy={}, kappa=1.0)
        assert estimate.slowdown(strangers, *pair).kind == "default"

    def test_the_model_name_comes_from_the_model_or_the_job_name(self):
        assert estimate.model_name("bert", "mine") == "bert"
        assert estimate.model_name(None, "mine[7]") == estimate.model_name(None, "mine[8]") == "name:mine"
        assert estimate.model_name(None, "") == "generic"


# ---- the state keeps up ----------------------------------------------------------------------------------------------


def told(state, *events):
    for event in events:
        state.apply(event)


def placed(name, *gpus):
    return ev.Planned(0.0, (Decision(name, Allocation(gpus), "given"),))


def test_only_models_that_learn_are_taught():
    assert isinstance(belief(), LearningModel)
    assert not isinstance(fitted(), LearningModel)


def test_a_pending_jobs_choice_changes_after_an_observation():
    """The pair a–b is seen to get on well; so c, which had better wait by what was believed, now joins d."""
    scheduler = Scheduler(policies.make("sjf-bsbf"), belief())
    jobs = [job("a", left=5000.0), job("b", left=5000.0), job("d", left=1000.0), job("c", left=600.0)]
    together = (Decision("a", Allocation((0,)), "given"), Decision("b", Allocation((0,)), "given"))
    told(scheduler.state, ev.NodeJoined(0.0, Node("n", (0, 1), 16 * GIB)), *(ev.Submitted(0.0, j) for j in jobs[:3]))
    told(scheduler.state, ev.Planned(0.0, together), placed("d", 1), *(ev.Started(0.0, name, 1) for name in "abd"))
    assert scheduler.step(0.0, [ev.Submitted(0.0, jobs[3])]) is None
    asked = scheduler.policy_calls
    planned = scheduler.step(10.0, [ev.Observed(10.0, name, 1, 9.0, 1.05) for name in "ab"])
    assert scheduler.policy_calls == asked + 1
    assert [d.job for d in planned.decisions] == ["c"]
    assert planned.decisions[0].allocation.gpus == (1,)


def test_beliefs_update_predicted_iteration_times_and_keep_measured_ones():
    state = State(belief(), lambda record, now: (0.0,))
    told(state, ev.NodeJoined(0.0, Node("n", (0, 1, 2), 16 * GIB)))
    for name, gpu in zip("abcdef", (0, 0, 1, 1, 2, 2), strict=True):
        told(state, ev.Submitted(0.0, job(name)), placed(name, gpu), ev.Started(0.0, name, 1))
    told(state, ev.Observed(5.0, "c", 1, 2.0, 3.0))
    assert state.jobs["c"].slowdown == 3.0
    state = snapshot.restore(
        json.loads(json.dumps(snapshot.encode(state))), belief(), state.sort_key
    )  # what is measured stays so
    before, version = state.jobs["e"].slowdown, state.belief_version
    state.pace_changes.clear()
    told(state, ev.Observed(9.0, "a", 1, 8.0, 1.1))
    assert state.belief_version == version + 1
    assert state.needs_decision
    assert state.jobs["e"].slowdown < before
    assert state.jobs["c"].iteration_s == 3.0
    assert {record.job.id for record in state.pace_changes} == {"b", "d", "e", "f"}


def test_no_slowdown_is_learned_while_a_mate_starts():
    state = State(belief(), lambda record, now: (0.0,))
    told(state, ev.NodeJoined(0.0, Node("n", (0,), 16 * GIB)))
    told(state, ev.Submitted(0.0, job("a")), placed("a", 0), ev.Started(0.0, "a", 1))
    told(state, ev.Submitted(0.0, job("b")), placed("b", 0), ev.Observed(1.0, "a", 1, 1.0, 9.0))
    assert state.perf.version == 0
    told(state, ev.Started(2.0, "b", 1), ev.Observed(3.0, "a", 1, 2.0, 9.0))
    assert state.perf.version == 1


def test_a_time_measured_alone_holds_for_its_attempt_only():
    state = State(belief(), lambda record, now: (0.0,))
    told(state, ev.NodeJoined(0.0, Node("n", (0, 1), 16 * GIB)))
    told(
        state, ev.Submitted(0.0, job("a")), placed("a", 0), ev.Started(0.0, "a", 1), ev.Observed(1.0, "a", 1, 1.0, 2.0)
    )
    assert state.jobs["a"].alone_seen
    told(state, ev.Planned(2.0, (Decision("a", None, "given"),)), ev.Stopped(3.0, "a", 1, 1.0), placed("a", 1))
    assert not state.jobs["a"].alone_seen


def test_new_speeds_reorder_the_queue_and_reshape_it():
    """A job of a name that turned out to be quick overtakes one whose length was given."""
    state = State(belief(), lambda record, now: (record.alone_left(now),))
    named = {"model": "name:quick", "duration_s": 5000.0, "iterations": 1000}
    told(state, ev.NodeJoined(0.0, Node("n", (0,), 16 * GIB)))
    told(state, ev.Submitted(0.0, job("a", **named)), placed("a", 0), ev.Started(0.0, "a", 1))
    told(state, ev.Submitted(0.0, job("long", left=900.0)), ev.Submitted(0.0, job("b", **named)))
    assert [r.job.id for r in state.queue] == ["long", "b"]
    told(state, ev.Observed(60.0, "a", 1, 600.0, 0.1))
    assert [r.job.id for r in state.queue] == ["b", "long"]
    assert state.jobs["b"].alone_left(60.0) == pytest.approx(100.0)


def test_new_speeds_reach_running_jobs_that_did_not_report_and_the_cost_of_splitting_a_batch():
    state = State(belief(), lambda record, now: (record.alone_left(now),))
    wide = {"duration_s": None, "batch": 64, "iterations": 1000}
    told(state, ev.NodeJoined(0.0, Node("n", (0, 1, 2), 16 * GIB)))
    for name, gpu, accumulation in (("a", 0, 2), ("b", 1, 2)):
        plan = ev.Planned(0.0, (Decision(name, Allocation((gpu,), accumulation), "given"),))
        told(state, ev.Submitted(0.0, job(name, **wide)), plan, ev.Started(0.0, name, 1))
    told(state, ev.Submitted(0.0, job("c", **wide)))
    one, two = state.perf.iteration_time(job("x", **wide), 1, ONE), state.perf.iteration_time(job("x", **wide), 2, ONE)
    told(state, ev.Observed(10.0, "b", 1, 5.0, 3 * two))
    assert state.jobs["a"].iteration_s == pytest.approx(3 * two)
    told(
        state,
        ev.Cancelled(20.0, "a"),
        ev.Stopped(20.0, "a", 1, 1.0),
        ev.Submitted(20.0, job("d", **wide)),
        placed("d", 0),
    )
    told(state, ev.Started(20.0, "d", 1), ev.Observed(21.0, "d", 1, 1.0, one))
    cut = next(size for size in state.jobs["c"].shape.sizes if size.accumulation == 2)
    assert cut.relative_time == pytest.approx(3 * two / one)


def test_a_job_that_never_reports_teaches_by_its_end():
    state = State(belief(), lambda record, now: (0.0,))
    named = {"model": "name:silent", "duration_s": 500.0, "iterations": 100}
    told(state, ev.NodeJoined(0.0, Node("n", (0,), 16 * GIB)))
    told(state, ev.Submitted(0.0, job("a", **named)), placed("a", 0), ev.Started(0.0, "a", 1))
    told(state, ev.Finished(40.0, "a", 1), ev.Submitted(41.0, job("b", **named)))
    assert state.jobs["b"].whole_left(41.0) == pytest.approx(40.0)


MODELS = sorted(TASKS)


def story(seed, policy="sjf-bsbf", report_error=0.05):
    """A simulation under a belief that learns, its log, and the believing state at the end."""
    random = Random(seed)
    cells = {(a, b): [MeasuredPair(random.uniform(1.0, 2.6))] for a in MODELS for b in MODELS}
    jobs = []
    for number in range(50):
        model = random.choice(MODELS)
        alone = random.choice([None, float(random.randint(20, 600))])
        jobs.append(
            Job(
                f"j{number}",
                6.0 * number,
                model,
                random.choice([1, 1, 2, 4]),
                16,
                random.randint(50, 500),
                duration_s=alone,
            )
        )
    log_of = []
    truth = FittedModel(TASKS, TableInterference(cells), 4)
    engine = Engine(
        jobs,
        nodes("2x4"),
        policies.make(policy),
        belief=belief(),
        truth=truth,
        report_error=(report_error, seed),
        log=log_of.append,
    )
    engine.run()
    return log_of, engine.belief


@pytest.mark.parametrize("policy", ["sjf-bsbf", "sjf-ffs", "tiresias"])
def test_a_journal_replayed_gives_the_same_belief_and_the_same_decisions(policy):
    for seed in range(3):
        journal, state = story(seed, policy)
        again, _ = story(seed, policy)
        assert journal == again
        replayed = State(belief(), state.sort_key)
        _ = replayed.hosts
        for event in journal:
            replayed.apply(decode(json.loads(json.dumps(encode(event)))))
        assert replayed.perf.dump() == state.perf.dump()
        assert facts(replayed) == facts(state)
        if policy != "tiresias":
            assert state.perf.version > 5, "there was something to learn"


def test_a_snapshot_carries_the_belief():
    """Restored in the middle, the scheduler decides as if nothing had been."""
    journal, state = story(4)
    middle = len(journal) // 2
    first = State(belief(), state.sort_key)
    for event in journal[:middle]:
        first.apply(event)
    data = json.loads(json.dumps(snapshot.encode(first)))
    restored = snapshot.restore(data, belief(), state.sort_key)
    assert restored.perf.dump() == first.perf.dump()
    assert xi(restored.perf) == xi(first.perf)
    for event in journal[middle:]:
        restored.apply(event)
    assert restored.perf.dump() == state.perf.dump()
    assert restored.belief_version == state.belief_version


def test_a_snapshot_does_not_hide_what_a_profile_has_measured_since():
    """What was learned stays; pairs that nobody knew then are those of the profile."""
    plain = [(8, 1.9), (64, 3.0)]

    def informed(known):
        model = belief()
        for batch, slow in known:
            model.note("plain", batch, "plain", batch, slow)
        model.pairs.take_up()
        return model

    def of(model, batch):
        return model.slowdown(job("x", batch=batch), 1, [(job("y", batch=batch), 1)])

    before, fresh = informed(plain[:1]), informed(plain)
    for number in range(4):
        before.learn(sighting(f"a{number}", [(f"b{number}", "plain")], 1.2, batch=8))
    restored = informed(plain)
    restored.restore(json.loads(json.dumps(before.dump())))
    assert abs(of(restored, 8) / of(before, 8) - 1) < 0.02 < of(fresh, 8) / of(before, 8) - 1
    assert abs(of(restored, 64) / of(fresh, 64) - 1) < 0.1 < of(fresh, 64) / of(before, 64) - 1


def test_beliefs_close_in_on_the_truth():
    random, model = Random(2), belief()
    cells = {(a, b): random.uniform(1.0, 2.6) for a in MODELS for b in MODELS}
    for number in range(3):
        for (a, b), true in cells.items():
            model.learn(sighting(f"{a}{b}{number}", [("m", b)], true * 2.718 ** random.gauss(0.0, 0.05), model=a))
    errors = [abs(xi(model, a, b) / true - 1.0) for (a, b), true in cells.items()]
    assert max(errors) < 0.12
    assert sum(errors) / len(errors) < 0.04
    assert model.pairs.has_seen((job_class("plain", 8), job_class("thin", 8)))


class LearningLife(Life):
    """The state machine of every event, with a belief that learns."""

    def model(self):
        return belief(0.4, 2)

    def teardown(self):
        super().teardown()
        if hasattr(self, "state") and not getattr(self, "restarted", False):
            replayed = State(self.model(), self.state.sort_key, self.state.jobs_per_gpu)
            for event in self.journal:
                replayed.apply(event)
            assert replayed.perf.dump() == self.state.perf.dump()


LearningLife.TestCase.settings = settings(max_examples=cases(100), stateful_step_count=40)
TestLearningLife = LearningLife.TestCase


def test_only_what_may_be_a_training_is_expected_to_start_up():
    known = belief()
    train, command, named = (job("a", model=name) for name in ("script:train.py:1f", "script:sleep:2e", "plain"))
    assert [known.startup_s(one) for one in (train, command, named)] == [5.0, 0.0, 0.0]
    known.learn_startup(StartUp(job("b", model="script:other.py:3d"), 8.0))
    assert [known.startup_s(one) for one in (train, command, named)] == [8.0, 0.0, 8.0]
    known.learn_startup(StartUp(command, 2.0))
    assert known.startup_s(command) == 2.0


def test_whether_a_job_tells_when_it_is_up_is_known_from_the_latest_of_its_family():
    known, train = belief(), job("a", model="script:train.py:1f")
    assert known.announces(train) is None
    for told in (False, True, False):
        known.learn_startup(StartUp(train, 8.0, told=told))
        again = belief()
        again.restore(known.dump())
        assert known.announces(train) is again.announces(train) is told
    old = known.dump()
    old["startups"] = old["startups"][:2]  # as a release wrote it that did not know
    known.restore(old)
    assert known.announces(train) is True


def test_a_time_that_was_assumed_is_not_learned():
    known, train = belief(), job("a", model="script:train.py:1f")
    known.learn_startup(StartUp(train, 10.0, told=False))
    assert known.startup_s(train) == 5.0
