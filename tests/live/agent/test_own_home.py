"""A node that does not see the service's home fetches snapshots and refuses gangs over nodes and unknown users."""

import asyncio
import os
import tarfile
from dataclasses import replace

import pytest

from carpool.errors import InputError
from carpool.live.agent.agent import Agent, AgentOptions, _check_user
from carpool.live.agent.checkpoints import remove_unfinished
from carpool.live.agent.parts import NodePart
from carpool.live.agent.road import NoAnswer, Turned
from carpool.live.executors.base import GangOutcome, Launch, StopMode
from carpool.live.executors.contract import opened
from carpool.live.executors.wire import PartOrder, Want
from carpool.live.home import Home
from tests.support.agents import agent_world

KEY = ("1", 1)


class PackedRoad:
    """A road that has one code snapshot to give. `lost`: requests that are not answered before."""

    def __init__(self, archive, lost=()):
        self.archive, self.lost, self.asked = archive, list(lost), 0

    def snapshot(self, job):
        self.asked += 1
        if self.lost:
            raise self.lost.pop(0)
        return self.archive.read_bytes()


@pytest.fixture
def archive(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')")
    path = tmp_path / "code.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        packed.add(folder / "train.py", "train.py")
    return path


def agent(home, road):
    home.create()
    found = Agent(AgentOptions(home, "a", "127.0.0.1", gpus=1), road)
    from carpool.live.executors.node import open_node

    found.executor._node = open_node(found._executor_options())
    return found


async def test_a_code_snapshot_is_fetched_once(home, archive):
    road = PackedRoad(archive)
    found = agent(home, road)
    launch = Launch(*KEY, (0,), ("true",), "/gone/snapshot", {}, snapshot=True, checkpoints="/gone/checkpoints")
    for attempt in (1, 2):
        adapted = found._adapt(replace(launch, attempt=attempt), "")
        assert adapted.directory == str(home.snapshot("1"))
        assert adapted.checkpoints == ""
        assert (home.snapshot("1") / "train.py").read_text() == "print('hello')"
    assert road.asked == 1


async def test_a_code_snapshot_is_asked_for_again_while_no_service_answers(home, archive):
    road = PackedRoad(archive, [NoAnswer("refused"), Turned(503, "stands by")])
    found = agent(home, road)
    found.parts.parts[KEY] = NodePart(KEY)
    order = PartOrder(Want.GO, launch=Launch(*KEY, (0,), ("true",), "/gone/snapshot", {}, snapshot=True))
    launched = []
    found.executor.launch = launched.append
    await found._launch(KEY, order)
    assert (road.asked, len(launched)) == (3, 1)
    assert found.parts.parts[KEY].ended is None


async def test_a_job_that_is_stopped_while_no_service_answers_never_starts(home, archive):
    found = agent(home, PackedRoad(archive, [NoAnswer("refused")] * 1000))
    found.parts.parts[KEY] = NodePart(KEY)
    order = PartOrder(Want.GO, launch=Launch(*KEY, (0,), ("true",), "/gone/snapshot", {}, snapshot=True))
    launching = asyncio.create_task(found._launch(KEY, order))
    await asyncio.sleep(0.1)
    assert not launching.done()
    found._stop(found.parts.parts[KEY], StopMode.SAVE)
    await asyncio.wait_for(launching, 10)
    assert found.parts.parts[KEY].ended.outcome is GangOutcome.NEVER_STARTED


async def test_a_directory_that_is_not_there_is_said(home, archive):
    found = agent(home, PackedRoad(archive))
    with pytest.raises(InputError, match="a: has no directory '/gone'; share it, or submit with --snapshot"):
        found._adapt(Launch(*KEY, (0,), ("true",), "/gone", {}), "")
    with pytest.raises(InputError, match="has 1 GPUs, and the job got others"):
        found._adapt(Launch(*KEY, (7,), ("true",), "/tmp", {}), "")


async def test_a_gang_over_nodes_is_refused_where_the_home_is_not_shared(tmp_path):
    async with agent_world(tmp_path, ("a", "b")) as world, opened(world.make_executor) as (executor, listener):
        (executor.home.path / "shared-home").unlink()
        from carpool.live.executors.contract import eventually

        await eventually(lambda: not world.agents["b"]._home_seen)
        gpus = tuple(slot.id for node in executor.nodes() for slot in node.slots)
        executor.launch(Launch(*KEY, gpus, ("sleep", "60"), "/", {}))
        ended = await listener.wait_for_end(KEY)
        assert ended.outcome is GangOutcome.REFUSED
        assert "does not see the service's home" in ended.reason
        assert listener.started == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root changes users")
@pytest.mark.parametrize(
    ("uid", "user", "problem"),
    [
        (0, "root", "jobs of users do not run as root"),
        (1, "nobody-else", "uid 1 is 'nobody-else' at the service and 'daemon' there"),
        (7_654_321, "eve", "unknown there"),
        (1, "", "without a login name"),
    ],
)
def test_a_user_who_is_somebody_else_on_the_node_is_refused(uid, user, problem):
    with pytest.raises(InputError, match=problem):
        _check_user(uid, user, "a")
    _check_user(1, "daemon", "a")
    _check_user(7_654_321, "", "a")


async def test_an_agent_without_root_refuses_jobs_of_other_users(home, archive, monkeypatch):
    found = agent(home, PackedRoad(archive))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    await found._launch(KEY, PartOrder(Want.GO, launch=Launch(*KEY, (0,), ("true",), "/", {}, uid=7), user="eve"))
    ended = found.parts.parts[KEY].ended
    assert ended.outcome is GangOutcome.REFUSED
    assert "does not run as root" in ended.reason


def test_two_agents_cannot_use_one_home(home):
    home.create()
    home.acquire()
    with pytest.raises(InputError, match="another service or agent"):
        Home(home.path).acquire()
    home.release()


async def test_what_a_job_of_another_service_left_under_the_same_number_is_no_part_of_a_new_job(home, archive):
    found = agent(home, PackedRoad(archive))
    for left in (home.snapshot("1"), home.checkpoints("1")):
        left.mkdir(parents=True)
        (left / "old").write_text("of somebody else")
    again = Launch("1", 2, (0,), ("true",), "/gone/snapshot", {}, snapshot=True)
    assert found._adapt(again, "").directory == str(home.snapshot("1"))
    assert (home.snapshot("1") / "old").exists(), "a job that goes on finds what it wrote"
    found._adapt(Launch(*KEY, (0,), ("true",), "/gone/snapshot", {}, snapshot=True), "")
    assert not (home.snapshot("1") / "old").exists()
    assert not home.checkpoints("1").exists()
    assert len(list(home.job("1").glob("*-before-*/old"))) == 2, "nothing is deleted"


async def test_an_agent_removes_the_archives_that_it_left_when_it_was_killed(home):
    home.create()
    (home.path / ".sending-x").mkdir()
    (home.path / ".fetching-y").mkdir()
    remove_unfinished(home)
    assert not [path for path in home.path.iterdir() if path.name.startswith((".sending", ".fetching"))]
