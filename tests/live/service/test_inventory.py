"""The inventory by itself: labels of GPUs, and the events that follow the executor's nodes."""

from carpool.core import events as ev
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.state import State
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.service.inventory import Inventory


def empty_state() -> State:
    return State(FittedModel({}, ConstantInterference(1.5), 4), lambda job, now: (now,), 2)


def test_labels_name_node_and_index():
    inventory = Inventory(MemoryExecutor(gpus=2, node_names=["a", "b"]))
    assert inventory.labels() == {0: "a:0", 1: "a:1", 2: "b:0", 3: "b:1"}
    assert inventory.label(2) == "b:0"


def test_users_see_nodes_by_name_whichever_joined_first():
    inventory = Inventory(MemoryExecutor(gpus=1, node_names=["node10", "gpu-b", "node2", "7"]))
    assert [node.id for node in inventory.by_name] == ["7", "gpu-b", "node2", "node10"]
    assert [node.id for node in inventory.nodes] == ["node10", "gpu-b", "node2", "7"], "the state knows them in order"


def test_the_state_follows_nodes_that_join_change_and_leave():
    executor, state = MemoryExecutor(gpus=2, node_names=["a", "b"]), empty_state()
    inventory = Inventory(executor)

    def follow() -> list[ev.Event]:
        events = inventory.changes(state, 1.0)
        for event in events:
            state.apply(event)
        return events

    first, second = (node.node for node in inventory.nodes)
    assert inventory.describe_changes(state) == []
    assert follow() == [ev.NodeJoined(1.0, first), ev.NodeJoined(1.0, second)]
    assert follow() == []
    executor.node_names = ["a"]
    assert inventory.describe_changes(state) == ["the GPUs of b changed: 2 before, 0 now"]
    assert follow() == [ev.NodeLost(1.0, "b")]
    executor.gpus = 1
    assert inventory.describe_changes(state) == ["the GPUs of a changed: 2 before, 1 now"]
    assert follow() == [ev.NodeLost(1.0, "a"), ev.NodeJoined(1.0, inventory.nodes[0].node)]
