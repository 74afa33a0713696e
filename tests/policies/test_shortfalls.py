"""Jobs that surely find too few hosts, against searching hosts for every job in every pass."""

import pytest

from carpool.core import offers
from carpool.core.model import Node
from carpool.core.perf import ConstantInterference, MeasuredPair, TableInterference
from carpool.policies.sharing.bsbf import SjfBsbf
from carpool.policies.sharing.shortfalls import SearchChance, Shortfalls
from carpool.profile.schema import load
from carpool.sim.engine import Engine
from carpool.sim.generate import philly_like
from carpool.sim.run import Setup, simulate
from tests.support.world import GIB, TASKS, job, model

MODELS = sorted(TASKS)
PAIRS = {
    (a, b): [MeasuredPair(1.0 + 0.13 * (3 * i + 5 * j + samples % 7), samples, 16) for samples in (2, 8)]
    for i, a in enumerate(MODELS)
    for j, b in enumerate(MODELS)
}
WORLDS = {
    "ξ 1.1": (ConstantInterference(1.1), (16,), 2),
    "ξ 1.5": (ConstantInterference(1.5), (16,), 2),
    "measured pairs": (TableInterference(PAIRS), (16,), 2),
    "GPUs of several sizes": (TableInterference(PAIRS), (16, 8, 12), 2),
    "three jobs per GPU": (ConstantInterference(1.1), (16,), 3),
}


def jobs():
    """Return jobs of several shapes that keep ten GPUs busy for some time, with a long queue at the end."""
    return [
        job(
            f"j{n}",
            1 + (n * n) % 5 % 4,
            3.0 + (n * 131) % 97 * (1 + n % 11),
            float(n * 41 // (2 + n % 2)),
            model=MODELS[n * 5 % 3],
            batch=(4, 8)[n % 7 == 0],
            max_slowdown=1.3 if n % 13 == 0 else None,
        )
        for n in range(400)
    ]


class SearchesAlways(Shortfalls):
    """No job surely finds too few: hosts are searched for each."""

    def begin(self, view):
        super().begin(view)
        return set()

    def chance(self, draft, guest):
        return SearchChance.OPEN


class Counts(Shortfalls):
    """Count the answers."""

    answers = witnessed = 0

    def begin(self, view):
        found = super().begin(view)
        self.answers += len(found)
        return found

    def chance(self, draft, guest):
        found = super().chance(draft, guest)
        self.answers += found is not SearchChance.OPEN
        self.witnessed += found is SearchChance.NONE_NOW
        return found


def log(shortfalls, world, **options):
    """Return the events of a run with these shortfalls."""
    table, memory, jobs_per_gpu = WORLDS[world]
    sizes = [memory[n % len(memory)] for n in range(5)]
    cluster = [Node(f"n{n}", (2 * n, 2 * n + 1), gib * GIB) for n, gib in enumerate(sizes)]
    policy, events = SjfBsbf(**options), []
    policy._shortfalls = made = shortfalls(policy._options, policy.floor)
    Engine(jobs(), cluster, policy, belief=model(table, 2), jobs_per_gpu=jobs_per_gpu, log=events.append).run()
    return events, made


@pytest.mark.parametrize("options", [{}, {"floor": 0.95}, {"single_host": True}], ids=["plain", "floor", "single host"])
@pytest.mark.parametrize("world", WORLDS)
def test_decisions_are_those_of_a_search_for_every_job(world, options):
    events, counting = log(Counts, world, **options)
    assert events == log(SearchesAlways, world, **options)[0]
    assert counting.answers > 100


def test_another_state_has_shortfalls_of_its_own():
    policy, expected = SjfBsbf(), []
    for shared in (False, True):
        for xi in (1.5, 1.1):
            events = []
            chosen = policy if shared else SjfBsbf()
            cluster = [Node(f"n{n}", (2 * n, 2 * n + 1), 16 * GIB) for n in range(5)]
            Engine(jobs(), cluster, chosen, belief=model(xi, 2), log=events.append).run()
            expected.append(events)
    assert expected[:2] == expected[2:]


@pytest.mark.parametrize("most", [8, offers.MOST_CHANGES])
def test_what_is_learned_and_what_the_log_has_forgotten_count_no_more(monkeypatch, most):
    monkeypatch.setattr(offers, "MOST_CHANGES", most)
    workload = philly_like(load("t4").core_tasks(), jobs=250, load=0.6)
    setup = Setup(cluster="4x4", truth="gavel", belief="learned", report_error=0.1)
    logs = []
    for shortfalls in (Counts, SearchesAlways):
        policy, events = SjfBsbf(), []
        policy._shortfalls = shortfalls(policy._options)
        simulate(workload, policy, setup, log=events.append)
        logs.append(events)
    assert logs[0] == logs[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"floor": 1.2}, {"single_host": True}], ids=["plain", "floor", "single host"])
@pytest.mark.parametrize("interference", ["1.2", "1.5", "gavel"])
def test_gangs_whose_hosts_need_different_sub_batches(interference, options):
    """Hosts of eight GPUs that leave room for the whole batch are few, and so are those that suit a smaller one."""
    workload = philly_like(load("t4").core_tasks(), jobs=2000, load=3.0, seed=1)
    logs, counting = [], []
    for shortfalls in (Counts, SearchesAlways):
        policy, events = SjfBsbf(**options), []
        policy._shortfalls = shortfalls(policy._options, policy.floor)
        counting.append(policy._shortfalls)
        simulate(workload, policy, Setup(cluster="16x8", truth=interference), log=events.append)
        logs.append(events)
    assert logs[0] == logs[1]
    assert counting[0].witnessed
