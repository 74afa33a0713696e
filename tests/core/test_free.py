"""Free GPUs: picks are on the fewest nodes, then the best fit."""

from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.free import FreeGpus, Topology
from carpool.core.model import Node


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 2**20))
def test_a_pick_uses_the_fewest_nodes(sizes, count, seed):
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


def test_a_copy_is_independent():
    topology = Topology()
    free = FreeGpus(topology)
    free.add_node(topology.add(Node("n", (0, 1), 16)))
    copy = free.copy()
    copy.take([0])
    assert (free.count, copy.count) == (2, 1)
    assert free.pick(2) == (0, 1)


def test_only_nodes_with_enough_memory_are_eligible():
    topology = Topology()
    free = FreeGpus(topology)
    for number, memory in enumerate((8, 16)):
        free.add_node(topology.add(Node(f"n{number}", (2 * number, 2 * number + 1), memory)))
    assert free.pick(1, topology.with_memory(12)) == (2,)
    assert free.pick(3, topology.with_memory(12)) is None
    assert topology.with_memory(17) == 0
