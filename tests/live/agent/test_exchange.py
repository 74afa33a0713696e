"""Agents and the cluster's executor in one process: messages that are lost, repeated or late change nothing."""

import asyncio
import os
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import carpool
from carpool.errors import InputError
from carpool.live.agent import agent as agents
from carpool.live.agent.agent import Agent, AgentOptions
from carpool.live.agent.memory import AgentMemory
from carpool.live.agent.parts import NodePart
from carpool.live.agent.road import Turned
from carpool.live.clock import since_boot
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors import wire
from carpool.live.executors.base import (
    ExecutorOptions,
    GangOutcome,
    Launch,
    OnlyService,
    StopMode,
    TellsDelays,
)
from carpool.live.executors.cluster import NOT_ROOT, ClusterExecutor
from carpool.live.executors.contract import RecordingListener, eventually, opened
from carpool.live.executors.local import ONE_USER, LocalExecutor
from carpool.live.executors.nodes import ClusterNode, NodeRecord
from carpool.live.home import Home, read_json
from tests.support.agents import agent_world

KEY = ("1", 1)
WRITING = ("sh", "-c", "i=0; while [ $i -lt 12000 ]; do i=$((i + 1)); echo $i; sleep 0.05; done")


def launch(gpus, command=WRITING, key=KEY):
    return Launch(*key, gpus, command, "/", {}, grace_s=5.0)


async def test_a_gang_over_two_nodes_starts_whole_and_ends_whole(tmp_path):
    async with agent_world(tmp_path, ("a", "b")) as world, opened(world.make_executor) as (executor, listener):
        gpus = tuple(sorted(slot.id for node in executor.nodes() for slot in node.slots))
        failing = ("sh", "-c", 'test "$RANK" = 2 && sleep 0.3 && exit 7; sleep 600')
        executor.launch(launch(gpus, failing))
        await listener.wait_for_start(KEY)
        assert [row["rank"] for row in executor.ranks(KEY)] == [0, 1, 2, 3]
        ended = await listener.wait_for_end(KEY)
        assert (ended.outcome, ended.exit_code) == (GangOutcome.FAILED, 7)
        assert "worker 2" in ended.reason


async def test_a_node_that_joins_is_noted_and_is_no_problem(tmp_path):
    async with agent_world(tmp_path, ("a", "b")) as world, opened(world.make_executor) as (executor, listener):
        assert len(executor.nodes()) == 2
        assert len([note for note in listener.notes if "joined with" in note]) == 2
        assert listener.warnings == []


async def test_a_gang_over_two_nodes_that_is_stopped_before_it_is_ready_never_starts(tmp_path):
    async with agent_world(tmp_path, ("a", "b")) as world, opened(world.make_executor) as (executor, listener):
        world.roads["b"].cut = True
        gpus = tuple(slot.id for node in executor.nodes() for slot in node.slots)
        executor.launch(launch(gpus))
        await eventually(lambda: executor._gangs[KEY].parts["a"].phase == "ready")
        assert listener.started == []
        executor.stop(KEY, StopMode.TERMINATE)
        world.roads["b"].cut = False
        assert (await listener.wait_for_end(KEY)).outcome is GangOutcome.NEVER_STARTED


