"""Nothing new starts on a closed node, whatever the policy; jobs there go on, and an opened node is used again."""

import pytest

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Job, Node, Status
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.rules import IllegalPlan
from carpool.core.scheduler import Scheduler
from carpool.core.validate import validate
from tests.support.world import GIB, TASKS

MODEL = sorted(TASKS)[0]


def job(name, at, gpus=1):
    return Job(name, at, MODEL, gpus, 8, 1000)


@pytest.mark.parametrize("name", sorted(policies.BUILT_IN))
def test_a_closed_node_gets_nothing_new(name):
    policy = policies.make(name)
    scheduler = Scheduler(policy, FittedModel(TASKS, ConstantInterference(1.01), 2), 2)
    state = scheduler.state

    def step(at, *events):
        scheduler.step(at, events, wake=True)
        validate(state)

    nodes = [Node(node, gpus, 16 * GIB) for node, gpus in (("a", (0, 1)), ("b", (2, 3)))]
    step(0.0, *(ev.NodeJoined(0.0, node) for node in nodes), ev.Submitted(0.0, job("first", 0.0, 2)))
    taken = state.jobs["first"].gpus
    closed = nodes[1].id if taken == nodes[1].gpus else nodes[0].id
    step(1.0, ev.Started(1.0, "first", 1), ev.NodeClosed(1.0, closed))
    shut = {gpu for node in nodes if node.id == closed for gpu in node.gpus}
    step(2.0, *(ev.Submitted(2.0, job(f"j{number}", 2.0)) for number in range(6)))
    for at in (3.0, 70.0, 500.0):
        step(at)
        assert not [r for r in state.running if r.job.id != "first" and shut.intersection(r.gpus)]
    assert state.jobs["first"].status in (Status.RUNNING, Status.STARTING, Status.STOPPING, Status.PAUSED)
    placed = {record.job.id for record in state.running if record.job.id != "first"}
    assert placed, "the open node is used"
    step(600.0, *(ev.Finished(600.0, "first", state.jobs["first"].attempt),), ev.NodeOpened(600.0, closed))
    assert any(shut.intersection(record.gpus) for record in state.running), "the opened node is used again"


def test_a_plan_for_a_closed_node_is_illegal():
    class Stubborn(type(policies.make("fifo"))):
        def decide(self, view):
            from carpool.core.model import Allocation, Decision

            return [Decision(record.job.id, Allocation((0,)), "there") for record in view.queue]

    scheduler = Scheduler(Stubborn(), FittedModel(TASKS, ConstantInterference(1.5), 1), 2)
    joined = (ev.NodeJoined(0.0, Node("a", (0,), 16 * GIB)), ev.NodeClosed(0.0, "a"))
    with pytest.raises(IllegalPlan, match="where nothing new may start"):
        scheduler.step(0.0, [*joined, ev.Submitted(0.0, job("x", 0.0))])
