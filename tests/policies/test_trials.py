"""Trials of pairs that nothing is known of: what begins one, how it goes, what it may cost, and what it teaches."""

import json
from dataclasses import replace
from random import Random

import pytest

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.validate import validate
from carpool.policies import make
from carpool.profile.schema import load
from carpool.sim.engine import Costs, Engine
from carpool.sim.estimation_error import MisestimatedTimes
from carpool.sim.unknown import UnknownBelief
from tests.support.world import TASKS, job, nodes

MODELS = dict.fromkeys(("one", "two", *(f"m{n}" for n in range(5))), TASKS["plain"])


class Watched(Engine):
    """An engine that measures in the true world what each trial costs, independently of the core's own count."""

    def __init__(self, jobs, xi, policy="carpool", startup_s=0.0, where="1x1", **options):
        truth = FittedModel(MODELS, ConstantInterference(xi), 1, ignore_memory=True, startup=lambda job: startup_s)
        belief = UnknownBelief(truth, 1, load("t4"), "mps")
        self.begun, self.lost, self.events = {}, [], []
        super().__init__(
            jobs,
            nodes(where),
            make(policy),
            belief=belief,
            truth=truth,
            report_s=options.pop("report_s", 1.0),
            costs=Costs(startup_s, pause_s=0.05),
            log=self.see,
            **options,
        )

    def see(self, event):
        self.events.append(event)
        validate(self.belief)
        now, jobs, trials = self.belief.now, self.world.jobs, self.belief.trials
        for seq, trial in trials.running.items():
            if trial.began >= 0.0 and seq not in self.begun:
                sides = [jobs[side.job] for side in trial.sides]
                self.begun[seq] = now, [(one, one.alone_done(now), one.alone_left(now)) for one in sides]
        for seq in [seq for seq in self.begun if seq not in trials.running]:
            began, sides = self.begun.pop(seq)
            self.lost += [(now - began - (one.alone_done(now) - done), left) for one, done, left in sides]


def tried(*jobs, xi, **options):
    engine = Watched(jobs, xi, **options)
    engine.run()
    return engine


PAIR = (job("host", left=1000.0, model="one"), job("guest", left=800.0, model="two", submitted=100.0))


def decisions(engine, name):
    plans = [event for event in engine.events if isinstance(event, ev.Planned)]
    return [(plan.at, d) for plan in plans for d in plan.decisions if d.job == name]


class TestAPair:
    def test_that_shares_well_is_kept(self):
        engine = tried(*PAIR, xi=1.1)
        trials = engine.belief.trials
        assert (trials.begun, trials.kept) == (1, 1)
        steps = [(d.allocation.active, d.trial) for _, d in decisions(engine, "host")]
        assert steps == [(True, None), (False, "guest"), (True, "guest")], "paused for a moment, and never again"
        assert engine.belief.perf.is_observed(PAIR[0], 1, PAIR[1], 1)
        assert engine.world.ended["guest"].ended == pytest.approx(100.0 + 800.0 * 1.1, abs=3.0)

    def test_that_shares_badly_takes_turns(self):
        engine = tried(*PAIR, xi=3.0)
        trials = engine.belief.trials
        assert (trials.begun, trials.kept) == (1, 0)
        ended = engine.world.ended
        assert max(ended["guest"].ended, ended["host"].ended) == pytest.approx(1800.0, abs=5.0), "no time is wasted"
        assert "paused so that" in decisions(engine, "host")[-2][1].why

    def test_is_not_tried_again(self):
        later = job("later", left=500.0, model="two", submitted=3000.0)
        again = job("again", left=800.0, model="one", submitted=3000.0)
        assert tried(*PAIR, later, again, xi=3.0).belief.trials.begun == 1

    def test_says_what_happens(self):
        engine = tried(*PAIR, xi=1.1)
        whys = [d.why for name in ("guest", "host") for _, d in decisions(engine, name)]
        assert any("to see how fast guest is alone" in why for why in whys)
        assert any("goes on beside guest, to see how fast both are" in why for why in whys)

    def test_without_reports_ends_when_it_has_cost_what_it_may(self):
        engine = tried(*PAIR, xi=3.0, report_s=10_000.0)
        trial = engine.belief.trials.ended[0]
        assert engine.belief.trials.begun == 1
        assert max(cost for cost, _ in engine.lost) <= 0.02 * 1000.0 + 1.0
        assert engine.belief.perf.is_observed(PAIR[0], 1, PAIR[1], 1), "it counts as observed, with what is known"
        assert trial.costs_s[1] <= 20.0