async def test_lost_answers_and_roads_that_fail_change_nothing(tmp_path):
    drawn = random.Random(4)
    async with agent_world(tmp_path, ("a", "b")) as world, opened(world.make_executor) as (executor, listener):
        gpus = tuple(slot.id for node in executor.nodes() for slot in node.slots)
        stop = asyncio.Event()

        async def disturb():
            while not stop.is_set():
                road = world.roads[drawn.choice("ab")]
                road.cut, road.lose_answers = drawn.random() < 0.3, drawn.random() < 0.5
                await asyncio.sleep(0.1)
            for road in world.roads.values():
                road.cut = road.lose_answers = False

        disturbing = asyncio.create_task(disturb())
        codes = {("1", 1): 4, ("2", 1): 5, ("3", 1): 0}  # the third is over both nodes, where one part may go later
        for (key, code), own in zip(codes.items(), (gpus[:1], gpus[2:3], (gpus[1], gpus[3])), strict=True):
            executor.launch(launch(own, ("sh", "-c", f"echo once; sleep 0.5; exit {code}"), key))
        for key, code in codes.items():
            assert (await listener.wait_for_end(key)).exit_code == code
        stop.set()
        await disturbing
        assert sorted(listener.started) == sorted(end.key for end in listener.ended) == sorted(codes)
        for key in codes:
            assert (await executor.read_log(key, 0, "stdout", limit=99)).data == b"once\n"


async def test_an_agent_that_restarts_goes_on_where_it_was(tmp_path):
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, listener):
        executor.launch(launch((0,)))
        await listener.wait_for_start(KEY)
        await world.end("a")
        world.start("a")
        before = (await executor.read_log(KEY, 0, "stdout", limit=1 << 20)).next

        async def grows():
            while (await executor.read_log(KEY, 0, "stdout", limit=1 << 20)).next <= before:
                await asyncio.sleep(0.05)

        await asyncio.wait_for(grows(), 20)
        assert listener.started == [KEY]
        assert listener.ended == []
        executor.pause(KEY)
        await listener.wait_for_switch(KEY, paused=True)


async def test_an_agent_that_leaves_is_waited_for_by_nobody(tmp_path):
    async with agent_world(tmp_path, ("a", "b")) as world, opened(world.make_executor) as (executor, listener):
        node = next(node for node in executor.nodes() if node.id == "a")
        executor.launch(launch((node.slots[0].id,)))
        await listener.wait_for_start(KEY)
        world.agents["a"].leave()
        await eventually(lambda: bool(listener.faults))
        assert listener.faults[0].gangs == {KEY}
        executor.stop(KEY, StopMode.SAVE)  # as the service does then
        await listener.wait_for_end(KEY)
        await asyncio.wait_for(world.running.pop("a"), 20)
        assert [node.id for node in executor.nodes()] == ["b"]


HOSTILE = """
import os, time
from carpool.channel import Report, ReportWriter
writer = ReportWriter(os.environ["CARPOOL_WORKER_DIR"])
writer.write(Report(attempt=1, iteration=2**63, peak_memory=2**63, total=2**63))
time.sleep(600)
"""


async def test_a_worker_with_impossible_reports_does_not_silence_its_node(tmp_path):
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, listener):
        env = {"PYTHONPATH": str(Path(carpool.__file__).parents[1])}
        executor.launch(replace(launch((0,), (sys.executable, "-c", HOSTILE)), env=env))
        await listener.wait_for_start(KEY)
        local = world.agents["a"].executor
        await eventually(lambda: (report := local.report(KEY)) is not None and report.iteration == 2**63)
        executor.launch(launch((1,), ("sh", "-c", "exit 3"), ("2", 1)))
        assert (await listener.wait_for_end(("2", 1))).exit_code == 3
        assert executor.report(KEY) is None


# ---- what the service refuses ----------------------------------------------------------------------------------------


async def test_why_a_gang_has_not_started_on_its_node_is_known(tmp_path):
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, listener):
        assert isinstance(executor, TellsDelays)
        in_the_way = world.agents["a"].home.jobs
        if in_the_way.exists():
            in_the_way.rmdir()
        in_the_way.write_text("")
        executor.launch(launch((0,)))
        await eventually(lambda: executor.delay(KEY).startswith("on node a, it cannot start now ("))
        in_the_way.unlink()
        await listener.wait_for_start(KEY)
        assert executor.delay(KEY) == ""


