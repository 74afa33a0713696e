"""Doors of workers on nodes: what an agent brings arrives once and in order, within bounds, whatever is lost."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.live.errors import Unavailable
from carpool.live.executors import relayed_doors
from carpool.live.executors.relayed_doors import MAX_DOORS, MAX_PENDING, NodeDoors, NoSuchDoor
from carpool.live.executors.wire import DoorsHere

KEY = ("7", 1)


async def opened(doors, **request):
    return doors.open(KEY, 0, request or {"do": "watch"})


@given(
    st.lists(st.binary(max_size=30), max_size=20),
    st.lists(st.tuples(st.integers(-9, 30), st.integers(0, 80)), max_size=40),
)
async def test_bytes_arrive_once_and_in_order_whatever_is_repeated_or_lost(lines, attempts):
    """Pieces begin before or after the end of the last one; the answer says how far they came."""
    text = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines)
    doors = NodeDoors("a")
    door = await opened(doors)
    size = 0
    for back, length in attempts:
        start = max(0, size - back)
        size = doors.bring(door.order.number, start, text[start : start + length], last=False)
    assert doors.bring(door.order.number, size, text[size:], last=True) == len(text)
    found = b""
    while line := await door.readline():
        found += line
    assert found == text


async def test_a_door_takes_no_more_than_its_reader_has_room_for():
    doors = NodeDoors("a")
    door = await opened(doors)
    text = b"x" * 99 + b"\n"
    most = doors.bring(1, 0, text * 5000, last=True)
    assert most == MAX_PENDING
    assert doors.bring(1, most, (text * 5000)[most:], last=True) == most, "there is no room, so it has not ended"
    for _ in range(100):
        assert await door.readline() == text
    assert doors.bring(1, most, (text * 5000)[most:], last=True) == most + 100 * len(text)


async def test_a_line_without_an_end_is_refused():
    doors = NodeDoors("a")
    door = await opened(doors)
    doors.bring(1, 0, b"x" * MAX_PENDING, last=False)
    with pytest.raises(ValueError, match="too long"):
        await door.readline()


async def test_an_agent_hears_of_each_door_and_of_its_end():
    doors = NodeDoors("a")
    assert not doors.summons()
    door = await opened(doors, do="run", command=["true"])
    assert doors.summons()
    assert not doors.summons(), "one answer calls it; the next one waits for it to ask"
    wanted = await doors.fetch(DoorsHere("x"))
    assert [(order.key, json.loads(order.request)["do"]) for order in wanted.new] == [("7-1", "run")]
    asking = asyncio.create_task(doors.fetch(DoorsHere("x", wanted.life, wanted.number, (1,))))
    await asyncio.sleep(0)
    assert not asking.done(), "nothing is new, so the answer is held"
    door.close()
    assert (await asking).open == ()
    with pytest.raises(NoSuchDoor, match="its caller has closed it"):
        doors.bring(1, 0, b"", last=True)


async def test_an_agent_that_lost_a_door_or_was_started_again_ends_the_connection():
    doors = NodeDoors("a")
    door = await opened(doors)
    wanted = await doors.fetch(DoorsHere("x"))
    other = await opened(doors)
    reading = asyncio.create_task(door.readline())
    wanted = await doors.fetch(DoorsHere("x", wanted.life, wanted.number))
    with pytest.raises(Unavailable, match="its agent has lost the connection"):
        await reading
    assert [order.number for order in wanted.new] == [2]
    doors.fail("its agent was started again")
    with pytest.raises(Unavailable, match="started again"):
        await other.readline()


async def test_a_silent_agent_ends_the_connection(monkeypatch):
    doors = NodeDoors("a")
    door = await opened(doors)
    doors.look()
    assert doors.summons(), "it is not given up at once"
    now = relayed_doors.since_boot()
    monkeypatch.setattr(relayed_doors, "since_boot", lambda: now + relayed_doors.LOST_S + 1.0)
    doors.look()
    with pytest.raises(Unavailable, match="node a: its agent does not answer"):
        await door.readline()


async def test_the_doors_of_a_node_are_bounded():
    doors = NodeDoors("a")
    for _ in range(MAX_DOORS):
        await opened(doors)
    with pytest.raises(Unavailable, match="end one"):
        await opened(doors)
