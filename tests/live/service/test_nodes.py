"""Nodes that come, go, fall silent and come back, as the service sees them, with an executor in memory."""

from dataclasses import replace

from carpool.live.executors.base import GangOutcome, StopMode
from carpool.live.executors.memory import MemoryExecutor
from tests.support.fakes import FakeClock
from tests.support.services import journalled, one, serving, settle, shell, status


class ClosableExecutor(MemoryExecutor):
    """An executor some of whose nodes are closed."""

    shut: frozenset[str] = frozenset()

    def nodes(self):
        return [replace(node, closed="it is silent" if node.id in self.shut else "") for node in super().nodes()]


async def test_a_job_can_be_submitted_before_the_first_node_has_joined(quick_home):
    executor = MemoryExecutor(gpus=2, node_names=[])
    async with serving(quick_home, executor=executor, clock=FakeClock(1.0)) as service:
        job = await one(service, shell("true", gpus=4))
        await settle(service)
        assert status(service, job) == "pending"
        assert service.queries.gpus()["nodes"] == []
        assert "It needs 4 GPUs, and the nodes that are here have 0." in service.queries.explain(job)["sentences"]
        executor.node_names = ["a", "b"]
        executor.listener.nodes_changed()
        await settle(service)
        assert [launch.gpus for launch in executor.launched] == [(0, 1, 2, 3)]


async def test_a_job_that_only_a_lost_node_could_hold_is_accepted_and_waits(quick_home):
    executor = MemoryExecutor(gpus=2, node_names=["a", "b"])
    async with serving(quick_home, executor=executor, clock=FakeClock(1.0)) as service:
        await settle(service)
        executor.node_names = ["a"]
        executor.listener.nodes_changed()
        await settle(service)
        job = await one(service, shell("true", gpus=4))
        await settle(service)
        assert status(service, job) == "pending"


async def test_a_job_that_was_to_start_on_a_lost_node_goes_back_to_the_queue(quick_home):
    """It is planned on two nodes, waits for another job to leave one of them, and has no gang of its own."""
    executor, clock = MemoryExecutor(gpus=1, node_names=["a", "b"]), FakeClock(1.0)
    options = {"jobs_per_gpu": 1, "executor": executor, "clock": clock}
    async with serving(quick_home, "tiresias:threshold_gpu_s=10", **options) as service:
        first = await one(service, shell("true"))
        await settle(service)
        executor.start((first, 1))
        await settle(service)
        clock.time = 100.0
        second = await one(service, shell("true", gpus=2))
        await settle(service)
        assert status(service, second) == "starting"
        assert [launch.job for launch in executor.launched] == [first]
        assert executor.launched[0].gpus == (0,), "the first job is on node a"
        executor.node_names = ["a"]
        executor.listener.nodes_changed()
        await settle(service)
        assert status(service, second) == "pending"


async def test_a_gang_that_lost_a_node_is_stopped_on_the_others(quick_home):
    executor, clock = MemoryExecutor(gpus=1, node_names=["a", "b"]), FakeClock(1.0)
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=clock) as service:
        job = await one(service, shell("true", gpus=2))
        await settle(service)
        executor.start((job, 1))
        await settle(service)
        executor.node_names = ["a"]
        executor.listener.nodes_changed()
        await settle(service)
        assert status(service, job) == "stopping"
        assert executor.stopped == [((job, 1), StopMode.SAVE)]
        executor.end((job, 1), GangOutcome.LOST, "node b was lost")
        await settle(service)
        assert status(service, job) == "pending"


async def test_many_changes_of_nodes_in_one_turn_are_one(quick_home):
    executor = MemoryExecutor(gpus=1, node_names=["a", "b"])
    async with serving(quick_home, executor=executor, clock=FakeClock(1.0)) as service:
        await settle(service)
        executor.node_names = ["b", "c"]
        for _ in range(3):
            executor.listener.nodes_changed()
        executor.node_names = ["c", "d"]
        executor.listener.nodes_changed()
        await settle(service)
        assert sorted(service.state.topology.present) == ["c", "d"]
        executor.node_names = []
        executor.listener.nodes_changed()
        executor.node_names = ["c", "d"]  # lost and back before the turn
        executor.listener.nodes_changed()
        await settle(service)
        assert sorted(service.state.topology.present) == ["c", "d"]


async def test_a_closed_node_gets_no_job_until_it_opens(quick_home):
    executor = ClosableExecutor(gpus=1, node_names=["a", "b"])
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=FakeClock(1.0)) as service:
        await settle(service)
        executor.shut = frozenset({"a"})
        executor.listener.nodes_changed()
        jobs = [await one(service, shell("true")) for _ in range(2)]
        await settle(service)
        assert [launch.gpus for launch in executor.launched] == [(1,)]
        waiting = next(job for job in jobs if status(service, job) == "pending")
        assert "Node a takes no new job: it is silent." in service.queries.explain(waiting)["sentences"]
        executor.shut = frozenset()
        executor.listener.nodes_changed()
        await settle(service)
        assert sorted(launch.gpus for launch in executor.launched) == [(0,), (1,)]
        assert {status(service, job) for job in jobs} == {"starting"}
        assert [event["node"] for kind in ("NodeClosed", "NodeOpened") for event in journalled(service, kind)] == [
            "a",
            "a",
        ]
    async with serving(quick_home, jobs_per_gpu=1, executor=executor, clock=FakeClock(2.0)) as service:
        assert not service.state.topology.closed
