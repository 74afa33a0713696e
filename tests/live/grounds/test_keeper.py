"""The keeper of a ground that the test plays: how many pilots there are, and when a node may be lost."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from carpool.errors import InputError
from carpool.live.commands import doctor as doctors
from carpool.live.commands.nodes import ground_line
from carpool.live.errors import Unavailable
from carpool.live.executors import wire
from carpool.live.executors.base import ExecutorOptions
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.executors.contract import RecordingListener
from carpool.live.grounds.base import JoinTicket, Pilot, PilotStatus
from carpool.live.home import Home
from carpool.live.service import ground_keeper
from carpool.live.service.ground_keeper import GroundKeeper, NodePlan
from carpool.live.service.longer_nodes import LongerNodes


class PlayedGround:
    """A ground whose pilots the test moves on."""

    name = "played"

    def __init__(self):
        self.listed: dict[str, Pilot] = {}
        self.away = self.refuses = False

    async def submit(self, ticket):
        self._check()
        if self.refuses:
            raise InputError("sbatch: invalid partition")
        self.listed[ticket.pilot] = Pilot(ticket.pilot, "", PilotStatus.WAITING)

    async def pilots(self):
        self._check()
        return list(self.listed.values())

    async def give_up(self, pilot):
        self._check()
        self.listed.pop(pilot.id, None)

    async def close(self):
        pass

    def _check(self):
        if self.away:
            raise InputError("played: away")

    def run(self, node: str) -> str:
        """Let the first pilot that waits run on a node; return it."""
        pilot = next(pilot for pilot in self.listed.values() if pilot.status is PilotStatus.WAITING)
        self.listed[pilot.id] = replace(pilot, node=node, status=PilotStatus.RUNNING)
        return pilot.id


class Played:
    """A keeper, its cluster, and a clock that the test sets."""

    def __init__(self, keeper, ground, cluster, queue, monkeypatch):
        self.keeper, self.ground, self.cluster, self.queue = keeper, ground, cluster, queue
        self.now = 1000.0
        from carpool.live.executors import members, nodes

        for module in (ground_keeper, members, nodes, wire):
            if hasattr(module, "since_boot"):
                monkeypatch.setattr(module, "since_boot", lambda: self.now)
        cluster.members._looked = self.now

    async def join(self, node: str) -> str:
        pilot = self.ground.run(node)
        await self.keeper.look()
        self.speak(node, pilot)
        return pilot

    def speak(self, node: str, pilot: str) -> None:
        """Let an agent join, or speak again."""
        found = self.cluster.members.admit(self.state(node, pilot), 1)
        found.answered, found.heard, found.silent = self.now, True, False

    def state(self, node: str, pilot: str) -> wire.NodeState:
        return wire.NodeState(
            node, f"home-{node}", "boot", f"i-{pilot}", 1, "127.0.0.1", 1 << 30, "logical", "1",
            (wire.DeviceRow(0), wire.DeviceRow(1)), ground="played", pilot=pilot, parts={},
        )  # fmt: skip

    async def pass_time(self, seconds: float, *speaking: tuple[str, str]) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for node, pilot in speaking:
                self.speak(node, pilot)
            self.cluster.members.look()

    def states(self):
        return {row["node"]: row["state"] for row in self.cluster.node_rows()}


@pytest.fixture
async def played(tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    home.create()
    cluster = ClusterExecutor(ExecutorOptions(home, settings={"lease": "4s", "margin": "1s"}))
    monkeypatch.setattr(cluster, "_watch", lambda: _nothing())
    await cluster.open()
    await cluster.recover([], RecordingListener())
    queue: list = []
    state = SimpleNamespace(queue=queue, jobs={}, topology=SimpleNamespace(nodes=[]), may_come=0)
    inbox = SimpleNamespace(note=lambda text: None, add_events=lambda *events: None)
    clock = SimpleNamespace(now=lambda: 100.0)
    ground = PlayedGround()
    plan = NodePlan(1, 3, grow_s=5.0, idle_s=20.0, save_s=60.0)
    keeper = GroundKeeper(
        ground,
        plan,
        cluster,
        state,
        inbox,
        clock,
        home,
        LongerNodes(state, inbox),
        lambda pilot: JoinTicket(pilot, ("http://x",), "t"),
    )
    yield Played(keeper, ground, cluster, queue, monkeypatch)
    await cluster.close()


async def _nothing():
    return None


def waiting(gpus: int, since: float = 0.0):
    return SimpleNamespace(job=SimpleNamespace(gpus=gpus), pending_since=since)


async def test_there_are_as_many_pilots_as_the_queue_needs_within_the_limits(played):
    await played.keeper.look()
    assert len(played.ground.listed) == 1, "the least"
    await played.join("n1")
    played.queue.append(waiting(3, since=99.0))
    await played.keeper.look()
    assert len(played.ground.listed) == 1, "the job has not waited for long"
    played.queue[:] = [waiting(3)]
    await played.keeper.look()
    assert len(played.ground.listed) == 2, "two more GPUs a node"
    played.queue[:] = [waiting(40)]
    await played.keeper.look()
    assert len(played.ground.listed) == 3, "the most"
    played.queue.clear()
    await played.keeper.look()
    assert len(played.ground.listed) == 1, "what waits is taken back"


async def test_idle_nodes_leave_down_to_the_least(played):
    played.queue.append(waiting(40))
    await played.keeper.look()
    for node in ("n1", "n2", "n3"):
        await played.join(node)
    played.queue.clear()
    await played.keeper.look()
    assert set(played.states().values()) == {"open"}
    speaking = [(pilot.node, pilot.id) for pilot in played.ground.listed.values()]
    await played.pass_time(21.0, *speaking)
    await played.keeper.look()
    assert sorted(played.states().values()) == ["leaving", "leaving", "open"]


async def test_a_node_is_lost_only_a_lease_and_a_margin_after_the_ground_gave_its_pilot_up(played):
    await played.keeper.look()
    pilot = await played.join("n1")
    await played.pass_time(3.9)
    await played.keeper.look()
    assert pilot in played.ground.listed
    await played.pass_time(2.0)
    await played.keeper.look()
    assert pilot not in played.ground.listed, "silent for a lease: given up"
    await played.keeper.look()
    began = played.now
    while "n1" in played.cluster.book.nodes and played.cluster.book.nodes["n1"].present:
        assert played.now < began + 20.0
        await played.pass_time(0.5)
        await played.keeper.look()
    assert 5.0 < played.now - began < 7.0


async def test_a_node_whose_agent_may_go_by_a_longer_lease_is_lost_later(played):
    await played.keeper.look()
    pilot = await played.join("n1")
    node = played.cluster.book.nodes["n1"]
    played.cluster.book.change(node, lease_s=30.0)  # of an earlier service
    played.ground.listed.pop(pilot)
    await played.keeper.look()
    began = played.now
    while node.present:
        assert played.now < began + 60.0
        await played.pass_time(0.5)
        await played.keeper.look()
    assert 31.0 < played.now - began < 33.0


async def test_a_new_pilot_is_not_charged_with_the_silence_of_the_one_before(played):
    await played.keeper.look()
    played.ground.listed.pop(await played.join("n1"))
    await played.pass_time(5.0)
    await played.keeper.look()
    pilot = played.ground.run("n1")
    await played.keeper.look()
    speaking = asyncio.create_task(played.cluster.sync(played.state("n1", pilot)))
    await asyncio.sleep(0)
    await played.keeper.look()
    assert pilot in played.ground.listed
    speaking.cancel()


async def test_a_new_pilot_does_not_leave_because_the_one_before_ended(played):
    await played.keeper.look()
    played.ground.listed.pop(await played.join("n1"))
    await played.keeper.look()
    assert played.states() == {"n1": "leaving"}
    pilot = played.ground.run("n1")
    await played.keeper.look()
    answer = await played.cluster.sync(replace(played.state("n1", pilot), seen="other"))
    assert not answer.leave
    await played.keeper.look()
    assert played.states() == {"n1": "open"}


async def test_a_ground_that_cannot_be_asked_loses_no_node(played):
    await played.keeper.look()
    await played.join("n1")
    played.ground.away = True
    for _ in range(20):
        await played.pass_time(2.0)
        with pytest.raises(InputError):
            await played.keeper.look()
    assert played.states() == {"n1": "silent"}


async def test_a_pilot_that_is_wanted_again_vouches_for_its_node(played):
    await played.keeper.look()
    pilot = await played.join("n1")
    known = played.ground.listed.pop(pilot)  # the controller forgot it, and remembered it
    await played.pass_time(4.0)
    await played.keeper.look()
    played.ground.listed[pilot] = known
    await played.keeper.look()
    played.ground.listed.pop(pilot)
    await played.pass_time(2.0)
    await played.keeper.look()
    await played.pass_time(4.0)
    await played.keeper.look()
    await played.pass_time(0.5)
    assert played.cluster.book.nodes["n1"].present, "the time counts from the last record"


async def test_a_service_that_was_stopped_does_not_take_its_own_silence_for_the_nodes(played):
    await played.keeper.look()
    pilot = await played.join("n1")
    await played.pass_time(1.0)
    played.now += 3600.0
    played.cluster.members.look()
    await played.keeper.look()
    assert pilot in played.ground.listed
    assert played.cluster.book.nodes["n1"].present


async def test_a_pilot_speaks_only_for_the_node_that_the_ground_names(played):
    with pytest.raises(Unavailable):
        played.keeper.node_of("unknown")
    await played.keeper.look()
    pilot = await played.join("n1")
    assert played.keeper.node_of(pilot) == "n1"
    played.ground.listed[pilot] = replace(played.ground.listed[pilot], node="n2")
    await played.keeper.look()
    assert played.keeper.node_of(pilot) == "n2"


async def test_pilots_that_end_before_they_join_are_not_submitted_again_at_once(played):
    await played.keeper.look()
    for seconds in (5.0, 10.0, 20.0):
        played.ground.run("n1")
        await played.keeper.look()
        played.ground.listed.clear()
        await played.keeper.look()
        assert not played.ground.listed
        played.now += seconds - 0.5
        await played.keeper.look()
        assert not played.ground.listed
        played.now += 1.0
        await played.keeper.look()
        assert len(played.ground.listed) == 1


async def test_that_the_last_pilot_never_joined_is_said_until_one_joins(played):
    await played.keeper.look()
    pilot = played.ground.run("n1")
    await played.keeper.look()
    played.ground.listed.clear()
    await played.keeper.look()
    row = played.keeper.row()
    assert f"pilot {pilot} ended on n1 before its agent joined; see " in ground_line(row)
    assert [one.level for one in doctors._ground(row)] == ["error"]
    played.now += 6.0
    await played.keeper.look()
    await played.join("n1")
    await played.keeper.look()
    row = played.keeper.row()
    assert "before its agent joined" not in ground_line(row)
    assert [one.level for one in doctors._ground(row)] == ["ok"]


async def test_why_the_ground_takes_no_pilot_is_said_until_it_takes_one(played):
    keeper, ground, notes = played.keeper, played.ground, []
    keeper.inbox.note = notes.append
    ground.refuses = True
    for _ in range(3):
        await keeper.look()
        await played.pass_time(ground_keeper.FORGOTTEN_S)
    row = keeper.row()
    assert (row["problem"], row["refusal"]) == ("", "sbatch: invalid partition")
    assert ground_line(row).endswith("it gives no node: sbatch: invalid partition")
    assert [one.level for one in doctors._ground(row)] == ["error"]
    assert len(notes) == 1
    ground.refuses = False
    await played.pass_time(ground_keeper.FORGOTTEN_S)
    await keeper.look()
    assert keeper.row()["refusal"] == ""
    assert len(ground.listed) == 1