async def test_why_a_gang_cannot_be_written_down_is_known(tmp_path):
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, listener):
        in_the_way = executor.home.jobs / KEY[0]
        in_the_way.write_text("")
        executor.launch(launch((0,)))
        await eventually(lambda: executor.delay(KEY).startswith("it cannot start now ("))
        in_the_way.unlink()
        await listener.wait_for_start(KEY)
        assert executor.delay(KEY) == ""


async def test_the_service_says_how_long_gangs_of_agents_stay_paused_without_it(tmp_path):
    def make():
        return world.make_executor(pause_patience_s=33.0, gang_pause_s=11.0)

    async with agent_world(tmp_path) as world, opened(make) as (executor, listener):
        for key, gpus in ((KEY, (0,)), (("2", 1), (0, 1))):
            executor.launch(launch(gpus, key=key))
            await listener.wait_for_start(key)
            executor.pause(key)
            await listener.wait_for_switch(key, paused=True)
            asked = read_json(world.agents["a"].home.rank(*key, 0) / "pause.json")
            assert asked["patience_s"] == (33.0 if len(gpus) == 1 else 11.0)


async def test_an_agent_leaves_mps_before_it_joins_a_service_whose_jobs_have_users_of_their_own(tmp_path):
    async with agent_world(tmp_path) as world:
        node = (await opened_node(world.agents["a"])).node
        node.mps, node.mechanism = IdleDaemon(), "mps"
        executor, listener = world.make_executor(), RecordingListener()
        try:
            await executor.open(separate_users=True)
            await executor.recover((), listener)
            (seen,) = executor.nodes()
            assert (seen.mechanism, seen.why) == ("time-slicing", ONE_USER)
            assert node.mps is None
        finally:
            await executor.close()


class IdleDaemon:
    """An MPS daemon that serves nobody."""

    def clients(self):
        return set()

    def stop(self):
        return


async def opened_node(agent):
    await eventually(lambda: agent.executor._node is not None)
    return agent.executor


def state(node="a", **changes):
    devices = (wire.DeviceRow(0), wire.DeviceRow(1))
    found = wire.NodeState(node, "home", "boot", "process", 1, "127.0.0.1", 1, "logical", "0", devices, parts={})
    return replace(found, **changes)


@pytest.fixture
async def executor(home):
    home.create()
    found = ClusterExecutor(ExecutorOptions(home, settings={"lease": "0.5s", "margin": "0.5s"}))
    await found.open()
    await found.recover([], RecordingListener())
    yield found
    await found.close()


async def test_a_node_keeps_the_numbers_of_its_gpus(executor):
    for name, instance in (("a", "1"), ("b", "2")):
        assert (await executor.sync(state(name, instance=instance, seen="x"))).joined
    before = {node.id: [slot.id for slot in node.slots] for node in executor.nodes()}
    assert before == {"a": [0, 1], "b": [2, 3]}
    await eventually(lambda: not executor.nodes())
    assert (await executor.sync(state("b", instance="3", boot="another", seen="x"))).joined
    assert {node.id: [slot.id for slot in node.slots] for node in executor.nodes()} == {"b": [2, 3]}
    larger = (wire.DeviceRow(0), wire.DeviceRow(1), wire.DeviceRow(2))
    await executor.sync(state("a", instance="4", devices=larger, seen="x"))
    assert {node.id: [slot.id for slot in node.slots] for node in executor.nodes()}["a"] == [4, 5, 6]
    owners = [executor.book.node_of(gpu) for gpu in range(8)]
    assert [node and node.name for node in owners] == [None, None, "b", "b", "a", "a", "a", None]


@pytest.mark.parametrize(
    ("nodes", "lease", "held_s"), [(2, "1h", 1), (600, "1h", 3), (5000, "1h", 5), (5000, "16s", 2)]
)
def test_exchanges_of_many_nodes_are_held_longer_but_not_for_much_of_the_lease(home, nodes, lease, held_s):
    members = ClusterExecutor(ExecutorOptions(home, settings={"lease": lease})).members
    members.listener = RecordingListener()
    for number in range(nodes):
        members.book.nodes[f"n{number}"] = ClusterNode(NodeRecord(f"n{number}", "", "", "", number, (), 0, ""))
    assert members.hold_s == held_s
    node = members.book.nodes["n0"]
    node.heard, node.answered = True, since_boot() - held_s - 1.0
    members.look()
    assert not node.silent, "it is heard again when its exchange is over"
    node.answered -= 2.0
    members.look()
    assert node.silent


