"""Random events against the state: the indexes equal a recount, and a replayed journal gives the same state."""

import json
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool import policies
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.codec import decode, encode
from carpool.core.model import Allocation, Closure, Decision, FairShare, Limits, Node, Status, UserGroup, accumulations
from carpool.core.perf import FittedModel, MeasuredPair, TableInterference
from carpool.core.rules import IllegalPlan, check
from carpool.core.scheduler import Scheduler
from carpool.core.state import State
from carpool.core.usage_report import report_usage
from tests.support.effort import cases
from tests.support.situations import check_state, facts, random_job
from tests.support.world import GIB, TASKS

pytestmark = pytest.mark.slow

PAIRS = {pair: [MeasuredPair(1.1 + 0.1 * n)] for n, pair in enumerate(product(TASKS, repeat=2))}
"""Every kind of job slows each other kind down by another factor."""
MODEL = FittedModel(TASKS, TableInterference(PAIRS), 2)
HOLDING = (Status.STARTING, Status.RUNNING, Status.PAUSING, Status.PAUSED, Status.RESUMING)
ALIVE = (*HOLDING, Status.STOPPING, Status.CANCELLING)


def living(found: dict) -> dict:
    """Return what a snapshot keeps: all but the ended jobs."""
    ended = (Status.FINISHED, Status.FAILED, Status.CANCELLED)
    return {**found, "jobs": {name: job for name, job in found["jobs"].items() if job["status"] not in ended}}


def account_of(state: State) -> dict:
    """Return the accounts as one flat mapping, which can be compared approximately."""
    told = report_usage(state, ("user", "group", "project", "day"), state.now).plain()
    rows = {(row["user"], row["day"], name): row[name] for row in told["rows"] for name in row if name.endswith("_s")}
    return {name: value or 0.0 for name, value in {**rows, **told["gpus"]}.items()}


