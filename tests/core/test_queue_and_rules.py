"""Queue, free GPUs and rules, each on its own."""

import subprocess
import sys
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core import events as ev
from carpool.core.free import FreeGpus, Topology
from carpool.core.model import Allocation, Decision, Limits, Node
from carpool.core.queue import Queue
from carpool.core.record import JobRecord
from carpool.core.rules import IllegalPlan, check
from carpool.core.scheduler import Scheduler
from carpool.core.shapes import Shape
from tests.support.world import cluster, job, model, nodes, pending, running
from tests.support.world import given as situation


class TestQueue:
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)), max_size=40), st.data())
    def test_a_scan_is_a_plain_sort_without_what_was_passed_over(self, jobs, data):
        queue, shapes, records = Queue(), {}, []
        asked_before = data.draw(st.booleans()) and (queue.in_order, queue.by_age)
        for number, (gpus, priority, key) in enumerate(jobs):
            shape = shapes.setdefault((gpus, priority), Shape(gpus, priority, False, None, None, (), None))
            record = JobRecord(job(str(number)), shape, number, 1.0)
            queue.add(record, (float(key),))
            records.append((-priority, key, number, record))
        for *_, record in data.draw(st.lists(st.sampled_from(records), unique_by=id)) if records else ():
            queue.remove(record)
            records = [entry for entry in records if entry[3] is not record]
        largest = data.draw(st.sampled_from([None, 0, 1, 2]))
        hopeless = {shape for shape in shapes.values() if data.draw(st.booleans())}
        seen, scan = [], queue.scan(largest)
        for record in scan:
            seen.append(record)
            if record.shape in hopeless:
                scan.skip_alike()
        wanted, passed = [], set()
        for *_, record in sorted(records, key=lambda entry: entry[:3]):
            if (largest is None or record.shape.gpus <= largest) and record.shape not in passed:
                wanted.append(record)
                if record.shape in hopeless:
                    passed.add(record.shape)
        assert seen == wanted
        assert len(queue) == len(records)
        assert [entry[2] for entry in queue.in_order] == [number for *_, number, _ in sorted(records)]
        assert [number for number, _ in queue.by_age] == [number for *_, number, _ in records]
        assert asked_before in (False, (queue.in_order, queue.by_age)), "one list, kept"


class TestFreeGpus:
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 2**20))
    def test_the_pick_is_on_fewest_nodes(self, sizes, count, seed):
        topology = Topology()
        free = FreeGpus(topology)
        first = 0
        for number, size in enumerate(sizes):
            free.add_node(topology.add(Node(f"n{number}", tuple(range(first, first + size)), 16)))
            first += size
        taken = [gpu for gpu in range(first) if Random(seed * 97 + gpu).random() < 0.4]
        free.take(taken)
        left = {number: sum(gpu not in taken for gpu in node.gpus) for number, node in enumerate(topology.nodes)}
        picked = free.pick(count)
        if sum(left.values()) < count:
            assert picked is None
            return
        assert len(set(picked)) == count
        assert not set(picked) & set(taken)
        fewest = next(
            n for n in range(1, len(left) + 1) if any(sum(left[x] for x in c) >= count for c in combinations(left, n))
        )
        used = {topology.node_of[gpu] for gpu in picked}
        assert len(used) == fewest
        if fewest == 1:
            assert left[used.pop()] == min(room for room in left.values() if room >= count), "best fit"

    def test_a_copy_is_independent(self):
        topology = Topology()
        free = FreeGpus(topology)
        free.add_node(topology.add(Node("n", (0, 1), 16)))
        copy = free.copy()
        copy.take([0])
        assert (free.count, copy.count) == (2, 1)
        assert free.pick(2) == (0, 1)

    def test_only_nodes_with_enough_memory_are_eligible(self):
        topology = Topology()
        free = FreeGpus(topology)
        for number, memory in enumerate((8, 16)):
            free.add_node(topology.add(Node(f"n{number}", (2 * number, 2 * number + 1), memory)))
        assert free.pick(1, topology.with_memory(12)) == (2,)
        assert free.pick(3, topology.with_memory(12)) is None
        assert topology.with_memory(17) == 0


class Rogue:
    """A policy that proposes what it is told to."""

    restart_s = 0.0

    def __init__(self, *decisions):
        self.decisions = decisions

    def key(self, record, now):
        return (record.job.submitted,)

    def decide(self, view):
        return self.decisions

    def wake(self, view):
        return None


def put(name, *gpus, accumulation=1, why="because"):
    return Decision(name, Allocation(tuple(gpus), accumulation), why)


FOUR = cluster("1x4")
A_RUNS = (running("a", on=[0, 1]), pending("b", gpus=2, left=10))