async def test_a_node_whose_gpus_changed_is_lost_only_when_nothing_runs_there(executor):
    assert (await executor.sync(state(seen="x"))).joined
    fewer = state(instance="2", devices=(wire.DeviceRow(0),), seen="x")
    for parts in (None, {"9-1": wire.PartState(wire.Phase.UP)}):
        answer = await executor.sync(replace(fewer, parts=parts))
        assert (answer.joined, dict(answer.orders)) == (False, {})
        assert [len(node.slots) for node in executor.nodes()] == [2]
    assert (await executor.sync(fewer)).joined
    assert [len(node.slots) for node in executor.nodes()] == [1]


async def test_a_lease_of_an_earlier_service_counts_until_it_is_over_and_the_agent_has_heard_another(home):
    async def service(lease, term):
        options = ExecutorOptions(home, settings={"lease": lease, "margin": "0.5s"}, leadership=OnlyService(term))
        found = ClusterExecutor(options)
        await found.open()
        await found.recover([], RecordingListener())
        return found

    home.create()
    first = await service("3s", 1)
    assert (await first.sync(state(seen="x"))).lease_s == 3.0
    await first.close()
    second = await service("0.5s", 2)
    began = since_boot()
    assert (await second.sync(state(number=2, term=1, seen="x"))).lease_s == 0.5
    await eventually(lambda: not second.nodes())
    assert since_boot() - began > 3.5, "its workers may go by the longer lease"
    again = state(instance="2", seen="x")
    assert (await second.sync(again)).joined
    node = second.book.nodes["a"]
    assert second.members.lease_of(node) == 3.0
    node.met -= 3.0
    await second.sync(replace(again, number=2, term=1))
    assert second.members.lease_of(node) == 3.0, "it has not heard this service"
    await second.sync(replace(again, number=3, term=2))
    assert second.members.lease_of(node) == 0.5
    await second.close()


async def test_a_second_agent_of_a_name_is_refused_until_the_first_must_be_gone(executor):
    await executor.sync(state(seen="x"))
    for other in (state(identity="other"), state(identity="other", boot="other")):
        with pytest.raises(WrongStatus, match=r"another|stop one"):
            await executor.sync(other)
    await eventually(lambda: not executor.nodes())
    assert (await executor.sync(state(identity="other", instance="q", seen="x"))).joined


async def test_a_node_with_something_to_get_rid_of_does_not_join(executor):
    running = {"9-1": wire.PartState(wire.Phase.UP)}
    for parts in (None, running):
        answer = await executor.sync(state(parts=parts))
        assert (answer.joined, answer.lease_s, dict(answer.orders)) == (False, 0.0, {})
    assert not executor.nodes()
    assert (await executor.sync(state(parts={"9-1": wire.PartState(wire.Phase.GONE)}, seen="x"))).joined


async def test_a_service_of_an_earlier_term_or_without_the_lead_answers_nothing(executor):
    with pytest.raises(Unavailable, match="later start of a service"):
        await executor.sync(state(term=7))

    class Deposed:
        term = 1

        def leads(self):
            return False

    executor._leadership = Deposed()
    with pytest.raises(Unavailable, match="does not lead"):
        await executor.sync(state())


async def test_a_request_that_was_overtaken_is_not_believed(executor):
    await executor.sync(state(number=5, seen="x"))
    executor.launch(launch((0,)))
    await eventually(lambda: executor._gangs[KEY].recorded)
    up = {"1-1": wire.PartState(wire.Phase.UP, started_ago_s=0.0)}
    await executor.sync(state(number=6, parts=up, seen="x"))
    await executor.sync(state(number=4, parts={}, seen="x"))
    assert executor._gangs[KEY].parts["a"].phase is wire.Phase.UP
    assert not executor._gangs[KEY].broken