GROUP = (
    job("first", left=1000.0, model="one"),
    job("second", left=900.0, model="m0", submitted=200.0),
    job("third", left=600.0, model="m1", submitted=400.0),
)


class TestALookAlone:
    """A job that begins to compute beside others, and of which nobody knows how fast it is, is seen alone first."""

    def test_pauses_all_mates_for_a_moment(self):
        engine = tried(*GROUP, xi=1.05, jobs_per_gpu=4)
        looks = [(at, d) for name in ("first", "second") for at, d in decisions(engine, name) if d.trial == "third"]
        assert [d.allocation.active for _, d in looks] == [False, False]
        assert all("to see how fast third is alone" in d.why for _, d in looks)
        assert engine.belief.trials.ended[-1].guest.job == "third"
        assert engine.belief.trials.ended[-1].seqs == (2, 0, 1)
        ends = [engine.world.ended[one.id].ended for one in GROUP]
        assert max(ends) < 1500.0, "all three went on together"

    @pytest.mark.parametrize(
        "change",
        [
            {"second": {"can_pause": False}},
            {"first": {"priority": 1}, "second": {"priority": 1}},
            {"policy": "carpool:trials=false"},
            {"third": {"model": "m0"}},
        ],
    )
    def test_is_not_taken_where_a_rule_forbids_it_or_the_speed_is_known(self, change):
        jobs = [replace(one, **change.get(one.id, {})) for one in GROUP]
        engine = tried(*jobs, xi=1.05, jobs_per_gpu=4, policy=change.get("policy", "carpool"))
        assert not [d for one in jobs for _, d in decisions(engine, one.id) if d.trial == "third"]

    def test_of_a_job_that_never_reports_ends_and_is_not_repeated(self):
        engine = tried(*GROUP, xi=1.05, jobs_per_gpu=4, report_s=10_000.0)
        assert len([trial for trial in engine.belief.trials.ended if trial.guest.job == "third"]) == 1
        assert max(cost for cost, _ in engine.lost) <= 0.02 * 1000.0 + 1.0


class TestNoTrial:
    @pytest.mark.parametrize(
        "change",
        [
            {"host": {"exclusive": True}},
            {"guest": {"exclusive": True}},
            {"guest": {"max_slowdown": 1.2}},
            {"host": {"max_slowdown": 1.2}},
            {"host": {"can_pause": False}, "guest": {"can_pause": False}},
            {"policy": "carpool:trials=false"},
            {"policy": "carpool:pause=false"},
            {"jobs_per_gpu": 1},
        ],
    )
    def test_where_a_rule_or_an_option_forbids_it(self, change):
        pair = [
            job("host", left=1000.0, model="one", **change.pop("host", {})),
            job("guest", left=800.0, model="two", submitted=100.0, **change.pop("guest", {})),
        ]
        engine = tried(*pair, xi=3.0, **change)
        assert engine.belief.trials.begun == 0

    def test_where_the_belief_is_certain(self):
        truth = FittedModel(MODELS, ConstantInterference(3.0), 1, ignore_memory=True)
        engine = Engine(PAIR, nodes("1x1"), make("carpool"), belief=truth)
        assert engine.run().trials.begun == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_trial_costs_each_side_two_per_cent_or_three_seconds(seed):
    random = Random(seed)
    jobs = [
        job(f"j{n}", left=random.uniform(20.0, 900.0), model=f"m{n % 5}", submitted=random.uniform(0.0, 300.0))
        for n in range(24)
    ]
    engine = tried(
        *jobs,
        xi=random.choice([1.1, 1.6, 2.0]),
        where="1x3",
        startup_s=random.choice([0.0, 5.0]),
        report_s=random.choice([0.5, 2.0]),
    )
    assert engine.belief.trials.begun, "nothing was tried"
    for lost, left in engine.lost:
        assert lost <= max(3.0, 0.02 * left) + 4 * 0.05 + 1e-6, "a pause and a resume take 0.05 s each"
    assert engine.belief.trials.cost_s <= sum(max(0.0, lost) for lost, _ in engine.lost) + 0.5 * len(engine.lost)
    assert not engine.belief.trials.running