class TestRules:
    @pytest.mark.parametrize(
        ("parts", "plan", "problem"),
        [
            (A_RUNS, [put("z", 2)], "job z does not exist"),
            (A_RUNS, [put("b", 2, 3), put("b", 2, 3)], "two decisions"),
            (A_RUNS, [put("b", 2, 3, why="")], "no reason"),
            (A_RUNS, [put("b", 2)], "gang of 2 GPUs and got 1"),
            (A_RUNS, [put("b", 2, 2)], "twice"),
            (A_RUNS, [put("b", 2, 9)], "does not exist"),
            (A_RUNS, [put("b", 2, 3, accumulation=0)], "cannot split"),
            (A_RUNS, [put("b", 2, 3, accumulation=9)], "cannot split"),
            (A_RUNS, [Decision("b", None, "because")], "does not run"),
            ((pending("b", can_shrink=False),), [put("b", 0, accumulation=2)], "may not be split"),
            ((*A_RUNS, running("c", on=[0])), [put("b", 0, 2)], "the limit is 2"),
            ((pending("b"), pending("c"), pending("d")), [put("b", 0), put("c", 0), put("d", 0)], "the limit is 2"),
            ((running("a", model="fat", batch=64), pending("b", model="fat")), [put("b", 0)], "do not fit"),
            ((running("a", exclusive=True), pending("b")), [put("b", 0)], "a asked not to share"),
            ((running("a"), pending("b", exclusive=True)), [put("b", 0)], "b asked not to share"),
            ((running("a", max_slowdown=1.2), pending("b")), [put("b", 0)], "its limit is 1.20"),
            ((running("a"), pending("b", max_slowdown=1.2)), [put("b", 0)], "its limit is 1.20"),
            ((running("a"), pending("b", after=("a",))), [put("b", 1)], "b is blocked"),
            ((running("a", max_slowdown=1.7), pending("b"), pending("c")), [put("b", 0), put("c", 0)], "limit"),
        ],
    )
    def test_an_illegal_plan_is_refused_and_changes_nothing(self, parts, plan, problem):
        state = situation(FOUR, *parts).state(lambda record, now: (record.job.submitted,))
        with pytest.raises(IllegalPlan, match=problem):
            check(state, plan)

    @pytest.mark.parametrize(("limits", "problem"), [(Limits(jobs=1), "1 jobs"), (Limits(gpus=3), "3 GPUs")])
    def test_users_are_kept_within_their_limits(self, limits, problem):
        limited = cluster("1x4", limits={"eve": limits})
        parts = (running("a", gpus=2, user="eve"), pending("b", gpus=2, user="eve"))
        state = situation(limited, *parts).state(lambda record, now: (0.0,))
        with pytest.raises(IllegalPlan, match=problem):
            check(state, [put("b", 2, 3)])
        check(state, [Decision("a", None, "make room"), put("b", 2, 3)])

    def test_a_preemption_makes_room_within_the_same_plan(self):
        state = situation(FOUR, running("a", gpus=4, exclusive=True), pending("b", gpus=4)).state(lambda r, n: (0.0,))
        with pytest.raises(IllegalPlan):
            check(state, [put("b", 0, 1, 2, 3)])
        check(state, [Decision("a", None, "make room"), put("b", 0, 1, 2, 3)])

    def test_a_retuned_job_keeps_its_memory_until_the_workers_confirm(self):
        host = running("a", model="fat", batch=64)  # 12.4 GiB; cut in 8 it needs 6.8
        state = situation(FOUR, host, pending("b", batch=64)).state(lambda r, n: (0.0,))  # 7.4 GiB
        retune = put("a", 0, accumulation=8)
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [retune, put("b", 0)])
        check(state, [retune])
        state.apply(ev.Planned(0.0, (retune,)))
        with pytest.raises(IllegalPlan, match="do not fit"):
            check(state, [put("b", 0)])
        state.apply(ev.Retuned(0.0, "a", 1, 8))
        check(state, [put("b", 0)])
        assert state.jobs["a"].iteration_s == pytest.approx(state.perf.iteration_time(host.job, 8, (1, 1)))

    def test_simulation_raises_and_live_refuses(self):
        for strict in (True, False):
            scheduler = Scheduler(Rogue(put("a", 7)), model(), strict=strict)
            events = [ev.NodeJoined(0.0, node) for node in nodes("1x4")] + [ev.Submitted(0.0, job("a"))]
            if strict:
                with pytest.raises(IllegalPlan):
                    scheduler.step(0.0, events)
            else:
                assert scheduler.step(0.0, events) is None
                assert "does not exist" in str(scheduler.refused[0])
            assert scheduler.state.free.count == 4

    def test_what_can_never_run_is_refused_with_a_reason(self):
        state = situation(cluster("2x2", limits={"eve": Limits(gpus=1)})).state(lambda r, n: (0.0,))
        assert "cluster has 4" in state.refusal(job("a", gpus=5))
        assert "which may not be split" in state.refusal(job("a", model="fat", batch=200, can_shrink=False))
        assert "may hold 1" in state.refusal(job("a", gpus=2, user="eve"))
        assert state.refusal(job("a", model="fat", batch=200)) is None
        small = situation(cluster("1x4", memory_gib=4.0)).state(lambda r, n: (0.0,))
        assert "6.1 GiB per GPU even at sub-batch 1" in small.refusal(job("a", model="fat", batch=200))


def test_core_loads_nothing_heavy_and_nothing_else_of_ours():
    code = (
        "import sys, carpool.core.scheduler, carpool.core.draft, carpool.core.codec\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'numpy', 'scipy', 'click', 'rich', 'fastapi', 'starlette', 'sqlalchemy', 'asyncio', 'socket')))\n"
        "print(sorted(m for m in sys.modules if m.startswith('carpool.') and not m.startswith('carpool.core')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]


def test_policies_load_nothing_heavy():
    code = "import sys, carpool.policies; print([m for m in ('torch', 'numpy', 'click', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