async def test_whatever_is_new_in_an_order_goes_out_at_once(executor):
    executor.lease_s = executor.members.lease_s = 600.0
    await executor.sync(state(number=1, seen="x"))
    executor.launch(launch((0,)))
    await eventually(lambda: executor._gangs[KEY].recorded)
    numbers = iter(range(2, 99))

    async def exchange(seen, seconds=0.5):
        up = {"1-1": wire.PartState(wire.Phase.UP, started_ago_s=0.0)}
        asked = state(number=next(numbers), parts=up, seen=seen)
        return (await asyncio.wait_for(executor.sync(asked), seconds)).mark

    mark = await exchange("x")
    for ask in (
        lambda: executor.retune(KEY, 2),
        lambda: executor.checkpoint(KEY),
        lambda: executor.checkpoint(KEY),
        lambda: executor.pause(KEY),
        lambda: executor.stop(KEY, StopMode.SAVE),
        lambda: executor.stop(KEY, StopMode.TERMINATE),
    ):
        held = asyncio.create_task(exchange(mark))
        await asyncio.sleep(0.1)
        assert not held.done(), "nothing is new"
        ask()
        mark = await held
    assert await exchange(mark, 5.0) == mark


@pytest.mark.parametrize("settings", [{"lease": "soon"}, {"leese": "3s"}])
def test_wrong_settings_are_refused(home, settings):
    with pytest.raises(InputError, match="--executor agents"):
        ClusterExecutor(ExecutorOptions(home, settings=settings))


async def test_a_request_never_knows_less_than_one_with_a_lower_number(tmp_path):
    agent = Agent(AgentOptions(Home(tmp_path / "a"), "a", "127.0.0.1", gpus=1), road=None)
    await agent.executor.open()
    agent._recovered = True
    looking, go_on = threading.Event(), threading.Event()

    def look_slowly():  # the first of the two
        if not looking.is_set():
            looking.set()
            go_on.wait(10.0)

    agent._read_use = look_slowly
    first = asyncio.create_task(agent._state())
    await eventually(looking.is_set)
    second = asyncio.create_task(agent._state())
    await asyncio.sleep(0.2)
    agent.parts.parts[KEY] = NodePart(KEY)
    go_on.set()
    one, two = await first, await second
    assert one.number < two.number
    assert set(one.parts) <= set(two.parts)


async def test_a_node_whose_agent_cannot_write_its_lease_gets_nothing_new(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(agents, "STEADY_S", 0.5)
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, listener):
        executor.launch(launch((0,)))
        await listener.wait_for_start(KEY)
        agent = world.agents["a"]
        place, agent.lease._path = agent.lease._path, tmp_path / "missing" / "lease"
        await eventually(lambda: executor.nodes()[0].closed)
        row = executor.node_rows()[0]
        assert row["state"] == "failing"
        assert "cannot write its files (No such file" in row["why"]
        executor.stop(KEY, StopMode.TERMINATE)
        await listener.wait_for_end(KEY)
        assert "jobs here end when the lease is over" in capsys.readouterr().err
        agent.lease._path = place
        await eventually(lambda: not executor.nodes()[0].closed)


async def test_a_gang_that_cannot_be_launched_for_a_while_is_lost_and_its_node_gets_nothing_new(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "LAUNCH_PATIENCE_S", 0.5)
    monkeypatch.setattr(agents, "STEADY_S", 2.0)
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, listener):
        in_the_way = world.agents["a"].home.jobs
        if in_the_way.exists():
            in_the_way.rmdir()
        in_the_way.write_text("")
        executor.launch(launch((0,)))
        ended = await listener.wait_for_end(KEY)
        assert ended.outcome is GangOutcome.LOST
        assert ended.reason.startswith("it could not start on a (")
        assert executor.node_rows()[0]["state"] == "failing"
        in_the_way.unlink()
        await eventually(lambda: not executor.nodes()[0].closed)
        executor.launch(launch((0,), key=("2", 1)))
        await listener.wait_for_start(("2", 1))