def test_a_host_of_several_gpus_is_in_one_trial_at_a_time():
    guests = [job(f"guest{n}", left=200.0, model=f"m{n}", submitted=100.0) for n in range(2)]
    engine = tried(job("host", gpus=2, left=1000.0, model="one"), *guests, xi=1.3, where="1x2")
    first, *others = engine.belief.trials.ended
    assert first.began == 100.0
    assert all(trial.began >= first.ended for trial in others)


@pytest.mark.parametrize("after", [0.5, 1.0, 1.05, 1.1])
def test_no_trial_begins_beside_a_job_whose_mate_goes_on_at_that_moment(after):
    """A host of two GPUs is paused for a look on one of them; on the other, its mate seems to be alone."""
    jobs = [
        job("host", gpus=2, left=1000.0, model="one"),
        job("mate", left=600.0, model="m0", submitted=100.0),
        job("guest", left=500.0, model="m1", submitted=300.0),
        job("late", left=300.0, model="m2", submitted=300.0 + after),
    ]
    engine = tried(*jobs, xi=1.1, where="1x2")  # the engine refuses a plan with three jobs on a GPU
    assert engine.belief.trials.begun >= 2
    assert {one.id for one in jobs} == set(engine.world.ended)


class Silent(Watched):
    """Jobs of the model `one` report nothing, as a script that was never seen alone and tells no total."""

    def _report(self, now, pace_changes):
        super()._report(now, [record for record in pace_changes if record.job.model != "one"])


def test_a_trial_keeps_others_waiting_for_its_length_only_although_a_job_of_it_cannot_report():
    jobs = (*PAIR, job("third", left=50.0, model="m0", submitted=101.0))
    engine = Silent(jobs, 1.01, jobs_per_gpu=3)
    engine.run()
    trial, starts = engine.belief.trials.ended[0], decisions(engine, "third")
    assert (trial.guest.job, trial.began) == ("guest", 100.0)
    assert starts[0][0] == pytest.approx(100.0 + 0.02 * 800.0, abs=0.1)


def test_a_snapshot_in_the_middle_of_a_trial_continues_it():
    engine = Watched(PAIR, 1.1)
    texts = []

    def keep(event):
        if engine.belief.trials.running:
            texts.append(json.dumps(snapshot.encode(engine.belief)))

    engine.log = keep
    engine.run()
    data = json.loads(texts[-1])
    again = snapshot.restore(data, UnknownBelief(engine.world.perf, 1, load("t4"), "mps"), engine.belief.sort_key)
    assert again.trials.dump() == data["trials"] or json.loads(json.dumps(again.trials.dump())) == data["trials"]
    trial = again.trials.running[1]
    assert (trial.guest.job, trial.hosts[0].job, trial.began) == ("guest", "host", 100.0)
    assert again.trials.begun == 1


def test_wrong_guesses_do_not_lead_to_pauses_in_turn():
    """A slow-down that is measured against a wrong speed alone must not contradict the belief at every report."""
    random = Random(1)
    jobs = [
        job(f"j{n}", left=random.uniform(300.0, 3000.0), model=f"m{n % 5}", submitted=random.uniform(0.0, 600.0))
        for n in range(24)
    ]
    truth = FittedModel(MODELS, ConstantInterference(1.4), 1, ignore_memory=True)
    belief = UnknownBelief(MisestimatedTimes(truth, 0.35, 1), 1, load("t4"), "unknown")
    engine = Engine(jobs, nodes("1x4"), make("carpool"), belief=belief, truth=truth, report_s=2.0)
    assert engine.run().pauses < 3 * len(jobs)
