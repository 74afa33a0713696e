"""A policy that fails: one line says so, and a stated fallback keeps jobs going."""

import asyncio

import pytest

from carpool.core.model import Allocation, Decision
from carpool.core.scheduler import Scheduler
from carpool.live.home import Home
from carpool.policies.base import BasePolicy
from carpool.policies.guarded import GuardedPolicy
from tests.support.command_line import call, process
from tests.support.services import notes, one, serving, shell, status, until
from tests.support.world import cluster, given, pending, running

ILLEGAL = '''
from carpool.core.model import Allocation, Decision
from carpool.policies.simple.fifo import Fifo

class Illegal(Fifo):
    """All its plans name a GPU that does not exist."""

    def decide(self, view):
        return [Decision(job.job.id, Allocation((99,)), "there") for job in view.queue]
'''
FAULTY = '''
from dataclasses import dataclass
from carpool.policies.base import BasePolicy

@dataclass
class Faulty(BasePolicy):
    """It fails."""
    name = "faulty"

    def key(self, job, now):
        return (job.job.submitted,)

    def decide(self, view):
        return view.nothing_of_that_name
'''


class Broken(BasePolicy):
    """Each test replaces what fails."""

    name = "broken"
    in_rounds = True
    pauses = True

    def key(self, job, now):
        return (0.0,)

    def decide(self, view):
        return []


def put(name, gpu):
    return Decision(name, Allocation((gpu,)), "because")


def fail(*_):
    raise KeyError("a\nb")


def leave(*_):
    raise SystemExit(3)


def interrupt(*_):
    raise KeyboardInterrupt


def cancel(*_):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("method", "does"),
    [
        ("decide", fail),
        ("decide", leave),
        ("decide", interrupt),
        ("decide", cancel),
        ("key", leave),
        ("wake", leave),
        ("decide", lambda self, view: None),
        ("decide", lambda self, view: ["start everything"]),
        ("decide", lambda self, view: [put("b", 99), put("none", 0)]),
        ("key", fail),
        ("key", lambda self, job, now: None),
        ("key", lambda self, job, now: (float("nan"),)),
        ("wake", fail),
        ("wake", lambda self, view: "tomorrow"),
    ],
)
def test_the_fallback_starts_jobs_where_the_policy_fails(monkeypatch, method, does):
    monkeypatch.setattr(Broken, method, does)
    policy = GuardedPolicy(Broken(), "mine.py:Broken")
    situation = given(cluster("1x2"), running("a"), pending("b"))
    state = situation.state(policy.key)
    scheduler = Scheduler(policy, state.perf, strict=False)
    scheduler.state = state
    policy.wake(state)
    state.needs_decision = True
    planned = scheduler.step(state.now, (), wake=True)
    assert (planned is not None) == (method == "decide"), "where it can decide, the policy itself does"
    assert planned is None or [decision.job for decision in planned.decisions] == ["b"]
    assert policy.failure.startswith(f"policy mine.py:Broken failed in {method}(): ")
    assert "fifo decides" in policy.failure
    assert "\n" not in policy.failure


def test_a_plan_of_which_a_part_is_legal_is_no_failure(monkeypatch):
    monkeypatch.setattr(Broken, "decide", lambda self, view: [put("a", 99), put("b", 0)])
    policy = GuardedPolicy(Broken(), "broken")
    state = given(cluster("1x2"), pending("a"), pending("b")).state(policy.key)
    scheduler = Scheduler(policy, state.perf, strict=False)
    scheduler.state = state
    planned = scheduler.step(state.now, (), wake=True)
    assert [decision.job for decision in planned.decisions] == ["b"]
    assert (policy.failure, len(scheduler.refused)) == ("", 1)


def test_an_empty_plan_for_an_empty_queue_does_not_show_that_a_policy_works(monkeypatch):
    monkeypatch.setattr(Broken, "decide", lambda self, view: [put(job.job.id, 99) for job in view.queue])
    policy = GuardedPolicy(Broken(), "broken")
    assert policy.decide(given(cluster("1x2"), pending("b")).state(policy.key))
    assert not policy.decide(given(cluster("1x2"), running("b")).state(policy.key))
    assert "fifo decides" in policy.failure


def test_a_policy_that_works_again_decides_again(monkeypatch):
    policy = GuardedPolicy(Broken(), "broken")
    monkeypatch.setattr(Broken, "decide", fail)
    state = given(cluster("1x2"), pending("b")).state(policy.key)
    assert policy.decide(state)
    assert not policy.in_rounds
    monkeypatch.setattr(Broken, "decide", lambda self, view: [])
    assert not policy.decide(state)
    assert (policy.failure, policy.in_rounds, policy.pauses) == ("", True, True)


def test_the_simulator_says_it_in_one_line(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    said = process("simulate", "--policy", f"{tmp_path}/faulty.py:Faulty", "--jobs", "5")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "has no attribute 'nothing_of_that_name' (faulty.py, line 14)" in said.err


def test_a_policy_that_exits_does_not_end_a_command_without_a_word(tmp_path):
    (tmp_path / "leaves.py").write_text(FAULTY.replace("return view.nothing_of_that_name", "raise SystemExit(0)"))
    (tmp_path / "never.py").write_text("raise SystemExit(0)")
    for policy in ("leaves.py:Faulty", "never.py:Faulty"):
        said = call("simulate", "--policy", f"{tmp_path}/{policy}", "--jobs", "5")
        assert (said.code, "SystemExit: 0" in said.err) == (2, True), said.err


async def test_jobs_do_not_wait_for_a_policy_whose_plans_are_all_illegal(tmp_path):
    (tmp_path / "illegal.py").write_text(ILLEGAL)
    async with serving(Home(tmp_path / "home"), f"{tmp_path}/illegal.py:Illegal", gpus=1, jobs_per_gpu=1) as service:
        jobs = [await one(service, shell("sleep 0.5")), await one(service, shell("true"))]
        await until(lambda: status(service, jobs[0]) == "running")
        assert "GPU 99" in service.queries.policy_failure()
        assert any("fifo decides" in line for line in service.queries.explain(jobs[1])["sentences"])
        assert await service.queries.wait(jobs[1]) == "finished"
        said = [text for text in notes(service) if "nothing of the plan obeys the rules" in text]
        assert 1 <= len(said) <= 3, "each sentence once"


async def test_live_jobs_go_on_and_it_is_said_everywhere(tmp_path, caplog):
    (tmp_path / "faulty.py").write_text(FAULTY)
    async with serving(Home(tmp_path / "home"), f"{tmp_path}/faulty.py:Faulty", gpus=1, jobs_per_gpu=1) as service:
        jobs = [await one(service, shell("sleep 0.5")), await one(service, shell("true"))]
        await until(lambda: status(service, jobs[0]) == "running")
        sentences = service.queries.explain(jobs[1])["sentences"]
        assert any("fifo decides" in line for line in sentences)
        assert service.queries.policy_failure()
        assert await service.queries.wait(jobs[1]) == "finished"
        assert len([text for text in notes(service) if "nothing_of_that_name" in text]) == 1
    assert "Traceback" not in caplog.text