class Life(RuleBasedStateMachine):
    """All events that a driver may report, in any order, stale and repeated ones included."""

    def model(self):
        return FittedModel(TASKS, TableInterference(PAIRS), 2, startup=lambda job: self.startup_s)

    @initialize(
        name=st.sampled_from(sorted(policies.BUILT_IN)),
        jobs_per_gpu=st.sampled_from([1, 2, 3]),
        startup_s=st.sampled_from([0.0, 20.0]),
        jobs=st.integers(0, 8),
        random=st.randoms(use_true_random=False),
    )
    def begin(self, name, jobs_per_gpu, startup_s, jobs, random):
        self.startup_s = startup_s
        self.scheduler = Scheduler(policies.make(name), self.model(), jobs_per_gpu)
        self.state = self.scheduler.state
        _ = self.state.hosts  # kept from the start on, so that every event updates it
        self.journal = []
        self.retunes = []
        self.count = 0
        self.report(ev.AccountsOpened(0.0))
        for number in range(2):
            self.report(ev.NodeJoined(0.0, Node(f"n{number}", (2 * number, 2 * number + 1), 16 * GIB, number == 0)))
        for _ in range(jobs):  # few rules let jobs compute: without these, mates that do would be rare
            self.submit(random_job(random, f"j{self.count}", 0.0, 4))
        for record in [r for r in self.state.jobs.values() if r.status is Status.STARTING]:
            self.report(ev.Started(0.0, record.job.id, record.attempt))

    def submit(self, job):
        if self.state.refusal(job) is None:
            self.count += 1
            self.report(ev.Submitted(self.state.now, job))

    def report(self, *events):
        self.journal += events
        planned = self.scheduler.step(self.state.now, events, wake=self.scheduler.in_rounds)
        if planned:
            self.journal.append(planned)

    def some(self, data, *statuses):
        jobs = [r for r in self.state.jobs.values() if r.status in statuses]
        return data.draw(st.sampled_from(jobs)) if jobs else None

    @rule(seconds=st.sampled_from([0.0, 1.0, 12.5, 400.0, 50_000.0]))
    def time_passes(self, seconds):
        self.state.advance(self.state.now + seconds)

    @rule(random=st.randoms(use_true_random=False), data=st.data())
    def a_job_is_submitted(self, random, data):
        job = random_job(random, f"j{self.count}", self.state.now, 4)
        if self.state.jobs and data.draw(st.booleans()):
            after = tuple(data.draw(st.lists(st.sampled_from(sorted(self.state.jobs)), max_size=2)))
            job = type(job)(**{**{f: getattr(job, f) for f in job.__slots__}, "after": after})
        limit_s, requeue = data.draw(st.sampled_from([None, 30.0])), data.draw(st.booleans())
        self.submit(replace(job, limit_s=limit_s, requeue=requeue))

    @rule(data=st.data())
    def a_gang_comes_up(self, data):
        if record := self.some(data, Status.STARTING):
            computes = data.draw(st.booleans())
            self.report(ev.Started(self.state.now, record.job.id, record.attempt, computes=computes))

    @rule(data=st.data())
    def a_gang_computes(self, data):
        if record := self.some(data, *HOLDING):
            self.report(ev.Computing(self.state.now, record.job.id, record.attempt))

    @rule(data=st.data())
    def a_stale_message_arrives(self, data):
        if record := self.some(data, *Status):
            before = facts(self.state)
            kind = data.draw(st.sampled_from([ev.Started, ev.Computing, ev.Paused, ev.Resumed, ev.Finished]))
            self.report(kind(self.state.now, record.job.id, record.attempt + data.draw(st.sampled_from([-1, 1]))))
            after = facts(self.state)
            assert after["jobs"] == before["jobs"] or before["queue"], "only the policy may have acted"

    @rule(data=st.data())
    def a_job_reports(self, data):
        if record := self.some(data, Status.RUNNING, Status.PAUSED):
            done = data.draw(st.floats(0.0, 3 * record.job.iterations))
            at, name, attempt = self.state.now, record.job.id, record.attempt
            seconds = data.draw(st.sampled_from([0.5, 1.0, 2.0])) * record.iteration_s
            report = st.sampled_from(
                [
                    ev.Progressed(at, name, attempt, done),
                    ev.Checkpointed(at, name, attempt, done),
                    ev.Observed(at, name, attempt, done, seconds),
                ]
            )
            event = data.draw(report)
            self.observed = isinstance(event, ev.Observed) and record.computing
            self.report(event)
            if self.observed:
                # A measured iteration time is not the model's: end the job so that the recount can be exact.
                self.report(ev.Cancelled(at, name), ev.Stopped(at, name, attempt, done))

    @rule(data=st.data())
    def a_job_finishes(self, data):
        if record := self.some(data, *ALIVE):
            self.report(ev.Finished(self.state.now, record.job.id, record.attempt))

    @rule(data=st.data())
    def a_job_fails(self, data):
        if record := self.some(data, *ALIVE):
            again = data.draw(st.booleans())
            self.report(ev.Failed(self.state.now, record.job.id, record.attempt, "reason", again))

    @rule(data=st.data())
    def a_stop_is_confirmed(self, data):
        if record := self.some(data, Status.STOPPING, Status.CANCELLING):
            self.report(ev.Stopped(self.state.now, record.job.id, record.attempt, record.done))

    @rule(data=st.data())
    def a_job_is_cancelled(self, data):
        if record := self.some(data, *Status):
            self.report(ev.Cancelled(self.state.now, record.job.id))

    @rule(data=st.data())
    def a_job_is_requeued(self, data):
        if record := self.some(data, *Status):
            self.report(ev.Requeued(self.state.now, record.job.id, record.attempt))

    @rule(data=st.data(), reached=st.booleans())
    def a_job_comes_to_its_time_limit(self, data, reached):
        if record := self.some(data, *Status):
            told = (self.state.now, record.job.id, record.attempt)
            self.report(ev.LimitReached(*told) if reached else ev.LimitNeared(*told, 1.0))

    @rule(data=st.data(), accumulation=st.sampled_from([1, 2, 64]))
    def a_job_splits_its_batch_by_itself(self, data, accumulation):
        if record := self.some(data, *ALIVE):
            accumulation = min(accumulation, record.job.batch)
            if accumulation >= record.accumulation:
                self.report(ev.Retuned(self.state.now, record.job.id, record.attempt, accumulation, unasked=True))

    @rule(data=st.data())
    def workers_confirm_a_pause(self, data):
        if record := self.some(data, *HOLDING):
            self.report(ev.Paused(self.state.now, record.job.id, record.attempt))

    @rule(data=st.data())
    def a_swap_fails(self, data):
        if record := self.some(data, *HOLDING):
            self.report(ev.SwapFailed(self.state.now, record.job.id, record.attempt))

    @rule(data=st.data())
    def workers_confirm_a_resume(self, data):
        if record := self.some(data, *HOLDING):
            self.report(ev.Resumed(self.state.now, record.job.id, record.attempt))

    @rule(data=st.data())
    def an_owner_pauses_a_job(self, data):
        if record := self.some(data, *Status):
            self.report(ev.PausedByOwner(self.state.now, record.job.id))

    @rule(data=st.data())
    def an_owner_resumes_a_job(self, data):
        if record := self.some(data, *Status):
            self.report(ev.ResumedByOwner(self.state.now, record.job.id))

    @rule(data=st.data())
    def a_job_is_held(self, data):
        if record := self.some(data, *Status):
            self.report(ev.Held(self.state.now, record.job.id))

    @rule(data=st.data())
    def a_job_is_released(self, data):
        if record := self.some(data, *Status):
            self.report(ev.Released(self.state.now, record.job.id))

    @rule(data=st.data(), shrink=st.sampled_from([None, True, False]), least=st.sampled_from([None, 1, 2, 100]))
    def the_constraints_of_a_job_change(self, data, shrink, least):
        if record := self.some(data, *Status):
            self.report(
                ev.ConstraintsChanged(
                    self.state.now, record.job.id, shrink, least, data.draw(st.sampled_from([None, True]))
                )
            )

    @rule(data=st.data(), gib=st.sampled_from([0, 1, 9, 20]))
    def other_processes_take_memory(self, data, gib):
        gpus = sorted(self.state.topology.node_of)
        self.report(ev.MemoryTaken(self.state.now, data.draw(st.sampled_from([*gpus, 10**6])), gib * GIB))

    @rule()
    def the_scheduler_starts_anew_from_a_snapshot(self):
        """A snapshot leaves out ended jobs and nothing else."""
        before = living(facts(self.state))
        data = json.loads(json.dumps(snapshot.encode(self.state)))
        self.state = snapshot.restore(data, self.model(), self.state.sort_key, self.state.jobs_per_gpu)
        self.scheduler.state = self.state
        assert living(facts(self.state)) == before
        assert [r.seq for r in self.state.running] == [r.seq for r in self.state.holders.values()]

    @rule(data=st.data(), priority=st.sampled_from([None, 0, 5]))
    def the_priority_of_a_job_changes(self, data, priority):
        if record := self.some(data, *Status):
            self.report(ev.PriorityChanged(self.state.now, record.job.id, priority))

    @rule(user=st.sampled_from(["", "eve"]), jobs=st.sampled_from([None, 1, 3]), gpus=st.sampled_from([None, 4]))
    def limits_change(self, user, jobs, gpus):
        self.report(ev.LimitsChanged(self.state.now, user, Limits(jobs, gpus)))

    @rule(
        name=st.sampled_from(["", "red", "blue"]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        guarantee=st.sampled_from([0, 0, 2]),
        cap=st.sampled_from([None, None, 4]),
    )
    def a_group_changes(self, name, weight, guarantee, cap):
        self.report(ev.GroupChanged(self.state.now, UserGroup(name, weight, guarantee, cap)))

    @rule(strength=st.sampled_from([0.0, 0.5, 0.9, 1.0]), half_life_s=st.sampled_from([50.0, 1e5]))
    def shares_count_more_or_less(self, strength, half_life_s):
        self.report(ev.FairShareChanged(self.state.now, FairShare(strength, half_life_s)))

    @rule(data=st.data())
    def a_job_outlives_what_is_believed(self, data):
        if record := self.some(data, Status.RUNNING):
            if data.draw(st.booleans()) and record.computing:
                self.state.advance(max(self.state.now, record.end() + 1.0))
            self.report(ev.Outlived(self.state.now, record.job.id, record.attempt))

    @rule(trusted=st.booleans())
    def guesses_are_trusted_or_not(self, trusted):
        self.report(ev.GuessesTrusted(self.state.now, trusted))

    @rule(data=st.data())
    def a_user_plans_by_hand(self, data):
        """Moves, re-tunes, preemptions, pauses and resumes that no built-in policy makes."""
        if record := self.some(data, Status.PENDING, *HOLDING):
            gpus = sorted(self.state.topology.node_of)
            if len(gpus) < record.job.gpus:
                return
            chosen = tuple(data.draw(st.permutations(gpus))[: record.job.gpus])
            if record.gpus and data.draw(st.booleans()):
                chosen = record.gpus
            accumulation = data.draw(st.sampled_from(accumulations(record.job.batch)))
            switched = Allocation(record.gpus, record.accumulation, record.batch, active=not record.active)
            swapped = Allocation(record.gpus, record.accumulation, record.batch, active=False, swapped=True)
            without_a_turn = Allocation(chosen, accumulation, active=False)
            choices = [None, Allocation(chosen, accumulation), without_a_turn, switched, swapped]
            allocation = data.draw(st.sampled_from(choices))
            plan = (Decision(record.job.id, allocation, "by hand"),)
            try:
                check(self.state, plan)
            except IllegalPlan:
                return
            planned = ev.Planned(self.state.now, plan)
            self.state.apply(planned)
            self.journal.append(planned)
            if record.status is Status.RUNNING:
                self.retunes.append((record.job.id, record.attempt, record.accumulation))

    @precondition(lambda self: getattr(self, "retunes", None))
    @rule(data=st.data())
    def a_retune_is_confirmed(self, data):
        """The confirmation may be late, repeated or missing."""
        self.report(ev.Retuned(self.state.now, *data.draw(st.sampled_from(self.retunes))))

    @rule(data=st.data())
    def a_node_is_lost(self, data):
        """The event may be repeated."""
        if len(self.state.topology.present) > 1:
            self.report(
                ev.NodeLost(self.state.now, data.draw(st.sampled_from(["n0", "n1", max(self.state.topology.present)])))
            )

    @rule(data=st.data(), closes=st.booleans())
    def a_node_is_closed_or_opened(self, data, closes):
        """The event may be repeated, and the node may be gone."""
        name = data.draw(st.sampled_from(["n0", "n1", *self.state.topology.present]))
        self.report((ev.NodeClosed if closes else ev.NodeOpened)(self.state.now, name))

    @rule(
        gpus=st.sets(st.integers(0, 3), min_size=1),
        wait=st.sampled_from([0.0, 5.0, 300.0]),
        group=st.sampled_from([None, "", "red"]),
        lets_finish=st.booleans(),
    )
    def gpus_are_drained_or_reserved(self, gpus, wait, group, lets_finish):
        at = self.state.now
        closure = Closure(
            f"c{min(gpus)}", tuple(gpus), at + wait, None if group is None else at + 400.0, group, lets_finish
        )
        self.report(ev.ClosureSet(at, closure))

    @precondition(lambda self: self.state.closures)
    @rule(data=st.data(), begins=st.booleans())
    def a_closure_begins_or_is_over(self, data, begins):
        name = data.draw(st.sampled_from(sorted(self.state.closures)))
        self.report((ev.ClosureBegan if begins else ev.ClosureRemoved)(self.state.now, name))

    @precondition(lambda self: len(self.state.topology.present) < 2)
    @rule(gib=st.sampled_from([8, 16]))
    def a_node_joins(self, gib):
        first = 1 + max(self.state.topology.node_of, default=-1) + len(self.journal)
        self.report(ev.NodeJoined(self.state.now, Node(f"n{first}", (first, first + 1), gib * GIB)))

    @invariant()
    def indexes_equal_a_recount(self):
        if hasattr(self, "state"):
            check_state(self.state)

    def teardown(self):
        if not hasattr(self, "state"):
            return
        replayed = State(self.model(), self.state.sort_key, self.state.jobs_per_gpu)
        _ = replayed.hosts
        for event in self.journal:
            replayed.apply(decode(json.loads(json.dumps(encode(event)))))
        replayed.advance(self.state.now)
        replayed.tenants.entitlement = self.state.tenants.entitlement  # the policy's, set before each decision
        for state in (replayed, self.state):  # tiers follow from what was used, whenever they were last computed
            state.rank_queue(at_once=True)
        assert living(facts(replayed)) == living(facts(self.state))
        assert account_of(replayed) == pytest.approx(account_of(self.state), abs=1e-6)


Life.TestCase.settings = settings(max_examples=cases(400), stateful_step_count=50)
TestLife = Life.TestCase


def test_a_duplicate_submission_is_refused():
    state = State(MODEL, lambda job, now: (0.0,))
    state.apply(ev.NodeJoined(0.0, Node("n", (0,), 16 * GIB)))
    job = random_job(Random(1), "j", 0.0, 1)
    state.apply(ev.Submitted(0.0, job))
    with pytest.raises(ValueError, match="exists already"):
        state.apply(ev.Submitted(1.0, job))