async def test_a_term_that_could_not_be_written_is_not_obeyed(tmp_path):
    memory = AgentMemory(tmp_path / "missing" / "agent.json")
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            memory.remember(3)
    assert memory.term == 0


async def test_a_service_without_agents_refuses_gangs_that_run_on_nodes(tmp_path):
    async with agent_world(tmp_path) as world:
        async with opened(world.make_executor, leave_gangs=True) as (executor, listener):
            executor.launch(launch((0,)))
            await listener.wait_for_start(KEY)
        local = LocalExecutor(ExecutorOptions(world.home, gpus=2))
        await local.open()
        with pytest.raises(InputError, match="job 1 runs on the nodes of a cluster"):
            await local.recover([KEY], RecordingListener())
        await local.close()
        async with opened(world.make_executor, [KEY]) as (executor, listener):
            executor.stop(KEY, StopMode.KILL)
            await listener.wait_for_end(KEY)
        local = LocalExecutor(ExecutorOptions(world.home, gpus=2))
        await local.open()
        assert await local.recover([KEY], RecordingListener()) == set(), "it has ended"
        await local.close()


async def test_a_service_with_agents_refuses_gangs_that_run_without(home):
    home.create()

    def without():
        return LocalExecutor(ExecutorOptions(home, gpus=1))

    async with opened(without, leave_gangs=True) as (executor, listener):
        executor.launch(launch((0,)))
        await listener.wait_for_start(KEY)
    cluster = ClusterExecutor(ExecutorOptions(home))
    await cluster.open()
    with pytest.raises(InputError, match="job 1 runs on this machine without an agent"):
        await cluster.recover([KEY], RecordingListener())
    await cluster.close()
    async with opened(without, [KEY]) as (executor, listener):
        executor.stop(KEY, StopMode.KILL)
        await listener.wait_for_end(KEY)
    cluster = ClusterExecutor(ExecutorOptions(home))
    await cluster.open()
    assert await cluster.recover([KEY], RecordingListener()) == set()
    await cluster.close()


async def test_an_agent_that_no_service_ever_accepted_ends_when_it_is_refused_again(tmp_path, capsys):
    class Closed:
        url, timeout_s = "closed", 1.0

        def sync(self, state):
            raise Turned(401, "the join token is not valid")

        def close(self):
            return

    for _ in range(2):  # the first one leaves its home behind
        agent = Agent(AgentOptions(Home(tmp_path / "a"), "a", "127.0.0.1", gpus=1), Closed())
        with pytest.raises(InputError, match="is not valid"):
            await asyncio.wait_for(agent.run(), 10)
    assert "tried again" not in capsys.readouterr().err


async def test_nobody_says_where_a_silent_nodes_home_is(tmp_path):
    async with agent_world(tmp_path) as world:
        async with opened(world.make_executor) as (executor, _):
            assert [row["shared_home"] for row in executor.node_rows()] == [True]
        await world.end("a")
        later = world.make_executor()
        await later.open()
        assert [row["shared_home"] for row in later.node_rows()] == [None]


async def test_a_node_without_root_is_closed_where_jobs_have_users_of_their_own(tmp_path, monkeypatch):
    async with agent_world(tmp_path) as world, opened(world.make_executor) as (executor, _):
        await eventually(lambda: not executor.nodes()[0].closed)
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        executor._separate_users = True
        await eventually(lambda: executor.nodes()[0].closed == NOT_ROOT)
        (row,) = executor.node_rows()
        assert (row["state"], row["why"]) == ("failing", NOT_ROOT)
